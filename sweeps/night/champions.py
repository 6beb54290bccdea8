"""The best known configuration of a model, from the record of past nights."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.planning.plan import ModelPlan
from sweeps.record import JobRecord, figure_of

ENDED_WELL = ("finished", "target_reached")


@dataclass(frozen=True)
class Champion:
    parameters: dict[str, Any]
    config_hash: str
    value: float
    """Mean of its runs, in the plan's first objective."""
    num_runs: int
    job: str
    """The first of its runs."""
    night: str


def best_known(
    jobs: Iterable[JobRecord], plan: ModelPlan, plan_name: str, is_comparable: Callable[[JobRecord], bool] | None = None
) -> Champion | None:
    """Of whole runs of this plan's searches. One that was run under several seeds is believed before one that was not:
    the best of many single runs is mostly the luckiest. None where no trial was ever run to its end.

    Runs that are not comparable (of another length, or under other settings of the plan) count only where there are no
    others: they still tell where to begin.
    """
    if not plan.objectives:
        return None
    objective = plan.objectives[0]
    groups: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        counts = job.plan == plan_name and job.model == plan.model and job.kind in ("trial", "champion")
        if counts and job.status in ENDED_WELL and job.objective_name == objective.metric and is_allowed(job, plan):
            groups[job.config_hash].append(job)
    if is_comparable is not None:
        comparable = {name: group for name, group in groups.items() if is_comparable(group[0])}
        groups = defaultdict(list, comparable or groups)
    scored = {name: [job for job in group if job.objective is not None] for name, group in groups.items()}
    scored = {name: group for name, group in scored.items() if group}
    repeated = {name: group for name, group in scored.items() if len({job.seed for job in group}) > 1}
    candidates = repeated or scored
    if not candidates:
        return None
    sign = 1 if objective.direction == "maximize" else -1
    best = max(sorted(candidates), key=lambda name: sign * _mean(candidates[name]))
    first = candidates[best][0]
    return Champion(
        dict(first.parameters), best, _mean(candidates[best]), len(candidates[best]), first.job, first.night
    )


def is_allowed(job: JobRecord, plan: ModelPlan) -> bool:
    """The constraints, as far as the record tells; of a figure that it does not hold nothing is known against it."""
    for constraint in plan.constraints:
        value = figure_of(job, constraint.metric)
        if value is not None and constraint.excess(value) > 0:
            return False
    return True


def _mean(group: Sequence[JobRecord]) -> float:
    return statistics.fmean(job.objective for job in group if job.objective is not None)
