"""Manifests of images and of indexes of images, read from their raw bytes, which alone have a digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from containers.errors import ContainerError

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
ACCEPTED = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX)
"""A registry that is not asked for these converts to its oldest format, which has another digest."""
LONGEST_MANIFEST_BYTES = 4 << 20

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le", "s390x": "s390x"}


class BadManifest(ContainerError):
    """What a registry or a bundle gave as a manifest is none."""


class WrongPlatform(ContainerError):
    """The image is not of the platform that was asked for."""


@dataclass(frozen=True)
class Descriptor:
    """What a manifest says of a blob."""

    digest: str
    size: int
    media_type: str


@dataclass(frozen=True)
class Platform:
    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


@dataclass(frozen=True)
class Manifest:
    """Of one image of one platform."""

    raw: bytes
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.raw)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Config and layers, each once however often the image uses it."""
        return tuple({blob.digest: blob for blob in (self.config, *self.layers)}.values())

    @property
    def size(self) -> int:
        """Bytes of all blobs: what a pull into nothing transfers."""
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True)
class IndexEntry:
    descriptor: Descriptor
    platform: Platform


@dataclass(frozen=True)
class Index:
    """Of images of several platforms."""

    raw: bytes
    media_type: str
    entries: tuple[IndexEntry, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.raw)


@dataclass(frozen=True)
class ImageConfig:
    """What an image's configuration says of it."""

    platform: Platform
    created: str
    diff_ids: tuple[str, ...]


def digest_of(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def parse_platform(text: str) -> Platform:
    """`linux/amd64` or `linux/arm64/v8`.

    >>> parse_platform("linux/arm64/v8")
    Platform(os='linux', architecture='arm64', variant='v8')
    """
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[a-z0-9_.-]+", part) for part in parts):
        raise ContainerError(f'platform "{text}": must be OS/ARCHITECTURE[/VARIANT], e.g. linux/amd64')
    return Platform(*parts)


def platform_of_machine(machine: str) -> Platform:
    """Of what `uname -m` prints.

    >>> str(platform_of_machine("aarch64"))
    'linux/arm64'
    """
    return Platform("linux", _MACHINES.get(machine, machine))


def parse(raw: bytes, media_type: str, source: str) -> Manifest | Index:
    """Read a manifest or an index; `media_type` as the registry named it, `source` for the messages."""
    data = _parse_object(raw, source)
    if data.get("schemaVersion") != 2:
        raise BadManifest(
            f"{source}: a manifest of schema {data.get('schemaVersion')!r}, not 2: push the image again "
            "with a newer client, or ask the registry's owner to serve schema 2"
        )
    # Inside the digested bytes, so it outranks the header, which anyone between may change.
    stated = str(data.get("mediaType") or media_type).split(";")[0].strip()
    if "manifests" in data:
        entries = tuple(_index_entry(entry, source) for entry in _list(data, "manifests", source))
        return Index(raw, stated if stated in (DOCKER_INDEX, OCI_INDEX) else OCI_INDEX, entries)
    if "config" not in data:
        raise BadManifest(f"{source}: neither an image manifest nor an index ({stated or 'no media type'})")
    layers = tuple(_descriptor(layer, f"{source}: layers") for layer in _list(data, "layers", source))
    config = _descriptor(data["config"], f"{source}: config")
    return Manifest(raw, stated if stated in (DOCKER_MANIFEST, OCI_MANIFEST) else OCI_MANIFEST, config, layers)


def choose(index: Index, wanted: Platform, source: str) -> IndexEntry:
    """The entry of an index for a platform; of several variants the one asked for, else the first."""
    fitting = [
        entry
        for entry in index.entries
        if (entry.platform.os, entry.platform.architecture) == (wanted.os, wanted.architecture)
        and (not wanted.variant or entry.platform.variant in ("", wanted.variant))
    ]
    if not fitting:
        # Attestations beside images have the platform unknown/unknown.
        offered = sorted({str(entry.platform) for entry in index.entries if entry.platform.os != "unknown"})
        raise WrongPlatform(
            f"{source}: has no image for {wanted}; it has {', '.join(offered) or 'none at all'}: "
            "choose one with --platform, or another tag"
        )
    exact = [entry for entry in fitting if entry.platform.variant == wanted.variant]
    return (exact or fitting)[0]


def parse_config(raw: bytes, source: str) -> ImageConfig:
    data = _parse_object(raw, source)
    root = data.get("rootfs")
    diff_ids = root.get("diff_ids") if isinstance(root, dict) else None
    if not isinstance(diff_ids, list) or not all(is_digest(str(diff_id)) for diff_id in diff_ids):
        raise BadManifest(f"{source}: rootfs.diff_ids: not a list of sha256 digests")
    platform = Platform(str(data.get("os", "")), str(data.get("architecture", "")), str(data.get("variant", "")))
    return ImageConfig(platform, str(data.get("created", "")), tuple(str(diff_id) for diff_id in diff_ids))


def check_platform(config: ImageConfig, wanted: Platform, source: str) -> None:
    """Raise where an image says it is of another platform: an engine takes it without a word and then cannot run it."""
    found = config.platform
    if (found.os, found.architecture) != (wanted.os, wanted.architecture):
        raise WrongPlatform(
            f"{source}: is an image for {found}, not for {wanted}: choose a tag built for {wanted}, "
            f"or ask for it with --platform {found}"
        )


def _parse_object(raw: bytes, source: str) -> Mapping[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadManifest(
            f"{source}: not JSON: the registry or a proxy before it answers with something else"
        ) from None
    if not isinstance(data, dict):
        raise BadManifest(f"{source}: JSON, but not an object")
    return data


def _list(data: Mapping[str, Any], name: str, source: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise BadManifest(f"{source}: {name}: not a list")
    return value


def _index_entry(entry: Any, source: str) -> IndexEntry:
    descriptor = _descriptor(entry, f"{source}: manifests")
    platform = entry.get("platform") or {}
    if not isinstance(platform, dict):
        raise BadManifest(f"{source}: manifests.platform: not an object")
    names = [str(platform.get(name, "")) for name in ("os", "architecture", "variant")]
    return IndexEntry(descriptor, Platform(*names))


def _descriptor(value: Any, source: str) -> Descriptor:
    if not isinstance(value, dict):
        raise BadManifest(f"{source}: not an object")
    digest, size = value.get("digest"), value.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise BadManifest(f"{source}: digest {str(digest)[:80]!r}: must be sha256: and 64 hexadecimal digits")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadManifest(f"{source}: size of {digest[:19]}: must be a number of bytes")
    return Descriptor(digest, size, str(value.get("mediaType", "")))
