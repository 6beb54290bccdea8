"""Regressions between nights: which series got worse, since when, by how much, and what it was lost to.

Series of the same model, hardware, image and settings of work are compared night by night: throughput on each number
of ranks, scaling factor, shares of a step lost, and the champion's accuracy. `level_shifts` decides what is a change.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.ledger.ledger import LOST, MEASURED, ScalingRow, nights_in_order, scaling_table
from sweeps.ledger.level_shifts import Sensitivity, Shift, difference_noise, worse_level
from sweeps.planning.plan import METRICS
from sweeps.record import JobRecord

THROUGHPUT, FACTOR, SHARE = "images_per_second", "scaling_factor", "share_"
RATIO = Sensitivity(least_change=0.05, least_noise=0.01)
SHARES = Sensitivity(least_change=0.03, least_noise=0.005)
ACCURACY = Sensitivity(least_change=0.01, least_noise=0.002)
STRAGGLER_TIE = 0.8
"""One of two ranks that is slow to load costs as much waiting for data as for it: it is then called a straggler."""
NAMED_FROM = 1 / 3
"""A measured cause is named where it explains so much of what a step takes longer; else it is computing."""


@dataclass(frozen=True)
class Sensitivities:
    """By kind of figure."""

    ratio: Sensitivity = RATIO
    """Of throughput and scaling factor, as a share of their value."""
    share: Sensitivity = SHARES
    """Of shares of a step."""
    accuracy: Sensitivity = ACCURACY


@dataclass(frozen=True)
class Point:
    """One night of a series."""

    night: str
    value: float
    """Median over the night's runs."""
    error_variance: float = 0.0
    """Of that median, from the spread of the night's runs; of its logarithm for throughput and scaling factor."""
    degrees_of_freedom: int = 0
    """Of that variance; 0: a single run, which has no spread."""


@dataclass(frozen=True)
class Series:
    """One quantity over nights, in order."""

    model: str
    hardware: str
    """Empty for accuracy, which does not depend on it."""
    image: str
    configuration: str
    """Of a ScalingRow; for accuracy the digest of the validation data."""
    num_nodes: int
    num_ranks: int
    quantity: str
    """images_per_second, scaling_factor, share_data, share_exposed_allreduce, share_straggler, or the objective's
    name for the champion's accuracy."""
    points: tuple[Point, ...]

    @property
    def is_ratio(self) -> bool:
        return self.quantity in (THROUGHPUT, FACTOR)

    @property
    def is_share(self) -> bool:
        return self.quantity.startswith(SHARE)

    @property
    def is_accuracy(self) -> bool:
        return not (self.is_ratio or self.is_share)

    @property
    def higher_is_better(self) -> bool:
        if not self.is_accuracy:
            return self.is_ratio
        return _direction(self.quantity) == "maximize"

    @property
    def nights(self) -> list[str]:
        return [point.night for point in self.points]


@dataclass(frozen=True)
class Regression:
    """A series whose newest level is worse than the one before."""

    series: Series
    before: float
    """Median of the nights of the level before."""
    after: float
    """Median of the nights since."""
    first_night: str
    is_new: bool
    """Found in the newest night, and not by the nights before it: what a morning's exit code is about."""
    noise: float
    """Standard deviation between nights that the change was held against: a share of the value, or for shares and
    accuracy its own unit."""
    threshold: float
    """A single night would have had to differ by so much to be noticed; in the unit of `noise`."""
    rule: str
    cause: str = ""
    """data, exposed_allreduce, straggler, or compute where none of them rose; empty for accuracy."""
    rises: dict[str, float] = field(default_factory=dict)
    """By cause: how much more of a step it takes, as a share of the step before."""
    differences: tuple[str, ...] = ()
    """What else differs from the night before: revision, settings, nodes."""

    @property
    def change(self) -> float:
        """Relative for throughput and scaling factor, else in the unit of the series."""
        return self.after / self.before - 1 if self.series.is_ratio else self.after - self.before

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "change": self.change, "text": self.text()}

    def text(self) -> str:
        """One line for people."""
        line = f"{self.series.model} on {self.figures()} since {self.first_night}"
        reasons = [*([f"cause: {self.cause_text()}"] if self.cause else []), *self.differences]
        return "; ".join([line, *reasons])

    def figures(self) -> str:
        """E.g. 2 ranks: throughput 152.8 → 130.8 images/s (-14.4 %)."""
        series = self.series
        where = f"{series.num_ranks} rank{'s' if series.num_ranks > 1 else ''}"
        if series.num_nodes > 1:
            where += f" of {series.num_nodes} nodes"
        change = f"{100 * self.change:+.1f} {'%' if series.is_ratio else 'points'}"
        return f"{where}: {_figures(series.quantity, self.before, self.after)} ({change})"

    def cause_text(self) -> str:
        """E.g. waiting for data (+48.0 % of a step); empty where none is known."""
        rise = self.rises.get(self.cause)
        return CAUSE_TEXTS.get(self.cause, "") + ("" if rise is None else f" ({100 * rise:+.1f} % of a step)")


CAUSE_TEXTS = {
    "data": "waiting for data",
    "exposed_allreduce": "exposed all-reduce",
    "straggler": "a slow rank (stragglers)",
    "compute": "computing itself",
}
QUANTITY_TEXTS = {
    THROUGHPUT: "throughput",
    FACTOR: "scaling factor",
    "share_data": "share of a step waiting for data",
    "share_exposed_allreduce": "share of a step in exposed all-reduce",
    "share_straggler": "share of a step waiting for the slowest rank",
}


def regressions(jobs: Sequence[JobRecord], sensitivities: Sensitivities | None = None) -> list[Regression]:
    """Of the jobs of many nights, the newest among them: what got worse and has not got better since.

    New ones first, then by model and number of ranks.
    """
    rows = scaling_table(jobs)
    every = series_of(jobs, rows)
    sensitivities = sensitivities or Sensitivities()
    order = {night: place for place, night in enumerate(nights_in_order(jobs))}
    shifts = _shifts(every, every, sensitivities)
    yesterday = [dataclasses.replace(series, points=series.points[:-1]) for series in every]
    changed = [series for series, shift in zip(yesterday, shifts, strict=True) if shift is not None]
    shifts_before = iter(_shifts(changed, yesterday, sensitivities))
    found = []
    for series, shift in zip(every, shifts, strict=True):
        if shift is not None:
            earlier = next(shifts_before)
            in_newest = order[series.nights[-1]] == len(order) - 1
            # A level's first night may move by one as more of them are seen.
            known = earlier is not None and shift.begin - earlier.begin <= 1
            found.append(_regression(series, shift, in_newest and not known, rows))
    quantities = list(QUANTITY_TEXTS)
    return sorted(
        found,
        key=lambda regression: (
            not regression.is_new,
            regression.series.model,
            regression.series.num_ranks,
            len(quantities) if regression.series.is_accuracy else quantities.index(regression.series.quantity),
        ),
    )


def series_of(jobs: Sequence[JobRecord], rows: Sequence[ScalingRow] | None = None) -> list[Series]:
    """Every series of the jobs' nights; `rows` is their scaling table, where it is at hand."""
    rows = scaling_table(jobs) if rows is None else rows
    one_rank = {(*row.series, row.night): row for row in rows if row.num_ranks == 1}
    points: dict[tuple[str, str, str, str, int, int, str], list[Point]] = {}
    for row in rows:
        key = (*row.series, row.num_nodes, row.num_ranks)
        points.setdefault((*key, THROUGHPUT), []).append(_point(row.night, row.images_per_second, [_logs(row.runs)]))
        if row.scaling_factor is not None and row.num_ranks > 1:
            both = [_logs(row.runs), _logs(one_rank[*row.series, row.night].runs)]
            points.setdefault((*key, FACTOR), []).append(_point(row.night, row.scaling_factor, both))
        for name, values in row.share_runs.items():
            if name == "data" or row.num_ranks > 1:
                points.setdefault((*key, SHARE + name), []).append(_point(row.night, row.shares[name], [values]))
    for key_of_accuracy, by_night in _accuracies(jobs).items():
        points[key_of_accuracy] = [
            _point(night, statistics.median(values), [values]) for night, values in by_night.items()
        ]
    return [Series(*key, points=tuple(value)) for key, value in points.items()]


def _accuracies(jobs: Sequence[JobRecord]) -> dict[tuple[str, str, str, str, int, int, str], dict[str, list[float]]]:
    """Series → night → objectives of the champion's repeats; one that stopped at a target says nothing of its end."""
    order = {night: place for place, night in enumerate(nights_in_order(jobs))}
    found: dict[tuple[str, str, str, str, int, int, str], dict[str, list[float]]] = {}
    for job in sorted(jobs, key=lambda job: order[job.night]):
        value, metric = job.objective, job.objective_name
        if job.kind != "champion" or job.status != "finished" or _direction(metric) is None:
            continue
        if value is not None and math.isfinite(value):
            validation = job.data_manifest.split("+")[-1]
            key = (job.model, "", "", validation, job.num_nodes, job.num_ranks, metric)
            found.setdefault(key, {}).setdefault(job.night, []).append(value)
    return found


def _direction(metric: str) -> str | None:
    """maximize or minimize; None for what is no accuracy."""
    return next((metrics[metric] for metrics in METRICS.values() if metric in metrics), None)


def _logs(values: Iterable[float]) -> list[float]:
    return [math.log(value) for value in values]


def _point(night: str, value: float, samples: Sequence[Sequence[float]]) -> Point:
    """`samples`: on whose medians the value depends, each with its own spread."""
    variance, freedom = 0.0, 0
    for sample in samples:
        if len(sample) > 1:
            # Variance of a median: that of the mean for two values, up to pi / 2 times it for many.
            of_median = 1.0 if len(sample) == 2 else math.pi / 2
            variance += of_median * statistics.variance(sample) / len(sample)
            freedom += len(sample) - 1
    return Point(night, value, variance, freedom)


def _shifts(some: Sequence[Series], every: Sequence[Series], sensitivities: Sensitivities) -> list[Shift | None]:
    """What `level_shifts` says of each; the noise of similar series (on other numbers of ranks) is heard."""
    groups: dict[tuple[str, ...], list[list[float]]] = {}
    for series in every:
        groups.setdefault(_group(series), []).append(_scale(series))
    noise = {group: difference_noise(values) for group, values in groups.items()}
    shifts = []
    for series in some:
        floor = max(noise[_group(series)], _noise_within(series.points))
        kind = sensitivities.ratio if series.is_ratio else sensitivities.share
        if series.is_accuracy:
            kind = sensitivities.accuracy
        shift = worse_level(_scale(series), kind, series.higher_is_better, floor) if series.points else None
        if shift is not None and series.is_ratio:
            shift = dataclasses.replace(shift, before=math.exp(shift.before), after=math.exp(shift.after))
        shifts.append(shift)
    return shifts


def _group(series: Series) -> tuple[str, ...]:
    return series.model, series.hardware, series.image, series.configuration, series.quantity


def _scale(series: Series) -> list[float]:
    """Values as they are compared: logarithms where it is ratios that matter."""
    values = [point.value for point in series.points]
    return _logs(values) if series.is_ratio else values


def _noise_within(points: Sequence[Point]) -> float:
    """What the spread of runs within nights alone would make nights differ by."""
    freedom = sum(point.degrees_of_freedom for point in points)
    total = sum(point.degrees_of_freedom * point.error_variance for point in points)
    return math.sqrt(total / freedom) if freedom else 0.0


def _regression(series: Series, shift: Shift, is_new: bool, rows: Sequence[ScalingRow]) -> Regression:
    first = series.nights[shift.begin]
    by_night = {
        row.night: row
        for row in rows
        if (*row.series, row.num_nodes, row.num_ranks)
        == (series.model, series.hardware, series.image, series.configuration, series.num_nodes, series.num_ranks)
    }
    cause, rises = "", {}
    differences: tuple[str, ...] = ()
    if not series.is_accuracy:
        own = [by_night[night] for night in series.nights]
        before = [own[place] for place in shift.nights_before]
        after = [own[place] for place in shift.nights_after]
        rises = _rises(before, after, _lost_times if series.quantity == FACTOR else _times)
        cause = series.quantity.removeprefix(SHARE) if series.is_share else _cause(rises)
        differences = _differences(own[shift.begin - 1], own[shift.begin])
        if series.quantity == FACTOR:
            differences = (*_one_rank_change(before, after), *differences)
    return Regression(
        series=series,
        before=shift.before,
        after=shift.after,
        first_night=first,
        is_new=is_new,
        noise=shift.noise,
        threshold=shift.threshold,
        rule=shift.rule,
        cause=cause,
        rises=rises,
        differences=differences,
    )


def _rises(
    before: Sequence[ScalingRow], after: Sequence[ScalingRow], times_of: Callable[[ScalingRow], Mapping[str, float]]
) -> dict[str, float]:
    """By cause, medians over nights; empty where runs did not measure where their time went."""
    earlier, later = [times_of(row) for row in before], [times_of(row) for row in after]
    earlier, later = [times for times in earlier if times], [times for times in later if times]
    if not earlier or not later:
        return {}
    middle = {name: statistics.median(times[name] for times in earlier) for name in (*LOST, "step")}
    return {name: (statistics.median(times[name] for times in later) - middle[name]) / middle["step"] for name in LOST}


def _times(row: ScalingRow) -> dict[str, float]:
    """Of each cause, for one image on one rank."""
    if set(row.shares) != set(MEASURED):
        return {}
    step = row.num_ranks / row.images_per_second
    measured = {name: row.shares[name] * step for name in MEASURED}
    return {**measured, "compute": step - sum(measured.values()), "step": step}


def _lost_times(row: ScalingRow) -> dict[str, float]:
    """Of each cause, as a multiple of a step on one rank."""
    if not row.lost or row.scaling_factor is None:
        return {}
    longer = row.num_ranks / row.scaling_factor
    return {**{name: row.lost[name] * longer for name in LOST}, "step": 1.0}


def _cause(rises: Mapping[str, float]) -> str:
    if not rises:
        return ""
    most = max(MEASURED, key=lambda name: rises[name])
    if most == "data" and rises["straggler"] >= STRAGGLER_TIE * rises["data"]:
        most = "straggler"
    whole = sum(rise for rise in rises.values() if rise > 0)
    return most if rises[most] > 0 and rises[most] >= NAMED_FROM * whole else "compute"


def _one_rank_change(before: Sequence[ScalingRow], after: Sequence[ScalingRow]) -> tuple[str, ...]:
    """A scaling factor also falls where one rank got faster: that is to be said."""
    old, new = (
        statistics.median(row.images_per_second / row.scaling_factor for row in rows if row.scaling_factor)
        for rows in (before, after)
    )
    if abs(new / old - 1) < RATIO.least_change:
        return ()
    return (f"one rank by itself {old:.1f} → {new:.1f} images/s",)


def _differences(before: ScalingRow, after: ScalingRow) -> tuple[str, ...]:
    lines = []
    if before.git_revisions != after.git_revisions:
        lines.append(f"revision {_revisions(before)} → {_revisions(after)}")
    for name in sorted(before.settings.keys() | after.settings.keys()):
        old, new = before.settings.get(name, "default"), after.settings.get(name, "default")
        if old != new:
            lines.append(f"{name} {old} → {new}")
    if before.data_manifest != after.data_manifest:
        lines.append("other training data")
    if before.nodes != after.nodes:
        lines.append(f"nodes {', '.join(before.nodes) or 'unknown'} → {', '.join(after.nodes) or 'unknown'}")
    return tuple(lines)


def _revisions(row: ScalingRow) -> str:
    return ", ".join(revision[:10] for revision in row.git_revisions) or "unknown"


def _figures(quantity: str, before: float, after: float) -> str:
    if quantity == THROUGHPUT:
        return f"throughput {before:.1f} → {after:.1f} images/s"
    if quantity == FACTOR:
        return f"scaling factor {before:.2f} → {after:.2f}"
    if quantity.startswith(SHARE):
        return f"{QUANTITY_TEXTS[quantity]} {100 * before:.1f} → {100 * after:.1f} %"
    return f"{quantity} of the champion {before:.4f} → {after:.4f}"
