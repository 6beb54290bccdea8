"""Uneven inputs: ranks stop together, by agreement, not by luck."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from perception.distributed.communicator import Communicator

T = TypeVar("T")


def agreed_batches(batches: Iterable[T], communicator: Communicator, until: str = "shortest") -> Iterator[T | None]:
    """Yield this rank's batches until the ranks agree to stop, by one tiny reduction a batch.

    until="shortest" ends when any rank runs out, so that every step has all ranks;
    until="longest" goes on until all have, yielding None on a rank without data, which then
    calls `reducer.contribute_nothing()`: the mean stays over the samples really seen.
    """
    if until not in ("shortest", "longest"):
        raise ValueError(f'until = "{until}": shortest or longest')
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        have = torch.tensor([int(batch is not None)], dtype=torch.int32)
        together = communicator.allreduce(have, "min" if until == "shortest" else "max")
        if not together.item():
            return
        yield batch
