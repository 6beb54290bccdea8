"""All-reduce over several hosts in two levels: ranks of a host in shared memory, hosts by the engine.

Each rank adds up its own share of every bucket over the ranks of its host, has the engine add
that share to those of the ranks with the same place on the other hosts, and writes the result
into the memory of all ranks of its host. So of n ranks on a host each sends 1/n of the data.
While one bucket crosses, the next one is summed. There is no thread of ours: as in
`SharedMemoryExchange`, a rank does what it can whenever backward has filled another bucket, and
the rest at the end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator, Pending
from perception.distributed.exchange import Bucket, dtype_on_wire, scale_on_wire
from perception.distributed.host_memory import HostMemory
from perception.distributed.shared_segment import SharedSegment
from perception.distributed.shared_wait import wait_until


@dataclass(frozen=True)
class _Piece:
    """A short range of this rank's share of a bucket."""

    ranges: tuple[Tensor, ...]
    """Where it lies in the memory of each rank of the host."""
    wire: Tensor
    """Where it lies in the message that crosses hosts."""
    total: Tensor
    """`wire` itself, or fp32 scratch where that is narrower."""
    wire_scale: float
    """By what values are multiplied on the wire."""
    square: Tensor | None
    """Where the sum of squares goes; None for extras, which are neither scaled nor part of the norm."""


@dataclass(frozen=True)
class _Share:
    """This rank's part of one bucket."""

    pieces: tuple[_Piece, ...]
    messages: tuple[Tensor, ...]
    """What crosses hosts, empty tensors left out: so on every host alike, as places there have equal shares."""
    title: str
    description: str


@dataclass(frozen=True)
class _Crossing:
    """A share on its way."""

    index: int
    began: float
    pending: tuple[Pending, ...]


class HierarchicalExchange:
    """Buckets of ranks on several hosts with equally many ranks each. Making one is collective."""

    def __init__(self, communicator: Communicator, name: str, segment: SharedSegment, wire_format: str) -> None:
        self._communicator = communicator
        self._watch = communicator.watch
        communicator.open_cross_group(name)
        communicator.exchanges.add(self)
        self._name, self._memory, self._wire_format = name, HostMemory(segment), wire_format
        # Folded into the local sums, where it is free: unchanged training code wants means.
        self.sum_scale = 1.0 / communicator.size
        self._shares: list[_Share] = []
        self._crossing: deque[_Crossing] = deque()
        self.spans: list[tuple[str, float, float]] | None = None
        self._squares = torch.zeros(0)
        self._norm: float | None = None
        self._launched = 0
        """Buckets whose share has been summed and sent; so many on every rank that has waited."""
        self._landed = 0
        self._base = 0
        """Buckets of all steps before the current layout."""

    @property
    def extra_bytes(self) -> int:
        return self.crossing_bytes

    @property
    def crossing_bytes(self) -> int:
        """What this rank gives to the engine in a step, to be summed over hosts."""
        return sum(m.numel() * m.element_size() for share in self._shares for m in share.messages)

    def allocate(self, sizes: Mapping[torch.dtype, int]) -> dict[torch.dtype, Tensor]:
        return self._memory.allocate(sizes)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        ranges = [self._memory.own_share(bucket) for bucket in buckets]
        self._squares = torch.zeros(max(1, sum(len(share) for share in ranges)))
        squares = iter(self._squares.unbind())
        self._shares = []
        for index, (bucket, share) in enumerate(zip(buckets, ranges, strict=True)):
            gradients, extras, messages = self._messages(bucket.buffer.dtype, share)
            is_cast = gradients.dtype is not bucket.buffer.dtype
            scale = scale_on_wire(gradients.dtype, self._wire_format) if is_cast else 1.0
            pieces, used = [], {True: 0, False: 0}
            for parts, is_gradient in share:
                message, start, numel = gradients if is_gradient else extras, used[is_gradient], parts[0].numel()
                used[is_gradient] += numel
                wire = message[start : start + numel]
                is_wide = parts[0].dtype is wire.dtype and wire.dtype in (torch.float32, torch.float64)
                total = wire if is_wide else self._memory.scratch[:numel]
                square = next(squares) if is_gradient else None
                pieces.append(_Piece(parts, wire, total, scale if is_gradient else 1.0, square))
            self._shares.append(_Share(tuple(pieces), messages, bucket.title(index), bucket.description))
        # Counters go on: another rank may still be looking at the last step's.
        self._base = self._landed

    def leave_sums(self) -> dict[torch.dtype, Tensor] | None:
        return None

    def start(self, index: int) -> None:
        self._watch.reached(f"{self._name}.bucket{index} ({self._shares[index].description})")
        self._memory.start()

    def progress(self) -> bool:
        """Sum and send what every rank of the host has made ready, write out what has crossed; never blocks.

        Raises what the engine raises for a reduction that failed.
        """
        worked = False
        ready = self._memory.ready
        while self._launched < ready:
            self._launch_next()
            self._land_crossed()
            worked = True
        return self._land_crossed() or worked

    def wait(self) -> None:
        self.progress()
        wait_until(self._memory.late, self._communicator.progress, self._memory.segment, self._watch)
        # Shares, and so their sums of squares, are the same on every host.
        self._norm = self._memory.square_norm()

    def square_norm(self) -> float | None:
        return self._norm

    def state(self) -> list[Tensor]:
        return []

    def load_state(self, state: Sequence[Tensor]) -> None:
        return None

    def _messages(
        self, dtype: torch.dtype, share: Sequence[tuple[tuple[Tensor, ...], bool]]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Memory for a share's gradients, for its extras, and what is to be sent of it: one message if one dtype."""
        num_gradients = sum(ranges[0].numel() for ranges, is_gradient in share if is_gradient)
        num_extras = sum(ranges[0].numel() for ranges, is_gradient in share if not is_gradient)
        wire_dtype = dtype_on_wire(self._communicator, dtype, self._wire_format)
        if wire_dtype is torch.float32:
            both = torch.zeros(num_gradients + num_extras)
            return both[:num_gradients], both[num_gradients:], (both,) if both.numel() else ()
        gradients, extras = torch.zeros(num_gradients, dtype=wire_dtype), torch.zeros(num_extras)
        return gradients, extras, tuple(message for message in (gradients, extras) if message.numel())

    def _launch_next(self) -> None:
        index = (self._launched - self._base) % len(self._shares)
        share = self._shares[index]
        began = time.perf_counter() if self.spans is not None else 0.0
        for piece in share.pieces:
            _sum_locally(piece, self.sum_scale)
        pending = tuple(
            self._communicator.start_cross_allreduce(message, f"{self._name}.bucket{index}.cross{part}", self._name)
            for part, message in enumerate(share.messages)
        )
        self._launched += 1
        self._crossing.append(_Crossing(index, began, pending))

    def _land_crossed(self) -> bool:
        """Write out the buckets that have crossed, in order; tells whether there were any."""
        before = self._landed
        while self._crossing and all(pending.done() for pending in self._crossing[0].pending):
            self._land(self._crossing.popleft())
        return self._landed > before

    def _land(self, crossing: _Crossing) -> None:
        for pending in crossing.pending:
            # Returns at once, or raises what became of it.
            pending.wait()
        share = self._shares[crossing.index]
        for piece in share.pieces:
            _write_out(piece)
        if self.spans is not None:
            self.spans.append((share.title, crossing.began, time.perf_counter()))
        self._landed += 1
        is_last = crossing.index == len(self._shares) - 1
        self._memory.finish(self._landed, float(self._squares.sum(dtype=torch.float64)) if is_last else None)


def _sum_locally(piece: _Piece, scale: float) -> None:
    """The sum over the host's ranks onto the wire; in rank order, so that results do not depend on who adds."""
    total, ranges = piece.total, piece.ranges
    total.copy_(ranges[0])
    for other in ranges[1:]:
        total.add_(other)
    if piece.square is not None:
        total.mul_(scale * piece.wire_scale)
    if total is not piece.wire:
        piece.wire.copy_(total)


def _write_out(piece: _Piece) -> None:
    """The sum over all ranks from the wire into the memory of the host's ranks."""
    total = piece.total
    if total is not piece.wire:
        total.copy_(piece.wire)
        if piece.wire_scale != 1.0:
            total.mul_(1 / piece.wire_scale)
    if piece.square is not None:
        flat = total if total.dtype is torch.float32 else total.float()
        torch.dot(flat, flat, out=piece.square)
    for target in piece.ranges:
        target.copy_(total)
