"""Predicted against measured on this host: one program that every rank runs, with its own limit beside it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from perception.config import DistributedConfig
from perception.distributed import Communicator, distribute
from perception.distributed.reduction import Reducer
from perception.scaling.calibrate import calibrate
from perception.scaling.host import HostConstants, HostPrediction, predict_measured
from perception.scaling.profile import StepProfile, scaled
from perception.scaling.record import record_profile

_WARM_UP_STEPS = 4


@dataclass(frozen=True)
class HostRound:
    """Mean seconds of a step: of independent processes, of the ranks as predicted, and as measured."""

    limit_seconds: float
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float:
        """Predicted throughput over measured."""
        return self.measured_seconds / self.predicted_seconds


@dataclass(frozen=True)
class HostComparison:
    profile: StepProfile
    rounds: tuple[HostRound, ...]
    constants: HostConstants
    """Of the last round, like the prediction."""
    prediction: HostPrediction

    def median(self, of: Callable[[HostRound], float]) -> float:
        return statistics.median(of(one) for one in self.rounds)


def compare_here(
    communicator: Communicator,
    model: nn.Module,
    optimizer: Optimizer,
    loss_of_batch: Callable[[], Tensor],
    *,
    config: DistributedConfig,
    name: str,
    precision: str,
    batch_size_per_rank: int,
    num_rounds: int = 5,
    num_steps: int = 20,
) -> HostComparison:
    """Measure and predict `num_rounds` times in turn, on all ranks; each predicts from its own profile.

    The weights change.

    In each round the ranks first train alone at the same time (the limit), then together. The prediction of a round
    knows its limit, the profile and the constants; the step times of the ranks together are only compared with it.
    """
    profile = record_profile(
        model,
        loss_of_batch,
        optimizer,
        name=name,
        precision=precision,
        batch_size_per_rank=batch_size_per_rank,
        num_steps=num_steps,
    )

    def alone() -> None:
        optimizer.zero_grad()
        loss_of_batch().backward()
        optimizer.step()

    def together_through(reducer: Reducer) -> Callable[[], None]:
        samples = float(batch_size_per_rank)

        def together() -> None:
            reducer.zero_grad()
            reducer.backward(loss_of_batch(), samples, global_samples=samples * communicator.size)
            reducer.finish()
            optimizer.step()

        return together

    rounds = []
    for _ in range(num_rounds):
        # Anew in each round, as the limit is: a shared machine is not the same from minute to minute.
        constants = calibrate(communicator, config)
        limits = _gathered_seconds(communicator, alone, num_steps)
        # Without the optimizer, which would stay tied to the reducer in the next round's limit.
        reducer = distribute(model, None, communicator, config)

        measured = _gathered_seconds(communicator, together_through(reducer), num_steps)
        reducer.remove()
        limit = statistics.fmean(limits)
        first_bucket_mib, bucket_mib = config.bucket_sizes_mib(on_gpu=False)
        prediction = predict_measured(
            scaled(profile, batch_size_per_rank / limit, profile.device),
            constants,
            communicator.size,
            first_bucket_mib=first_bucket_mib,
            bucket_mib=bucket_mib,
            limit_step_seconds=limits,
        )
        rounds.append(HostRound(limit, prediction.step_seconds, statistics.fmean(measured)))
    profile = dataclasses.replace(profile, device=f"{profile.device}, {communicator.size} processes")
    return HostComparison(profile, tuple(rounds), constants, prediction)


def _gathered_seconds(communicator: Communicator, step: Callable[[], None], num_steps: int) -> list[float]:
    """Seconds of each step of each rank, all of them started together."""
    for _ in range(_WARM_UP_STEPS):
        step()
    communicator.barrier()
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return [one for rank in communicator.allgather_object(seconds) for one in rank]
