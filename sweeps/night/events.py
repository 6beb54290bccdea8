"""What the controller decides and learns, as the lines of a night's journal: one frozen dataclass a kind."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any

from perception.errors import UserError
from sweeps.job import JobStatus
from sweeps.record import JobRecord, Kind, NightRecord, job_from_row, night_from_row


@dataclass(frozen=True)
class NightOpened:
    utc: float
    night: NightRecord


@dataclass(frozen=True)
class ControllerStarted:
    """Once for each process that has driven this night."""

    utc: float
    pid: int
    host: str


@dataclass(frozen=True)
class ControllerStopped:
    """In an orderly way; one that was killed leaves none."""

    utc: float
    cause: str
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class JobPlanned:
    """A configuration that is to be run: a suggestion of the search, or a repeat or scaling run of the plan."""

    utc: float
    job: str
    model: str
    kind: Kind
    argv: tuple[str, ...]
    """Complete, without the run folder and the ranks: those are the attempt's."""
    config_hash: str
    trial: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    space_hash: str = ""
    seed: int = 0
    num_nodes: int = 1
    ranks_per_node: int = 1
    priority: int = 0
    num_samples: int = 0
    same_as: str = ""
    """Job of an equal configuration, whose record answers this one."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class SubmissionAnnounced:
    """Written before the launcher is asked, so that a controller that dies meanwhile looks for the job first."""

    utc: float
    job: str
    attempt: int
    name: str
    excluded_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submitted:
    utc: float
    job: str
    attempt: int
    id: str


@dataclass(frozen=True)
class StatusSeen:
    utc: float
    job: str
    attempt: int
    status: JobStatus
    wasted_seconds: float = 0.0
    """Wall time of starts before the latest (a requeued job has several) whose work has to be computed again."""
    kept_step: int = 0
    """Step of the newest checkpoint when the latest start began."""
    charged_seconds: float = 0.0
    """Wall time of the starts before the latest."""


@dataclass(frozen=True)
class Measured:
    """An evaluation of a running trial, as told to the search."""

    utc: float
    job: str
    samples: int
    value: float


@dataclass(frozen=True)
class StopOrdered:
    """By control.json in the run folder."""

    utc: float
    job: str
    cause: str


@dataclass(frozen=True)
class CancelAsked:
    """Of the launcher: the job gets a signal, writes a checkpoint and ends."""

    utc: float
    job: str
    cause: str


@dataclass(frozen=True)
class EndAsked:
    """Of the launcher, by a person who stops the controller: the job goes on later, whatever it had come to."""

    utc: float
    job: str
    attempt: int


@dataclass(frozen=True)
class AttemptEnded:
    utc: float
    job: str
    attempt: int
    action: str
    """resume, retry or retry_elsewhere; conclude, give_up or cancel where the job ends with it."""
    failure: str = ""
    signature: str = ""
    node: str = ""
    rank_seconds_allocated: float = 0.0
    rank_seconds_wasted: float = 0.0
    kept_step: int = 0
    """Step of the newest checkpoint, from which the next attempt goes on."""


@dataclass(frozen=True)
class JobConcluded:
    """The job's record, together with the end of the attempt that led to it: a killed controller has both or none."""

    utc: float
    record: JobRecord
    ended: AttemptEnded | None = None
    """None where nothing was run: answered from another's record, or cancelled before it was submitted."""

    @property
    def job(self) -> str:
        return self.record.job


@dataclass(frozen=True)
class TwinFailed:
    """The job whose record should have answered this one has none: this one is run itself."""

    utc: float
    job: str


@dataclass(frozen=True)
class NodeExcluded:
    utc: float
    node: str
    cause: str


@dataclass(frozen=True)
class Noted:
    utc: float
    text: str


@dataclass(frozen=True)
class ModelDone:
    """No further trial of this model is asked for."""

    utc: float
    model: str
    cause: str


@dataclass(frozen=True)
class BestChosen:
    """The model's search has ended, and this is its best trial, to be repeated under other seeds."""

    utc: float
    model: str
    job: str
    """Empty: no trial came to its end."""


@dataclass(frozen=True)
class ClosingBegun:
    """No job is submitted any more."""

    utc: float
    cause: str


@dataclass(frozen=True)
class NightClosed:
    utc: float
    night: NightRecord


Event = (
    NightOpened
    | ControllerStarted
    | ControllerStopped
    | JobPlanned
    | SubmissionAnnounced
    | Submitted
    | StatusSeen
    | Measured
    | StopOrdered
    | CancelAsked
    | EndAsked
    | AttemptEnded
    | JobConcluded
    | TwinFailed
    | NodeExcluded
    | Noted
    | ModelDone
    | BestChosen
    | ClosingBegun
    | NightClosed
)

KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in typing.get_args(Event)}


def to_row(event: Event) -> dict[str, Any]:
    """Plain JSON values; the kind is the field `event`."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def from_row(row: dict[str, Any], where: str) -> Event:
    """Of `to_row`. Raises UserError for a kind or field that this version does not know."""
    values = dict(row)
    name = values.pop("event", None)
    kind = KINDS.get(str(name))
    if kind is None:
        raise UserError(f'{where}: event "{name}" is unknown: written by a newer version; update this one')
    names = {f.name for f in dataclasses.fields(kind)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise UserError(
            f"{where}: field {unknown[0]} of {name} is unknown: written by a newer version; update this one"
        )
    try:
        if "record" in values:
            values["record"] = job_from_row(values["record"], where)
        if values.get("ended") is not None:
            values["ended"] = AttemptEnded(**values["ended"])
        if "night" in values:
            values["night"] = night_from_row(values["night"], where)
        if "status" in values:
            values["status"] = JobStatus(**{**values["status"], "nodes": tuple(values["status"].get("nodes", ()))})
        for listed in ("argv", "excluded_nodes"):
            if listed in values:
                values[listed] = tuple(values[listed])
        return typing.cast(Event, typing.cast(Any, kind)(**values))
    except TypeError as error:
        raise UserError(f"{where}: not an event ({error})") from None
