"""Replay of a recorded training step: computing is waiting, the all-reduce is real.

A model stands for the recorded one. It has the same gradients, and they become ready at the recorded times, but
no core works for them. The reducer, its buckets and its communicator cannot tell the difference, so that many
ranks can be exercised on a few cores and bucket plans be compared.

What is real costs this host's time and not the recorded device's: copying gradients into their buckets, their
norm and scaling, and the reduction itself. `ReplayedSteps.lag_seconds` tells how far the schedule was missed.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from perception.config import DistributedConfig
from perception.distributed import Communicator, distribute
from perception.errors import UserError
from perception.scaling.profile import GradientReady, StepProfile

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class ReplayedSteps:
    """What was measured in the steps; lists are by rank, then by step."""

    step_seconds: list[list[float]]
    wait_seconds: list[list[float]]
    """Waiting for the reduction at the end of backward, stragglers included."""
    straggler_seconds: list[list[float]]
    """The part of it until the last rank had its gradients ready."""
    lag_seconds: list[list[float]]
    """How much later than recorded a gradient was ready, the mean over a step's gradients."""
    max_lag_seconds: list[list[float]]
    rank_cores: float
    """Cores that the ranks together kept busy."""
    host_cpu_share: float
    """Busy share of all cores of the host, whoever used them."""


class ReplayModel(nn.Module):
    """Parameters of the profile's sizes whose gradients, the same ones each step, are ready at its times.

    Parameters are registered in reverse order of readiness, as a model's layers mostly are: a profile does not
    hold the order in which the recorded model had them. Gradients are given without a copy: they may be read, and
    are to be None again before the next backward.
    """

    def __init__(self, profile: StepProfile, seed: int = 0, device: torch.device | None = None) -> None:
        """`seed` draws the gradients. Raises UserError for an element size that no gradient has."""
        super().__init__()
        self.profile = profile
        generator = torch.Generator().manual_seed(seed)
        self.own_gradients = [_gradient(gradient, generator).to(device) for gradient in profile.gradients]
        """In order of readiness, flat; those of the loss that `forward` returns."""
        self.parameters_by_readiness = nn.ParameterList(
            nn.Parameter(torch.zeros_like(gradient)) for gradient in reversed(self.own_gradients)
        )
        self.lags: list[float] = []
        """How late each gradient of the current step was, in seconds."""
        self._given, self._factor = self.own_gradients, 1.0
        self._start = 0.0
        self._stretch = 1.0

    def begin_step(self, stretch: float = 1.0) -> None:
        """Start the clock of a step whose recorded times are all multiplied by `stretch`."""
        self._start = time.perf_counter()
        self._stretch = stretch
        self.lags = []

    def forward(self) -> Tensor:
        """Return a loss when the recorded forward would; its backward takes the recorded time."""
        profile = self.profile
        trained = list(reversed(self.parameters_by_readiness))
        groups = [
            (ready_seconds, [index for index, _ in members])
            for ready_seconds, members in groupby(enumerate(profile.gradients), lambda item: item[1].ready_seconds)
        ]
        # Backward runs from the end of the chain, so what is ready last comes first.
        chain: Tensor = torch.zeros((), requires_grad=True)
        chain = _due(chain, self._end_backward)
        for ready_seconds, indices in reversed(groups):
            give = self._gradients_at(ready_seconds, indices)
            chain = _due(chain, give, [trained[index] for index in indices])
        self._wait_until(profile.forward_seconds)
        return chain

    def optimizer_step(self) -> None:
        """Wait as long as the recorded update took; no parameter changes."""
        time.sleep(self.profile.optimizer_seconds * self._stretch)

    def _gradients_at(self, ready_seconds: float, indices: Sequence[int]) -> Callable[[float], list[Tensor]]:
        def give(factor: float) -> list[Tensor]:
            if factor != self._factor:
                # A reducer multiplies the loss by the same number in every step, so this is done once.
                self._given, self._factor = [own * factor for own in self.own_gradients], factor
            lag = self._wait_until(self.profile.forward_seconds + ready_seconds)
            self.lags += [lag] * len(indices)
            # Tensors that nobody else holds: autograd takes them as they are, as it does with new ones.
            return [self._given[index].detach() for index in indices]

        return give

    def _end_backward(self, _: float) -> list[Tensor]:
        self._wait_until(self.profile.forward_seconds + self.profile.backward_seconds)
        return []

    def _wait_until(self, seconds: float) -> float:
        """Sleep until so long after the step's start; returns by how much it is later than that.

        Measured from the start, so that sleeping too long once does not shift what follows.
        """
        due = self._start + seconds * self._stretch
        remaining = due - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return time.perf_counter() - due


class _Due(torch.autograd.Function):
    """The identity of `chain`, whose backward waits and then gives the parameters their gradients.

    `give` is called with the loss's factor. Autograd hands the gradients on, and runs the reducer's hooks, before
    it goes back along the chain.
    """

    @staticmethod
    def forward(ctx: Any, chain: Tensor, give: Callable[[float], list[Tensor]], *parameters: Tensor) -> Tensor:
        ctx.give = give
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *ctx.give(float(gradients[0]))


def _due(chain: Tensor, give: Callable[[float], list[Tensor]], parameters: Sequence[Tensor] = ()) -> Tensor:
    due: Tensor = _Due.apply(chain, give, *parameters)  # type: ignore[no-untyped-call]
    return due


def replay_steps(
    profile: StepProfile,
    communicator: Communicator,
    config: DistributedConfig,
    num_steps: int,
    num_warmup_steps: int = 3,
    jitter_fraction: float = 0.0,
    seed: int = 0,
) -> ReplayedSteps:
    """Train `num_steps` on the ranks of `communicator`, each after its own `profile`; the same result on all.

    `jitter_fraction` is the standard deviation of a step's length over ranks and steps, drawn log-normally around
    the recorded length from `seed`, rank and step.
    """
    model = ReplayModel(profile, communicator.rank, communicator.device)
    reducer = distribute(model, None, communicator, config)
    draw = random.Random(f"{seed} {communicator.rank}")
    rows: list[list[float]] = []
    cpu_seconds = began = 0.0
    for step in range(-num_warmup_steps, num_steps):
        if step == 0:
            communicator.barrier()
            psutil.cpu_percent()
            cpu_seconds, began = time.process_time(), time.perf_counter()
        begun = time.perf_counter()
        model.begin_step(_jitter(draw, jitter_fraction))
        # Within the recorded forward, which includes its own zeroing.
        reducer.zero_grad()
        reducer.backward(model(), num_samples=1.0)
        reduction = reducer.finish()
        model.optimizer_step()
        seconds = time.perf_counter() - begun
        lags = model.lags
        rows.append([seconds, reduction.wait_seconds, reduction.straggler_seconds, statistics.mean(lags), max(lags)])
    host_cpu_share = psutil.cpu_percent() / 100
    cores = (time.process_time() - cpu_seconds) / (time.perf_counter() - began)
    reducer.remove()
    steps = torch.tensor(rows[num_warmup_steps:], dtype=torch.float64)
    step, wait, straggler, lag, max_lag = torch.stack(communicator.allgather(steps)).permute(2, 0, 1).tolist()
    rank_cores, host_share = communicator.allreduce(torch.tensor([cores, host_cpu_share], dtype=torch.float64)).tolist()
    return ReplayedSteps(step, wait, straggler, lag, max_lag, rank_cores, host_share / communicator.size)


def _gradient(gradient: GradientReady, generator: torch.Generator) -> Tensor:
    if gradient.element_bytes not in _DTYPES:
        raise UserError(
            f"profile of gradient {gradient.name}: element_bytes = {gradient.element_bytes} cannot be replayed; "
            f"allowed: {', '.join(map(str, _DTYPES))}"
        )
    return torch.randn(gradient.numel, generator=generator).to(_DTYPES[gradient.element_bytes])


def _jitter(draw: random.Random, fraction: float) -> float:
    """A log-normal factor of mean 1 and standard deviation `fraction`."""
    variance = math.log1p(fraction * fraction)
    return draw.lognormvariate(-variance / 2, math.sqrt(variance))
