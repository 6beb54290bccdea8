"""Images from a file that `save` wrote, checked against the lock file: `python -m containers load FILE`. No network."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from containers.bundle import BLOBS, BUNDLE_FORMAT, CONTENTS
from containers.errors import ContainerError
from containers.lock import LOCK_FILE, Lock, LockedImage, read_lock
from containers.manifests import LONGEST_MANIFEST_BYTES, Descriptor, Manifest, digest_of, is_digest, parse
from containers.progress import NoProgress, Progress, progress_for
from containers.retry import RetryPolicy
from containers.transfer_errors import CorruptBlob, LockMismatch

if TYPE_CHECKING:
    from containers.blob_cache import BlobCache
    from containers.engine import ImageFacts
    from containers.pull_engine import ImageStore

_LONGEST_CONTENTS_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Entry:
    """One image in the file, whose name the lock file pins to the same."""

    locked: LockedImage
    manifest_digest: str


def load(
    path: Path, lock: Lock, lock_path: Path, cache_folder: Path, store: ImageStore, progress: Progress
) -> list[tuple[LockedImage, ImageFacts]]:
    """Bring the images of the file into the engine. Raises LockMismatch before anything is read of what differs."""
    from containers.blob_cache import BlobCache

    if not path.is_file():
        raise ContainerError(f"{path}: is no file; python -m containers save NAME FILE writes one")
    cache = BlobCache(cache_folder)
    try:
        with cache.in_use(), tarfile.open(path, mode="r|") as archive:
            entries = _entries(archive, path, lock, lock_path)
            manifests = _take_blobs(archive, path, {entry.manifest_digest for entry in entries}, cache)
            return [_deliver(entry, manifests, path, cache, store, progress) for entry in entries]
    except (tarfile.TarError, EOFError) as error:
        raise ContainerError(f"{path}: is cut short or no bundle ({error}): copy it again") from None


def _entries(archive: tarfile.TarFile, path: Path, lock: Lock, lock_path: Path) -> list[_Entry]:
    """What the file says of itself comes first, and is compared before gigabytes are read."""
    member = archive.next()
    file = archive.extractfile(member) if member is not None and member.name == CONTENTS else None
    if member is None or file is None or member.size > _LONGEST_CONTENTS_BYTES:
        raise ContainerError(f"{path}: is no bundle of `python -m containers save`: its first entry is not {CONTENTS}")
    try:
        data = json.loads(file.read())
        rows = data["images"]
        known_format = data["format"] == BUNDLE_FORMAT
        described = [(str(row["name"]), str(row["digest"]), str(row["image_id"]), str(row["manifest"])) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise ContainerError(f"{path}: {CONTENTS}: damaged: copy the file again") from None
    if not known_format:
        raise ContainerError(f"{path}: format {data['format']!r}, this version reads {BUNDLE_FORMAT}")
    return [_checked(described_one, path, lock, lock_path) for described_one in described]


def _checked(described: tuple[str, str, str, str], path: Path, lock: Lock, lock_path: Path) -> _Entry:
    name, digest, image_id, manifest_digest = described
    locked = lock.image(name, lock_path)
    if (digest, image_id) != (locked.digest, locked.image_id) or not is_digest(manifest_digest):
        raise LockMismatch(
            f"{path}: holds {name} as {digest} (image ID {image_id[:19]}…), but {lock_path} pins {locked.digest} "
            f"(image ID {locked.image_id[:19]}…): refused. Bring the lock file the bundle was saved with, or save anew"
        )
    return _Entry(locked, manifest_digest)


def _take_blobs(
    archive: tarfile.TarFile, path: Path, manifest_digests: set[str], cache: BlobCache
) -> Mapping[str, bytes]:
    """All blobs into the cache, verified; the manifests are returned."""
    manifests: dict[str, bytes] = {}
    for member in archive:
        if not member.name.startswith(BLOBS):
            continue
        digest = f"sha256:{member.name.removeprefix(BLOBS)}"
        file = archive.extractfile(member) if is_digest(digest) and member.isreg() else None
        if file is None:
            raise ContainerError(f"{path}: {member.name[:80]!r}: not a blob: copy the file again")
        if digest not in manifest_digests:
            cache.put(Descriptor(digest, member.size, ""), _chunks(file), str(path))
            continue
        if member.size > LONGEST_MANIFEST_BYTES:
            raise ContainerError(f"{path}: {digest[:19]}…: a manifest of {member.size} bytes is none")
        manifests[digest] = file.read()
        if digest_of(manifests[digest]) != digest:
            raise CorruptBlob(f"{path}: manifest {digest[:19]}… is damaged: copy the file again")
    return manifests


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _deliver(
    entry: _Entry,
    manifests: Mapping[str, bytes],
    path: Path,
    cache: BlobCache,
    store: ImageStore,
    progress: Progress,
) -> tuple[LockedImage, ImageFacts]:
    from containers.deliver import Delivery, deliver, find_image
    from containers.resolve import with_config
    from containers.transfer import Transfers

    locked = entry.locked
    raw = manifests.get(entry.manifest_digest)
    manifest: Any = parse(raw, "", f"{path}: {locked.name}") if raw is not None else None
    if not isinstance(manifest, Manifest):
        raise ContainerError(f"{path}: lacks the manifest of {locked.name}: save it anew")
    if manifest.config.digest != locked.image_id:
        raise LockMismatch(
            f"{path}: the manifest of {locked.name} has the image ID {manifest.config.digest}, the lock file pins "
            f"{locked.image_id}: refused; save it anew"
        )
    # Without registries: what is not in the file is an error.
    transfers = Transfers(cache, (), RetryPolicy(), progress, threading.Event())
    image = with_config(locked.reference, manifest, transfers, cache)
    transfers.fetch(manifest.layers)

    def name_it(facts: ImageFacts) -> None:
        store.tag(facts.image_id, locked.pinned.full_repository, locked.pinned.tag)

    facts: Any = find_image(image, store)
    if facts is not None:
        name_it(facts)
    else:
        facts = deliver(image, Delivery(store, cache, transfers, RetryPolicy(), progress), name_it)
    return locked, facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="written by `save`")
    parser.add_argument("--lock", type=Path, default=LOCK_FILE, help="the lock file (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="the cache of blobs (default: ROADFUSE_IMAGE_CACHE or ~/.cache)")
    parser.add_argument("--quiet", action="store_true", help="no progress; errors all the same")


def run(options: argparse.Namespace) -> int:
    from containers.blob_cache import default_cache_folder
    from containers.engine import DockerEngine
    from containers.pull_engine import DockerImages

    folder = options.cache or default_cache_folder(os.environ)
    progress: Progress = NoProgress() if options.quiet else progress_for(sys.stderr)
    with DockerEngine() as engine:
        try:
            lock = read_lock(options.lock)
            loaded = load(options.file, lock, options.lock, folder, DockerImages(engine), progress)
        finally:
            progress.close()
    for locked, facts in loaded:
        print(f"{locked.reference}@{locked.digest} image ID {facts.image_id}, {facts.platform}")
    return 0
