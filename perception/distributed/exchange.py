"""How full buckets become sums over ranks: the seam between the gradient reducer and what moves the data.

`EngineExchange` hands them to the communicator's engine; `SharedMemoryExchange` (in its own
file) lets ranks of one host add them up in place; `PowerSgdExchange` sends low-rank factors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator, Pending

_FP16_SCALE = 256.0
"""Gradients travel as fp16 times this: 2e-10 to 250 instead of 6e-8 to 65,504, which is where gradients lie."""


@dataclass(frozen=True)
class Bucket:
    """One contiguous range of the reducer's memory and what lies in it."""

    buffer: Tensor
    """(numel,) gradients with their padding, then the extras if it is the last bucket."""
    num_extras: int
    """fp32 numbers at the end of `buffer` that are summed exactly as they are."""
    matrices: tuple[Tensor, ...]
    """The gradients as views with the parameters' shapes."""
    description: str
    """For people: the parameters in it."""
    parameters: tuple[int, ...] = ()
    """Whose gradients `matrices` are: places in the model's list of parameters."""

    def title(self, index: int) -> str:
        """For a picture of the step."""
        return f"bucket {index} ({self.buffer.numel() * self.buffer.element_size() / 1e6:.1f} MB)"

    @property
    def gradients(self) -> Tensor:
        return self.buffer[: self.buffer.numel() - self.num_extras]

    @property
    def extras(self) -> Tensor:
        return self.buffer[self.buffer.numel() - self.num_extras :]


class Exchange(Protocol):
    """Sums buckets over ranks, in place. Every rank starts the same buckets in the same order."""

    sum_scale: float
    """By what the sums of gradients, not of extras, come out multiplied."""
    spans: list[tuple[str, float, float]] | None
    """Receives (name, begin, end) of the work on each bucket if it is a list; seconds of time.perf_counter."""

    @property
    def extra_bytes(self) -> int:
        """Memory taken beside the buckets."""

    def allocate(self, sizes: Mapping[torch.dtype, int]) -> dict[torch.dtype, Tensor]:
        """Zeros for all buckets of each dtype, where this exchange needs them to be. Called once."""

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Name the ranges to be exchanged from now on; no exchange may be under way."""

    def leave_sums(self) -> dict[torch.dtype, Tensor] | None:
        """From now on sums of gradients need to be in one place only, where every rank can read them.

        Returns this place, laid out as what `allocate` gave; None where each rank gets the sums all the same. Called
        on all ranks between steps.
        """

    def start(self, index: int) -> None:
        """This rank's part of bucket `index` is complete and may be changed from now on."""

    def progress(self) -> bool:
        """Do what can be done without waiting; tells whether there was anything."""

    def wait(self) -> None:
        """Block until every started bucket holds its sum; raise if another rank is gone or too late."""

    def square_norm(self) -> float | None:
        """Sum of squares of all summed gradients, if it came for free; the same on every rank."""

    def state(self) -> list[Tensor]:
        """What this rank carries from step to step, not copied; as many tensors and shapes on every rank."""

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Go on from what `state` gave, between steps. Raises ValueError if shapes differ."""


class EngineExchange:
    """One asynchronous all-reduce of the engine for each bucket, cast to the wire's dtype where it differs."""

    sum_scale = 1.0

    def __init__(self, communicator: Communicator, name: str, wire_format: str) -> None:
        self._communicator = communicator
        self._name = name
        self._wire_format = wire_format
        self._buckets: list[Bucket] = []
        self._wires: list[Tensor | None] = []
        self._pending: list[tuple[int, float, Pending]] = []
        self.spans: list[tuple[str, float, float]] | None = None

    @property
    def extra_bytes(self) -> int:
        return sum(wire.numel() * wire.element_size() for wire in self._wires if wire is not None)

    def allocate(self, sizes: Mapping[torch.dtype, int]) -> dict[torch.dtype, Tensor]:
        return {
            dtype: torch.zeros(size, dtype=dtype, device=self._communicator.device) for dtype, size in sizes.items()
        }

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._wires = []
        for bucket in buckets:
            dtype = dtype_on_wire(self._communicator, bucket.buffer.dtype, self._wire_format)
            same = dtype is bucket.buffer.dtype
            self._wires.append(None if same else torch.zeros_like(bucket.gradients, dtype=dtype))

    def leave_sums(self) -> dict[torch.dtype, Tensor] | None:
        return None

    def start(self, index: int) -> None:
        bucket, wire = self._buckets[index], self._wires[index]
        name = f"{self._name}.bucket{index}"
        if wire is None:
            payload = bucket.buffer
        else:
            torch.mul(bucket.gradients, scale_on_wire(wire.dtype, self._wire_format), out=wire)
            payload = wire
        if payload.numel():
            self._pending.append(
                (index, time.perf_counter(), self._communicator.start_allreduce(payload, name, stream=self._name))
            )
        if wire is not None and bucket.num_extras:
            extras = self._communicator.start_allreduce(bucket.extras, f"{self._name}.extras", stream=self._name)
            self._pending.append((-1, time.perf_counter(), extras))

    def progress(self) -> bool:
        return False

    def wait(self) -> None:
        for index, began, pending in self._pending:
            pending.wait()
            if self.spans is not None and index >= 0:
                self.spans.append((self._buckets[index].title(index), began, time.perf_counter()))
            wire = self._wires[index] if index >= 0 else None
            if wire is not None:
                # Widened first: torch would multiply in the wire's dtype, where small numbers lose their digits again.
                gradients = self._buckets[index].gradients.copy_(wire)
                scale = scale_on_wire(wire.dtype, self._wire_format)
                if scale != 1.0:
                    gradients.mul_(1 / scale)
        self._pending.clear()

    def square_norm(self) -> float | None:
        return None

    def state(self) -> list[Tensor]:
        return []

    def load_state(self, state: Sequence[Tensor]) -> None:
        return None


def dtype_on_wire(communicator: Communicator, dtype: torch.dtype, wire_format: str) -> torch.dtype:
    """What gradients of `dtype` travel as by the engine."""
    if dtype is torch.float32 and wire_format in ("fp16", "bf16"):
        return torch.float16 if wire_format == "fp16" else torch.bfloat16
    return communicator.wire_dtype(dtype)


def scale_on_wire(dtype: torch.dtype, wire_format: str) -> float:
    """By what gradients that were cast to `dtype` are multiplied before."""
    return _FP16_SCALE if wire_format == "fp16" and dtype is torch.float16 else 1.0
