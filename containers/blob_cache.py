"""A cache of blobs by their digest: partial ones outlive a crash, and of two processes one fetches for both.

blobs/sha256/HEX      whole and verified when it was put there
partial/HEX           so far, in order
locks/HEX             held by whoever writes the partial one
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from containers.errors import ContainerError
from containers.manifests import Descriptor
from containers.transfer_errors import CorruptBlob, DiskFull

CACHE_VARIABLE = "ROADFUSE_IMAGE_CACHE"
_READ_BYTES = 1 << 20
_ROOM_LEFT_BYTES = 256 << 20
"""Of the disk, beside what is fetched: a full one harms more than this pull."""


@dataclass(frozen=True)
class CachedBlob:
    digest: str
    size: int
    used_seconds: float
    """Since the epoch."""
    complete: bool


@dataclass(frozen=True)
class CachePruned:
    """What pruning removed, or would."""

    removed: tuple[CachedBlob, ...]
    kept_bytes: int

    @property
    def removed_bytes(self) -> int:
        return sum(blob.size for blob in self.removed)


def default_cache_folder(environment: Mapping[str, str]) -> Path:
    named = environment.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "roadfuse" / "images"


class BlobCache:
    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        """Of the whole blob, there or not."""
        return self.root / "blobs" / "sha256" / _hex(digest)

    def partial_path(self, digest: str) -> Path:
        return self.root / "partial" / _hex(digest)

    def has(self, descriptor: Descriptor) -> bool:
        """Whole; its bytes were right when it came, and are checked again by whoever takes the blob as an image."""
        try:
            return self.path(descriptor.digest).stat().st_size == descriptor.size
        except FileNotFoundError:
            return False

    def partial_bytes(self, digest: str) -> int:
        try:
            return self.partial_path(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, descriptor: Descriptor) -> bytes:
        """A small blob that is there, verified."""
        data = self.path(descriptor.digest).read_bytes()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor.digest:
            self.drop(descriptor.digest)
            raise CorruptBlob(f"{self.path(descriptor.digest)}: was damaged on disk and is removed: pull again")
        return data

    def used(self, digest: str) -> None:
        """Note the time, by which pruning chooses."""
        with suppress(FileNotFoundError):
            os.utime(self.path(digest))

    @contextmanager
    def writing(self, digest: str) -> Iterator[bool]:
        """The right to write a blob: False at once if another thread or process has it."""
        path = self.root / "locks" / _hex(digest)
        with self._disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Pruning removes locks with their blobs: one that has lost its name protects nothing.
                held = os.fstat(handle).st_ino == path.stat().st_ino
            except (BlockingIOError, FileNotFoundError):
                held = False
            yield held
        finally:
            os.close(handle)

    def open_partial(self, descriptor: Descriptor) -> PartialBlob:
        """What is there of a blob, to go on with. Only under `writing`."""
        path = self.partial_path(descriptor.digest)
        with self._disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.path(descriptor.digest).parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b", buffering=0)
        partial = PartialBlob(self, descriptor, file)
        try:
            partial.read_what_is_there()
        except BaseException:
            file.close()
            raise
        return partial

    def put(self, descriptor: Descriptor, chunks: Iterable[bytes], source: str) -> None:
        """Take a blob from elsewhere than a registry, verified. One that is there is not read again."""
        while not self.has(descriptor):
            with self.writing(descriptor.digest) as held:
                if not held:
                    time.sleep(0.1)
                    continue
                self.partial_path(descriptor.digest).unlink(missing_ok=True)
                partial = self.open_partial(descriptor)
                with partial:
                    for chunk in chunks:
                        partial.append(chunk, source)
                    partial.finish(source)

    def drop(self, digest: str) -> None:
        self.path(digest).unlink(missing_ok=True)

    def drop_if_damaged(self, descriptor: Descriptor) -> bool:
        """Read a whole blob again and remove it if its bytes are not what they were."""
        path = self.path(descriptor.digest)
        try:
            with path.open("rb") as file:
                right = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == descriptor.digest
        except FileNotFoundError:
            return False
        if not right:
            self.drop(descriptor.digest)
        return not right

    def check_room(self, needed_bytes: int) -> None:
        """Raise before a pull that cannot fit is begun."""
        with self._disk_errors():
            self.root.mkdir(parents=True, exist_ok=True)
        state = os.statvfs(self.root)
        free = state.f_bavail * state.f_frsize
        if free < needed_bytes + _ROOM_LEFT_BYTES:
            raise DiskFull(
                f"{self.root}: {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} GB are to be pulled: free some "
                f"(python -m containers prune --cache-size 0 --apply), or set {CACHE_VARIABLE} to a larger disk"
            )

    def blobs(self) -> list[CachedBlob]:
        """All, the longest unused first."""
        found = []
        for folder, complete in ((self.root / "blobs" / "sha256", True), (self.root / "partial", False)):
            for path in folder.glob("*"):
                with suppress(FileNotFoundError):
                    state = path.stat()
                    found.append(CachedBlob(f"sha256:{path.name}", state.st_size, state.st_mtime, complete))
        return sorted(found, key=lambda blob: blob.used_seconds)

    def prune(self, keep_bytes: int, needed: Collection[str], apply: bool) -> CachePruned:
        """Remove the longest unused until `keep_bytes` are left, never a needed digest; nothing while in use."""
        blobs = self.blobs()
        total = sum(blob.size for blob in blobs)
        removed: list[CachedBlob] = []
        for blob in blobs:
            if total > keep_bytes and blob.digest not in needed:
                removed.append(blob)
                total -= blob.size
        if apply and removed:
            with self._in_use(fcntl.LOCK_EX | fcntl.LOCK_NB):
                for blob in removed:
                    path = self.path(blob.digest) if blob.complete else self.partial_path(blob.digest)
                    path.unlink(missing_ok=True)
                    (self.root / "locks" / _hex(blob.digest)).unlink(missing_ok=True)
        return CachePruned(tuple(removed), total)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While it is, nothing is pruned."""
        with self._in_use(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _in_use(self, how: int) -> Iterator[None]:
        with self._disk_errors():
            # What is pulled may be private.
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.root / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, how)
            except BlockingIOError:
                raise ContainerError(f"{self.root}: a pull is using it: prune when that has ended") from None
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(self.root, error) from None


class PartialBlob:
    """The part of a blob that is there, with its hash so far."""

    def __init__(self, cache: BlobCache, descriptor: Descriptor, file: IO[bytes]) -> None:
        self._cache = cache
        self._descriptor = descriptor
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> PartialBlob:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_what_is_there(self) -> None:
        self._file.seek(0)
        while chunk := self._file.read(_READ_BYTES):
            self._hash.update(chunk)
            self.size += len(chunk)
        if self.size > self._descriptor.size:
            self.restart()

    def append(self, chunk: bytes, source: str) -> None:
        if self.size + len(chunk) > self._descriptor.size:
            self.restart()
            raise CorruptBlob(
                f"{source}: blob {self._descriptor.digest[:19]}… is longer than its {self._descriptor.size} bytes"
            )
        self._hash.update(chunk)
        view = memoryview(chunk)
        try:
            while view:
                written = self._file.write(view)
                view = view[written:]
        except OSError as error:
            raise disk_error(self._cache.root, error) from None
        self.size += len(chunk)

    def finish(self, source: str) -> None:
        """Verify, and make it a whole blob of the cache. Raises CorruptBlob, and starts anew, if it is another's."""
        found = f"sha256:{self._hash.hexdigest()}"
        if self.size != self._descriptor.size or found != self._descriptor.digest:
            had = self.size
            self.restart()
            raise CorruptBlob(
                f"{source}: blob {self._descriptor.digest[:19]}… arrived as {had} of {self._descriptor.size} bytes "
                f"with digest {found[:19]}…: it was altered at the registry or on the way"
            )
        # Not flushed to the disk: what a crash of the machine leaves is verified again by the engine, and dropped then.
        self._cache.partial_path(self._descriptor.digest).replace(self._cache.path(self._descriptor.digest))

    def restart(self) -> None:
        """From nothing, as another file: whoever reads the old one sees that it is no longer this blob."""
        path = self._cache.partial_path(self._descriptor.digest)
        self._file.close()
        path.unlink(missing_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._hash = hashlib.sha256()
        self.size = 0


def disk_error(root: Path, error: OSError) -> DiskFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cure = f"free some, or set {CACHE_VARIABLE} to a larger disk; what arrived is kept"
        return DiskFull(f"{root}: the disk is full: {cure}")
    return DiskFull(f"{root}: cannot be written ({error.strerror}): set {CACHE_VARIABLE} to a folder of yours")


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
