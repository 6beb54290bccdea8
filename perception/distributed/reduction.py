"""What the training loop asks of the layer: the contract that all gradient reducers keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from perception.distributed.buckets import BucketPlan, ParameterSpec


@dataclass(frozen=True)
class Reduction:
    """What one step's reduction found; equal on all ranks but for the waiting."""

    grad_norm: float
    """Global L2 norm of the mean gradient, before clipping."""
    finite: bool
    """False if any gradient of any rank holds inf or NaN: do not step."""
    weight: float
    """Samples behind the gradient, over all ranks."""
    wait_seconds: float
    """From this rank's last gradient to the end of the reduction: stragglers, and what backward did not hide."""
    straggler_seconds: float
    """The part of it until the last rank had its gradients ready."""
    busy_seconds: float
    """This rank's work on the reduction within backward: copies into buckets, launches, its share of sums."""
    extras: Tensor
    """(num_extras,) fp32, the sums over ranks of what each passed to `finish`."""


class Reducer(Protocol):
    """Averages a model's gradients over ranks, weighted by samples.

    Two ways to use it. Unchanged code: `loss.backward(); optimizer.step()`; backward returns
    when gradients are averaged, every rank weighing the same.
    In full: `zero_grad`, then for each micro-batch `backward(loss, num_samples, last=...)`,
    then `finish(clip_norm)`; the result is the mean over all samples of all ranks. A model
    is trained in one way or the other, not in turns.
    """

    num_extras: int
    specs: Sequence[ParameterSpec]
    plans: Sequence[BucketPlan]
    spans: list[tuple[str, float, float]] | None
    """Set to a list, it receives (name, begin, end) of the work on every bucket, in seconds of time.perf_counter."""

    @property
    def order(self) -> Sequence[int] | None:
        """Parameters as backward was seen to reach them, which decides where sums are rounded; None if not known."""

    def follow(self, order: Sequence[int]) -> None:
        """Take up the `order` of the run that is resumed, between steps and on all ranks."""

    def local_state(self) -> list[Tensor]:
        """What a checkpoint must keep of each rank besides the model, not copied: PowerSGD's errors and factors.

        As many tensors and shapes on every rank; empty for other wire formats.
        """

    def load_local_state(self, state: Sequence[Tensor]) -> None:
        """Go on from what `local_state` gave on this rank. Raises ValueError if shapes differ."""

    @property
    def buffer_bytes(self) -> int:
        """Memory that the layer takes beside the model."""

    def leave_to_owners(self, is_own: Callable[[Tensor], bool]) -> None:
        """A parameter needs a gradient only on the rank that updates it: see `share_update`. Collective."""

    def zero_grad(self) -> None:
        """Begin a step: no parameter has a gradient."""

    def backward(
        self, loss: Tensor, num_samples: float, last: bool = True, global_samples: float | None = None
    ) -> None:
        """Run backward of a mean loss over `num_samples`; `last` ends the accumulation and starts reductions.

        `global_samples`, if known: all samples of all ranks in this step, the same in every call of the
        step. Gradients then come out as means by themselves and need no pass to divide them.
        """

    def contribute_nothing(self) -> None:
        """Take part in a step without samples: zero gradients of weight 0."""

    def accumulating(self) -> AbstractContextManager[None]:
        """For unchanged code: backward passes inside add up locally, and the next one outside reduces the sum."""

    def finish(self, clip_norm: float = 0.0, extras: Tensor | None = None) -> Reduction:
        """Complete the reduction: afterwards every `.grad` is the mean over all samples of all ranks.

        Gradients are scaled down to the global norm `clip_norm` if that is above 0. A parameter
        that no rank used gets `.grad = None`, so that the optimizer leaves it alone. `extras`
        (num_extras,) are summed over ranks on the way.
        Raises what the engine raises if a rank is gone.
        """

    def remove(self) -> None:
        """Detach from the model: gradients are ordinary tensors again."""
