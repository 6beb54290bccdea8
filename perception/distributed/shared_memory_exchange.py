"""All-reduce among ranks of one host without moving the data: gradients lie in memory that all of them map.

Each rank adds up its own share of every bucket over all ranks and writes the sum into all of
them, piece by piece so that a piece stays in the cache between reading and writing. There is no
thread: a rank does its share of the earlier buckets whenever backward has filled another one,
and the rest at the end, so the reduction never takes a core from the computation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator
from perception.distributed.exchange import Bucket
from perception.distributed.host_memory import HostMemory
from perception.distributed.shared_segment import SharedSegment
from perception.distributed.shared_wait import wait_until


@dataclass(frozen=True)
class _Piece:
    """A short range of one bucket in every rank's memory."""

    ranges: tuple[Tensor, ...]
    total: Tensor | None
    """fp32 scratch for the sum of narrower floats."""
    square: Tensor | None
    """Where the sum of squares goes; None for extras, which are neither scaled nor part of the norm."""


class SharedMemoryExchange:
    """Buckets of the ranks of one host, summed in place."""

    def __init__(self, communicator: Communicator, name: str, segment: SharedSegment) -> None:
        self._watch, self._work = communicator.watch, communicator.progress
        communicator.exchanges.add(self)
        self._name, self._memory = name, HostMemory(segment)
        # Folded into the sums, where it is free: unchanged training code wants means.
        self.sum_scale = 1.0 / self._memory.size
        self._pieces: list[list[_Piece]] = []
        self._descriptions: list[str] = []
        self._titles: list[str] = []
        self.spans: list[tuple[str, float, float]] | None = None
        self._leaves_sums = False
        """Sums of gradients stay in the memory of the first rank."""
        self._squares = torch.zeros(0)
        self._norm: float | None = None
        self._summed = 0
        self._base = 0
        """Buckets of all steps before the current layout."""

    @property
    def extra_bytes(self) -> int:
        return 0

    def allocate(self, sizes: Mapping[torch.dtype, int]) -> dict[torch.dtype, Tensor]:
        return self._memory.allocate(sizes)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        shares = [self._memory.own_share(bucket) for bucket in buckets]
        self._squares = torch.zeros(max(1, sum(len(share) for share in shares)))
        self._pieces, next_square = [], 0
        for share in shares:
            pieces = []
            for ranges, is_gradient in share:
                wide = ranges[0].dtype in (torch.float32, torch.float64)
                total = None if wide else self._memory.scratch[: ranges[0].numel()]
                pieces.append(_Piece(ranges, total, self._squares[next_square] if is_gradient else None))
                next_square += 1
            self._pieces.append(pieces)
        # Counters go on: another rank may still be looking at the last step's.
        self._base = self._summed
        self._descriptions = [bucket.description for bucket in buckets]
        self._titles = [bucket.title(index) for index, bucket in enumerate(buckets)]

    def leave_sums(self) -> dict[torch.dtype, Tensor] | None:
        self._leaves_sums = True
        return self._memory.first_arenas()

    def start(self, index: int) -> None:
        self._watch.reached(f"{self._name}.bucket{index} ({self._descriptions[index]})")
        self._memory.start()

    def progress(self) -> bool:
        """Sum this rank's share of all buckets that every rank has made ready; tells whether there were any."""
        before = self._summed
        ready = self._memory.ready
        while self._summed < ready:
            self._sum_next()
        return self._summed > before

    def wait(self) -> None:
        self.progress()
        wait_until(self._memory.late, self._work, self._memory.segment, self._watch)
        self._norm = self._memory.square_norm()

    def square_norm(self) -> float | None:
        return self._norm

    def state(self) -> list[Tensor]:
        return []

    def load_state(self, state: Sequence[Tensor]) -> None:
        return None

    def _sum_next(self) -> None:
        index = (self._summed - self._base) % len(self._pieces)
        began = time.perf_counter() if self.spans is not None else 0.0
        for piece in self._pieces[index]:
            _sum_piece(piece, self.sum_scale, self._leaves_sums)
        if self.spans is not None:
            self.spans.append((self._titles[index], began, time.perf_counter()))
        self._summed += 1
        is_last = index == len(self._pieces) - 1
        self._memory.finish(self._summed, float(self._squares.sum(dtype=torch.float64)) if is_last else None)


def _sum_piece(piece: _Piece, scale: float, leaves_sums: bool) -> None:
    ranges, total = piece.ranges, piece.total
    if total is None:
        # In rank order on every rank, so that results do not depend on who adds.
        total = ranges[0]
        for other in ranges[1:]:
            total.add_(other)
        targets = ranges[1:]
    else:
        total.copy_(ranges[0])
        for other in ranges[1:]:
            total.add_(other)
        targets = ranges
    if piece.square is not None:
        total.mul_(scale)
        flat = total if total.dtype is torch.float32 else total.float()
        torch.dot(flat, flat, out=piece.square)
    if leaves_sums and piece.square is not None:
        # Extras are read on every rank, and by one that is late when the first has gone on to fill in its next.
        targets = () if total is ranges[0] else ranges[:1]
    for target in targets:
        target.copy_(total)
