"""Prediction for ranks on the cores of one host, where the all-reduce competes with the computation.

A GPU's all-reduce runs beside its kernels. On a host whose cores all compute, whatever the reduction does takes time
from the step even while backward "hides" it; only its waiting is hidden. The base is therefore a step of independent
processes at full load, which share memory and clock already, and the constants are measured by `calibrate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perception.scaling.overlap import TimedBucket, timed_plan
from perception.scaling.profile import StepProfile


@dataclass(frozen=True)
class HostConstants:
    """What the layer adds to a step: seconds = step + tensors * tensor + buckets * bucket + bytes / bandwidth."""

    engine: str
    transport: str
    local_reduction: str
    ranks: int
    step_seconds: float
    tensor_seconds: float
    bucket_seconds: float
    bytes_per_second: float
    core_share: float
    """Part of that time in which the reduction keeps a core from computing; the rest is waiting."""

    def seconds(self, num_tensors: int, num_buckets: int, num_bytes: float) -> float:
        """Without `step_seconds`."""
        return num_tensors * self.tensor_seconds + num_buckets * self.bucket_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class HostPrediction:
    ranks: int
    limit_seconds: float
    """A step of independent processes."""
    step_seconds: float
    layer_seconds: float
    """What the layer adds, by work that takes a core and by what backward does not hide."""
    jitter_seconds: float
    """Waiting for the slower rank."""

    @property
    def ratio_to_limit(self) -> float:
        return self.limit_seconds / self.step_seconds


def predict_measured(
    profile: StepProfile,
    constants: HostConstants,
    ranks: int,
    *,
    first_bucket_mib: float,
    bucket_mib: float,
    limit_step_seconds: Sequence[float] = (),
) -> HostPrediction:
    """Predict a step of `ranks` ranks of one host.

    `profile` is one process's step at the limit: recorded while `ranks` independent processes ran. Their step
    times, if given, tell by how much ranks differ from step to step. Raises ValueError for another number of ranks
    than the constants were measured with: how they change with it was not measured.
    """
    if ranks != constants.ranks:
        raise ValueError(f"the constants are of {constants.ranks} ranks, not of {ranks}: calibrate with {ranks}")
    plan = timed_plan(profile, first_bucket_mib, bucket_mib)
    tensors_per_byte = len(profile.gradients) / max(1, sum(bucket.num_bytes for bucket in plan.buckets))
    added = constants.step_seconds + _added_seconds(plan.buckets, profile.backward_seconds, constants, tensors_per_byte)
    jitter = (
        mean_of_slowest(limit_step_seconds, ranks) - float(np.mean(limit_step_seconds)) if limit_step_seconds else 0.0
    )
    alone = profile.step_seconds
    return HostPrediction(ranks, alone, alone + added + jitter, added, jitter)


def mean_of_slowest(values: Sequence[float], count: int) -> float:
    """Expected maximum of `count` independent draws from the empirical distribution of `values`."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    share_below = np.arange(len(ordered) + 1) / len(ordered)
    return float(ordered @ np.diff(share_below**count))


def _added_seconds(
    buckets: Sequence[TimedBucket], backward_seconds: float, constants: HostConstants, tensors_per_byte: float
) -> float:
    """Later end of the step than without the layer.

    Work on a bucket that falls into backward delays it, and so all later buckets, by the share that takes a core.
    """
    delay, end = 0.0, 0.0
    for bucket in buckets:
        seconds = constants.seconds(1, 1, bucket.num_bytes) - constants.tensor_seconds
        seconds += constants.tensor_seconds * tensors_per_byte * bucket.num_bytes
        start = max(bucket.ready_seconds + delay, end)
        end = start + seconds
        hidden = max(0.0, min(end, backward_seconds + delay) - start)
        delay += hidden * constants.core_share
    return max(delay, end - backward_seconds)
