"""The gradient reducer: flat buckets, gradients as views of them, reduced while backward runs.

Each bucket is one contiguous tensor that the reducer owns. A parameter's `.grad` is a
view into it with the parameter's own strides (so channels_last costs nothing), filled by
autograd itself. When the last gradient of a bucket is in, the bucket's all-reduce starts,
strictly in bucket order on every rank. `finish` waits, divides, clips and decides whether
the step is finite: after the reduction, so that all ranks decide alike.

The last buffer carries a tail of fp32 extras: the sample weight, a mark for each parameter
that got a gradient, and numbers of the caller's, so that weighted means, stop requests
and losses cost no call of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from perception.distributed.buckets import BucketPlan, ParameterSpec, plan_buckets
from perception.distributed.communicator import Communicator, Pending


@dataclass(frozen=True)
class Reduction:
    """What one step's reduction found; equal on all ranks but for the wait."""

    grad_norm: float
    """Global L2 norm of the mean gradient, before clipping."""
    finite: bool
    """False if any gradient of any rank holds inf or NaN: do not step."""
    weight: float
    """Samples behind the gradient, over all ranks."""
    wait_seconds: float
    """Time for which this rank had nothing to do but wait: the exposed part of the reduction."""
    extras: Tensor
    """(num_extras,) fp32, the sums over ranks of what each passed to `finish`."""


class _Bucket:
    """A flat buffer and its state within the current step."""

    def __init__(self, plan: BucketPlan, dtype: torch.dtype, device: torch.device, num_extras: int) -> None:
        self.plan = plan
        self.buffer = torch.zeros(plan.numel + num_extras, dtype=dtype, device=device)
        self.gradients = self.buffer[: plan.numel]
        self.extras = self.buffer[plan.numel :]
        self.wire: Tensor | None = None
        self.waiting = len(plan.slots)
        self.pending: Pending | None = None


class GradientReducer:
    """Average a model's gradients over the ranks of `communicator`, weighted by samples.

    Two ways to use it. Unchanged code: `loss.backward(); optimizer.step()`; backward returns
    when gradients are averaged, every rank weighing the same.
    In full: `zero_grad`, then for each micro-batch `backward(loss, num_samples, last=...)`,
    then `finish(clip_norm)`; the result is the mean over all samples of all ranks.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        communicator: Communicator,
        first_bucket_bytes: int,
        bucket_bytes: int,
        num_extras: int = 0,
    ) -> None:
        """Take (name, parameter) pairs, all that require gradients; `num_extras` floats travel along."""
        self.communicator = communicator
        # Reductions of two models may be in flight at once, and Horovod tells them apart by name.
        self._name = f"model{communicator.num_reducers}"
        communicator.num_reducers += 1
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        if not self.parameters:
            raise ValueError("no parameter requires a gradient: nothing to reduce")
        self.specs = [_spec(name, parameter) for name, parameter in parameters]
        self.plans = plan_buckets(self.specs, first_bucket_bytes, bucket_bytes)
        device = self.parameters[0].device
        dtypes = [self.parameters[plan.slots[0].parameter].dtype for plan in self.plans]
        tail = 1 + len(self.parameters) + num_extras
        if dtypes[-1] is not torch.float32:
            self.plans += (BucketPlan("torch.float32", (), 0, 0),)
            dtypes.append(torch.float32)
        last = len(self.plans) - 1
        self._buckets = [
            _Bucket(plan, dtype, device, tail if index == last else 0)
            for index, (plan, dtype) in enumerate(zip(self.plans, dtypes, strict=True))
        ]
        for bucket in self._buckets:
            wire_dtype = communicator.wire_dtype(bucket.buffer.dtype)
            if wire_dtype != bucket.buffer.dtype:
                bucket.wire = torch.zeros_like(bucket.buffer, dtype=wire_dtype)
        self.num_extras = num_extras
        self._bucket_of = [0] * len(self.parameters)
        self._views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for index, bucket in enumerate(self._buckets):
            for slot in bucket.plan.slots:
                self._bucket_of[slot.parameter] = index
                self._views[slot.parameter] = _view(
                    bucket.gradients[slot.offset : slot.offset + slot.numel], self.parameters[slot.parameter]
                )
        self._ready = [False] * len(self.parameters)
        """Gradient complete: this step's last micro-batch has reached it."""
        self._touched = [False] * len(self.parameters)
        """A backward has reached it since its gradient was last zeroed or removed."""
        self._next_bucket = 0
        self._launching = True
        self._callback_queued = False
        self._weight: float | None = None
        """Samples of this rank in this step; None in unchanged code, where each rank weighs 1."""
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self.parameters)
        ]
        self.zero_grad()

    @property
    def buffer_bytes(self) -> int:
        """Memory that the buckets take, wire copies included."""
        buffers = [b.buffer for b in self._buckets] + [b.wire for b in self._buckets if b.wire is not None]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)

    def zero_grad(self) -> None:
        """Zero all gradients, one memset a bucket, and make each a view of its bucket again."""
        self._settle()
        for bucket in self._buckets:
            bucket.buffer.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view
        self._touched = [False] * len(self.parameters)

    def backward(self, loss: Tensor, num_samples: float, last: bool = True) -> None:
        """Run backward of a mean loss over `num_samples`; `last` ends the accumulation and starts reductions."""
        self._weight = (self._weight or 0.0) + num_samples
        self._launching = last
        try:
            (loss * num_samples).backward()
        finally:
            self._launching = True

    def contribute_nothing(self) -> None:
        """Take part in a step without samples: zero gradients of weight 0."""
        self._weight = self._weight or 0.0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """For unchanged code: backward passes inside add up locally, and the next one outside reduces the sum."""
        self._launching = False
        try:
            yield
        finally:
            self._launching = True

    def finish(self, clip_norm: float = 0.0, extras: Tensor | None = None) -> Reduction:
        """Complete the reduction: afterwards every `.grad` is the mean over all samples of all ranks.

        Gradients are scaled down to the global norm `clip_norm` if that is above 0. A parameter
        that no rank used gets `.grad = None`, so that the optimizer leaves it alone. `extras`
        (num_extras,) are summed over ranks on the way.
        Raises what the engine raises if a rank is gone.
        """
        for index, ready in enumerate(self._ready):
            if not ready:
                self._adopt(index)
        tail = self._buckets[-1].extras
        num_parameters = len(self.parameters)
        marks = [1.0 if self._weight is None else self._weight, *map(float, self._touched)]
        tail[: 1 + num_parameters] = torch.tensor(marks, device=tail.device)
        if extras is not None:
            tail[1 + num_parameters :] = extras
        while self._next_bucket < len(self._buckets):
            self._launch(self._buckets[self._next_bucket])
        began = time.perf_counter()
        for bucket in self._buckets:
            self._wait(bucket)
        wait_seconds = time.perf_counter() - began
        sums = tail.tolist()
        weight = sums[0]
        # 0 only if every rank contributed nothing.
        divisor = weight if weight > 0 else 1.0
        norms = [torch.linalg.vector_norm(b.gradients, dtype=torch.float32) for b in self._buckets if b.plan.slots]
        grad_norm = float(torch.linalg.vector_norm(torch.stack(norms)).item()) / divisor
        finite = math.isfinite(grad_norm)
        scale = 1.0 / divisor
        if finite and 0 < clip_norm < grad_norm:
            scale *= clip_norm / grad_norm
        if scale != 1.0:
            for bucket in self._buckets:
                bucket.gradients.mul_(scale)
        for index in range(num_parameters):
            if sums[1 + index] == 0:
                self.parameters[index].grad = None
        self._reset()
        return Reduction(grad_norm, finite, weight, wait_seconds, tail[1 + num_parameters :].clone())

    def remove(self) -> None:
        """Detach from the model: gradients are ordinary tensors again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def gradient_is_in(parameter: Tensor) -> None:
            bucket = self._buckets[self._bucket_of[index]]
            if bucket.pending is not None:
                raise RuntimeError(
                    f"a second backward reached {self.names[index]} while its all-reduce is in flight: "
                    "pass last=False for all but the last micro-batch, and call finish() after that"
                )
            self._touched[index] = True
            if parameter.grad is not self._views[index]:
                self._adopt(index)
            if not self._launching or self._ready[index]:
                return
            if self._weight is None and not self._callback_queued:
                # Unchanged code clips or unscales right after backward, so it must end with the reduction done.
                self._callback_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
            self._ready[index] = True
            bucket.waiting -= 1
            while self._next_bucket < len(self._buckets) - 1 and self._buckets[self._next_bucket].waiting == 0:
                self._launch(self._buckets[self._next_bucket])

        return gradient_is_in

    def _finish_backward(self) -> None:
        self.finish()

    def _adopt(self, index: int) -> None:
        """Bring a gradient that user code replaced or removed back into its bucket."""
        parameter, view = self.parameters[index], self._views[index]
        if parameter.grad is view:
            return
        if parameter.grad is None:
            view.zero_()
            self._touched[index] = False
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def _launch(self, bucket: _Bucket) -> None:
        """Start the next bucket in order. The last one, which carries the extras, starts in `finish`."""
        index = self._next_bucket
        self._next_bucket += 1
        payload = bucket.buffer
        if bucket.wire is not None:
            bucket.wire.copy_(bucket.buffer)
            payload = bucket.wire
        bucket.pending = self.communicator.start_allreduce(payload, f"{self._name}.bucket{index}", bucket=True)

    def _wait(self, bucket: _Bucket) -> None:
        if bucket.pending is None:
            return
        bucket.pending.wait()
        bucket.pending = None
        if bucket.wire is not None:
            bucket.buffer.copy_(bucket.wire)

    def _settle(self) -> None:
        """Let reductions of an abandoned step end before their buffers are touched."""
        while 0 < self._next_bucket < len(self._buckets):
            self._launch(self._buckets[self._next_bucket])
        for bucket in self._buckets:
            self._wait(bucket)
        self._reset()

    def _reset(self) -> None:
        self._ready = [False] * len(self.parameters)
        self._next_bucket = 0
        self._weight = None
        self._callback_queued = False
        for bucket in self._buckets:
            bucket.waiting = len(bucket.plan.slots)


def _spec(name: str, parameter: nn.Parameter) -> ParameterSpec:
    return ParameterSpec(name, tuple(parameter.shape), str(parameter.dtype), parameter.element_size())


def _view(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view of `flat` with the parameter's shape, and its strides where they fill it without gaps."""
    strides = sorted(
        ((stride, length) for stride, length in zip(parameter.stride(), parameter.shape, strict=True) if length != 1)
    )
    expected = 1
    for stride, length in strides:
        if stride != expected:
            return flat.view(parameter.shape)
        expected *= length
    return flat.as_strided(parameter.size(), parameter.stride())
