"""The scaling factor of data-parallel training, predicted from one rank's profile and a cluster's links.

    scaling factor at n = n * t_1 / (t_1 + exposed + copies + E[max jitter over n] + input stall)

`exposed` is what backward does not hide of the all-reduce, `copies` the reducer's own passes over the gradients.
A rank's step varies from step to step, and all wait for the slowest: the expected maximum of n normal draws. Input is
prefetched, so it costs what it takes longer than all the rest. Jitter and input are `Residue`: they are fitted,
as bandwidths alone predict more than 99 % where 87 % were published.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from perception.scaling.allreduce_time import allreduce_seconds
from perception.scaling.links import Cluster
from perception.scaling.overlap import TimedPlan, best_plan, candidate_plans
from perception.scaling.profile import StepProfile

COPY_PASSES = 3
"""Passes of the reducer over the gradients after the all-reduce: the norm reads, the division reads and writes."""


@dataclass(frozen=True)
class Residue:
    """What bandwidths and latencies do not tell, fitted to measured or published points."""

    jitter_fraction: float = 0.0
    """Standard deviation of a rank's step, as a share of the step."""
    input_images_per_second: float = math.inf
    """Most images that a whole node's input pipeline delivers."""


@dataclass(frozen=True)
class Prediction:
    ranks: int
    nodes: int
    step_seconds: float
    exposed_seconds: float
    copy_seconds: float
    jitter_seconds: float
    input_stall_seconds: float
    scaling_factor: float
    first_bucket_mib: float
    bucket_mib: float
    num_buckets: int
    algorithms: tuple[str, ...]
    """Those that the plan's buckets take, by their number."""

    @property
    def efficiency(self) -> float:
        return self.scaling_factor / self.ranks


def predict(
    profile: StepProfile,
    cluster: Cluster,
    ranks: int,
    residue: Residue | None = None,
    plans: Sequence[TimedPlan] | None = None,
) -> Prediction:
    """Predict training on `ranks` GPUs with the best of `plans`, or of all candidate bucket plans.

    Exactly 1 for one rank. Raises UserError where `ranks` do not fill the cluster's nodes.
    """
    residue = residue or Residue()
    nodes, per_node = cluster.shape(ranks)
    plans = plans or candidate_plans(profile)

    @functools.cache
    def reduction(num_bytes: int) -> tuple[float, str]:
        return allreduce_seconds(cluster, ranks, num_bytes)

    if ranks == 1:
        plan, exposed, copies = max(plans, key=lambda each: each.bucket_mib), 0.0, 0.0
    else:
        plan, exposed = best_plan(
            plans, profile.backward_seconds, lambda num_bytes: reduction(num_bytes)[0], cluster.launch_seconds
        )
        copies = COPY_PASSES * profile.gradient_bytes / cluster.node.memory_bytes_per_second
    alone = profile.step_seconds
    jitter = residue.jitter_fraction * alone * expected_maximum(ranks)
    busy = alone + exposed + copies + jitter
    images_of_node = per_node * profile.batch_size_per_rank
    # t_1 contains the wait of a rank that had the node's input to itself, so one rank has no stall.
    stall = max(0.0, images_of_node / residue.input_images_per_second - busy) if ranks > 1 else 0.0
    step_seconds = busy + stall
    used = [reduction(bucket.num_bytes)[1] for bucket in plan.buckets]
    return Prediction(
        ranks=ranks,
        nodes=nodes,
        step_seconds=step_seconds,
        exposed_seconds=exposed,
        copy_seconds=copies,
        jitter_seconds=jitter,
        input_stall_seconds=stall,
        scaling_factor=ranks * alone / step_seconds,
        first_bucket_mib=plan.first_bucket_mib,
        bucket_mib=plan.bucket_mib,
        num_buckets=len(plan.buckets),
        algorithms=tuple(sorted(set(used), key=used.count, reverse=True)),
    )


@functools.cache
def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` independent standard normal draws; 0 for one."""
    if count == 1:
        return 0.0
    normal = NormalDist()
    x = np.linspace(-10, 10, 4001)
    density = np.array([normal.pdf(value) for value in x])
    below = np.array([normal.cdf(value) for value in x])
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))
