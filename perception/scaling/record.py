"""Record the profile of a model's training step on this machine, from hooks on real backward passes."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perception.errors import UserError
from perception.scaling.profile import GradientReady, StepProfile


def record_profile(
    model: nn.Module,
    loss_of_batch: Callable[[], Tensor],
    optimizer: Optimizer,
    *,
    name: str,
    precision: str,
    batch_size_per_rank: int,
    num_steps: int = 15,
    num_warmup_steps: int = 3,
    device_name: str = "",
) -> StepProfile:
    """Train `num_steps` on one process and return medians over them; the weights change.

    `loss_of_batch()` runs forward on `batch_size_per_rank` images that are in memory already and returns their
    mean loss. `device_name` says on what, where this machine's own name will not do. A parameter that no backward
    reached counts as ready at the end of backward, which is when a reducer can tell. On a GPU times are those of
    CUDA events (written for it, not yet run on one). Raises UserError if nothing is trained.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UserError(f"{name}: no parameter requires a gradient: nothing to record")
    device = trained[0][1].device
    mark: Callable[[], _Mark] = _CudaMark if device.type == "cuda" else _HostMark
    ready: list[_Mark | None] = [None] * len(trained)

    def stamp(index: int) -> Callable[[Tensor], None]:
        def gradient_is_in(_: Tensor) -> None:
            ready[index] = mark()

        return gradient_is_in

    hooks = [parameter.register_post_accumulate_grad_hook(stamp(index)) for index, (_, parameter) in enumerate(trained)]
    forward: list[float] = []
    backward: list[float] = []
    update: list[float] = []
    ready_by_step: list[list[float]] = []
    try:
        for step in range(num_warmup_steps + num_steps):
            ready[:] = [None] * len(trained)
            # Inside the step: a reducer zeroes too.
            begun = mark()
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of_batch()
            forward_done = mark()
            loss.backward()
            backward_done = mark()
            optimizer.step()
            ended = mark()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if step < num_warmup_steps:
                continue
            forward.append(begun.until(forward_done))
            backward.append(forward_done.until(backward_done))
            update.append(backward_done.until(ended))
            ready_by_step.append([forward_done.until(each or backward_done) for each in ready])
    finally:
        for hook in hooks:
            hook.remove()
    return StepProfile(
        model=name,
        device=device_name or _device_name(device),
        precision=precision,
        batch_size_per_rank=batch_size_per_rank,
        forward_seconds=statistics.median(forward),
        backward_seconds=statistics.median(backward),
        optimizer_seconds=statistics.median(update),
        gradients=_in_order(trained, ready_by_step),
    )


def _in_order(
    trained: Sequence[tuple[str, nn.Parameter]], ready_by_step: Sequence[Sequence[float]]
) -> tuple[GradientReady, ...]:
    medians = [statistics.median(times) for times in zip(*ready_by_step, strict=True)]
    gradients = [
        GradientReady(name, parameter.numel(), parameter.element_size(), seconds)
        for (name, parameter), seconds in zip(trained, medians, strict=True)
    ]
    return tuple(sorted(gradients, key=lambda gradient: gradient.ready_seconds))


class _Mark(Protocol):
    """A moment in the stream of work."""

    def until(self, later: _Mark) -> float:
        """Seconds."""


class _HostMark:
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def until(self, later: _Mark) -> float:
        assert isinstance(later, _HostMark)
        return later.seconds - self.seconds


class _CudaMark:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def until(self, later: _Mark) -> float:
        assert isinstance(later, _CudaMark)
        return float(self.event.elapsed_time(later.event)) / 1e3


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
