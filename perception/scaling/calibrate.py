"""Measure on this host what the all-reduce layer adds to a step, by short trials whose gradients cost nothing."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from perception.config import DistributedConfig
from perception.cores import available_cores
from perception.distributed import Communicator, distribute
from perception.scaling.host import HostConstants

MIB = 1 << 20
_WARM_UP_STEPS = 3
_STEPS = 10


@dataclass(frozen=True)
class _Trial:
    num_tensors: int
    num_buckets: int
    num_bytes: int


_TRIALS = (
    _Trial(1, 1, 64 * 1024),
    _Trial(1, 1, MIB),
    _Trial(1, 1, 4 * MIB),
    _Trial(1, 1, 16 * MIB),
    _Trial(8, 8, MIB),
    _Trial(8, 8, 8 * MIB),
    _Trial(128, 1, MIB),
    _Trial(128, 8, 8 * MIB),
)


class _Instant(torch.autograd.Function):
    """A sum that is 0 and whose gradient is there already."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _Gradients(nn.Module):
    """So many equal parameters whose backward costs next to nothing."""

    def __init__(self, trial: _Trial) -> None:
        super().__init__()
        numel = trial.num_bytes // 4 // trial.num_tensors
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(trial.num_tensors))
        self.gradients = [torch.rand(numel) for _ in range(trial.num_tensors)]

    def forward(self) -> Tensor:
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([_Instant.apply(weight, gradient) for weight, gradient in pairs]).sum()  # type: ignore[no-untyped-call]


def calibrate(communicator: Communicator, config: DistributedConfig | None = None) -> HostConstants:
    """Fit what the layer of `config` adds to a step on this host; equal on all ranks, which all call this.

    Times steps through `distribute` against the same steps without it, at several sizes and numbers of tensors
    and buckets, and solves for four non-negative constants by least squares of relative errors. Takes about a second.
    """
    config = config or DistributedConfig()
    rows, seconds, core_seconds = [], [], []
    for trial in _TRIALS:
        wall, core = _added(communicator, config, trial)
        # The slowest rank is the one that all of them end with.
        worst = communicator.allreduce(torch.tensor([wall, core], dtype=torch.float64), "max").tolist()
        rows.append([1.0, trial.num_tensors, trial.num_buckets, trial.num_bytes])
        seconds.append(max(worst[0], 1e-6))
        core_seconds.append(worst[1])
    weights = 1 / np.array(seconds)
    solution, _ = nnls(np.array(rows) * weights[:, None], np.ones(len(rows)))
    step, tensor, bucket, byte = solution.tolist()
    # A reduction in the training thread always takes its core; threads of an engine do where no core is left.
    spare = available_cores() >= communicator.size * (torch.get_num_threads() + 1)
    share = min(1.0, sum(core_seconds) / sum(seconds))
    in_thread = config.local_reduction != "engine" and communicator.size == communicator.local_size
    return HostConstants(
        engine=communicator.engine,
        transport=communicator.transport,
        local_reduction=config.local_reduction,
        ranks=communicator.size,
        step_seconds=step,
        tensor_seconds=tensor,
        bucket_seconds=bucket,
        bytes_per_second=1 / byte if byte > 0 else float("inf"),
        core_share=0.0 if spare and not in_thread else share,
    )


def _added(communicator: Communicator, config: DistributedConfig, trial: _Trial) -> tuple[float, float]:
    """(wall, processor) seconds that the layer adds to a step, medians over steps."""
    size_mib = trial.num_bytes / trial.num_buckets / MIB
    config = dataclasses.replace(config, first_bucket_mib=size_mib, bucket_mib=size_mib)
    plain, reduced = _Gradients(trial), _Gradients(trial)
    reducer = distribute(reduced, None, communicator, config)

    def plain_step() -> None:
        plain.zero_grad()
        plain().backward()

    def reduced_step() -> None:
        reducer.zero_grad()
        reducer.backward(reduced(), 1.0, global_samples=float(communicator.size))
        reducer.finish()

    communicator.barrier()
    with_layer = _medians(reduced_step)
    reducer.remove()
    communicator.barrier()
    without = _medians(plain_step)
    return with_layer[0] - without[0], with_layer[1] - without[1]


def _medians(step: Callable[[], None]) -> tuple[float, float]:
    walls, cores = [], []
    for number in range(_WARM_UP_STEPS + _STEPS):
        wall, core = time.perf_counter(), time.process_time()
        step()
        if number >= _WARM_UP_STEPS:
            walls.append(time.perf_counter() - wall)
            cores.append(time.process_time() - core)
    return statistics.median(walls), statistics.fmean(cores)
