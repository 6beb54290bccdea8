"""Images in one file for a machine without network: `python -m containers save lane sign FILE`.

The file is a tar in the OCI image layout, so that other tools read it too, with the entries of the lock file in front.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from containers.errors import ContainerError
from containers.lock import LockedImage
from containers.manifests import Descriptor, Manifest
from containers.progress import NoProgress, Progress, format_bytes, progress_for
from containers.pull import PullSettings, add_source_arguments, open_source, settings_of
from containers.transfer_errors import CorruptBlob

if TYPE_CHECKING:
    from containers.blob_cache import BlobCache

BUNDLE_FORMAT = 1
CONTENTS = "roadfuse-bundle.json"
BLOBS = "blobs/sha256/"


def save(names: Sequence[str], path: Path, settings: PullSettings, progress: Progress) -> int:
    """Write locked images to a file, fetching what the cache lacks; returns its size in bytes."""
    from containers.resolve import resolve, wanted_image

    entries: list[tuple[LockedImage, Manifest]] = []
    with ExitStack() as stack:
        cache = None
        for name in names:
            locked = settings.lock.image(name, settings.lock_path)
            wanted = wanted_image(name, settings.lock, settings.lock_path, None)
            source = stack.enter_context(open_source(wanted.reference, settings, progress))
            cache = source.cache
            resolved = resolve(wanted, settings.lock_path, source.registries, source.transfers, cache, progress.say)
            manifest = resolved.image.manifest
            progress.layers({layer.digest: layer.size for layer in manifest.layers})
            source.transfers.fetch(manifest.blobs)
            entries.append((locked, manifest))
        if cache is None:
            raise ContainerError("name at least one image of the lock file to save")
        _write(path, entries, cache)
    return path.stat().st_size


def contents_of(entries: Sequence[tuple[LockedImage, Manifest]]) -> dict[str, Any]:
    """What the file says of itself: the lock's entries, and the manifest of each."""
    images = [{**dataclasses.asdict(locked), "manifest": manifest.digest} for locked, manifest in entries]
    return {"format": BUNDLE_FORMAT, "images": images}


def _write(path: Path, entries: Sequence[tuple[LockedImage, Manifest]], cache: BlobCache) -> None:
    """As a whole, or not at all; the same images give the same bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT) as archive:
                _add(archive, CONTENTS, _json(contents_of(entries)))
                _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
                _add(archive, "index.json", _json(_index(entries)))
                _add_blobs(archive, entries, cache)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ContainerError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _add_blobs(archive: tarfile.TarFile, entries: Sequence[tuple[LockedImage, Manifest]], cache: BlobCache) -> None:
    """Each once, whatever the number of images that share it."""
    manifests = {manifest.digest: manifest.raw for _, manifest in entries}
    for digest, raw in sorted(manifests.items()):
        _add(archive, BLOBS + digest.removeprefix("sha256:"), raw)
    blobs = {blob.digest: blob for _, manifest in entries for blob in manifest.blobs}
    for blob in blobs.values():
        _add_blob(archive, blob, cache)


def _add_blob(archive: tarfile.TarFile, blob: Descriptor, cache: BlobCache) -> None:
    entry = _entry(BLOBS + blob.digest.removeprefix("sha256:"), blob.size)
    with cache.path(blob.digest).open("rb") as file:
        hashing = _HashingReader(file)
        archive.addfile(entry, hashing)
    if f"sha256:{hashing.hash.hexdigest()}" != blob.digest:
        cache.drop(blob.digest)
        raise CorruptBlob(f"{cache.path(blob.digest)}: was damaged on disk and is removed: save again")


class _HashingReader(io.RawIOBase):
    """Verifies on the way what the cache has held since it was verified."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.hash.update(data)
        return data


def _index(entries: Sequence[tuple[LockedImage, Manifest]]) -> dict[str, Any]:
    manifests = [
        {
            "mediaType": manifest.media_type,
            "digest": manifest.digest,
            "size": len(manifest.raw),
            "annotations": {"org.opencontainers.image.ref.name": locked.reference},
        }
        for locked, manifest in entries
    ]
    return {"schemaVersion": 2, "manifests": manifests}


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    archive.addfile(_entry(name, len(data)), io.BytesIO(data))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="of the lock file")
    parser.add_argument("file", type=Path, metavar="FILE", help="what to write, e.g. images.tar")
    add_source_arguments(parser)


def run(options: argparse.Namespace) -> int:
    progress: Progress = NoProgress() if options.quiet else progress_for(sys.stderr)
    try:
        size = save(list(dict.fromkeys(options.names)), options.file, settings_of(options, os.environ), progress)
    finally:
        progress.close()
    print(f"{options.file}: {', '.join(options.names)}, {format_bytes(size)}")
    return 0
