"""Where each gradient lies: a fixed plan of flat buckets, computed without any communication.

The plan depends on names, shapes, dtypes and two sizes only, so that every rank
computes the same one; its digest is compared over ranks at start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ParameterSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    strides: tuple[int, ...] = ()
    """Of its gradient within the bucket."""

    @property
    def numel(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product


@dataclass(frozen=True)
class Slot:
    parameter: int
    """Index into the parameter list."""
    offset: int
    """First element within the bucket."""
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    dtype: str
    slots: tuple[Slot, ...]
    numel: int
    """Elements, with the padding that aligns every slot to 64 bytes."""
    num_bytes: int


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    first_bucket_bytes: int,
    bucket_bytes: int,
    order: Sequence[int] | None = None,
) -> tuple[BucketPlan, ...]:
    """Group parameters in the order of backward, so that a bucket fills while backward still runs.

    `order` holds every parameter's index once, as backward was seen to reach them; without it
    the reverse order of the parameters stands in. A bucket holds one dtype. The first one is
    small, to start communication early; a parameter larger than the limit gets a bucket of its
    own. Buckets come in the order in which backward fills them, in which they are launched.
    """
    order = list(reversed(range(len(parameters)))) if order is None else order
    position = {index: place for place, index in enumerate(order)}
    open_slots: dict[str, list[Slot]] = {}
    open_numel: dict[str, int] = {}
    closed: list[tuple[int, BucketPlan]] = []

    def close(dtype: str, element_bytes: int) -> None:
        slots = tuple(open_slots.pop(dtype))
        numel = open_numel.pop(dtype)
        last_ready = max(position[slot.parameter] for slot in slots)
        closed.append((last_ready, BucketPlan(dtype, slots, numel, numel * element_bytes)))

    num_of_dtype: dict[str, int] = {}
    for index in order:
        spec = parameters[index]
        limit = first_bucket_bytes if num_of_dtype.get(spec.dtype, 0) == 0 else bucket_bytes
        aligned = _aligned(spec.numel, spec.element_bytes)
        if spec.dtype in open_slots and (open_numel[spec.dtype] + aligned) * spec.element_bytes > limit:
            close(spec.dtype, spec.element_bytes)
            num_of_dtype[spec.dtype] = num_of_dtype.get(spec.dtype, 0) + 1
        offset = open_numel.get(spec.dtype, 0)
        open_slots.setdefault(spec.dtype, []).append(Slot(index, offset, spec.numel))
        open_numel[spec.dtype] = offset + aligned
    for dtype in list(open_slots):
        close(dtype, next(spec.element_bytes for spec in parameters if spec.dtype == dtype))
    return tuple(plan for _, plan in sorted(closed, key=lambda item: item[0]))


def digest(parameters: Sequence[ParameterSpec], plans: Sequence[BucketPlan]) -> str:
    """Hex digest of everything that must be equal on all ranks."""
    content = [
        [[spec.name, list(spec.shape), spec.dtype, list(spec.strides)] for spec in parameters],
        [[plan.dtype, plan.numel, [[s.parameter, s.offset] for s in plan.slots]] for plan in plans],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def first_difference(
    mine: Sequence[ParameterSpec], theirs: Sequence[ParameterSpec], my_rank: int, their_rank: int
) -> str | None:
    """One line that names the first parameter in which two ranks differ; None if they agree."""
    for position in range(max(len(mine), len(theirs))):
        here = mine[position] if position < len(mine) else None
        there = theirs[position] if position < len(theirs) else None
        if here != there:
            same_but_strides = here is not None and there is not None and replace(here, strides=there.strides) == there
            return (
                f"parameter {position} is {_described(here, same_but_strides)} on rank {my_rank} "
                f"but {_described(there, same_but_strides)} on rank {their_rank}"
            )
    return None


def _described(spec: ParameterSpec | None, with_strides: bool) -> str:
    if spec is None:
        return "missing"
    strides = f" strides {list(spec.strides)}" if with_strides else ""
    return f"{spec.name} {list(spec.shape)} {spec.dtype}{strides}"


def _aligned(numel: int, element_bytes: int) -> int:
    step = max(1, _ALIGNMENT_BYTES // element_bytes)
    return -(-numel // step) * step
