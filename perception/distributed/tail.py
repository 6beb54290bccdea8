"""The fp32 numbers that travel behind the gradients: weights, arrival times, marks and the caller's extras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator

_HEAD = 2
_CLOCK_RANGE_SECONDS = 256.0
"""Arrival times are sent modulo this, so that fp32 keeps them to 15 microseconds."""


@dataclass(frozen=True)
class TailSums:
    weight: float
    """Samples of all ranks."""
    share: float
    """What the summed gradients are to be divided by."""
    straggler_seconds: float
    """From this rank's arrival to the last rank's."""
    used: Sequence[bool] | None
    """Parameters that some rank used; None for all."""
    order: Sequence[int]
    """All parameters as rank 0's backward reached them, where `fill` was given an order."""
    extras: Tensor


class Tail:
    """Layout: samples, share, a slot a rank for its arrival, a mark and a place in the order a parameter, extras."""

    def __init__(self, communicator: Communicator, num_parameters: int, num_extras: int) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._clock_offset_seconds = 0.0
        self._marks = slice(_HEAD + self._size, _HEAD + self._size + num_parameters)
        self._order = slice(self._marks.stop, self._marks.stop + num_parameters)
        self.numel = self._order.stop + num_extras

    def align_clocks(self, offset_seconds: float) -> None:
        """What to add to this rank's time.perf_counter() to get rank 0's."""
        self._clock_offset_seconds = offset_seconds

    def fill(
        self,
        tail: Tensor,
        weight: float,
        share: float,
        arrived: float,
        used: Sequence[bool],
        order: Sequence[int] | None,
        extras: Tensor | None,
    ) -> None:
        """Write this rank's numbers into (numel,) `tail`; `order` holds parameters as backward reached them."""
        head = [weight, share, *([0.0] * self._size)]
        head[_HEAD + self._rank] = self._on_clock(arrived)
        tail[: len(head)] = torch.tensor(head, device=tail.device)
        if all(used):
            tail[self._marks].fill_(1.0)
        else:
            tail[self._marks] = torch.tensor([float(mark) for mark in used], device=tail.device)
        if order is not None:
            tail[self._order].zero_()
            if self._rank == 0:
                tail[self._order] = torch.tensor(self._complete(order), dtype=torch.float32, device=tail.device)
        if extras is None:
            tail[self._order.stop :].zero_()
        else:
            tail[self._order.stop :] = extras

    def read(self, tail: Tensor, arrived: float, learning: bool) -> TailSums:
        """What the sums over ranks say; `arrived` as passed to `fill`, `learning` if an order was."""
        marks = tail[self._marks]
        values = torch.cat([tail[: self._marks.start], marks.min().reshape(1)]).tolist()
        used = None if values[-1] > 0 else (marks > 0).tolist()
        own = self._on_clock(arrived)
        later = [_difference(other, own) for other in values[_HEAD : _HEAD + self._size]]
        order = [int(index) for index in tail[self._order].tolist()] if learning else []
        return TailSums(values[0], values[1], max(0.0, *later), used, order, tail[self._order.stop :].clone())

    def _complete(self, order: Sequence[int]) -> list[int]:
        seen = set(order)
        num_parameters = self._marks.stop - self._marks.start
        return [*order, *(index for index in reversed(range(num_parameters)) if index not in seen)]

    def _on_clock(self, seconds: float) -> float:
        return (seconds + self._clock_offset_seconds) % _CLOCK_RANGE_SECONDS


def _difference(later: float, earlier: float) -> float:
    half = _CLOCK_RANGE_SECONDS / 2
    return (later - earlier + half) % _CLOCK_RANGE_SECONDS - half
