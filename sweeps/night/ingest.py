"""From a run folder to the record of its job. Whether a run succeeded stands in its result.json, and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from perception.run_folder import RunFolder
from sweeps.job import JobStatus
from sweeps.night.budget import split_useful
from sweeps.night.events import AttemptEnded, JobPlanned
from sweeps.night.metrics_tail import first_reached
from sweeps.night.state import SUCCESSES, JobState
from sweeps.planning.plan import ModelPlan, Target, figure
from sweeps.record import Failure, JobRecord, NightRecord

ENDINGS = (*SUCCESSES, "preempted", "diverged", "failed")
"""What `status` in result.json can be."""
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Result:
    """What result.json says of a run."""

    status: str
    """Of ENDINGS, or "none": the file is missing or is no result."""
    cause: str
    values: dict[str, Any] = field(default_factory=dict)
    written_utc: float = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    last_step: int
    """Of which anything is known."""
    kept_step: int
    """Of the newest checkpoint: what a run that goes on need not compute again."""


def read_result(folder: Path, plan: ModelPlan | None = None) -> Result:
    """The run's own word; with a plan, a run that finished without a figure that is searched for is no success."""
    path = RunFolder(folder).result
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        written = path.stat().st_mtime
    except FileNotFoundError:
        return Result("none", "there is no result.json")
    except OSError as error:
        return Result("none", f"result.json cannot be read ({error.strerror})")
    except ValueError:
        return Result("none", "result.json is truncated or is not JSON")
    if not isinstance(values, dict) or values.get("status") not in ENDINGS:
        return Result("none", "result.json has no status that is known")
    cause = str(values.get("cause") or "")
    status = str(values["status"])
    if plan is not None and plan.target is not None and not _part(values, "target"):
        # A run that is to become as good as it can does not end at its target.
        values["target"] = _noted(folder, plan.target)
    if plan is not None and status in ("finished", "target_reached"):
        for objective in plan.objectives:
            if figure(values, objective.metric) is None:
                found = _raw(values, objective.metric)
                if isinstance(found, float):
                    return Result("diverged", f"{objective.metric} is {found}", values, written)
                if plan.target is not None and objective.metric.startswith("target_"):
                    # No failure, and trained again it would be the same.
                    cause = f"{plan.target.metric} never reached {plan.target.value:g}"
                    return Result("pruned", cause, values, written)
                return Result("failed", f"result.json has no figure {objective.metric}", values, written)
    return Result(status, cause, values, written)


def _noted(folder: Path, target: Target) -> dict[str, Any]:
    """As a run that ended at its target writes it."""
    seconds, samples = first_reached(RunFolder(folder).metrics, target.metric, target.value) or (None, None)
    return {"metric": target.metric, "value": target.value, "reached_seconds": seconds, "reached_samples": samples}


def progress_of(folder: Path) -> Progress:
    """From the records of checkpoints and the last lines of metrics.jsonl; zeros where there are none."""
    run = RunFolder(folder)
    steps = [int(match[1]) for path in _names(run.checkpoints) if (match := re.fullmatch(r"step-(\d+)\.json", path))]
    kept = max(steps, default=0)
    last = 0
    for line in reversed(_tail_lines(run.metrics)):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            last = int(json.loads(line)["step"])
            break
    return Progress(max(kept, last), kept)


def wasted_share(begun_step: int, progress: Progress) -> float:
    """Of an interrupted start's time: the part whose steps are to be computed again; all where it made no step."""
    done = progress.last_step - begun_step
    if done <= 0:
        return 1.0
    return min(1.0, max(0.0, (progress.last_step - progress.kept_step) / done))


def reproduce_command(planned: JobPlanned) -> str:
    """One line for a shell that trains the same again, into a run folder of its own."""
    argv = list(planned.argv)
    if "--out" in argv:
        place = argv.index("--out")
        del argv[place : place + 2]
    argv = [word for word in argv if word != "--resume-if-possible"]
    argv[:1] = ["python"]
    if planned.num_ranks > 1:
        argv += ["--ranks", str(planned.num_ranks)]
    return shlex.join(argv)


def make_record(
    night: NightRecord,
    plan: ModelPlan,
    job: JobState,
    status: str,
    cause: str,
    result: Mapping[str, Any],
    folder: Path,
    ended: AttemptEnded | None,
    log_tail: str = "",
    latest: JobStatus | None = None,
) -> JobRecord:
    """Of a job that has ended, with the account of all its attempts: useful and wasted add up to allocated.

    `latest` is the status with which it ended, which the journal need not hold to the second.
    """
    allocated = job.rank_seconds_allocated + (ended.rank_seconds_allocated if ended else 0.0)
    wasted = job.rank_seconds_wasted + (ended.rank_seconds_wasted if ended else 0.0)
    _, wasted = split_useful(allocated, wasted if status in SUCCESSES else allocated)
    statuses = [attempt.status for attempt in job.attempts if attempt.ended is not None and attempt.status is not None]
    if latest is not None:
        statuses.append(latest)
    succeeded = status in SUCCESSES
    environment = _json_object(RunFolder(folder).environment)
    throughput, losses = _part(result, "throughput"), _part(result, "lost_scaling")
    checkpoint, target = _part(result, "checkpoint"), _part(result, "target")
    objective = plan.objectives[0].metric if plan.objectives else ""
    # Runs that are cut short to measure their speed aim at nothing.
    aim = plan.target if job.planned.kind != "scaling" else None
    failure = cast(Failure, ended.failure) if ended is not None and ended.failure in get_args(Failure) else None
    return dataclasses.replace(
        _planned_record(night, job),
        image=str(environment.get("image_digest") or night.image),
        git_revision=str(_part(environment, "git").get("revision") or night.git_revision),
        data_manifest=_manifest(environment),
        status=status,
        cause=cause,
        failure=None if succeeded else failure,
        failure_signature="" if succeeded or ended is None else ended.signature,
        log_tail="" if succeeded else log_tail[-4000:],
        objective_name=objective,
        # What a run that failed left behind is no figure of its configuration.
        objective=figure(result, objective) if objective and succeeded else None,
        metrics={name: float(value) for name, value in _part(result, "metrics").items() if _is_number(value)},
        images_per_second=_number(throughput.get("images_per_second")),
        scaling_factor=_number(throughput.get("scaling_factor")),
        lost_scaling={name: float(value) for name, value in losses.items() if _is_number(value)},
        seconds=_number(result.get("seconds")),
        samples=_whole(result.get("samples")),
        num_parameters=_whole(figure(result, "num_parameters")),
        latency_seconds=figure(result, "latency_seconds"),
        target_metric=aim.metric if aim else "",
        target_value=aim.value if aim else None,
        target_seconds=_number(target.get("reached_seconds")) if aim else None,
        target_samples=_whole(target.get("reached_samples")) if aim else None,
        checkpoint_path=str(folder / checkpoint["path"]) if checkpoint.get("path") else "",
        checkpoint_sha256=str(checkpoint.get("sha256") or ""),
        weights_sha256=str(checkpoint.get("weights_sha256") or ""),
        run_folder=str(folder),
        submitted_utc=job.attempts[0].announced_utc if job.attempts else None,
        started_utc=min((s.started_utc for s in statuses if s.started_utc is not None), default=None),
        ended_utc=max((s.ended_utc for s in statuses if s.ended_utc is not None), default=None),
        num_attempts=len(job.attempts),
        num_starts=sum(s.num_starts for s in statuses),
        nodes=tuple(dict.fromkeys(node for s in statuses for node in s.nodes)),
        rank_seconds_allocated=allocated,
        rank_seconds_wasted=wasted,
    )


def answered_record(night: NightRecord, job: JobState, source: JobRecord) -> JobRecord:
    """Of a configuration that was run before in this night: the figures are that job's, no time was spent."""
    return dataclasses.replace(
        _planned_record(night, job),
        seed=source.seed,
        num_nodes=source.num_nodes,
        num_ranks=source.num_ranks,
        image=source.image,
        git_revision=source.git_revision,
        data_manifest=source.data_manifest,
        status="answered",
        cause=f"the same configuration as {source.job} ({source.status})",
        objective_name=source.objective_name,
        objective=source.objective,
        metrics=dict(source.metrics),
        num_parameters=source.num_parameters,
        latency_seconds=source.latency_seconds,
        target_metric=source.target_metric,
        target_value=source.target_value,
    )


def _planned_record(night: NightRecord, job: JobState) -> JobRecord:
    """What is known of a job before it runs."""
    planned = job.planned
    return JobRecord(
        night=night.night,
        job=job.name,
        plan=night.plan,
        model=planned.model,
        kind=planned.kind,
        trial=planned.trial,
        config_hash=planned.config_hash,
        space_hash=planned.space_hash,
        parameters=dict(planned.parameters),
        seed=planned.seed,
        num_nodes=planned.num_nodes,
        num_ranks=planned.num_ranks,
        launcher=night.launcher,
        hardware=night.hardware,
        command=reproduce_command(planned),
    )


def allocated_rank_seconds(status: JobStatus | None, num_ranks: int) -> float:
    """As the launcher counts it."""
    return max(0.0, status.allocated_seconds) * num_ranks if status is not None else 0.0


def _raw(values: Mapping[str, Any], name: str) -> Any:
    for part in (_part(values, "metrics"), _part(values, "throughput"), values):
        if name in part:
            return part[name]
    return None


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _whole(value: Any) -> int | None:
    return int(value) if _is_number(value) else None


def _manifest(environment: Mapping[str, Any]) -> str:
    data = _part(environment, "data")
    sums = [str(_part(data, split).get("manifest_sha256_sum") or "") for split in ("train", "validation")]
    return "+".join(total[:16] for total in sums if total)


def _json_object(path: Path) -> Mapping[str, Any]:
    """{} where it is missing or damaged: it only describes the run."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def _names(folder: Path) -> Sequence[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _tail_lines(path: Path) -> list[bytes]:
    """Of the end of a file that may be long; the first may be half a line."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
