"""What became of a night's jobs and of the time of its ranks: counts and sums that add up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweeps.record import JobRecord, NightRecord

DONE = ("finished", "target_reached")
OUTCOMES = ("finished", "answered", "pruned", "preempted", "cancelled", "failed", "lost", "other")
"""In the order in which they are shown; together they are all jobs of the night."""
CAUSE_NAMES = {
    "out_of_memory": "out of memory",
    "collective_timeout": "collective timeout",
    "not_finite": "loss not finite",
    "hardware": "hardware",
    "data": "data",
    "time_limit": "time limit",
    "preempted": "preempted",
    "node": "node lost",
    "user_error": "wrong setting",
    "code": "code",
    "no_result": "no result",
}
"""What people read for a `Failure`."""


@dataclass(frozen=True)
class Accounts:
    """Of one night. Sums are of rank-seconds: slots (GPUs) times the seconds for which they were held."""

    num_planned: int
    num_jobs: int
    """With a record."""
    outcomes: dict[str, int]
    """Of OUTCOMES; only those that occur."""
    num_not_started: int
    """Planned, and never begun when the night ended."""
    num_retried: int
    """Jobs of more than one attempt."""
    num_more_starts: int
    """Starts after the first of an attempt: the launcher's own, after a preemption or a lost node."""
    allocated: float
    useful: float
    wasted: float
    wasted_by_cause: dict[str, float]
    """Largest first; its sum is `wasted`."""
    allocated_by_model: dict[str, float]
    useful_by_kind: dict[str, float]
    budget: float | None
    makespan_seconds: float | None
    """From the first submission to the last end; None where no job ran."""
    lower_bound_seconds: float | None
    """No schedule can be shorter: the larger of allocated / slots and the longest job."""
    longest_job: str
    utilisation: float | None
    """Lower bound / makespan."""
    filled: float | None
    """Allocated / (slots × makespan): the share of all slots that was held."""
    num_inconsistent: int
    """Jobs whose record wastes more than it was allocated, or less than nothing; they count as all wasted or none."""

    @property
    def num_done(self) -> int:
        return self.outcomes.get("finished", 0)

    @property
    def num_failed(self) -> int:
        return self.outcomes.get("failed", 0)

    @property
    def num_lost(self) -> int:
        return self.outcomes.get("lost", 0)


def outcome(job: JobRecord) -> str:
    """One of OUTCOMES."""
    if job.status in DONE:
        return "finished"
    if job.status in ("failed", "diverged"):
        return "failed"
    return job.status if job.status in OUTCOMES else "other"


def is_failure(job: JobRecord) -> bool:
    return outcome(job) in ("failed", "lost")


def waste_cause(job: JobRecord) -> str:
    """Why time of this job was wasted, in the words of the report."""
    if job.failure is not None:
        return CAUSE_NAMES[job.failure]
    if job.status == "diverged":
        return CAUSE_NAMES["not_finite"]
    if job.status in ("preempted", "cancelled", "lost", "failed"):
        return {"cancelled": "cut off by the end", "failed": "failed, cause unknown"}.get(job.status, job.status)
    return "computed again"


def accounts_of(night: NightRecord, jobs: Sequence[JobRecord]) -> Accounts:
    counted = Counter(map(outcome, jobs))
    wasted_by_cause: dict[str, float] = defaultdict(float)
    allocated_by_model: dict[str, float] = defaultdict(float)
    useful_by_kind: dict[str, float] = defaultdict(float)
    num_inconsistent = 0
    allocated = wasted = 0.0
    for job in jobs:
        held = max(0.0, job.rank_seconds_allocated)
        lost = min(held, max(0.0, job.rank_seconds_wasted))
        # A hair's difference is rounding; more of it is a wrong record.
        num_inconsistent += abs(lost - job.rank_seconds_wasted) > 1e-6 * max(1.0, held)
        allocated += held
        wasted += lost
        if lost > 0:
            wasted_by_cause[waste_cause(job)] += lost
        if held > 0:
            allocated_by_model[job.model] += held
        if held > lost:
            useful_by_kind[job.kind] += held - lost
    ran = [job for job in jobs if job.started_utc is not None and job.ended_utc is not None]
    makespan = lower_bound = None
    longest_job = ""
    if ran:
        first = min(_begin(job) for job in ran)
        makespan = max(float(job.ended_utc or 0.0) for job in ran) - first
        longest = max(ran, key=_held_seconds)
        longest_job = longest.job
        lower_bound = max(allocated / max(1, night.num_slots), _held_seconds(longest))
    has_makespan = makespan is not None and makespan > 0
    return Accounts(
        num_planned=night.num_planned,
        num_jobs=len(jobs),
        outcomes={name: counted[name] for name in OUTCOMES if counted[name]},
        num_not_started=max(0, night.num_planned - len(jobs)),
        num_retried=sum(job.num_attempts > 1 for job in jobs),
        num_more_starts=sum(max(0, job.num_starts - max(1, job.num_attempts)) for job in jobs),
        allocated=allocated,
        useful=allocated - wasted,
        wasted=wasted,
        wasted_by_cause=_largest_first(wasted_by_cause),
        allocated_by_model=dict(sorted(allocated_by_model.items())),
        useful_by_kind=_largest_first(useful_by_kind),
        budget=night.budget_rank_seconds,
        makespan_seconds=makespan,
        lower_bound_seconds=lower_bound,
        longest_job=longest_job,
        utilisation=lower_bound / makespan if has_makespan and lower_bound is not None and makespan else None,
        filled=allocated / (max(1, night.num_slots) * makespan) if has_makespan and makespan else None,
        num_inconsistent=num_inconsistent,
    )


def _largest_first(sums: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _begin(job: JobRecord) -> float:
    return float(job.submitted_utc if job.submitted_utc is not None else job.started_utc or 0.0)


def _held_seconds(job: JobRecord) -> float:
    """For which it held its ranks, over all attempts, one after another."""
    return max(0.0, job.rank_seconds_allocated) / max(1, job.num_ranks)
