"""What follows from a job's status: whether it has a result, goes on, is tried again, or is given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sweeps.job import JobStatus
from sweeps.night.events import AttemptEnded, Event, JobConcluded, NodeExcluded, StatusSeen
from sweeps.night.ingest import (
    Result,
    allocated_rank_seconds,
    make_record,
    progress_of,
    read_result,
    wasted_share,
)
from sweeps.night.state import SUCCESSES, JobState
from sweeps.planning.plan import ModelPlan, Retries
from sweeps.record import NightRecord

EXIT_PREEMPTED = 75
CLOCK_SLACK_SECONDS = 2.0
"""By which the clocks of the nodes and of this host may differ."""
MOST_RESUMPTIONS_WITHOUT_PROGRESS = 10
"""A job that is preempted so often before it writes any new checkpoint is given up."""

MOST_SHOWN = 300
"""Characters of the line of a log that is given as a cause."""


class Report(Protocol):
    """What `failures.classify` says of an attempt that has no result."""

    @property
    def failure(self) -> str: ...
    @property
    def signature(self) -> str: ...
    @property
    def line(self) -> str: ...
    @property
    def log_tail(self) -> str: ...
    @property
    def action(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def max_retries(self) -> int: ...


Classify = Callable[[Path, JobStatus], Report]


@dataclass(frozen=True)
class Settling:
    """What settling needs to know of the night."""

    night: NightRecord
    retries: Retries
    classify: Classify


def status_seen(job: JobState, earlier: JobStatus | None, status: JobStatus, folder: Path, utc: float) -> StatusSeen:
    """The event of a status that differs, with the account of a start that was cut short, if there was one.

    A scheduler that requeues a job keeps it one attempt of several starts: what the last start had computed after its
    newest checkpoint is lost.
    """
    attempt = job.live
    assert attempt is not None
    wasted, charged, kept = attempt.wasted_seconds, attempt.charged_seconds, attempt.kept_step
    if earlier is not None and earlier.state == "running" and _began_again(earlier, status):
        progress = progress_of(folder)
        # While it waits its account stands still, so that of the new status is what the starts before it took.
        total = status.allocated_seconds if status.state == "pending" else earlier.allocated_seconds
        wasted += wasted_share(kept, progress) * max(0.0, total - charged)
        charged, kept = max(charged, total), progress.kept_step
    return StatusSeen(utc, job.name, attempt.number, status, wasted, kept, charged)


def differs(earlier: JobStatus | None, status: JobStatus) -> bool:
    """In what a journal has to keep; the seconds that pass are none of it."""
    if earlier is None:
        return True

    def kept(of: JobStatus) -> tuple[object, ...]:
        return of.id, of.state, of.reason, of.exit_code, of.nodes, of.num_starts

    return kept(earlier) != kept(status)


def settle(
    settling: Settling, plan: ModelPlan, job: JobState, status: JobStatus, folder: Path, utc: float
) -> list[Event]:
    """The events by which an attempt that has ended, or was lost, is closed; result.json has the first word."""
    attempt = job.live
    assert attempt is not None
    result = read_result(folder, plan)
    if result.status not in SUCCESSES and result.written_utc < attempt.announced_utc - CLOCK_SLACK_SECONDS:
        # An earlier attempt left it, and this one died before it took it away: it tells nothing of this one.
        result = Result("none", "there is no result.json of this attempt")
    if result.status in SUCCESSES:
        return _conclude(settling, plan, job, status, folder, utc, result.status, result, "conclude")
    if job.cancel_cause:
        cancelled = Result("cancelled", job.cancel_cause, result.values)
        return _conclude(settling, plan, job, status, folder, utc, "cancelled", cancelled, "cancel")
    if result.status == "diverged":
        cause = result.cause or "not finite"
        return _conclude(
            settling, plan, job, status, folder, utc, "diverged", result, "give_up", "not_finite", f"diverged: {cause}"
        )
    was_asked = attempt.end_asked or _was_preempted(result, status)
    report = None if was_asked else settling.classify(folder, status)
    if report is None or report.action == "resume":
        failure, signature = ("preempted", "") if report is None else (report.failure, report.signature)
        if _resumptions_without_progress(job, folder) < MOST_RESUMPTIONS_WITHOUT_PROGRESS:
            return [_ended(job, status, folder, utc, "resume", failure, signature)]
        cause = f"interrupted {MOST_RESUMPTIONS_WITHOUT_PROGRESS} times in a row without a new checkpoint"
        stuck = Result("failed", cause, result.values)
        return _conclude(settling, plan, job, status, folder, utc, "failed", stuck, "give_up", failure, cause)
    failure, action = report.failure, report.action
    if _num_earlier(job, failure) >= report.max_retries or job.num_failures + 1 >= settling.retries.max_attempts:
        action = "give_up"
    events: list[Event] = []
    if report.action == "retry_elsewhere" and report.node:
        # The node is bad also where this job is not tried again.
        events.append(NodeExcluded(utc, report.node, f"{job.name}: {report.signature or failure}"))
    if action != "give_up":
        events.append(_ended(job, status, folder, utc, action, failure, report.signature, report.node))
        return events
    shown = report.line.strip()[:MOST_SHOWN] or report.signature or status.reason
    cause = result.cause if result.status == "failed" and result.cause else shown
    ending = "lost" if status.state == "lost" and result.status == "none" else "failed"
    outcome = Result(ending, cause or result.cause, result.values)
    events += _conclude(
        settling, plan, job, status, folder, utc, ending, outcome, "give_up", failure, report.signature, report
    )
    return events


def _conclude(
    settling: Settling,
    plan: ModelPlan,
    job: JobState,
    status: JobStatus,
    folder: Path,
    utc: float,
    ending: str,
    result: Result,
    action: str,
    failure: str = "",
    signature: str = "",
    report: Report | None = None,
) -> list[Event]:
    ended = _ended(job, status, folder, utc, action, failure, signature, report.node if report else "")
    log_tail = report.log_tail if report is not None else ""
    record = make_record(
        settling.night, plan, job, ending, result.cause, result.values, folder, ended, log_tail, latest=status
    )
    return [JobConcluded(utc, record, ended)]


def _ended(
    job: JobState,
    status: JobStatus,
    folder: Path,
    utc: float,
    action: str,
    failure: str = "",
    signature: str = "",
    node: str = "",
) -> AttemptEnded:
    """With its account: of a start that led to nothing, what was computed after the newest checkpoint is wasted."""
    attempt = job.live
    assert attempt is not None
    progress = progress_of(folder)
    seconds = max(0.0, status.allocated_seconds)
    of_this_start = max(0.0, seconds - attempt.charged_seconds)
    share = 0.0 if action == "conclude" else wasted_share(attempt.kept_step, progress)
    ranks = job.planned.num_ranks
    return AttemptEnded(
        utc=utc,
        job=job.name,
        attempt=attempt.number,
        action=action,
        failure=failure,
        signature=signature,
        node=node,
        rank_seconds_allocated=allocated_rank_seconds(status, ranks),
        rank_seconds_wasted=min(seconds, attempt.wasted_seconds + share * of_this_start) * ranks,
        kept_step=progress.kept_step,
    )


def _began_again(earlier: JobStatus, status: JobStatus) -> bool:
    return status.state == "pending" or status.num_starts > max(1, earlier.num_starts)


def _was_preempted(result: Result, status: JobStatus) -> bool:
    """By its own word, by its exit code, or by the scheduler's."""
    if result.status == "preempted" or status.exit_code == EXIT_PREEMPTED:
        return True
    return result.status == "none" and status.reason.upper().startswith("PREEMPTED")


def _num_earlier(job: JobState, failure: str) -> int:
    """Attempts that failed in the same way."""
    return sum(1 for attempt in job.attempts if attempt.ended is not None and attempt.ended.failure == failure)


def _resumptions_without_progress(job: JobState, folder: Path) -> int:
    """Attempts just before this one that were preempted at the step where this one's newest checkpoint is."""
    kept = progress_of(folder).kept_step
    number = 0
    for attempt in reversed(job.attempts[:-1]):
        if attempt.ended is None or attempt.ended.action != "resume" or attempt.ended.kept_step != kept:
            break
        number += 1
    return number
