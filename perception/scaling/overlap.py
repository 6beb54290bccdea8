"""How much of the all-reduce a backward pass hides, and the bucket sizes that hide most.

Buckets start strictly in order, each once it is full and the one before has ended:
start_k = max(ready_k, end_{k-1}), end_k = start_k + T(S_k), exposed = max(0, end_K - end of backward).
The same recurrence as in Li et al. 2020 (PyTorch Distributed) and Hu et al. 2022 (dPRO).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perception.distributed.buckets import ParameterSpec, plan_buckets
from perception.scaling.profile import StepProfile

MIB = 1 << 20
FIRST_SIZES_MIB = (0.25, 1, 4, 16)
SIZES_MIB = (1, 2, 4, 8, 16, 25, 32, 50, 64, 100, 128, 256)


@dataclass(frozen=True)
class TimedBucket:
    num_bytes: int
    ready_seconds: float
    """When its last gradient is in, since the start of backward."""


@dataclass(frozen=True)
class TimedPlan:
    first_bucket_mib: float
    bucket_mib: float
    buckets: tuple[TimedBucket, ...]


def timed_plan(profile: StepProfile, first_bucket_mib: float, bucket_mib: float) -> TimedPlan:
    """The buckets that the reducer would make of this model, and when each is full.

    The reducer fills buckets in the order in which backward reaches gradients: here as recorded.
    Its last bucket carries the step's extras and starts when backward has ended.
    """
    specs = [
        ParameterSpec(
            gradient.name, (gradient.numel,), f"float{8 * gradient.element_bytes}", gradient.element_bytes, (1,)
        )
        for gradient in profile.gradients
    ]
    plans = plan_buckets(specs, int(first_bucket_mib * MIB), int(bucket_mib * MIB), order=range(len(specs)))
    buckets = [
        TimedBucket(plan.num_bytes, max(profile.gradients[slot.parameter].ready_seconds for slot in plan.slots))
        for plan in plans
    ]
    buckets[-1] = TimedBucket(buckets[-1].num_bytes, profile.backward_seconds)
    return TimedPlan(first_bucket_mib, bucket_mib, tuple(buckets))


def candidate_plans(profile: StepProfile) -> list[TimedPlan]:
    """All combinations of sizes that give different buckets; of equal ones the smallest sizes stay."""
    different: dict[tuple[TimedBucket, ...], TimedPlan] = {}
    for size in SIZES_MIB:
        for first in (*FIRST_SIZES_MIB, size):
            if first <= size:
                plan = timed_plan(profile, first, size)
                different.setdefault(plan.buckets, plan)
    return list(different.values())


def exposed_seconds(
    buckets: Sequence[TimedBucket], backward_seconds: float, seconds_of: Callable[[int], float], launch_seconds: float
) -> float:
    """What of the all-reduce comes after backward; `seconds_of` gives the time of so many bytes."""
    end = 0.0
    for bucket in buckets:
        end = max(bucket.ready_seconds + launch_seconds, end) + seconds_of(bucket.num_bytes)
    return max(0.0, end - backward_seconds)


def best_plan(
    plans: Sequence[TimedPlan], backward_seconds: float, seconds_of: Callable[[int], float], launch_seconds: float
) -> tuple[TimedPlan, float]:
    """(plan, its exposed seconds) that hides most.

    Of plans within a thousandth of backward of each other, the one with the fewest buckets: each costs the host work.
    """
    exposed = [exposed_seconds(plan.buckets, backward_seconds, seconds_of, launch_seconds) for plan in plans]
    enough = min(exposed) + backward_seconds / 1000
    good = [index for index, seconds in enumerate(exposed) if seconds <= enough]
    best = min(good, key=lambda index: (len(plans[index].buckets), exposed[index]))
    return plans[best], exposed[best]
