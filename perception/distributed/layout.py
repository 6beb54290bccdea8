"""From a module's parameters to what a bucket plan needs, and from flat memory back to gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from perception.distributed.buckets import BucketPlan, ParameterSpec
from perception.distributed.exchange import Bucket
from perception.errors import UserError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def parameter_spec(name: str, parameter: nn.Parameter) -> ParameterSpec:
    """Raises TypeError for a parameter whose gradients no engine can add up."""
    if parameter.dtype not in _FLOATS:
        raise TypeError(
            f"{name} is {parameter.dtype}: only fp16, bf16, fp32 and fp64 parameters can be trained on several ranks; "
            "hold a complex one as torch.view_as_real of it"
        )
    return ParameterSpec(
        name, tuple(parameter.shape), str(parameter.dtype), parameter.element_size(), gradient_strides(parameter)
    )


def gradient_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides (so channels_last stays) where they fill memory without gaps, else contiguous."""
    strides = sorted(
        ((stride, length) for stride, length in zip(parameter.stride(), parameter.shape, strict=True) if length != 1)
    )
    expected = 1
    for stride, length in strides:
        if stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= length
    return parameter.stride()


def arena_sizes(plans: Sequence[BucketPlan], tail_numel: int) -> dict[torch.dtype, int]:
    """Elements of each dtype in all buckets; the fp32 tail is in the last one."""
    sizes: dict[torch.dtype, int] = {}
    for plan in plans:
        dtype = torch_dtype(plan)
        sizes[dtype] = sizes.get(dtype, 0) + plan.numel
    sizes[torch.float32] = sizes.get(torch.float32, 0) + tail_numel
    return sizes


def lay_out(
    plans: Sequence[BucketPlan],
    arenas: Mapping[torch.dtype, Tensor],
    parameters: Sequence[tuple[str, nn.Parameter]],
    tail_numel: int,
) -> tuple[Bucket, ...]:
    """Buckets one behind the other in the arenas of their dtypes; the last one ends in the tail."""
    buckets = []
    used = dict.fromkeys(arenas, 0)
    for number, plan in enumerate(plans):
        dtype = torch_dtype(plan)
        start = used[dtype]
        flat = arenas[dtype][start:]
        views = []
        for slot in plan.slots:
            _, parameter = parameters[slot.parameter]
            part = flat[slot.offset : slot.offset + slot.numel]
            views.append(part.as_strided(parameter.size(), gradient_strides(parameter)))
        num_extras = tail_numel if number == len(plans) - 1 else 0
        used[dtype] = start + plan.numel + num_extras
        names = [parameters[slot.parameter][0] for slot in plan.slots]
        description = f"{names[0]} to {names[-1]}" if names else "no gradients"
        owners = tuple(slot.parameter for slot in plan.slots)
        buckets.append(Bucket(arenas[dtype][start : used[dtype]], num_extras, tuple(views), description, owners))
    return tuple(buckets)


def at_the_same_place(view: Tensor, arena: Tensor, other: Tensor) -> Tensor:
    """What lies in `other` where `view` lies in `arena`, with its shape and strides."""
    first = (view.data_ptr() - arena.data_ptr()) // view.element_size()
    return other[first : first + view.numel()].as_strided(view.size(), view.stride())


def torch_dtype(plan: BucketPlan) -> torch.dtype:
    dtype = getattr(torch, plan.dtype.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def with_tail(plans: Sequence[BucketPlan]) -> tuple[BucketPlan, ...]:
    """The plan, ending in an fp32 bucket, which the tail can be appended to."""
    if plans[-1].dtype == "torch.float32":
        return tuple(plans)
    return (*plans, BucketPlan("torch.float32", (), 0, 0))


def check_frozen(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise UserError for the first that requires a gradient by now: it has no place in the buckets."""
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise UserError(
                f"{name} was frozen when the model was distributed and is trained now: "
                "call reducer.remove() and distribute the model again after unfreezing"
            )
