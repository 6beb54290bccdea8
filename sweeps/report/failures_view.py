"""Failures of a night grouped by what their logs show: how many, where, and since which revision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeps.record import JobRecord
from sweeps.report.accounts import CAUSE_NAMES, is_failure, outcome, waste_cause

NUM_GROUPS = 20
NUM_TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class FailureGroup:
    failure: str
    """Class, in people's words."""
    signature: str
    num_jobs: int
    jobs: tuple[str, ...]
    models: tuple[str, ...]
    nodes: dict[str, int]
    """Node → jobs of this group that ran there, most first."""
    rank_seconds_wasted: float
    is_new: bool
    """No earlier night of the history has this signature."""
    first_night: str
    first_revision: str
    """Of the first job of the history that failed so: where to look for what broke it."""
    num_by_night: tuple[int, ...]
    """Of the nights in order, this one last."""
    log_tail: str
    """Of the first job of this night that failed so and left one."""
    log_job: str
    command: str
    """Reproduces that job."""


@dataclass(frozen=True)
class FailuresView:
    num_failures: int
    groups: tuple[FailureGroup, ...]
    """Most jobs first, at most NUM_GROUPS."""
    num_groups: int
    num_by_class: dict[str, int]


def counts_as_failure(job: JobRecord) -> bool:
    """It ended without a result of its own, whether it may go on another night or not."""
    return is_failure(job) or (job.failure is not None and outcome(job) not in ("finished", "pruned", "answered"))


def failures_of(
    jobs: Sequence[JobRecord], earlier: Mapping[str, Sequence[JobRecord]], night: str, revision: str
) -> FailuresView:
    """earlier: jobs of earlier nights by night, oldest first. revision: of the night, for jobs without their own."""
    failed = [job for job in jobs if counts_as_failure(job)]
    grouped: dict[tuple[str, str], list[JobRecord]] = {}
    for job in failed:
        grouped.setdefault(_key(job), []).append(job)
    before: dict[tuple[str, str], dict[str, list[JobRecord]]] = {}
    for name, own in earlier.items():
        for job in own:
            if counts_as_failure(job) and _key(job) in grouped:
                before.setdefault(_key(job), {}).setdefault(name, []).append(job)
    groups = [
        _group(key, own, before.get(key, {}), list(earlier), night, revision)
        for key, own in sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return FailuresView(
        num_failures=len(failed),
        groups=tuple(groups[:NUM_GROUPS]),
        num_groups=len(groups),
        num_by_class=dict(Counter(waste_cause(job) for job in failed).most_common()),
    )


def _key(job: JobRecord) -> tuple[str, str]:
    failure = CAUSE_NAMES[job.failure] if job.failure is not None else waste_cause(job)
    return failure, job.failure_signature or job.cause or job.status


def _group(
    key: tuple[str, str],
    jobs: Sequence[JobRecord],
    before: Mapping[str, Sequence[JobRecord]],
    nights: Sequence[str],
    night: str,
    revision: str,
) -> FailureGroup:
    ordered = sorted(jobs, key=lambda job: (job.ended_utc is None, job.ended_utc or 0.0, job.job))
    logged = next((job for job in ordered if job.log_tail.strip()), ordered[0])
    first_night = next((name for name in nights if name in before), night)
    first = min(
        before.get(first_night, ordered), key=lambda job: (job.ended_utc is None, job.ended_utc or 0.0, job.job)
    )
    return FailureGroup(
        failure=key[0],
        signature=key[1],
        num_jobs=len(jobs),
        jobs=tuple(job.job for job in ordered),
        models=tuple(sorted({job.model for job in jobs})),
        nodes=dict(Counter(node for job in jobs for node in set(job.nodes)).most_common()),
        rank_seconds_wasted=sum(max(0.0, job.rank_seconds_wasted) for job in jobs),
        is_new=not before,
        first_night=first_night,
        first_revision=first.git_revision or (revision if not before else ""),
        num_by_night=(*(len(before.get(name, ())) for name in nights), len(jobs)),
        log_tail=logged.log_tail[-NUM_TAIL_CHARACTERS:],
        log_job=logged.job,
        command=logged.command,
    )
