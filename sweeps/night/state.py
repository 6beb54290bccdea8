"""The state of a night: the fold of its journal and nothing else, so that a restarted controller knows the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from sweeps.job import JobStatus
from sweeps.night.events import (
    AttemptEnded,
    BestChosen,
    CancelAsked,
    ClosingBegun,
    ControllerStarted,
    ControllerStopped,
    EndAsked,
    Event,
    JobConcluded,
    JobPlanned,
    Measured,
    ModelDone,
    NightClosed,
    NightOpened,
    NodeExcluded,
    Noted,
    StatusSeen,
    StopOrdered,
    SubmissionAnnounced,
    Submitted,
    TwinFailed,
)
from sweeps.record import JobRecord, NightRecord

Phase = Literal["waiting", "out", "twin", "done"]
"""waiting: to be submitted; out: with the launcher, or announced to it; twin: answered by an equal job's record."""


@dataclass
class Attempt:
    number: int
    name: str
    """As the launcher knows it."""
    announced_utc: float
    excluded_nodes: tuple[str, ...] = ()
    id: str | None = None
    """None while the launcher has not confirmed it."""
    status: JobStatus | None = None
    wasted_seconds: float = 0.0
    """Of starts before the latest, whose work has to be computed again."""
    charged_seconds: float = 0.0
    """Of starts before the latest, all of it."""
    kept_step: int = 0
    """From which the latest start goes on."""
    end_asked: bool = False
    """By a person who stopped the controller: it goes on later."""
    ended: AttemptEnded | None = None


@dataclass
class JobState:
    planned: JobPlanned
    attempts: list[Attempt] = field(default_factory=list)
    measured: list[tuple[int, float]] = field(default_factory=list)
    """(samples, value), in order of samples."""
    stop_cause: str = ""
    cancel_cause: str = ""
    record: JobRecord | None = None
    phase: Phase = "waiting"

    @property
    def name(self) -> str:
        return self.planned.job

    @property
    def live(self) -> Attempt | None:
        """The attempt that the launcher has, or was to have."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].ended is None else None

    @property
    def is_running(self) -> bool:
        live = self.live
        return live is not None and live.status is not None and live.status.state == "running"

    @property
    def rank_seconds_allocated(self) -> float:
        return sum(attempt.ended.rank_seconds_allocated for attempt in self.attempts if attempt.ended is not None)

    @property
    def rank_seconds_wasted(self) -> float:
        return sum(attempt.ended.rank_seconds_wasted for attempt in self.attempts if attempt.ended is not None)

    @property
    def kept_step(self) -> int:
        """Of the newest checkpoint when the last attempt ended."""
        last = self.attempts[-1].ended if self.attempts else None
        return last.kept_step if last is not None else 0

    @property
    def num_failures(self) -> int:
        """Attempts that ended by a failure: preempted ones are none."""
        return sum(
            1 for attempt in self.attempts if attempt.ended is not None and attempt.ended.action.startswith("retry")
        )


@dataclass
class NightState:
    """Indexes beside the jobs keep every step of the controller independent of how many jobs there were."""

    night: NightRecord | None = None
    closed: NightRecord | None = None
    closing: str = ""
    """Why nothing is submitted any more; empty while it is."""
    jobs: dict[str, JobState] = field(default_factory=dict)
    waiting: dict[str, dict[str, JobState]] = field(default_factory=dict)
    """Model → jobs to be submitted, in the order in which they are to go."""
    out: dict[str, JobState] = field(default_factory=dict)
    twins: dict[str, list[JobState]] = field(default_factory=dict)
    """Configuration's hash → jobs that are to be answered by the record of the one that stands for it."""
    first_of_configuration: dict[str, str] = field(default_factory=dict)
    """Configuration's hash → the job that stands for it: one that is under way or succeeded."""
    num_planned: dict[str, int] = field(default_factory=dict)
    """Of a model, its jobs so far; their names count on from it."""
    num_jobs: int = 0
    """Planned to be run: those answered from a record are not counted."""
    num_trials: dict[str, int] = field(default_factory=dict)
    done_models: dict[str, str] = field(default_factory=dict)
    """Model → why no further trial is asked for."""
    confirmed_models: dict[str, str] = field(default_factory=dict)
    """Model → the job whose configuration was found best and is repeated under other seeds; empty: none was."""
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    """Node → cause."""
    rank_seconds: dict[str, float] = field(default_factory=dict)
    """Model → allocated by attempts that have ended."""
    num_controller_starts: int = 0
    controller_cpu_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    num_results: int = 0
    """Jobs that ran and have a result that counts."""
    first_failures: dict[str, int] = field(default_factory=dict)
    """Signature → jobs given up with it, while no job has succeeded yet."""

    def apply(self, event: Event) -> None:
        """Take an event in: whatever the controller decides is first written, then applied here."""
        match event:
            case JobPlanned():
                self._plan(event)
            case SubmissionAnnounced():
                job = self.jobs[event.job]
                attempt = Attempt(event.attempt, event.name, event.utc, event.excluded_nodes)
                attempt.kept_step = job.kept_step
                job.attempts.append(attempt)
                self._move(job, "out")
            case Submitted():
                self._attempt(event.job, event.attempt).id = event.id
            case StatusSeen():
                attempt = self._attempt(event.job, event.attempt)
                attempt.status, attempt.kept_step = event.status, event.kept_step
                attempt.wasted_seconds, attempt.charged_seconds = event.wasted_seconds, event.charged_seconds
            case Measured():
                self.jobs[event.job].measured.append((event.samples, event.value))
            case StopOrdered():
                self.jobs[event.job].stop_cause = event.cause
            case CancelAsked():
                self.jobs[event.job].cancel_cause = event.cause
            case EndAsked():
                self._attempt(event.job, event.attempt).end_asked = True
            case AttemptEnded():
                self._end_attempt(event)
            case JobConcluded():
                self._conclude(event)
            case TwinFailed():
                job = self.jobs[event.job]
                self.first_of_configuration.setdefault(job.planned.config_hash, job.name)
                self.num_jobs += 1
                self._move(job, "waiting")
            case NodeExcluded():
                self.excluded_nodes[event.node] = event.cause
            case Noted():
                self.notes.append(event.text)
            case ModelDone():
                self.done_models.setdefault(event.model, event.cause)
            case BestChosen():
                self.confirmed_models[event.model] = event.job
            case ClosingBegun():
                self.closing = self.closing or event.cause
            case NightOpened():
                self.night = event.night
            case NightClosed():
                self.closed = event.night
            case ControllerStarted():
                self.num_controller_starts += 1
            case ControllerStopped():
                self.controller_cpu_seconds += event.cpu_seconds

    @property
    def num_waiting(self) -> int:
        return sum(len(jobs) for jobs in self.waiting.values())

    @property
    def num_twins(self) -> int:
        return sum(len(jobs) for jobs in self.twins.values())

    @property
    def records(self) -> list[JobRecord]:
        return [job.record for job in self.jobs.values() if job.record is not None]

    def _attempt(self, job: str, number: int) -> Attempt:
        return self.jobs[job].attempts[number - 1]

    def _plan(self, event: JobPlanned) -> None:
        job = JobState(event)
        self.jobs[event.job] = job
        self.num_planned[event.model] = self.num_planned.get(event.model, 0) + 1
        if event.kind == "trial":
            self.num_trials[event.model] = self.num_trials.get(event.model, 0) + 1
        if event.same_as:
            job.phase = "twin"
            self.twins.setdefault(event.config_hash, []).append(job)
        else:
            self.num_jobs += 1
            self.first_of_configuration.setdefault(event.config_hash, event.job)
            self.waiting.setdefault(event.model, {})[event.job] = job

    def _move(self, job: JobState, phase: Phase) -> None:
        model = job.planned.model
        if job.phase == "waiting":
            del self.waiting[model][job.name]
        elif job.phase == "out":
            del self.out[job.name]
        elif job.phase == "twin":
            configuration = job.planned.config_hash
            self.twins[configuration] = [twin for twin in self.twins[configuration] if twin is not job]
            if not self.twins[configuration]:
                del self.twins[configuration]
        job.phase = phase
        if phase == "waiting":
            self.waiting.setdefault(model, {})[job.name] = job
        elif phase == "out":
            self.out[job.name] = job

    def _end_attempt(self, event: AttemptEnded) -> None:
        job = self.jobs[event.job]
        self._attempt(event.job, event.attempt).ended = event
        model = job.planned.model
        self.rank_seconds[model] = self.rank_seconds.get(model, 0.0) + event.rank_seconds_allocated
        self._move(job, "waiting")
        # What was begun goes on before anything new: its time is spent already.
        self.waiting[model] = {job.name: job, **self.waiting[model]}

    def _conclude(self, event: JobConcluded) -> None:
        job = self.jobs[event.job]
        if event.ended is not None:
            self._end_attempt(event.ended)
        record = event.record
        job.record = record
        self._move(job, "done")
        if record.status in SUCCESSES:
            self.num_results += 1
        elif self.first_of_configuration.get(record.config_hash) == record.job:
            # It stands for its configuration no longer: an equal one is run, not answered by a failure.
            del self.first_of_configuration[record.config_hash]
        if record.failure and record.status not in SUCCESSES:
            signature = record.failure_signature or record.failure
            self.first_failures[signature] = self.first_failures.get(signature, 0) + 1


SUCCESSES = ("finished", "target_reached", "pruned")
"""Statuses of runs that led to what was asked of them."""


def fold(events: Iterable[Event]) -> NightState:
    state = NightState()
    for event in events:
        state.apply(event)
    return state
