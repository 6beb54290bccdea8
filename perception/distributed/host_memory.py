"""Gradients in memory that all ranks of a host map, and how far each rank has come with its share of the sums.

Within a bucket each rank adds up an equal part over all ranks. It says with one counter how many
buckets it has made ready, and with another how many of its parts are done.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from perception.distributed.exchange import Bucket
from perception.distributed.shared_segment import SharedSegment

PIECE_BYTES = 256 * 1024
"""Sums of a piece stay in a core's own cache."""
_ALIGNMENT_BYTES = 64
_READY = 0
_DONE = 1
_SQUARE_NORM = 2


class HostMemory:
    """The memory of every rank of this host, by place, and their counters over all steps."""

    def __init__(self, segment: SharedSegment) -> None:
        self.segment = segment
        self.size, self.own = len(segment.neighbours.ranks), segment.neighbours.own
        self.scratch = torch.zeros(PIECE_BYTES // torch.float16.itemsize)
        """fp32, as long as a piece of narrower floats: for their sums."""
        self._arenas: dict[torch.dtype, list[Tensor]] = {}
        self._started = 0

    def allocate(self, sizes: Mapping[torch.dtype, int]) -> dict[torch.dtype, Tensor]:
        """Zeros of this rank for each dtype, which the others see too."""
        offset = 0
        for dtype, numel in sizes.items():
            self._arenas[dtype] = [self.segment.tensor(place, dtype, offset, numel) for place in range(self.size)]
            offset += aligned_bytes(numel, dtype)
        return {dtype: arenas[self.own] for dtype, arenas in self._arenas.items()}

    def first_arenas(self) -> dict[torch.dtype, Tensor]:
        """Of the first rank, as this one sees them."""
        return {dtype: arenas[0] for dtype, arenas in self._arenas.items()}

    def own_share(self, bucket: Bucket) -> list[tuple[tuple[Tensor, ...], bool]]:
        """The equal part of a bucket that this rank adds up, cut into pieces.

        Returns for each piece its range in the memory of every rank, and whether it holds gradients,
        which come first, or extras.
        """
        arenas, element_bytes = self._arenas[bucket.buffer.dtype], bucket.buffer.element_size()
        first = (bucket.buffer.data_ptr() - arenas[self.own].data_ptr()) // element_bytes
        step, length = max(1, _ALIGNMENT_BYTES // element_bytes), PIECE_BYTES // element_bytes
        pieces = []
        for start, numel, is_gradient in (
            (first, bucket.gradients.numel(), True),
            (first + bucket.gradients.numel(), bucket.num_extras, False),
        ):
            per_rank = -(-numel // (self.size * step)) * step
            low, high = min(self.own * per_rank, numel), min((self.own + 1) * per_rank, numel)
            for offset in range(low, high, length):
                begin, end = start + offset, start + min(offset + length, high)
                pieces.append((tuple(arena[begin:end] for arena in arenas), is_gradient))
        return pieces

    def start(self) -> None:
        """This rank's next bucket is ready."""
        self._started += 1
        self._publish(_READY, self._started)

    @property
    def ready(self) -> int:
        """Buckets that every rank has made ready."""
        return min(self._counts(_READY))

    def finish(self, done: int, square_norm: float | None) -> None:
        """This rank has finished its part of `done` buckets; the sum of squares of its parts after a step's last."""
        if square_norm is not None:
            # Before the counter: who sees that reads this.
            self.segment.reals[self.own * 8 + _SQUARE_NORM] = square_norm
        self._publish(_DONE, done)

    def late(self) -> list[int]:
        """Places of the ranks whose part of this rank's started buckets is not finished."""
        return [place for place, done in enumerate(self._counts(_DONE)) if done < self._started]

    def square_norm(self) -> float:
        """Of all sums of a step, once nobody is late; added in the order of places on every rank."""
        return float(sum(self.segment.reals[place * 8 + _SQUARE_NORM] for place in range(self.size)))

    def _publish(self, counter: int, count: int) -> None:
        self.segment.counters[self.own * 8 + counter] = count

    def _counts(self, counter: int) -> list[int]:
        return [self.segment.counters[place * 8 + counter] for place in range(self.size)]


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of an arena of `numel` elements, rounded up to whole cache lines."""
    return -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
