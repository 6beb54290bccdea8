"""The scaling ledger: throughput on N ranks against one, its interval, and what the rest was lost to, night by night.

Pure functions over `JobRecord`; the command `scaling` prints and draws what they return, the morning report too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.record import JobRecord

MEASURED = ("data", "exposed_allreduce", "straggler")
"""Shares of a step that a run measures."""
LOST = (*MEASURED, "compute")
"""What scaling is lost to; compute is the rest: the same work that takes longer on more ranks."""
WANTED_CONFIDENCE = 0.95

WORK_SECTIONS = ("model", "augment", "data")
WORK_FIELDS = ("train.batch_size_per_rank", "train.accumulation", "train.global_batch", "train.precision")
NO_WORK_FIELDS = ("data.workers_per_rank", "data.cache_folder", "data.image_cache_mib", "data.num_validation_scenes")
"""Settings that change the work of a step, and so tell one series of figures from another. All others (the all-reduce
layer's, the loader's, threads) change speed alone, which is what the series are to show."""


@dataclass(frozen=True)
class ScalingRow:
    """Throughput of one model on one number of ranks in one night: the median of its scaling runs."""

    night: str
    model: str
    hardware: str
    image: str
    configuration: str
    """Digest of the settings that change the work of a step; empty: the model's own."""
    num_nodes: int
    num_ranks: int
    runs: tuple[float, ...]
    """Images a second of each run, as a run measures it: without its first steps."""
    images_per_second: float
    scaling_factor: float | None = None
    """Over the median on one rank of the same night; None where none was run."""
    low: float | None = None
    """Interval of the scaling factor by rank sums; None with a single run on both sides."""
    high: float | None = None
    confidence: float | None = None
    """Of the interval: 0.95 or more where there are four runs or more on each side, else what they allow."""
    shares: dict[str, float] = field(default_factory=dict)
    """Of a step, as measured: data, exposed_allreduce, straggler; medians over the runs."""
    share_runs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    """What is missing to the ideal, by cause; the four add up to 1 − scaling_factor / num_ranks. Below 0: won."""
    git_revisions: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Of its runs, by dotted name, without length and seed."""
    nodes: tuple[str, ...] = ()
    data_manifest: str = ""

    @property
    def ratio_to_ideal(self) -> float | None:
        return None if self.scaling_factor is None else self.scaling_factor / self.num_ranks

    @property
    def series(self) -> tuple[str, str, str, str]:
        """What is compared night by night."""
        return self.model, self.hardware, self.image, self.configuration

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratio_to_ideal": self.ratio_to_ideal}


def scaling_table(jobs: Iterable[JobRecord]) -> list[ScalingRow]:
    """A row for each model, hardware, image, configuration, night and number of ranks, in this order."""
    groups: dict[tuple[Any, ...], list[JobRecord]] = {}
    for job in jobs:
        if why_left_out(job) is None:
            key = (job.model, job.hardware, job.image, configuration_of(job), job.night, job.num_ranks, job.num_nodes)
            groups.setdefault(key, []).append(job)
    nights = nights_in_order(job for group in groups.values() for job in group)
    order = {night: place for place, night in enumerate(nights)}
    rows = {key: _row(key[3], group) for key, group in groups.items()}
    compared = [_against_one_rank(row, rows.get((*key[:5], 1, 1))) for key, row in rows.items()]
    return sorted(compared, key=lambda row: (*row.series, order[row.night], row.num_ranks, row.num_nodes))


def why_left_out(job: JobRecord) -> str | None:
    """Why a job is no part of the scaling table; None where it is one."""
    if job.kind != "scaling":
        return "not a scaling run"
    if job.status == "answered":
        return "answered by the record of an equal run"
    if job.status not in ("finished", "target_reached"):
        return f"ended as {job.status or 'unknown'}"
    if job.images_per_second is None or not math.isfinite(job.images_per_second) or job.images_per_second <= 0:
        return "measured no throughput (too short)"
    return None


def left_out(jobs: Iterable[JobRecord]) -> dict[str, int]:
    """Scaling runs that are in no row, counted by reason."""
    reasons = (why_left_out(job) for job in jobs if job.kind == "scaling")
    return dict(Counter(reason for reason in reasons if reason is not None))


def configuration_of(job: JobRecord) -> str:
    """Digest of the settings that change the work of a step; empty where none was set."""
    work = {name: value for name, value in job.parameters.items() if _is_work(name)}
    if not work:
        return ""
    return hashlib.sha256(json.dumps(work, sort_keys=True, default=str).encode()).hexdigest()[:12]


def nights_in_order(jobs: Iterable[JobRecord]) -> list[str]:
    """Names of nights by the time of their first job; where that is not known, by name, numbers as numbers."""
    began: dict[str, float | None] = {}
    for job in jobs:
        times = [time for time in (job.submitted_utc, job.started_utc, began.get(job.night)) if time is not None]
        began[job.night] = min(times, default=None)
    if None in began.values():
        return sorted(began, key=_natural)
    return sorted(began, key=lambda night: (began[night], _natural(night)))


def latest_rows(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Those of each series' newest night; `rows` are in the order of `scaling_table`."""
    newest = {row.series: row.night for row in rows}
    return [row for row in rows if newest[row.series] == row.night]


def row_before(rows: Sequence[ScalingRow], row: ScalingRow) -> ScalingRow | None:
    """The same number of ranks of the same series in the night before; `rows` are in the order of `scaling_table`."""
    same = [
        other
        for other in rows
        if (other.series, other.num_ranks, other.num_nodes) == (row.series, row.num_ranks, row.num_nodes)
    ]
    place = next(place for place, other in enumerate(same) if other.night == row.night)
    return same[place - 1] if place else None


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], wanted: float = WANTED_CONFIDENCE
) -> tuple[float, float, float] | None:
    """(low, high, confidence) of the ratio by which one sample is a multiple of another; None for single values.

    Exact and free of any distribution: the ratios of all pairs, as many cut off at both ends as the null
    distribution of Mann and Whitney's U allows at `wanted`. With few values all pairs together fall short of it
    (three and three: 0.90); the confidence is then theirs.
    """
    first, second = len(numerators), len(denominators)
    if first + second < 3 or not first or not second:
        return None
    ratios = sorted(a / b for a in numerators for b in denominators)
    counts = _rank_sum_counts(first, second)
    total = sum(counts)
    cut, tail = 0, counts[0]
    while cut + 1 < len(counts) // 2 and 1 - 2 * (tail + counts[cut + 1]) / total >= wanted:
        cut += 1
        tail += counts[cut]
    # The ratio of medians may lie outside a narrow interval of theirs; what is stated is within.
    value = statistics.median(numerators) / statistics.median(denominators)
    return min(ratios[cut], value), max(ratios[-1 - cut], value), 1 - 2 * tail / total


def _rank_sum_counts(first: int, second: int) -> list[int]:
    """Number of orders of two samples by U, from 0 to first * second (Mann and Whitney's recurrence)."""
    table: dict[tuple[int, int], list[int]] = {}
    for a in range(first + 1):
        for b in range(second + 1):
            counts = [0] * (a * b + 1)
            if a == 0 or b == 0:
                counts[0] = 1
            else:
                for u, number in enumerate(table[a - 1, b]):
                    counts[u + b] += number
                for u, number in enumerate(table[a, b - 1]):
                    counts[u] += number
            table[a, b] = counts
    return table[first, second]


def _row(configuration: str, jobs: Sequence[JobRecord]) -> ScalingRow:
    first = jobs[0]
    runs = tuple(job.images_per_second for job in jobs if job.images_per_second is not None)
    share_runs = {
        name: tuple(job.lost_scaling[name] for job in jobs if job.lost_scaling.get(name) is not None)
        for name in MEASURED
    }
    share_runs = {name: values for name, values in share_runs.items() if values}
    settings = {
        name: value
        for job in jobs
        for name, value in job.parameters.items()
        if name not in ("train.num_samples", "train.seed")
    }
    return ScalingRow(
        night=first.night,
        model=first.model,
        hardware=first.hardware,
        image=first.image,
        configuration=configuration,
        num_nodes=first.num_nodes,
        num_ranks=first.num_ranks,
        runs=runs,
        images_per_second=statistics.median(runs),
        shares={name: statistics.median(values) for name, values in share_runs.items()},
        share_runs=share_runs,
        git_revisions=tuple(sorted({job.git_revision for job in jobs if job.git_revision})),
        settings=settings,
        nodes=tuple(sorted({node for job in jobs for node in job.nodes})),
        data_manifest=first.data_manifest,
    )


def _against_one_rank(row: ScalingRow, one: ScalingRow | None) -> ScalingRow:
    if one is None:
        return row
    factor = row.images_per_second / one.images_per_second
    if row.num_ranks == 1 and row.num_nodes == 1:
        lost = _lost(row, one, 1.0)
        return dataclasses.replace(row, scaling_factor=1.0, low=1.0, high=1.0, confidence=1.0, lost=lost)
    low, high, confidence = ratio_interval(row.runs, one.runs) or (None, None, None)
    return dataclasses.replace(
        row, scaling_factor=factor, low=low, high=high, confidence=confidence, lost=_lost(row, one, factor)
    )


def _lost(row: ScalingRow, one: ScalingRow, factor: float) -> dict[str, float]:
    """Where the time went by which a step on N ranks is longer than on one, as shares of the step on N.

    A cause's share there less its time on one rank; with equal batches a step on one rank takes factor / N of it.
    """
    if set(row.shares) != set(MEASURED):
        return {}
    ideal = factor / row.num_ranks
    lost = {name: row.shares[name] - one.shares.get(name, 0.0) * ideal for name in MEASURED}
    return {**lost, "compute": 1 - ideal - sum(lost.values())}


def _is_work(name: str) -> bool:
    if name in NO_WORK_FIELDS:
        return False
    return name in WORK_FIELDS or name.split(".")[0] in WORK_SECTIONS


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts: list[str] = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
