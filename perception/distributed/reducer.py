"""The gradient reducer: flat buckets, filled as backward runs and summed over ranks while it goes on.

All gradients of a dtype lie in one arena; a bucket is a contiguous range of it. Autograd makes
each gradient as it likes (no buffer to zero, nothing to add to); once all of a bucket are there
they are copied in, and the bucket's exchange starts, strictly in bucket order on every rank.
After `finish` each `.grad` is a view of its bucket with the parameter's own strides.
Whether gradients are finite, and clipping, are decided after the reduction, so that all ranks
decide alike.

The order in which gradients arrive is learnt from the first backward, and buckets are laid out by it.
The last bucket carries a tail of fp32 extras, so that weights, arrival times and numbers of the
caller's cost no call of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from perception.distributed.buckets import BucketPlan, ParameterSpec
from perception.distributed.communicator import Communicator
from perception.distributed.exchange import Bucket, Exchange
from perception.distributed.layout import arena_sizes, at_the_same_place, check_frozen, lay_out, parameter_spec
from perception.distributed.reduction import Reduction
from perception.distributed.tail import Tail


class GradientReducer:
    """`Reducer` over the ranks of a communicator."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        communicator: Communicator,
        plans: Sequence[BucketPlan],
        exchange: Exchange,
        replan: Callable[[Sequence[int]], Sequence[BucketPlan]],
        num_extras: int = 0,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        """Take (name, parameter) pairs, all that require gradients; `num_extras` floats travel along.

        `replan` lays out the buckets anew for an order of arrival. `frozen` are the model's other
        parameters, which must stay so. `distribute` puts all this together.
        """
        self.communicator = communicator
        self._named = list(parameters)
        self.parameters = [parameter for _, parameter in parameters]
        self.specs: Sequence[ParameterSpec] = [parameter_spec(name, parameter) for name, parameter in parameters]
        self.num_extras = num_extras
        self._exchange, self._replan = exchange, replan
        self._frozen = frozen
        self._tail = Tail(communicator, len(self.parameters), num_extras)
        self._arenas = exchange.allocate(arena_sizes(plans, self._tail.numel))
        self._views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self._own: Callable[[Tensor], bool] | None = None
        """Asked once gradients are left to those who update their parameters; None: every rank gets them all."""
        self._sums: dict[int, Tensor] | None = None
        """Of the parameters that this rank updates, where their sums are left; None: in its own buckets."""
        self._lay_out(plans)
        self._arrived = [False] * len(self.parameters)
        """This step's last micro-batch has reached it. Kept only while every parameter has its hook."""
        self._used = [False] * len(self.parameters)
        """Its part of the bucket holds gradients of this step."""
        self._learning: list[int] | None = []
        """Parameters in the order in which their gradients arrive; None once the buckets follow it."""
        self._order: tuple[int, ...] | None = None
        self._next_bucket = 0
        self._launching = True
        self._inside_backward = False
        self._explicit = False
        """This model is trained by `backward` and `finish`, not by unchanged code."""
        self._reduced = False
        """Gradients are means over ranks already, and no optimizer has stepped since."""
        self._callback_queued = False
        self._ended_backward = 0.0
        self._busy_seconds = 0.0
        self._weight: float | None = None
        """Samples of this rank in this step; None in unchanged code, where each rank weighs 1."""
        self._share = 0.0
        """This rank's part of the sum of weights that gradients have been multiplied by."""
        self._sentinels = False
        """Only the last parameter of each bucket has a hook."""
        self._hooks: list[RemovableHandle] = []
        self._step_hook: RemovableHandle | None = None
        self._hook_all()

    @property
    def buffer_bytes(self) -> int:
        own = sum(arena.numel() * arena.element_size() for arena in self._arenas.values())
        return own + self._exchange.extra_bytes

    @property
    def spans(self) -> list[tuple[str, float, float]] | None:
        return self._exchange.spans

    @spans.setter
    def spans(self, spans: list[tuple[str, float, float]] | None) -> None:
        self._exchange.spans = spans

    @property
    def order(self) -> Sequence[int] | None:
        return self._order

    def local_state(self) -> list[Tensor]:
        return self._exchange.state()

    def load_local_state(self, state: Sequence[Tensor]) -> None:
        self._exchange.load_state(state)

    def zero_grad(self) -> None:
        self._settle()
        for parameter in self.parameters:
            parameter.grad = None

    def backward(
        self, loss: Tensor, num_samples: float, last: bool = True, global_samples: float | None = None
    ) -> None:
        self._explicit = True
        self._weight = (self._weight or 0.0) + num_samples
        self._share += num_samples / (global_samples or 1.0)
        factor = num_samples / ((global_samples or 1.0) * self._exchange.sum_scale)
        if self._learning is None and not self._sentinels:
            self._hook_sentinels()
        self._set_aside()
        self._launching, self._inside_backward = last, True
        try:
            (loss if factor == 1.0 else loss * factor).backward()
        finally:
            self._launching, self._inside_backward = True, False
        if not last:
            self._add_up()

    def contribute_nothing(self) -> None:
        self._explicit = True
        self._weight = self._weight or 0.0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._launching = False
        try:
            yield
        finally:
            self._launching = True

    @torch.no_grad()
    def finish(self, clip_norm: float = 0.0, extras: Tensor | None = None) -> Reduction:
        check_frozen(self._frozen)
        self.start_rest(extras)
        arrived = self._ended_backward
        self._exchange.wait()
        ended = time.perf_counter()
        sums = self._tail.read(self._buckets[-1].extras, arrived, self._learning is not None)
        # 0 only if every rank contributed nothing.
        divisor = sums.share if sums.share > 0 else 1.0
        grad_norm = self._norm() / divisor
        finite = math.isfinite(grad_norm)
        scale = 1.0 if math.isclose(divisor, 1.0, rel_tol=1e-6) else 1.0 / divisor
        if finite and 0 < clip_norm < grad_norm:
            scale *= clip_norm / grad_norm
        if scale != 1.0:
            sums_here = [b.gradients for b in self._buckets] if self._sums is None else list(self._sums.values())
            if sums_here:
                torch._foreach_mul_(sums_here, scale)
        self._hand_out(sums.used)
        wait_seconds = ended - arrived
        straggler_seconds, busy_seconds = min(wait_seconds, sums.straggler_seconds), self._busy_seconds
        learnt = self._learning is not None and (sums.used is None or any(sums.used))
        self._reset()
        self._reduced = True
        if learnt:
            self.follow(sums.order)
        return Reduction(grad_norm, finite, sums.weight, wait_seconds, straggler_seconds, busy_seconds, sums.extras)

    def leave_to_owners(self, is_own: Callable[[Tensor], bool]) -> None:
        """From now on, or once the order is learnt, a parameter has a gradient only on the rank that updates it.

        Collective. Sums then need not be written out to the others; where that saves nothing, all get them as before.
        Each step must end with an `Update.settle`, or with a gradient that is not finite.
        """
        self._own = is_own
        if self._learning is None:
            self._leave_sums()

    def align_clocks(self, offset_seconds: float) -> None:
        """What to add to this rank's time.perf_counter() to get rank 0's: arrival times are compared."""
        self._tail.align_clocks(offset_seconds)

    def watch_steps_of(self, optimizer: Optimizer) -> None:
        """Have unchanged code reduce before this optimizer's step at the latest."""
        self._step_hook = optimizer.register_step_pre_hook(lambda *_: self._finish_unchanged())

    def remove(self) -> None:
        self._unhook()
        if self._step_hook is not None:
            self._step_hook.remove()
        for parameter in self.parameters:
            parameter.grad = None

    # Arrival of gradients.

    def _hook_all(self) -> None:
        self._unhook()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrival(index))
            for index, parameter in enumerate(self.parameters)
        ]

    def _hook_sentinels(self) -> None:
        """Where the reducer itself runs backward, a bucket is full when its last gradient is there: one hook each."""
        self._unhook()
        self._sentinels = True
        for plan in self.plans:
            trained = [p for p in (self.parameters[slot.parameter] for slot in plan.slots) if p.requires_grad]
            if trained:
                self._hooks.append(trained[-1].register_post_accumulate_grad_hook(self._sentinel))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arrival(self, index: int) -> Callable[[Tensor], None]:
        def gradient_is_in(parameter: Tensor) -> None:
            if self._bucket_of[index] < self._next_bucket:
                raise RuntimeError(self._second_backward(index))
            if not self._launching or self._arrived[index]:
                return
            if self._learning is not None:
                self._learning.append(index)
            if not self._inside_backward and not self._callback_queued:
                # Unchanged code clips or unscales right after backward, so it must end with the reduction done.
                self._callback_queued = True
                self.communicator.unfinished.append(self)
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
            self._arrived[index] = True
            self._missing[self._bucket_of[index]] -= 1
            self._advance(lambda bucket: self._missing[bucket] == 0)

        return gradient_is_in

    def _sentinel(self, _: Tensor) -> None:
        if not self._inside_backward:
            raise RuntimeError("this model is trained by reducer.backward(loss, ...): do not call loss.backward()")
        if not self._launching:
            return
        self._advance(self._is_full)

    def _advance(self, is_full: Callable[[int], bool]) -> None:
        """Within backward: start what is full, the last bucket excepted, and help with what others wait for."""
        began = time.perf_counter()
        while self._next_bucket < len(self._buckets) - 1 and is_full(self._next_bucket):
            self._start_next()
        self._exchange.progress()
        self._busy_seconds += time.perf_counter() - began

    def _is_full(self, bucket: int) -> bool:
        return all(self.parameters[slot.parameter].grad is not None for slot in self.plans[bucket].slots)

    def _finish_backward(self) -> None:
        # One backward may reach several models, in another order on another rank: none waits before all have started.
        waiting = self.communicator.unfinished
        for reducer in waiting:
            reducer.start_rest()
        waiting.clear()
        self.finish()

    def _finish_unchanged(self) -> None:
        """Before an optimizer's step in unchanged code, where this rank's loss reached no parameter."""
        if not self._explicit and not self._reduced:
            self.finish()
        self._reduced = False

    def _second_backward(self, index: int) -> str:
        return (
            f"a second backward reached {self.specs[index].name} while its all-reduce is in flight: "
            "pass last=False for all but the last micro-batch, and call finish() after that"
        )

    # From gradients to buckets and back.

    @torch.no_grad()
    def start_rest(self, extras: Tensor | None = None) -> None:
        """Backward has ended: start every bucket that has not been, the last one with its tail."""
        if self._next_bucket == len(self._buckets):
            return
        self._ended_backward = time.perf_counter()
        while self._next_bucket < len(self._buckets) - 1:
            self._start_next()
        self._collect(self._next_bucket)
        unchanged = self._weight is None
        weight = 1.0 if unchanged else float(self._weight or 0.0)
        share = self._exchange.sum_scale if unchanged else self._share
        tail = self._buckets[-1].extras
        self._tail.fill(tail, weight, share, self._ended_backward, self._used, self._learning, extras)
        self._start_collected()

    @torch.no_grad()
    def _start_next(self) -> None:
        self._collect(self._next_bucket)
        self._start_collected()

    def _start_collected(self) -> None:
        index = self._next_bucket
        self._next_bucket += 1
        self._exchange.start(index)

    def _collect(self, bucket: int) -> None:
        self._take_in([slot.parameter for slot in self.plans[bucket].slots], zero_missing=True)

    @torch.no_grad()
    def _set_aside(self) -> None:
        """Leave every parameter without a gradient, so that backward makes new ones; what is there goes to buckets."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            gradient = parameter.grad
            if self._sums is not None and gradient is self._sums.get(index):
                parameter.grad = gradient = None
            if gradient is not None:
                if gradient is not view:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
                parameter.grad = None
            self._used[index] = gradient is not None

    @torch.no_grad()
    def _add_up(self) -> None:
        """After a micro-batch that is not the last: gradients are what has been added up so far."""
        self._take_in(range(len(self.parameters)), zero_missing=False)
        for parameter, view, used in zip(self.parameters, self._views, self._used, strict=True):
            if used:
                parameter.grad = view

    def _take_in(self, indices: Sequence[int], zero_missing: bool) -> None:
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        missing = []
        for index in indices:
            parameter, view = self.parameters[index], self._views[index]
            gradient = parameter.grad
            if gradient is None:
                if zero_missing and not self._used[index]:
                    missing.append(view)
                continue
            if gradient is not view:
                targets, sources = added if self._used[index] else copied
                targets.append(view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
            self._used[index] = True
            parameter.grad = None
        if copied[0]:
            torch._foreach_copy_(copied[0], copied[1])
        if added[0]:
            torch._foreach_add_(added[0], added[1])
        if missing:
            torch._foreach_zero_(missing)

    def _hand_out(self, used: Sequence[bool] | None) -> None:
        """Give each parameter its view; `used` None: all were used by some rank."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.grad is not None:
                raise RuntimeError(self._second_backward(index))
            if used is None or used[index]:
                parameter.grad = view if self._sums is None else self._sums.get(index)

    def _norm(self) -> float:
        square = self._exchange.square_norm()
        if square is not None:
            return math.sqrt(square) if square >= 0 else math.nan
        norms = [
            torch.linalg.vector_norm(b.gradients, dtype=torch.promote_types(b.gradients.dtype, torch.float32)).float()
            for b in self._buckets
            if b.gradients.numel()
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    # The layout.

    def _lay_out(self, plans: Sequence[BucketPlan]) -> None:
        self.plans: Sequence[BucketPlan] = tuple(plans)
        self._buckets: Sequence[Bucket] = lay_out(self.plans, self._arenas, self._named, self._tail.numel)
        self._bucket_of = [0] * len(self.parameters)
        for number, bucket in enumerate(self._buckets):
            for index, view in zip(bucket.parameters, bucket.matrices, strict=True):
                self._bucket_of[index], self._views[index] = number, view
        self._missing = [len(plan.slots) for plan in self.plans]
        self._exchange.set_buckets(self._buckets)

    @torch.no_grad()
    def follow(self, order: Sequence[int]) -> None:
        """Lay the buckets out by `order`; gradients that were handed out move along."""
        self._learning, self._order = None, tuple(order)
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]
        for arena in self._arenas.values():
            # What lies between the gradients of the new layout must be 0: it counts in the norm.
            arena.zero_()
        self._lay_out(self._replan(order))
        for parameter, view, gradient in zip(self.parameters, self._views, gradients, strict=True):
            if gradient is not None:
                parameter.grad = view.copy_(gradient)
        self._leave_sums()

    def _leave_sums(self) -> None:
        """Find where the sums of this layout are left, if they are."""
        left = self._exchange.leave_sums() if self._own is not None else None
        if left is None or self._own is None:
            return
        self._sums = {}
        self._sums = {
            index: at_the_same_place(view, self._arenas[view.dtype], left[view.dtype])
            for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True))
            if self._own(parameter)
        }

    def _settle(self) -> None:
        """Let reductions of an abandoned step end before their buckets are touched."""
        if self._next_bucket:
            for parameter in self.parameters:
                parameter.grad = None
            while self._next_bucket < len(self._buckets):
                self._start_next()
            self._exchange.wait()
        self._reset()

    def _reset(self) -> None:
        self._arrived = [False] * len(self.parameters)
        self._used = [False] * len(self.parameters)
        self._missing = [len(plan.slots) for plan in self.plans]
        self._next_bucket = 0
        self._weight, self._share = None, 0.0
        self._callback_queued = False
        self._busy_seconds = 0.0
        if self._learning is not None:
            self._learning = []
