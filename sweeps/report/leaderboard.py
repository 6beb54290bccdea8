"""The best configurations of each model, against the default, the champion and last night, with the noise band."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.record import JobRecord, figure_of
from sweeps.report.accounts import DONE, outcome
from sweeps.report.noise import Comparison, Noise, Repeats, compare, groups_of, noise_of, scored
from sweeps.report.plan_facts import ModelFacts
from sweeps.report.wording import score, signed_score

NUM_ENTRIES = 10


@dataclass(frozen=True)
class Entry:
    """One configuration of the night, over its seeds."""

    rank: int
    config_hash: str
    kind: str
    """default, champion (that the night began with), confirmed (picked this night and run again under other seeds) or
    trial."""
    trial: int | None
    parameters: dict[str, Any]
    mean: float
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    against_default: Comparison | None
    against_champion: Comparison | None
    job: str
    """Its best run, which the rest is of."""
    checkpoint_path: str
    checkpoint_sha256: str
    weights_sha256: str
    command: str
    images_per_second: float | None
    seconds: float | None
    metrics: dict[str, float]
    others: dict[str, float | None]
    """Further objectives of the plan: means over the runs."""
    is_on_front: bool
    """With several objectives: no other configuration is better in one and no worse in the rest."""


@dataclass(frozen=True)
class NightBest:
    """Of one night of the history: what the best configuration and the default reached."""

    night: str
    best: float
    config_hash: str
    default: float | None


@dataclass(frozen=True)
class Board:
    """Of one model. Differences are in the objective's direction: above 0 is better."""

    model: str
    objective_name: str
    direction: str
    has_stated_direction: bool
    """From the plan or the list of metrics; False: larger was taken to be better."""
    num_jobs: int
    outcomes: dict[str, int]
    num_configurations: int
    """With at least one scored run, and within the plan's constraints."""
    num_breaking: int
    """With a scored run, but a figure that breaks a constraint of the plan: no answers, so they are not ranked."""
    front: tuple[tuple[str, float, float, bool], ...]
    """With several objectives, of each ranked configuration: its hash, the first two, whether it is on the front."""
    entries: tuple[Entry, ...]
    """The first NUM_ENTRIES; below them, with their ranks, the default, the champion, and the first that is better
    than the default beyond the noise, where they are not among those."""
    default: Repeats | None
    champion: Repeats | None
    """Champion runs of this night, of the configuration that the night began with."""
    champion_parameters: dict[str, Any]
    noise: Noise | None
    verdict: str
    """better, not beyond noise, worse, none (nothing was scored), or unknown (no noise or no default)."""
    verdict_reason: str
    change_since_last_night: float | None
    last_night: str
    """The nearest earlier night with a scored run of this model and objective; empty: none."""
    history: tuple[NightBest, ...]
    """Oldest first, this night last."""
    num_nights_apart: int
    """Earlier nights with runs of this model that are not compared: of another plan, data or length."""
    num_nights_without_gain: int
    """Newest nights in a row, this one included, whose best is not above the best of those before by the noise."""

    @property
    def best(self) -> Entry | None:
        return self.entries[0] if self.entries else None

    @property
    def sign(self) -> int:
        return -1 if self.direction == "minimize" else 1

    @property
    def is_better(self) -> bool:
        return self.verdict == "better"


def board_of(
    model: str, jobs: Sequence[JobRecord], earlier: Sequence[JobRecord], facts: ModelFacts, champion: Mapping[str, Any]
) -> Board:
    """jobs: this model's of the night; earlier: its jobs of earlier nights, oldest night first."""
    searched = [job for job in jobs if job.kind != "scaling"]
    objective = facts.objective or next((job.objective_name for job in scored(searched)), "") or "objective"
    sign = -1 if facts.direction == "minimize" else 1
    tonight = [job for job in searched if job.objective_name == objective]
    is_comparable = _comparable_with(tonight)
    searched_earlier = [job for job in earlier if job.kind != "scaling"]
    earlier = [job for job in searched_earlier if job.objective_name == objective and is_comparable(job)]
    num_nights_apart = len({job.night for job in searched_earlier} - {job.night for job in earlier})
    groups, confirmed = _ranked_groups(tonight)
    runs: dict[str, list[JobRecord]] = defaultdict(list)
    for job in scored(tonight):
        runs[job.config_hash or job.job].append(job)
    noise = noise_of([*earlier, *tonight])
    default = _repeats(tonight, "default")
    # Champion runs of another configuration confirm what this night picked.
    champion_repeats = _repeats([j for j in tonight if champion and j.parameters == dict(champion)], "champion")
    # What was pruned could have been the best as well, had luck been with it at its rung.
    tried = {job.config_hash or job.job for job in tonight if job.kind == "trial" and job.status in (*DONE, "pruned")}
    num_tried = max(1, len(tried)) * (2 if confirmed else 1)

    def against(name: str, reference: Repeats | None) -> Comparison | None:
        if reference is None or reference.config_hash == name:
            return None
        num_compared = 2 * len(confirmed) if name in confirmed else num_tried
        return compare(groups[name].values, reference.values, noise, num_compared, sign)

    breaking = {name for name in groups if any(_breaks(job, facts) for job in runs[name])}
    order = sorted(groups.keys() - breaking, key=lambda name: (-sign * groups[name].mean, name))
    others = {name: _others(runs[name], facts) for name in order}
    front = _front(order, {name: sign * groups[name].mean for name in order}, others, facts)
    entries = [
        _entry(
            rank,
            groups[name],
            runs[name],
            sign,
            against(name, default),
            against(name, champion_repeats),
            others[name],
            name in front,
            champion_repeats is not None and champion_repeats.config_hash == name,
        )
        for rank, name in enumerate(order, start=1)
    ]
    known = {repeats.config_hash for repeats in (default, champion_repeats) if repeats is not None}
    better = better_of(entries)
    shown = [e for e in entries if e.rank <= NUM_ENTRIES or e.config_hash in known or e is better]
    history = _history([*earlier, *tonight], sign)
    before = [night for night in history if not jobs or night.night != jobs[0].night]
    verdict, reason = _verdict(entries, default, noise, sign)
    return Board(
        model=model,
        objective_name=objective,
        direction=facts.direction or "maximize",
        has_stated_direction=bool(facts.direction),
        num_jobs=len(jobs),
        outcomes=dict(Counter(map(outcome, jobs)).most_common()),
        num_configurations=len(order),
        num_breaking=len(breaking),
        front=_drawn_front(order, groups, others, front, facts),
        entries=tuple(shown),
        default=default,
        champion=champion_repeats,
        champion_parameters=dict(champion),
        noise=noise,
        verdict=verdict,
        verdict_reason=reason,
        change_since_last_night=sign * (entries[0].mean - before[-1].best) if entries and before else None,
        last_night=before[-1].night if before else "",
        history=tuple(history),
        num_nights_apart=num_nights_apart,
        num_nights_without_gain=_nights_without_gain(history, noise, sign),
    )


def _comparable_with(tonight: Sequence[JobRecord]) -> Callable[[JobRecord], bool]:
    """Whether a job of an earlier night trained under the same plan, on the same data and, to its end, as long."""
    plans = {job.plan for job in tonight}
    manifests = {job.data_manifest for job in tonight if job.data_manifest}
    lengths = {job.samples for job in tonight if job.status == "finished" and job.samples is not None}

    def is_comparable(job: JobRecord) -> bool:
        has_other_data = bool(manifests and job.data_manifest) and job.data_manifest not in manifests
        has_other_length = bool(lengths and job.samples) and job.status == "finished" and job.samples not in lengths
        return (not plans or job.plan in plans) and not has_other_data and not has_other_length

    return is_comparable


def better_of(entries: Sequence[Entry]) -> Entry | None:
    """The first that is better than the default beyond the noise."""
    return next((e for e in entries if e.against_default is not None and e.against_default.is_better), None)


def _ranked_groups(jobs: Sequence[JobRecord]) -> tuple[dict[str, Repeats], set[str]]:
    """(configuration → the runs that it is ranked by, those that are confirmed): of a configuration with two champion
    runs or more these alone, as the run that it was picked for is likely a lucky one."""
    groups = groups_of(jobs)
    again = groups_of(job for job in jobs if job.kind == "champion")
    confirmed = {name: group for name, group in again.items() if len(group.values) > 1}
    return {**groups, **confirmed}, set(confirmed)


def _repeats(jobs: Sequence[JobRecord], kind: str) -> Repeats | None:
    """Of the configuration with the most runs of that kind."""
    groups = groups_of(job for job in jobs if job.kind == kind)
    return max(groups.values(), key=lambda group: len(group.values), default=None)


def _entry(
    rank: int,
    group: Repeats,
    runs: Sequence[JobRecord],
    sign: int,
    against_default: Comparison | None,
    against_champion: Comparison | None,
    others: dict[str, float | None],
    is_on_front: bool,
    is_champion: bool,
) -> Entry:
    best = max(runs, key=lambda job: (sign * float(job.objective or 0.0), bool(job.checkpoint_path)))
    kinds = {job.kind for job in runs}
    if "default" in kinds:
        kind = "default"
    elif "champion" in kinds:
        kind = "champion" if is_champion else "confirmed"
    else:
        kind = "trial"
    return Entry(
        rank=rank,
        config_hash=group.config_hash,
        kind=kind,
        trial=next((job.trial for job in runs if job.trial is not None), None),
        parameters=dict(best.parameters),
        mean=group.mean,
        values=group.values,
        seeds=group.seeds,
        against_default=against_default,
        against_champion=against_champion,
        job=best.job,
        checkpoint_path=best.checkpoint_path,
        checkpoint_sha256=best.checkpoint_sha256,
        weights_sha256=best.weights_sha256,
        command=best.command,
        images_per_second=best.images_per_second,
        seconds=best.seconds,
        metrics=dict(best.metrics),
        others=others,
        is_on_front=is_on_front,
    )


def _breaks(job: JobRecord, facts: ModelFacts) -> bool:
    """A figure that is not recorded breaks nothing."""
    values = [(constraint, figure_of(job, constraint.metric)) for constraint in facts.constraints]
    return any(value is not None and constraint.excess(value) > 0 for constraint, value in values)


def _others(runs: Sequence[JobRecord], facts: ModelFacts) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name, _ in facts.others:
        values = [value for job in runs if (value := figure_of(job, name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return means


def _front(
    order: Sequence[str],
    first: Mapping[str, float],
    others: Mapping[str, Mapping[str, float | None]],
    facts: ModelFacts,
) -> set[str]:
    """Configurations that no other one dominates; none where there is one objective."""
    if not facts.others:
        return set()
    signs = {name: -1 if direction == "minimize" else 1 for name, direction in facts.others}
    points = {}
    for name in order:
        values = [others[name][objective] for objective in signs]
        if None not in values:
            own = (sign * float(value or 0.0) for sign, value in zip(signs.values(), values, strict=True))
            points[name] = (first[name], *own)
    return {
        name
        for name, own in points.items()
        if not any(other != own and all(a >= b for a, b in zip(other, own, strict=True)) for other in points.values())
    }


def _drawn_front(
    order: Sequence[str],
    groups: Mapping[str, Repeats],
    others: Mapping[str, Mapping[str, float | None]],
    front: set[str],
    facts: ModelFacts,
) -> tuple[tuple[str, float, float, bool], ...]:
    if not facts.others:
        return ()
    second = facts.others[0][0]
    return tuple(
        (name, groups[name].mean, value, name in front) for name in order if (value := others[name][second]) is not None
    )


def _verdict(entries: Sequence[Entry], default: Repeats | None, noise: Noise | None, sign: int) -> tuple[str, str]:
    if not entries:
        return "none", "no run was trained to its end with a figure"
    if default is None:
        return "unknown", "the default was not run this night, so there is nothing to compare with"
    better = better_of(entries)
    best = next((e for e in entries if e.against_default is not None), None)
    if best is None:
        return "not beyond noise", "the default itself is the only configuration"
    if noise is None:
        return "unknown", "no configuration was run under two seeds, so the noise is not known"
    if noise.standard_deviation <= 0:
        return "unknown", "all repeats have the same figure, as untrained models do, so the noise is not known"
    chosen = better or best
    comparison = chosen.against_default
    assert comparison is not None
    figures = f"{signed_score(sign * comparison.difference)} against {score(comparison.needed)} needed"
    if better is not None:
        return "better", figures
    return ("worse" if comparison.difference <= 0 else "not beyond noise"), figures


def _history(jobs: Sequence[JobRecord], sign: int) -> list[NightBest]:
    nights: dict[str, list[JobRecord]] = {}
    for job in jobs:
        nights.setdefault(job.night, []).append(job)
    found = []
    for night, own in nights.items():
        groups, _ = _ranked_groups(own)
        if groups:
            best = max(groups.values(), key=lambda group: sign * group.mean)
            default = _repeats(own, "default")
            found.append(NightBest(night, best.mean, best.config_hash, None if default is None else default.mean))
    return found


def _nights_without_gain(history: Sequence[NightBest], noise: Noise | None, sign: int) -> int:
    if len(history) < 2:
        return 0
    threshold = noise.standard_deviation if noise is not None else 0.0
    last_gain, best = 0, sign * history[0].best
    for index, night in enumerate(history[1:], start=1):
        if sign * night.best > best + threshold:
            last_gain, best = index, sign * night.best
    return len(history) - 1 - last_gain
