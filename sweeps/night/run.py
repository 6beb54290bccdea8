"""What the parts of a controller share: the night's plan and state, and the one way by which the state changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.job import JobStatus
from sweeps.launchers.launcher import Launcher
from sweeps.night.budget import Durations, Limits, Spent
from sweeps.night.champions import ENDED_WELL
from sweeps.night.clock import Clock
from sweeps.night.events import Event
from sweeps.night.journal import Journal
from sweeps.night.planned_jobs import Planner
from sweeps.night.state import JobState, NightState
from sweeps.night.trials import ModelTrials
from sweeps.planning.plan import ModelPlan, Plan
from sweeps.record import JobRecord, NightRecord


@dataclass
class NightRun:
    night: NightRecord
    plan: Plan
    folder: Path
    state: NightState
    journal: Journal
    launcher: Launcher
    trials: Mapping[str, ModelTrials]
    planners: Mapping[str, Planner]
    limits: Limits
    clock: Clock
    say: Callable[[str], None]
    """One line of note, for a person."""
    latest: dict[str, JobStatus] = field(default_factory=dict)
    """Job under way → its status as polled last; the journal keeps only what changed."""
    durations: Durations = field(default_factory=Durations)

    def __post_init__(self) -> None:
        for job in self.state.jobs.values():
            if job.record is not None:
                self.learn_duration(job, job.record)

    def record(self, *events: Event) -> None:
        """Write, then apply: what is decided is on the disk before anything follows from it."""
        self.journal.append(events)
        for event in events:
            self.state.apply(event)

    def model(self, job: JobState) -> ModelPlan:
        return self.plan.model(job.planned.model)

    def learn_duration(self, job: JobState, record: JobRecord) -> None:
        if record.status in ENDED_WELL:
            useful = record.rank_seconds_allocated - record.rank_seconds_wasted
            self.durations.add(job.planned.model, job.planned.num_samples, useful)

    def expected_rank_seconds(self, model: str, num_samples: int) -> float | None:
        return self.durations.rank_seconds(model, num_samples)

    def mean_seconds(self) -> float | None:
        """For which a job holds its slots, of the kind that is over soonest; None where none has ended yet."""
        return min(
            (mean / self.plan.model(model).num_ranks for (model, _), (_, mean) in self.durations.means.items()),
            default=None,
        )

    def used_rank_seconds(self, job: JobState) -> float:
        """By the live attempt of a job under way."""
        status = self.latest.get(job.name)
        return status.allocated_seconds * job.planned.num_ranks if status is not None else 0.0

    def spent(self) -> Spent:
        used = to_come = 0.0
        for job in self.state.out.values():
            so_far = self.used_rank_seconds(job)
            expected = self.expected_rank_seconds(job.planned.model, job.planned.num_samples) or 0.0
            used += so_far
            to_come += max(0.0, expected - so_far)
        return Spent(self.state.num_jobs, sum(self.state.rank_seconds.values()) + used, to_come)
