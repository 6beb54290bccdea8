"""From a name or a reference to one image of one platform, known to the bit and equal to what the lock file pins."""

from __future__ import annotations

import platform as machine_platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from containers import manifests
from containers.blob_cache import BlobCache
from containers.deliver import ResolvedImage
from containers.errors import ContainerError
from containers.lock import Lock, LockedImage
from containers.manifests import Index, Manifest, Platform
from containers.names import ImageReference, is_short_name, parse_reference
from containers.registry import Registry, in_turn
from containers.transfer import Transfers
from containers.transfer_errors import LockMismatch, NotFound

_LARGEST_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class Wanted:
    """What a name or a reference asks for, by the lock file."""

    reference: ImageReference
    """Without a digest where a tag was asked for, locked or not: the registry is asked what that is now."""
    locked: LockedImage | None
    platform: Platform


@dataclass(frozen=True)
class Resolved:
    image: ResolvedImage
    digest: str
    """Of what the tag or digest names: of an index where it is one, else of the manifest."""
    from_origin: bool
    """The registry itself answered, not a mirror of it."""


def wanted_image(text: str, lock: Lock, lock_path: Path, platform: Platform | None) -> Wanted:
    """Look a name or a reference up in the lock file. Raises LockMismatch where what is asked is not what it pins."""
    locked: LockedImage | None
    if is_short_name(text):
        locked = lock.image(text, lock_path)
        reference = locked.pinned
    else:
        reference = parse_reference(text)
        if not reference.registry:
            names = ", ".join(sorted(lock.images)) or "it has none"
            raise ContainerError(
                f'image "{text}": names no registry: write e.g. nvcr.io/{text}, or a name of {lock_path} ({names})'
            )
        same = [image for image in lock.images.values() if reference.tag and image.reference == reference.tagged]
        locked = same[0] if same else None
        if locked is not None and reference.digest not in ("", locked.digest):
            # Whoever names another digest has pinned it by that; so one takes a new image before one locks it.
            locked = None
    if locked is None:
        return Wanted(reference, None, platform or this_platform())
    locked_platform = manifests.parse_platform(locked.platform)
    if platform not in (None, locked_platform):
        raise mismatch(lock_path, locked, f"it is for {locked_platform}, and you ask for {platform}")
    return Wanted(reference, locked, locked_platform)


def resolve(
    wanted: Wanted,
    lock_path: Path,
    registries: Sequence[Registry],
    transfers: Transfers,
    cache: BlobCache,
    say: Callable[[str], None],
) -> Resolved:
    """Ask the registries in order, down to the configuration of the image, which then is in the cache.

    Raises LockMismatch where the lock file pins something else, WrongPlatform where it is for another machine.
    """
    name = str(wanted.reference)
    (raw, media_type), registry = _top_manifest(wanted, lock_path, registries, say)
    top = manifests.parse(raw, media_type, name)
    manifest = top
    if isinstance(top, Index):
        entry = manifests.choose(top, wanted.platform, name)
        (raw, media_type), _ = in_turn(registries, lambda one: one.manifest(entry.descriptor.digest), say)
        manifest = manifests.parse(raw, media_type, f"{name} ({entry.platform})")
        say(f"{name}: an index of {len(top.entries)} manifests; taken for {entry.platform}: {manifest.digest}")
    if not isinstance(manifest, Manifest):
        raise manifests.BadManifest(f"{name}: an index in an index: name the inner one by its digest")
    if wanted.locked is not None and wanted.locked.digest not in (top.digest, manifest.digest):
        new = f"{wanted.locked.reference}@{top.digest}"
        raise mismatch(
            lock_path,
            wanted.locked,
            f"{registry.endpoint} has {top.digest} under {wanted.reference.tag}",
            f"; to take the new one: python -m containers pull {new} and then lock {wanted.locked.name} {new}",
        )
    image = with_config(name, manifest, transfers, cache)
    manifests.check_platform(image.config, wanted.platform, name)
    if wanted.locked is not None and wanted.locked.image_id != manifest.config.digest:
        raise mismatch(lock_path, wanted.locked, f"the manifest has the image ID {manifest.config.digest}")
    return Resolved(image, top.digest, registry is registries[-1])


def with_config(name: str, manifest: Manifest, transfers: Transfers, cache: BlobCache) -> ResolvedImage:
    """Fetch the configuration of an image, and look whether it fits its manifest."""
    if manifest.config.size > _LARGEST_CONFIG_BYTES:
        raise manifests.BadManifest(f"{name}: a configuration of {manifest.config.size} bytes is none")
    transfers.fetch((manifest.config,))
    config = manifests.parse_config(cache.read(manifest.config), f"{name}: configuration")
    if len(config.diff_ids) != len(manifest.layers):
        raise manifests.BadManifest(
            f"{name}: {len(manifest.layers)} layers in the manifest, {len(config.diff_ids)} in the configuration"
        )
    return ResolvedImage(name, manifest, config)


def this_platform() -> Platform:
    return manifests.platform_of_machine(machine_platform.machine())


def mismatch(lock_path: Path, locked: LockedImage, what: str, cure: str = "") -> LockMismatch:
    return LockMismatch(
        f"{lock_path}: pins {locked.name} to {locked.digest} (image ID {locked.image_id[:19]}…), but {what}: "
        f"refused. To have the pinned one: python -m containers pull {locked.name}{cure}"
    )


def _top_manifest(
    wanted: Wanted, lock_path: Path, registries: Sequence[Registry], say: Callable[[str], None]
) -> tuple[tuple[bytes, str], Registry]:
    asked = wanted.reference.digest or wanted.reference.tag
    try:
        return in_turn(registries, lambda registry: registry.manifest(asked), say)
    except NotFound as error:
        if wanted.locked is None or not wanted.reference.digest:
            raise
        raise NotFound(
            f"{error}; {lock_path} pins {wanted.locked.name} to it: if it was deleted there, pull another release and "
            f"python -m containers lock {wanted.locked.name} REFERENCE"
        ) from None
