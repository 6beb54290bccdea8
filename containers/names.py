"""Names of images: any registry's references, and our own `REGISTRY/ORG[/TEAM]/NAME:YY.MM[-VARIANT]-py3`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from containers.errors import ContainerError, nearest

IMAGES = ("base", "train", "lane", "sign")
"""Each built on the one before it, lane and sign both on train."""
ORGANISATION = "roadfuse"

_DOMAIN = re.compile(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*(?::[0-9]{1,5})?"
)
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RELEASE = re.compile(r"([0-9]{2})\.(0[1-9]|1[0-2])(?:-([a-z0-9]+(?:[.-][a-z0-9]+)*))?-py3")
_SHAPE = "REGISTRY/ORG[/TEAM]/NAME:YY.MM[-cpu]-py3[@sha256:...]"


@dataclass(frozen=True)
class ImageReference:
    """One image somewhere; has a tag, a digest or both."""

    registry: str
    """Host with its port, e.g. nvcr.io or 127.0.0.1:5000; empty: this machine's engine, or its default registry."""
    repository: str
    """Path in the registry, e.g. roadfuse/lane."""
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """The last part of the repository: lane of nvcr.io/roadfuse/lane."""
        return self.repository.rsplit("/", 1)[-1]

    @property
    def full_repository(self) -> str:
        return f"{self.registry}/{self.repository}" if self.registry else self.repository

    @property
    def tagged(self) -> str:
        """Without the digest, which an engine does not take for a tag."""
        return f"{self.full_repository}:{self.tag}"

    @property
    def pinned(self) -> str:
        """By digest alone: this, and only this, is verified by a registry's clients."""
        return f"{self.full_repository}@{self.digest}"

    def with_digest(self, digest: str) -> ImageReference:
        return replace(self, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.full_repository}{tag}{f'@{self.digest}' if self.digest else ''}"


@dataclass(frozen=True)
class Release:
    """The tag of an image of ours, e.g. 26.11-cpu-py3."""

    year: int
    month: int
    variant: str = ""
    """Empty: for GPUs; cpu: for machines without."""

    def __str__(self) -> str:
        return f"{self.year:02d}.{self.month:02d}{f'-{self.variant}' if self.variant else ''}-py3"


def parse_reference(text: str) -> ImageReference:
    """Of any registry. Raises ContainerError for one that names no single image: no tag, or "latest"."""
    if not text or text != text.strip() or any(character.isspace() for character in text):
        raise ContainerError(f'image "{text}": is empty or has blanks; give {_SHAPE}')
    rest, digest = text, ""
    if "@" in rest:
        rest, digest = rest.split("@", 1)
        if not _DIGEST.fullmatch(digest):
            raise ContainerError(f'image "{text}": digest "{digest}" is not sha256: and 64 hexadecimal digits')
    registry, slash, path = rest.partition("/")
    if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
        registry, path = "", rest
    elif not _DOMAIN.fullmatch(registry):
        raise ContainerError(f'image "{text}": "{registry}" is not a registry\'s HOST[:PORT]')
    repository, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise ContainerError(f'image "{text}": tag "{tag}" is not one: letters, digits, dots, dashes, at most 128')
    for component in repository.split("/"):
        if not _COMPONENT.fullmatch(component):
            raise ContainerError(
                f'image "{text}": "{component}" cannot be part of a name: lower case letters and digits, '
                "with single dots, dashes or underscores between them"
            )
    if tag == "latest":
        raise ContainerError(f'image "{text}": "latest" names another image every day; give a release, {_SHAPE}')
    if not tag and not digest:
        raise ContainerError(f'image "{text}": has no tag and no digest; give {_SHAPE}')
    return ImageReference(registry, repository, tag, digest)


def parse_release(tag: str) -> Release:
    """Of a tag in NGC's manner. Raises ContainerError for any other."""
    match = _RELEASE.fullmatch(tag)
    if not match:
        raise ContainerError(f'tag "{tag}" is not YY.MM[-VARIANT]-py3, e.g. 26.11-py3 or 26.11-cpu-py3')
    return Release(int(match[1]), int(match[2]), match[3] or "")


def parse_our_reference(text: str) -> ImageReference:
    """The same, where ORG and a release's tag must be there. Raises ContainerError for any other reference."""
    reference = parse_reference(text)
    if not 2 <= len(reference.repository.split("/")) <= 3:
        raise ContainerError(f'image "{text}": has no ORG[/TEAM]/NAME; give {_SHAPE}')
    if not reference.tag:
        raise ContainerError(f'image "{text}": has no tag; give {_SHAPE}')
    try:
        parse_release(reference.tag)
    except ContainerError as error:
        raise ContainerError(f'image "{text}": {error}') from None
    return reference


def our_reference(prefix: str, name: str, release: Release) -> ImageReference:
    """`prefix` is REGISTRY/ORG[/TEAM], ORG[/TEAM], or REGISTRY alone, which gets our ORG; empty: our ORG alone."""
    check_image_name(name)
    parts = [part for part in prefix.rstrip("/").split("/") if part]
    is_registry = bool(parts) and ("." in parts[0] or ":" in parts[0] or parts[0] == "localhost")
    if not parts[is_registry:]:
        parts.append(ORGANISATION)
    return parse_our_reference(f"{'/'.join(parts)}/{name}:{release}")


def check_image_name(name: str) -> None:
    if name not in IMAGES:
        raise ContainerError(f'image "{name}" is unknown{nearest(name, IMAGES)}')


def is_short_name(text: str) -> bool:
    """`lane` rather than a reference: to be looked up in the lock file."""
    return "/" not in text and ":" not in text and "@" not in text
