"""What is kept of a job and of a night: the rows that the ledger and the morning report are made from.

The controller alone writes them. Times are seconds since the epoch, UTC; a value that is not known is None, never 0.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from perception.errors import UserError

Kind = Literal["trial", "champion", "default", "scaling"]
"""trial: a suggestion of the search; champion, default: repeats under other seeds of the best known configuration and
of the model's own; scaling: a throughput run at a number of ranks."""
Failure = Literal[
    "out_of_memory", "collective_timeout", "not_finite", "hardware", "data", "time_limit", "preempted", "node",
    "user_error", "code", "no_result",
]  # fmt: skip


_Record = typing.TypeVar("_Record", "JobRecord", "NightRecord")


@dataclass(frozen=True)
class JobRecord:
    """One job of a night, over all its attempts."""

    night: str
    """Name of the night, e.g. 2026-11-30 or 2026-11-30.2: UTC date of its begin."""
    job: str
    """Unique in the night, e.g. lane-small-0017."""
    plan: str
    model: str
    kind: Kind
    trial: int | None = None
    """Optuna's number of the trial in its study."""
    config_hash: str = ""
    """Of what is trained: model, overrides, data; the seed is not in it."""
    space_hash: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Dotted name → value of what the search or the plan set."""
    seed: int = 0
    num_nodes: int = 1
    num_ranks: int = 1
    launcher: str = "local"
    hardware: str = ""
    """Of one node, e.g. "8 x NVIDIA H100" or the processor's name and cores."""
    image: str = ""
    """Digest of the container image, or empty."""
    git_revision: str = ""
    data_manifest: str = ""
    status: str = ""
    """Of result.json: finished, target_reached, pruned, preempted, diverged, failed; lost where there was none;
    answered: an equal configuration's record was taken; cancelled: by the end of the night."""
    cause: str = ""
    failure: Failure | None = None
    failure_signature: str = ""
    """The line of the log that shows the failure, with numbers, paths and addresses normalised."""
    log_tail: str = ""
    """Of the first rank that failed, for failures only; at most 4,000 characters."""
    objective_name: str = ""
    objective: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    images_per_second: float | None = None
    scaling_factor: float | None = None
    """As the run itself measured it."""
    lost_scaling: dict[str, float] = field(default_factory=dict)
    """Shares of a step lost: data, exposed_allreduce, straggler."""
    seconds: float | None = None
    """Training time."""
    samples: int | None = None
    num_parameters: int | None = None
    """Of the model: its size."""
    latency_seconds: float | None = None
    """Of the trained network on one image, on the hardware of the job; None where the run was ended early."""
    target_metric: str = ""
    target_value: float | None = None
    target_seconds: float | None = None
    """Training time until the target was reached; None: not reached, or no target."""
    target_samples: int | None = None
    checkpoint_path: str = ""
    checkpoint_sha256: str = ""
    weights_sha256: str = ""
    run_folder: str = ""
    command: str = ""
    """One line that reproduces the job, quoted for a shell."""
    submitted_utc: float | None = None
    started_utc: float | None = None
    ended_utc: float | None = None
    num_attempts: int = 0
    num_starts: int = 0
    nodes: tuple[str, ...] = ()
    rank_seconds_allocated: float = 0.0
    """Slots (GPUs) times the wall time for which they were held, over all attempts."""
    rank_seconds_wasted: float = 0.0
    """The part of it that led to no result or was computed again after a failure."""


@dataclass(frozen=True)
class NightRecord:
    """One night: of one plan, by one controller and its restarts."""

    night: str
    plan: str
    plan_text: str
    """The plan file as it was read."""
    launcher: str
    num_slots: int
    """GPUs, or CPU slots, that the launcher could fill."""
    hardware: str
    image: str
    git_revision: str
    started_utc: float
    ended_utc: float | None = None
    """None while it runs."""
    closing: str = ""
    """Why it ended: budget spent, deadline, converged, stopped, overran (closed by the next night)."""
    num_planned: int = 0
    num_controller_starts: int = 1
    controller_cpu_seconds: float = 0.0
    budget_rank_seconds: float | None = None
    deadline_utc: float | None = None
    champions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model → parameters of the configuration that this night started from as the best known."""
    notes: tuple[str, ...] = ()
    """What a person should know: jobs left out, nodes excluded, records that could not be read."""


def figure_of(job: JobRecord, name: str) -> float | None:
    """A metric or another figure that plans name, as the record has it; None where it is not known or not finite."""
    own = {
        "images_per_second": job.images_per_second,
        "seconds": job.seconds,
        "num_parameters": job.num_parameters,
        "latency_seconds": job.latency_seconds,
        "target_seconds": job.target_seconds,
        "target_samples": job.target_samples,
    }
    value = own[name] if name in own else job.metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def to_row(record: JobRecord | NightRecord) -> dict[str, Any]:
    """Plain JSON values."""
    return dataclasses.asdict(record)


def job_from_row(row: dict[str, Any], where: str) -> JobRecord:
    """Of `to_row`; a field that this version does not know is an error, one that is missing takes its default."""
    return _from_row(JobRecord, row, where)


def night_from_row(row: dict[str, Any], where: str) -> NightRecord:
    return _from_row(NightRecord, row, where)


def _from_row(cls: type[_Record], row: dict[str, Any], where: str) -> _Record:
    names = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(row) - names)
    if unknown:
        raise UserError(f"{where}: field {unknown[0]} is unknown: written by a newer version; update this one")
    tuples = {name for name, hint in typing.get_type_hints(cls).items() if typing.get_origin(hint) is tuple}
    values = {name: tuple(value) if name in tuples and value is not None else value for name, value in row.items()}
    try:
        return typing.cast(_Record, typing.cast(Any, cls)(**values))
    except TypeError as error:
        raise UserError(f"{where}: not a record ({error})") from None
