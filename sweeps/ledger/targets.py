"""Time to accuracy, as DAWNBench ranks it: what runs took until they reached their target, and who holds the record.

Pure functions over `JobRecord`. What a run takes is its training time until the evaluation that reached the target;
rank-hours are that time on all its ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sweeps.ledger.ledger import nights_in_order
from sweeps.record import JobRecord


@dataclass(frozen=True)
class TargetKey:
    """Runs that are ranked together."""

    model: str
    metric: str
    value: float
    data_manifest: str
    """Digest of the validation data: another data set's accuracy is another target."""
    hardware: str
    num_ranks: int


@dataclass(frozen=True)
class TargetEntry:
    """One run that reached its target."""

    key: TargetKey
    seconds: float
    samples: int | None
    rank_hours: float
    cost: float | None
    """At the price of a rank-hour; None where none is known."""
    night: str
    job: str
    command: str
    git_revision: str = ""
    image: str = ""
    checkpoint_sha256: str = ""


@dataclass(frozen=True)
class TargetRecord:
    """The ranking of one target."""

    key: TargetKey
    entries: tuple[TargetEntry, ...]
    """Fastest first; of equal ones the earlier."""
    num_runs: int
    """That aimed at it and ended, whether they reached it or not."""
    history: tuple[TargetEntry, ...] = ()
    """Who held the record, in order of time; the last holds it."""

    @property
    def holder(self) -> TargetEntry | None:
        return self.entries[0] if self.entries else None

    @property
    def holder_before(self) -> TargetEntry | None:
        """From whom the holder took it."""
        return self.history[-2] if len(self.history) > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.key),
            "num_runs": self.num_runs,
            "num_reached": len(self.entries),
            "holder": _entry_json(self.holder),
            "holder_before": _entry_json(self.holder_before),
            "entries": [_entry_json(entry) for entry in self.entries],
            "history": [_entry_json(entry) for entry in self.history],
        }


def records(jobs: Iterable[JobRecord], price_per_rank_hour: float | None = None) -> list[TargetRecord]:
    """By model, metric, value, hardware and number of ranks; targets that nobody reached have no holder."""
    kept = [job for job in jobs if why_no_run(job) is None]
    order = {night: place for place, night in enumerate(nights_in_order(kept))}
    kept.sort(key=lambda job: (order[job.night], _ended(job), job.job))
    by_key: dict[TargetKey, list[JobRecord]] = {}
    for job in kept:
        by_key.setdefault(_key(job), []).append(job)
    found = []
    for key, runs in by_key.items():
        entries = [_entry(key, job, price_per_rank_hour) for job in runs if job.target_seconds is not None]
        held: list[TargetEntry] = []
        for entry in entries:
            if not held or entry.seconds < held[-1].seconds:
                held.append(entry)
        ranked = tuple(sorted(entries, key=lambda entry: entry.seconds))
        found.append(TargetRecord(key, ranked, len(runs), tuple(held)))
    return sorted(found, key=lambda record: dataclasses.astuple(record.key))


def why_no_run(job: JobRecord) -> str | None:
    """Why a job is no run towards a target; None where it is one."""
    if not job.target_metric or job.target_value is None:
        return "has no target"
    if job.status == "answered":
        return "answered by the record of an equal run"
    if job.target_seconds is None and job.status not in ("finished", "target_reached"):
        return f"ended as {job.status or 'unknown'} before it could reach its target"
    if job.target_seconds is not None and not (math.isfinite(job.target_seconds) and job.target_seconds > 0):
        return "has no valid time to its target"
    return None


def best_of_model(found: Iterable[TargetRecord]) -> dict[tuple[str, str, float], tuple[TargetEntry, TargetEntry]]:
    """(model, metric, value) → the fastest and the cheapest entry over all hardware and numbers of ranks."""
    entries: dict[tuple[str, str, float], list[TargetEntry]] = {}
    for record in found:
        place = (record.key.model, record.key.metric, record.key.value)
        entries.setdefault(place, []).extend(record.entries)
    return {
        place: (min(some, key=lambda entry: entry.seconds), min(some, key=lambda entry: entry.rank_hours))
        for place, some in entries.items()
        if some
    }


def _key(job: JobRecord) -> TargetKey:
    return TargetKey(
        job.model,
        job.target_metric,
        job.target_value if job.target_value is not None else math.nan,
        job.data_manifest.split("+")[-1],
        job.hardware,
        job.num_ranks,
    )


def _entry(key: TargetKey, job: JobRecord, price: float | None) -> TargetEntry:
    assert job.target_seconds is not None
    rank_hours = job.target_seconds * job.num_ranks / 3600
    return TargetEntry(
        key=key,
        seconds=job.target_seconds,
        samples=job.target_samples,
        rank_hours=rank_hours,
        cost=None if price is None else price * rank_hours,
        night=job.night,
        job=job.job,
        command=job.command,
        git_revision=job.git_revision,
        image=job.image,
        checkpoint_sha256=job.checkpoint_sha256,
    )


def _ended(job: JobRecord) -> float:
    return next((time for time in (job.ended_utc, job.started_utc, job.submitted_utc) if time is not None), math.inf)


def _entry_json(entry: TargetEntry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    values = dataclasses.asdict(entry)
    del values["key"]
    return values
