"""Small collective calls among ranks of one host through shared memory: microseconds instead of an engine's cycle.

Each rank writes its values into its slot; once all have, each adds up all slots for itself, in
rank order. Slots are used in turns of two: who begins the call after the next has seen every
rank begin the next one, and so finish reading this one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perception.distributed.shared_segment import SharedSegment
from perception.distributed.shared_wait import wait_until
from perception.distributed.stall_watch import StallWatch

SLOT_BYTES = 256 * 1024
CALL_BYTES = 2 * SLOT_BYTES
"""Memory of each rank."""
_CALLS = 1
_NUMEL = 2
_KIND = 4
_OPS = ("sum", "max", "min", "broadcast")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class SharedCalls:
    """Sums, extremes and broadcasts of flat tensors in main memory."""

    def __init__(self, segment: SharedSegment, watch: StallWatch, work: Callable[[], bool]) -> None:
        """`work` is done while waiting and tells whether there was any."""
        self._segment, self._watch, self._work = segment, watch, work
        self._size, self._own = len(segment.neighbours.ranks), segment.neighbours.own
        self._calls = 0
        self._slots: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def combine(self, flat: Tensor, op: str, name: str) -> None:
        """Overwrite contiguous 1-D `flat` with the sum, max or min over ranks; narrow floats are added as fp32."""
        for piece in flat.split(SLOT_BYTES // flat.element_size()):
            parts = self._meet(piece, True, op, name)
            total = parts[0].to(_WIDE.get(flat.dtype, flat.dtype), copy=True)
            for part in parts[1:]:
                if op == "sum":
                    total.add_(part)
                elif op == "max":
                    torch.maximum(total, part.to(total.dtype), out=total)
                else:
                    torch.minimum(total, part.to(total.dtype), out=total)
            piece.copy_(total)

    def broadcast(self, flat: Tensor, root: int, name: str) -> None:
        """Overwrite contiguous 1-D `flat` with that of the rank at place `root`."""
        for piece in flat.split(SLOT_BYTES // flat.element_size()):
            slots = self._meet(piece, self._own == root, "broadcast", name, root)
            if self._own != root:
                piece.copy_(slots[root])

    def _meet(self, piece: Tensor, shows: bool, op: str, name: str, root: int = 0) -> list[Tensor]:
        """Meet all ranks; returns their slots, cut to the length of `piece`, which this rank's holds if it `shows`.

        Raises RuntimeError on every rank where the calls of two of them differ.
        """
        self._watch.reached(name)
        counters, own, numel = self._segment.counters, self._own * 8, piece.numel()
        self._calls += 1
        slots = [slot[:numel] for slot in self._slots_of(piece.dtype)]
        if shows:
            slots[self._own].copy_(piece)
        kind = (root * len(_OPS) + _OPS.index(op)) * len(_DTYPES) + _DTYPES.index(piece.dtype)
        counters[own + _NUMEL + self._calls % 2] = numel
        counters[own + _KIND + self._calls % 2] = kind
        counters[own + _CALLS] = self._calls
        calls = self._calls
        wait_until(
            lambda: [place for place in range(self._size) if counters[place * 8 + _CALLS] < calls],
            self._work,
            self._segment,
            self._watch,
        )
        for place in range(self._size):
            line = place * 8 + calls % 2
            their_numel, their_kind = counters[line + _NUMEL], counters[line + _KIND]
            if (their_numel, their_kind) != (numel, kind):
                ranks = self._segment.neighbours.ranks
                raise RuntimeError(
                    f"{name}: rank {ranks[self._own]} has {_told(numel, kind)}, "
                    f"rank {ranks[place]} has {_told(their_numel, their_kind)}: "
                    "every rank must make the same call with a tensor of the same shape and dtype"
                )
        return slots

    def _slots_of(self, dtype: torch.dtype) -> list[Tensor]:
        turn = self._calls % 2
        if (dtype, turn) not in self._slots:
            numel = SLOT_BYTES // dtype.itemsize
            self._slots[dtype, turn] = [
                self._segment.tensor(place, dtype, turn * SLOT_BYTES, numel) for place in range(self._size)
            ]
        return self._slots[dtype, turn]


def _told(numel: int, kind: int) -> str:
    rest, dtype = divmod(kind, len(_DTYPES))
    root, op = divmod(rest, len(_OPS))
    source = f" from rank {root}" if _OPS[op] == "broadcast" else ""
    return f"{numel} values of {_DTYPES[dtype]} to {_OPS[op]}{source}"
