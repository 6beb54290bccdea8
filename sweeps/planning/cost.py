"""What a plan would launch and cost, before anything runs: pure functions of the plan and of measured speeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sweeps.planning.plan import JobKind, ModelPlan, Plan, run_config
from sweeps.record import JobRecord
from sweeps.search.population import num_generations
from sweeps.search.pruning import expected_share


@dataclass(frozen=True)
class Speed:
    """Of a model on a number of ranks, from the record of past nights."""

    images_per_second: float
    """Median over jobs, of all ranks together."""
    start_seconds: float
    """For which a job holds its ranks beyond its training: start, evaluations, checkpoints. Median."""
    num_jobs: int


Speeds = Mapping[tuple[str, int], Speed]
"""(model, ranks) → speed; what was never run is missing."""


@dataclass(frozen=True)
class Group:
    """Jobs of one model that cost the same."""

    model: str
    kind: JobKind
    num_jobs: int | None
    """None: as many as the budget allows."""
    num_ranks: int
    num_samples: int
    """Expected of each, with what pruning is expected to save."""
    whole_samples: int
    """Of each, if none is pruned."""
    rank_hours: float | None
    """Of all its jobs; None where the speed or the number is not known."""
    hours_each: float | None
    """Of one job."""


@dataclass(frozen=True)
class Cost:
    """Of a night."""

    groups: tuple[Group, ...]
    budget_rank_hours: float | None
    """The least of what rank_hours, and slots times the time until the end, allow; None where nothing bounds them."""
    num_jobs: int | None
    rank_hours: float | None
    unknown: tuple[str, ...]
    """What could not be estimated, a line each."""
    too_large: tuple[Group, ...] = ()
    """On more ranks than there are slots: left out."""


def measured_speeds(jobs: Iterable[JobRecord], launcher: str) -> dict[tuple[str, int], Speed]:
    """From jobs of that launcher that trained, the newest 50 of each model and number of ranks."""
    found: dict[tuple[str, int], list[JobRecord]] = defaultdict(list)
    for job in jobs:
        if job.launcher == launcher and job.images_per_second and job.seconds is not None and job.num_attempts == 1:
            found[job.model, job.num_ranks].append(job)
    speeds = {}
    for key, rows in found.items():
        rows = sorted(rows, key=lambda row: row.started_utc or 0.0)[-50:]
        rates = [row.images_per_second for row in rows if row.images_per_second]
        starts = [max(0.0, row.rank_seconds_allocated / row.num_ranks - (row.seconds or 0.0)) for row in rows]
        speeds[key] = Speed(statistics.median(rates), statistics.median(starts), len(rows))
    return speeds


def estimate(plan: Plan, speeds: Speeds, num_slots: int | None, hours_to_end: float | None) -> Cost:
    """Jobs by kind and their cost; trials without a bound of their own take what the budget leaves, by share."""
    planned = [group for model in plan.models for group in _fixed_groups(model, speeds)]
    fixed = [group for group in planned if num_slots is None or group.num_ranks <= num_slots]
    too_large = [group for group in planned if group not in fixed]
    bounds = [plan.budget.rank_hours] if plan.budget.rank_hours else []
    if num_slots is not None and hours_to_end is not None:
        bounds.append(num_slots * hours_to_end)
    budget = min(bounds, default=None)
    groups = list(fixed)
    jobs_left = _jobs_left(plan, sum(group.num_jobs or 0 for group in fixed))
    for model in plan.models:
        if not model.space.parameters:
            continue
        own = [group for group in fixed if group.model == model.model]
        hours_left = None
        if budget is not None and all(group.rank_hours is not None for group in own):
            total = sum(m.share for m in plan.models)
            hours_left = max(0.0, budget * model.share / total - sum(group.rank_hours or 0.0 for group in own))
        groups.append(_trials(model, speeds, hours_left, jobs_left.get(model.model)))
    order = {model.model: place for place, model in enumerate(plan.models)}
    groups.sort(key=lambda group: order[group.model])
    known = [group.rank_hours for group in groups]
    counts = [group.num_jobs for group in groups]
    unknown = []
    for model in plan.models:
        missing = sorted(
            {g.num_ranks for g in groups if g.model == model.model} - {n for m, n in speeds if m == model.model}
        )
        if missing:
            unknown.append(f"{model.model}, ranks {', '.join(map(str, missing))}: not run in any night yet")
    return Cost(
        groups=tuple(groups),
        budget_rank_hours=budget,
        num_jobs=None if None in counts else sum(count or 0 for count in counts),
        rank_hours=None if None in known else sum(hours or 0.0 for hours in known),
        unknown=tuple(unknown),
        too_large=tuple(too_large),
    )


def _jobs_left(plan: Plan, taken: int) -> dict[str, int]:
    """Of the budget's jobs, those for each model's trials; a model that plans fewer leaves the rest to the others."""
    if not plan.budget.max_jobs:
        return {}
    left = max(0, plan.budget.max_jobs - taken)
    waiting = [model for model in plan.models if model.space.parameters]
    found: dict[str, int] = {}
    while waiting:
        part = left / sum(model.share for model in waiting)
        content = [model for model in waiting if model.max_trials and model.max_trials <= part * model.share]
        if not content:
            return found | {model.model: int(part * model.share) for model in waiting}
        found |= {model.model: model.max_trials for model in content}
        left -= sum(model.max_trials for model in content)
        waiting = [model for model in waiting if model not in content]
    return found


def _fixed_groups(model: ModelPlan, speeds: Speeds) -> list[Group]:
    whole = run_config(model, {}).train.num_samples
    groups = []
    repeats: list[tuple[JobKind, int]] = [("default", model.default_repeats)]
    if model.space.parameters and not model.population.size:
        repeats.append(("champion", model.champion_repeats))
    for kind, count in repeats:
        if count:
            groups.append(_group(model.model, kind, count, model.num_ranks, whole, whole, speeds))
    for ranks in model.scaling.ranks:
        samples = ranks * model.scaling.num_samples_per_rank
        groups.append(_group(model.model, "scaling", model.scaling.repeats, ranks, samples, samples, speeds))
    return groups


def _trials(model: ModelPlan, speeds: Speeds, hours_left: float | None, jobs_left: int | None) -> Group:
    whole = run_config(model, {}).train.num_samples
    if model.population.size:
        samples = model.population.samples_per_generation
        count = model.population.size * num_generations(model.population, whole)
        return _group(model.model, "trial", count, model.num_ranks, samples, samples, speeds)
    expected = round(whole * expected_share(model.pruning, whole))
    one = _group(model.model, "trial", 1, model.num_ranks, expected, whole, speeds)
    bounds = [bound for bound in (model.max_trials or None, jobs_left) if bound is not None]
    if hours_left is not None and one.rank_hours:
        bounds.append(int(hours_left / one.rank_hours))
    if model.sampler == "grid":
        bounds.append(model.space.num_grid_points())
    count_or_none = min(bounds, default=None)
    return _group(model.model, "trial", count_or_none, model.num_ranks, expected, whole, speeds)


def _group(
    model: str, kind: JobKind, count: int | None, num_ranks: int, samples: int, whole: int, speeds: Speeds
) -> Group:
    speed = speeds.get((model, num_ranks))
    each = (samples / speed.images_per_second + speed.start_seconds) / 3600 if speed is not None else None
    total = each * num_ranks * count if each is not None and count is not None else None
    return Group(model, kind, count, num_ranks, samples, whole, total, each)
