"""Memory that all ranks of one host map, with a line of counters for each: no copy, no system call, no daemon.

The file is unlinked as soon as every rank has mapped it, so nothing is left in /dev/shm
whatever becomes of the ranks. Each rank holds a lock on its own byte of the file, which the
kernel lets go of when the process ends: so the others know who is alive.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import uuid
import weakref
from pathlib import Path

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator, Neighbours

FOLDER = Path("/dev/shm")
_LINE_BYTES = 64
"""One cache line a rank, so that ranks that count do not disturb each other."""
_PAGE_BYTES = 4096


class SharedSegment:
    """`num_bytes` of zeros for each rank of a host, mapped by all of them."""

    def __init__(self, descriptor: int, neighbours: Neighbours, num_bytes: int) -> None:
        """Map an open file of `segment_bytes(...)`; the descriptor is taken over."""
        self._descriptor = descriptor
        self.neighbours = neighbours
        self._stride = _pages(num_bytes)
        size = len(neighbours.ranks)
        self._header = _pages(_LINE_BYTES * size)
        self._map = mmap.mmap(descriptor, segment_bytes(size, num_bytes))
        header = memoryview(self._map)[: self._header]
        self.counters = header.cast("q")
        """int64; counter c of the rank at place p is at p * 8 + c. One aligned store each, seen in order on x86."""
        self.reals = header.cast("d")
        """The same bytes as float64."""
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, neighbours.own)
        # Else the unlinked file would keep its memory for as long as the process lives.
        weakref.finalize(self, os.close, descriptor)

    def tensor(self, place: int, dtype: torch.dtype, offset_bytes: int, numel: int) -> Tensor:
        """(numel,) view of the memory of the rank at `place`."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        start = self._header + place * self._stride + offset_bytes
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)

    def is_alive(self, place: int) -> bool:
        if place == self.neighbours.own:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place)
        return False


class SharedCounters:
    """One count a rank, in a segment without other memory."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self.ranks = segment.neighbours.ranks

    def publish(self, count: int) -> None:
        self._segment.counters[self._segment.neighbours.own * 8] = count

    def count(self, place: int) -> int:
        return int(self._segment.counters[place * 8])


def segment_bytes(num_ranks: int, num_bytes: int) -> int:
    return _pages(_LINE_BYTES * num_ranks) + num_ranks * _pages(num_bytes)


def open_segment(communicator: Communicator, num_bytes: int) -> SharedSegment | str:
    """A segment with `num_bytes` for each rank of this host, or why some rank could not have one. Collective."""
    neighbours = communicator.neighbours()
    total = segment_bytes(len(neighbours.ranks), num_bytes)
    reason = None if FOLDER.is_dir() else f"{FOLDER} does not exist"
    path, descriptor = "", -1
    if reason is None and neighbours.own == 0:
        path = str(FOLDER / f"roadfuse-{uuid.uuid4().hex}")
        try:
            descriptor = _create(path, total)
        except OSError as error:
            reason = (
                f"{FOLDER}: {error.strerror}, {total / 1e6:.0f} MB needed; start the container with a larger --shm-size"
            )
    rows = communicator.allgather_object([path, reason])
    path = rows[neighbours.ranks[0]][0]
    reason = next((row[1] for row in rows if row[1]), None)
    segment: SharedSegment | None = None
    if reason is None:
        try:
            segment = SharedSegment(descriptor if descriptor >= 0 else _open(path, total), neighbours, num_bytes)
            descriptor = -1
        except OSError as error:
            reason = f"{path}: {error.strerror}: do the ranks of a host share {FOLDER}?"
    # Every rank has it open or has failed: the name can go.
    reasons = [text for text in communicator.allgather_object(reason) if text]
    if neighbours.own == 0 and path:
        Path(path).unlink(missing_ok=True)
    if reasons:
        if descriptor >= 0:
            os.close(descriptor)
        return str(reasons[0])
    assert segment is not None
    return segment


def _create(path: str, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Takes the memory now: a full /dev/shm is an error here, and a bus error when it is touched later.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        Path(path).unlink()
        raise
    return descriptor


def _open(path: str, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_size != size:
        os.close(descriptor)
        raise OSError(0, "has another size than on the first rank of the host")
    return descriptor


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
