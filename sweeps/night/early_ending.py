"""Whether a model's search may end before its budget, from the state of the night: see early_end.py for the rule."""

from __future__ import annotations

import math
from collections import defaultdict

from sweeps.night.champions import ENDED_WELL, is_allowed
from sweeps.night.run import NightRun
from sweeps.search.early_end import LEAST_TRIALS, noise_of, outlook


def why_search_ends(run: NightRun, model: str) -> str:
    """One line, or empty: it goes on, also where nothing is known of the noise."""
    plan = run.plan.model(model)
    if not run.plan.budget.early_end or run.state.num_trials.get(model, 0) < LEAST_TRIALS:
        return ""
    if len(plan.objectives) != 1:
        # A front may still grow where the first objective does not.
        return ""
    values: list[float | None] = []
    repeats: dict[str, list[float]] = defaultdict(list)
    for record in run.state.records:
        if record.model != model:
            continue
        whole = record.status in ENDED_WELL and record.objective is not None
        if record.kind == "trial" and record.status != "answered":
            # What breaks a constraint is no answer that others would have to beat.
            values.append(record.objective if whole and is_allowed(record, plan) else None)
        elif record.kind in ("default", "champion") and whole and record.objective is not None:
            repeats[record.config_hash].append(record.objective)
    noise = noise_of(list(repeats.values()))
    if noise is None or len(values) < LEAST_TRIALS:
        return ""
    expected = outlook(values, plan.objectives[0].direction, noise, _num_left(run, model, len(values)))
    return f"converged: {expected.reason}" if expected.end and expected.probability > 0 else ""


def _num_left(run: NightRun, model: str, num_done: int) -> int:
    """Trials that the rest of the budget could pay for; many where nothing bounds it."""
    plan, limits = run.plan.model(model), run.limits
    bounds: list[float] = [10_000.0]
    if plan.max_trials:
        bounds.append(plan.max_trials - num_done)
    if limits.max_jobs is not None:
        bounds.append(limits.max_jobs - run.state.num_jobs)
    planner = run.planners[model]
    each = run.expected_rank_seconds(model, planner.num_samples(planner.trial(0, {})))
    if each:
        if limits.rank_seconds is not None:
            bounds.append((limits.rank_seconds - run.spent().rank_seconds) / each)
        if limits.deadline_utc is not None:
            slots = max(1, run.launcher.num_slots())
            bounds.append((limits.deadline_utc - run.clock.now()) * slots / each)
    return max(0, math.floor(min(bounds)))
