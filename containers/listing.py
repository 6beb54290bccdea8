"""Images in the engine and in registries, with sizes, ages and digests: `python -m containers list [--remote]`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from containers.errors import ContainerError
from containers.lock import Lock
from containers.manifests import Index, Manifest, is_digest, parse, parse_config
from containers.names import IMAGES, ImageReference, is_short_name, parse_our_reference, parse_reference
from containers.progress import format_bytes, progress_for, short
from containers.pull import add_source_arguments, open_source, settings_of
from containers.transfer_errors import NotFound

if TYPE_CHECKING:
    from containers.engine import ImageFacts
    from containers.registry import Registry


@dataclass(frozen=True)
class ListedImage:
    """One name of one image, here or in a registry."""

    reference: ImageReference
    """With its digest where that is known."""
    image_id: str
    """Empty for an index."""
    size_bytes: int
    """Unpacked in the engine, compressed in a registry, of all platforms for an index."""
    created_seconds: float | None
    """Since the epoch, UTC; None where the image does not say."""
    platforms: tuple[str, ...]
    parts: tuple[str, ...] = ()
    """Digests of an index's manifests."""


def local_images(facts: Iterable[ImageFacts], wanted: Callable[[ImageReference], bool]) -> list[ListedImage]:
    """Every tag of these images that is wanted, in their order."""
    listed = []
    for image in facts:
        for tag in image.tags:
            reference = _tolerant_reference(tag)
            if reference is None or not wanted(reference):
                continue
            digests = {digest.partition("@")[0]: digest.partition("@")[2] for digest in image.digests}
            digest = digests.get(reference.full_repository, "")
            named = reference.with_digest(digest) if is_digest(digest) else reference
            created = parse_time(image.created)
            listed.append(ListedImage(named, image.image_id, image.size_bytes, created, (image.platform,)))
    return listed


def is_ours(reference: ImageReference, lock: Lock) -> bool:
    """Of a repository that the lock file names, or named in our manner: nobody else's images are looked at."""
    if any(image.pinned.full_repository == reference.full_repository for image in lock.images.values()):
        return True
    try:
        return parse_our_reference(reference.tagged).name in IMAGES
    except ContainerError:
        return False


def remote_images(repository: ImageReference, registry: Registry, last: int | None) -> tuple[list[ListedImage], int]:
    """The `last` tags of a repository by their names, newest release first, and how many there are in all."""
    tags = sorted(registry.tags(), key=natural, reverse=True)
    listed = []
    for tag in tags[:last]:
        try:
            listed.append(_remote_image(repository, tag, registry))
        except NotFound:
            continue  # Removed since the tags were listed; a tag without a manifest is none.
    return listed, len(tags)


def _remote_image(repository: ImageReference, tag: str, registry: Registry) -> ListedImage:
    reference = ImageReference(repository.registry, repository.repository, tag)
    raw, media_type = registry.manifest(tag)
    top = parse(raw, media_type, str(reference))
    named = reference.with_digest(top.digest)
    if isinstance(top, Manifest):
        config = parse_config(registry.small_blob(top.config.digest), f"{reference}: configuration")
        created = parse_time(config.created)
        return ListedImage(named, top.config.digest, top.size, created, (str(config.platform),))
    assert isinstance(top, Index)
    size, moments = 0, []
    for entry in top.entries:
        raw, media_type = registry.manifest(entry.descriptor.digest)
        part = parse(raw, media_type, f"{reference} ({entry.platform})")
        if isinstance(part, Manifest):
            size += part.size
            if entry.platform.os != "unknown":
                config = parse_config(registry.small_blob(part.config.digest), f"{reference}: configuration")
                moments.append(parse_time(config.created))
    known = [moment for moment in moments if moment is not None]
    platforms = tuple(str(entry.platform) for entry in top.entries if entry.platform.os != "unknown")
    parts = tuple(entry.descriptor.digest for entry in top.entries)
    return ListedImage(named, "", size, max(known, default=None), platforms, parts)


def parse_repository(text: str, lock: Lock) -> ImageReference:
    """REGISTRY/ORG/NAME, or a name of the lock file; without a tag."""
    if is_short_name(text) and text in lock.images:
        pinned = lock.images[text].pinned
        return ImageReference(pinned.registry, pinned.repository)
    # A tag that is given as well does no harm.
    reference = parse_reference(text if ":" in text.rpartition("/")[2] or "@" in text else f"{text}:0")
    if not reference.registry:
        names = ", ".join(sorted(lock.images)) or "it has none"
        raise ContainerError(
            f'repository "{text}": must be REGISTRY/ORG/NAME, e.g. nvcr.io/nvidia/pytorch, or in the lock ({names})'
        )
    return ImageReference(reference.registry, reference.repository)


def natural(text: str) -> list[tuple[int, int | str]]:
    """A key that sorts numbers in text as numbers.

    >>> sorted(["9.10", "10.1", "9.9"], key=natural)
    ['9.9', '9.10', '10.1']
    """
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.findall(r"\d+|\D+", text)]


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of an ISO time with any number of decimals.

    None for none, for Go's year 1, and for the beginning of the epoch, which reproducible builds write: an image that
    hides its age is not old.

    >>> parse_time("2020-01-01T00:00:00.123456789Z"), parse_time("1970-01-01T00:00:00Z")
    (1577836800.123456, None)
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.year < 1980:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def format_age(seconds: float | None) -> str:
    """
    >>> [format_age(seconds) for seconds in (None, 5, 7200, 3 * 86400)]
    ['unknown', '0 min', '2 h', '3 days']
    """
    if seconds is None:
        return "unknown"
    if seconds < 3600:
        return f"{max(0, int(seconds // 60))} min"
    if seconds < 2 * 86400:
        return f"{int(seconds // 3600)} h"
    return f"{int(seconds // 86400)} days"


def table(images: Sequence[ListedImage], lock: Lock, now_seconds: float) -> list[str]:
    """Aligned columns; a digest in full, since it is what one copies."""
    rows = [("IMAGE", "SIZE", "AGE", "PLATFORM", "IMAGE ID", "LOCK", "DIGEST")]
    for image in images:
        age = None if image.created_seconds is None else now_seconds - image.created_seconds
        rows.append(
            (
                image.reference.tagged,
                format_bytes(image.size_bytes),
                format_age(age),
                ", ".join(image.platforms),
                short(image.image_id) or "-",
                ", ".join(names_in_lock(image, lock)) or "-",
                image.reference.digest or "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def names_in_lock(image: ListedImage, lock: Lock) -> list[str]:
    """Which names of the lock file need this image."""
    digests = {image.reference.digest, *image.parts} - {""}
    return sorted(
        locked.name for locked in lock.images.values() if locked.image_id == image.image_id or locked.digest in digests
    )


def _tolerant_reference(tag: str) -> ImageReference | None:
    """What an engine holds may have any name, "latest" too."""
    try:
        return parse_reference(tag)
    except ContainerError:
        repository, colon, name = tag.rpartition(":")
        return ImageReference("", repository, name) if colon else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "repositories", nargs="*", metavar="REPOSITORY", help="names of the lock file, or REGISTRY/ORG/NAME"
    )
    parser.add_argument("--remote", action="store_true", help="ask the registries; without it, the engine")
    parser.add_argument("--all", action="store_true", help="also images of others in the engine")
    parser.add_argument("--last", type=int, default=20, help="tags of each remote repository (default: %(default)s)")
    add_source_arguments(parser)


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options, os.environ)
    if options.last < 1:
        raise ContainerError(f"--last {options.last}: must be 1 or more")
    lock = settings.lock
    names = options.repositories or (sorted(lock.images) if options.remote else [])
    repositories = [parse_repository(name, lock) for name in names]
    if options.remote:
        if not repositories:
            raise ContainerError(f"{settings.lock_path}: pins nothing: name a repository, REGISTRY/ORG/NAME")
        for repository in dict.fromkeys(repositories):
            with open_source(repository, settings, progress_for(sys.stderr)) as source:
                listed, num_tags = remote_images(repository, source.registries[-1], options.last)
            _print(listed, lock)
            if num_tags > len(listed):
                print(f"{repository.full_repository}: {len(listed)} of {num_tags} tags shown; --last N shows more")
        return 0
    from containers.engine import DockerEngine
    from containers.pull_engine import DockerImages

    chosen = {repository.full_repository for repository in repositories}

    def wanted(reference: ImageReference) -> bool:
        return reference.full_repository in chosen if chosen else options.all or is_ours(reference, lock)

    with DockerEngine() as engine:
        facts = DockerImages(engine).images()
    listed = local_images(facts, wanted)
    if listed:
        _print(listed, lock)
    else:
        print("the engine holds none: `make images` builds ours, `python -m containers pull IMAGE` gets one")
    hidden = sum(len(image.tags) for image in facts) - len(listed)
    if hidden:
        print(f"{hidden} other names of images are not shown; --all shows them")
    return 0


def _print(images: Sequence[ListedImage], lock: Lock) -> None:
    print("\n".join(table(images, lock, time.time())))
