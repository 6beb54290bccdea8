"""What the search of each model did: trials in order, which parameters mattered, learning curves of what was pruned."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sweeps.record import JobRecord
from sweeps.report.accounts import outcome
from sweeps.report.noise import scored
from sweeps.report.wording import finite

MIN_TRIALS_FOR_IMPORTANCE = 8
NUM_GROUPS = 4
NUM_CURVES = 40
"""Of one model."""
NUM_CURVE_POINTS = 60
NUM_CURVE_BYTES = 4 << 20
"""Read of one metrics.jsonl; what lies beyond is left out."""
IMPORTANCE_RULE = (
    "share of the variance of the objective that splitting the trials by this parameter alone explains, less what "
    f"chance explains (epsilon squared; {NUM_GROUPS} groups of equal size, choices one group each)"
)


@dataclass(frozen=True)
class TrialPoint:
    job: str
    trial: int | None
    outcome: str
    objective: float | None
    """As far as the trial came: of a pruned one, its last evaluation."""
    parameters: dict[str, Any]
    best_so_far: float | None


@dataclass(frozen=True)
class Curve:
    """An objective against samples seen."""

    job: str
    outcome: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class SearchView:
    model: str
    objective_name: str
    direction: str
    num_trials: int
    outcomes: dict[str, int]
    rank_seconds: float
    """Allocated to trials."""
    rank_seconds_pruned: float
    """Of it, to those that were pruned."""
    trials: tuple[TrialPoint, ...]
    """In the order in which they were suggested."""
    log_parameters: tuple[str, ...]
    """Searched evenly in their logarithm, and drawn so."""
    varied: tuple[str, ...]
    """Parameters of more than one value, the most important first."""
    importance: dict[str, float]
    """Largest first; empty: not known."""
    importance_source: str
    """How it was found, or why it was not."""
    curves: tuple[Curve, ...]
    curves_note: str
    """What is missing of them, and why."""


def search_of(
    model: str,
    jobs: Sequence[JobRecord],
    objective: str,
    direction: str,
    importance: Mapping[str, float] | None = None,
    log_parameters: Collection[str] = (),
) -> SearchView | None:
    """Of one model's jobs of a night; None without trials. importance: the search's own, where it is at hand."""
    trials = [job for job in jobs if job.kind == "trial"]
    if not trials:
        return None
    trials.sort(key=lambda job: (job.trial is None, job.trial or 0, job.submitted_utc or 0.0, job.job))
    points = _points(trials, -1 if direction == "minimize" else 1)
    if importance:
        known = {name: value for name, value in importance.items() if finite(value) is not None}
        found, source = known, "by the search's own study (PED-ANOVA)"
    else:
        found, source = importance_of(trials)
    found = dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
    names = sorted({name for job in trials for name in job.parameters})
    varied = [name for name in names if len({_key(job.parameters.get(name)) for job in trials}) > 1]
    varied.sort(key=lambda name: (-found.get(name, -1.0), name))
    curves, note = learning_curves(trials, objective, direction)
    return SearchView(
        model=model,
        objective_name=objective,
        direction=direction,
        num_trials=len(trials),
        outcomes=dict(Counter(map(outcome, trials)).most_common()),
        rank_seconds=sum(max(0.0, job.rank_seconds_allocated) for job in trials),
        rank_seconds_pruned=sum(max(0.0, job.rank_seconds_allocated) for job in trials if job.status == "pruned"),
        trials=tuple(points),
        log_parameters=tuple(sorted(set(names) & set(log_parameters))),
        varied=tuple(varied),
        importance=found,
        importance_source=source,
        curves=curves,
        curves_note=note,
    )


def importance_of(trials: Sequence[JobRecord]) -> tuple[dict[str, float], str]:
    """(parameter → share explained, how or why not), by IMPORTANCE_RULE."""
    known = scored(trials)
    if len(known) < MIN_TRIALS_FOR_IMPORTANCE:
        return {}, f"left out: {len(known)} trials were trained to the end, {MIN_TRIALS_FOR_IMPORTANCE} are needed"
    values = [float(job.objective or 0.0) for job in known]
    mean = sum(values) / len(values)
    total = sum((value - mean) ** 2 for value in values)
    if total <= 0:
        return {}, "left out: all trials have the same objective"
    found = {}
    for name in sorted({name for job in known for name in job.parameters}):
        groups = _groups([job.parameters.get(name) for job in known], values)
        if len(groups) < 2 or len(values) <= len(groups):
            continue
        between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in groups)
        within = (total - between) / (len(values) - len(groups))
        found[name] = max(0.0, (between - (len(groups) - 1) * within) / total)
    if not found:
        return {}, "left out: no parameter had more than one value"
    return found, f"from the records of {len(known)} trials: {IMPORTANCE_RULE}"


def _groups(settings: Sequence[Any], values: Sequence[float]) -> list[list[float]]:
    """The objective's values by the parameter's: one group a choice, or NUM_GROUPS along a range."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in settings):
        order = sorted(range(len(values)), key=lambda index: settings[index])
        if len({settings[index] for index in order}) > NUM_GROUPS:
            groups: list[list[float]] = [[] for _ in range(NUM_GROUPS)]
            place = 0
            for index, item in enumerate(order):
                # Equal settings stay in one group.
                if index and settings[item] != settings[order[index - 1]]:
                    place = index * NUM_GROUPS // len(order)
                groups[place].append(values[item])
            return [group for group in groups if group]
    by_choice: dict[str, list[float]] = {}
    for setting, value in zip(settings, values, strict=True):
        by_choice.setdefault(_key(setting), []).append(value)
    return list(by_choice.values())


def learning_curves(trials: Sequence[JobRecord], objective: str, direction: str) -> tuple[tuple[Curve, ...], str]:
    """Of trials whose metrics.jsonl is still there: the best, then what was pruned."""
    sign = -1 if direction == "minimize" else 1
    worst = -math.inf
    order = sorted(
        trials, key=lambda job: -(worst if finite(job.objective) is None else sign * float(job.objective or 0.0))
    )
    # Half of them the best, the rest from the pruned, best first.
    leaders = order[: NUM_CURVES // 2]
    order = [*leaders, *sorted(order[NUM_CURVES // 2 :], key=lambda job: job.status != "pruned")]
    curves: list[Curve] = []
    num_gone = num_without = 0
    for job in order:
        if len(curves) >= NUM_CURVES:
            break
        path = Path(job.run_folder) / "metrics.jsonl"
        if not job.run_folder or not path.is_file():
            num_gone += 1
            continue
        points = read_curve(path, objective)
        if len(points) > 1:
            curves.append(Curve(job.job, outcome(job), tuple(points)))
        else:
            num_without += 1
    notes = []
    if len(curves) == NUM_CURVES < len(trials):
        notes.append(f"{NUM_CURVES} of {len(trials)} trials drawn")
    if num_gone:
        notes.append(f"{num_gone} without metrics.jsonl on this machine")
    if num_without:
        notes.append(f"{num_without} with fewer than two evaluations")
    return tuple(curves), "; ".join(notes)


def read_curve(path: Path, objective: str) -> list[tuple[float, float]]:
    """(samples, objective) of each evaluation in a metrics.jsonl; damaged lines are passed over."""
    key = f"validation/{objective}"
    points: dict[float, float] = {}
    try:
        with path.open("rb") as file:
            text = file.read(NUM_CURVE_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    for line in text.splitlines():
        if key not in line:
            continue
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if not isinstance(values, dict):
            continue
        samples, value = values.get("samples", values.get("step")), values.get(key)
        if _is_number(samples) and _is_number(value):
            points[samples] = value
    found = sorted(points.items())
    stride = max(1, math.ceil(len(found) / NUM_CURVE_POINTS))
    return found if stride == 1 else [*found[::stride], *found[-1:]]


def _points(trials: Sequence[JobRecord], sign: int) -> list[TrialPoint]:
    points, best = [], None
    counted = {job.job for job in scored(trials)}
    for job in trials:
        value = finite(job.objective)
        if job.job in counted and value is not None and (best is None or sign * value > sign * best):
            best = value
        points.append(TrialPoint(job.job, job.trial, outcome(job), value, dict(job.parameters), best))
    return points


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
