"""What squeue, sacct and scontrol say of jobs, read into one form whatever Slurm's version writes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweeps.job import State

PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
"""They hold nodes."""
BY_SLURM = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
"""An end that Slurm itself brought: it is none yet, for such a job is queued again a moment later."""


@dataclass(frozen=True)
class SlurmJob:
    """One start of one job, or of one task of an array, as Slurm tells it."""

    id: str
    """123, or 123_4 for a task of an array."""
    name: str
    """Slurm's; of an array the same for all tasks."""
    state: str
    """In Slurm's capitals."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    submitted: float | None = None
    """Of the latest requeue, if there was one."""
    started: float | None = None
    ended: float | None = None
    """None while it has not ended, whatever Slurm expects."""
    exit_code: int | None = None
    """As a shell has it: 128 + n for signal n."""
    num_restarts: int = 0
    comment: str = ""

    @property
    def kind(self) -> State:
        if self.state in PENDING:
            return "pending"
        return "running" if self.state in RUNNING else "ended"

    @property
    def is_held_after_failed_launch(self) -> bool:
        words = self.reason.lower().replace("_", " ")
        return self.kind == "pending" and "launch failed requeued held" in words


def read_squeue(text: str) -> list[SlurmJob]:
    """Of `squeue --json` or `scontrol show jobs --json`; raises ValueError for anything else.

    Tasks of an array that wait stand in one entry and come out as one each.
    """
    return [job for entry in _entries(text) for job in _jobs_of(entry)]


SACCT_FIELDS = ("JobID", "JobName", "State", "ExitCode", "NodeList", "Submit", "Start", "End", "Reason", "Comment")
SACCT = ("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--format={','.join(SACCT_FIELDS)}")
"""Not --json, in which Slurm 22.05 gives every job the exit code 0. Times as SLURM_TIME_FORMAT=%s writes them."""


def read_sacct(text: str) -> list[SlurmJob]:
    """Of SACCT: every start of every job."""
    found = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) < len(SACCT_FIELDS):
            continue
        fields = dict(zip(SACCT_FIELDS, values, strict=False))
        job = SlurmJob(
            id=fields["JobID"],
            name=fields["JobName"],
            state=fields["State"].split(" ")[0],
            reason=_meaningful(fields["Reason"]),
            nodes=expand_hosts(_meaningful(fields["NodeList"])),
            submitted=_seconds(fields["Submit"]),
            started=_seconds(fields["Start"]),
            ended=_seconds(fields["End"]),
            exit_code=_exit_code_of_text(fields["ExitCode"]),
            # A comment may have any character, the separator too.
            comment="|".join(values[len(SACCT_FIELDS) - 1 :]),
        )
        found.append(job if job.ended is not None and job.started is not None else _without_plans(job))
    return found


def read_scontrol(text: str) -> list[SlurmJob]:
    """Of `scontrol show job --oneliner ID`, which needs neither accounting nor a JSON plug-in."""
    found = []
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobId" not in fields:
            continue
        parent, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
        base = SlurmJob(
            id=fields["JobId"],
            name=fields.get("JobName", ""),
            state=fields.get("JobState", ""),
            reason=_meaningful(fields.get("Reason", "")),
            nodes=expand_hosts(_meaningful(fields.get("NodeList", ""))),
            submitted=_seconds(fields.get("SubmitTime", "")),
            started=_seconds(fields.get("StartTime", "")),
            ended=_seconds(fields.get("EndTime", "")),
            exit_code=_exit_code_of_text(fields.get("ExitCode", "")),
            num_restarts=int(fields.get("Restarts", "0") or 0),
            comment=fields.get("Comment", ""),
        )
        tasks = expand_tasks(task) if parent else ()
        found += [_without_plans(replace(base, id=f"{parent}_{index}")) for index in tasks] if tasks else [base]
    return found


def held_seconds(starts: Sequence[SlurmJob], now: float) -> float:
    """Wall time for which a job has held its nodes, over its starts."""
    return sum(max(0.0, (start.ended or now) - start.started) for start in starts if start.started is not None)


def expand_hosts(nodes: str) -> tuple[str, ...]:
    """Every name of a node list.

    >>> expand_hosts("dgx[07-09,12],login1")
    ('dgx07', 'dgx08', 'dgx09', 'dgx12', 'login1')
    """
    found: list[str] = []
    for part in re.findall(r"(?:[^\[\],\s]|\[[^\]]*\])+", nodes):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            endings = [literal] if literal else [number for each in ranges.split(",") for number in _numbers(each)]
            names = [name + ending for name in names for ending in endings]
        found += names
    return tuple(found)


def _numbers(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def expand_tasks(text: str) -> tuple[int, ...]:
    """Indices of an array's waiting tasks, e.g. of "3,5-7%20" or "0-9:3"; none where there are no tasks."""
    indices: list[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            indices += range(first, last + 1, step)
    return tuple(indices)


def _entries(text: str) -> list[Mapping[str, Any]]:
    content = json.loads(text)
    jobs = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(jobs, list):
        raise ValueError("Slurm's answer has no list of jobs")
    return [job for job in jobs if isinstance(job, dict)]


def _jobs_of(entry: Mapping[str, Any]) -> Iterator[SlurmJob]:
    parent, task = int(_number(entry.get("array_job_id")) or 0), _number(entry.get("array_task_id"))
    waiting = expand_tasks(str(entry.get("array_task_string") or ""))
    number = int(_number(entry.get("job_id")) or 0)
    base = _without_plans(
        SlurmJob(
            id=f"{parent}_{int(task)}" if parent and task is not None else str(number),
            name=str(entry.get("name") or ""),
            state=_word(entry.get("job_state")),
            reason=_meaningful(str(entry.get("state_description") or entry.get("state_reason") or "")),
            nodes=expand_hosts(_meaningful(str(entry.get("nodes") or ""))),
            submitted=_time(entry.get("submit_time")),
            started=_time(entry.get("start_time")),
            ended=_time(entry.get("end_time")),
            exit_code=_exit_code(entry.get("exit_code")),
            num_restarts=int(_number(entry.get("restart_cnt")) or 0),
            comment=str(entry.get("comment") or ""),
        )
    )
    if parent and waiting:
        yield from (replace(base, id=f"{parent}_{index}") for index in waiting)
    else:
        yield base


def _without_plans(job: SlurmJob) -> SlurmJob:
    """Slurm tells of a waiting job when it expects to start it, and of a running one when its limit ends it."""
    if job.kind == "pending":
        return replace(job, started=None, ended=None, nodes=(), exit_code=None)
    return replace(job, ended=None, exit_code=None) if job.kind == "running" else job


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """Plain, or as newer versions write it: {"set": true, "infinite": false, "number": 7}."""
    if isinstance(value, dict):
        return _number(value.get("number")) if value.get("set") and not value.get("infinite") else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _time(value: Any) -> float | None:
    """Seconds since the epoch; Slurm's 0 is none."""
    return _number(value) or None


def _seconds(text: str) -> float | None:
    """Since the epoch; or the local time that a version prints which knows no SLURM_TIME_FORMAT."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text) or None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _exit_code_of_text(text: str) -> int | None:
    """Of "code:signal"."""
    code, _, signal = text.partition(":")
    if signal.isdigit() and int(signal):
        return 128 + int(signal)
    return int(code) if code.isdigit() else None


def _word(value: Any) -> str:
    """A state; newer versions write a list, in which a flag such as COMPLETING follows the state it is on top of."""
    if isinstance(value, list):
        words = [str(word) for word in value]
        return next((word for word in reversed(words) if word in RUNNING | PENDING), words[0] if words else "")
    return str(value or "").split(" ")[0]


def _meaningful(text: str) -> str:
    return "" if text in ("None", "None assigned", "(null)", "Unknown") else text


def _exit_code(value: Any) -> int | None:
    """Of a status as wait gives it, or of {"return_code", "signal"}."""
    if isinstance(value, dict):
        signal = _mapping(value.get("signal"))
        number = _number(signal.get("id", signal.get("signal_id")))
        if number:
            return 128 + int(number)
        code = _number(value.get("return_code"))
        return int(code) if code is not None else None
    status = _number(value)
    if status is None:
        return None
    return 128 + (int(status) & 127) if int(status) & 127 else int(status) >> 8
