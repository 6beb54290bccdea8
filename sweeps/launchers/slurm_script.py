"""What Slurm is given: batches of jobs alike and the script of each, as pure functions.

Recorded as text in tests/golden/sweeps/, since a machine executes it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perception.distributed.failure import EXIT_PREEMPTED, FAILURE_FOLDER_VARIABLE
from perception.errors import UserError
from sweeps.job import START_MARK, TIME_LIMIT_MARK, Job
from sweeps.launchers.container_argv import (
    command_in_image,
    docker_words,
    image_environment,
    pyxis_preamble,
    pyxis_words,
)
from sweeps.planning.plan import SlurmSettings

NICE_WITHOUT_PRIORITY = 10_000
NICE_PER_PRIORITY = 1_000
"""Users may only lower their jobs' standing, so a job of no priority leaves room above."""
LATE_SECONDS = 60
"""Slurm may send the signal before a time limit so much earlier than asked."""
END_WAIT_SECONDS = 60
"""For the other ranks after the first has ended: rank 0 may still be writing."""


@dataclass(frozen=True)
class Batch:
    """What one sbatch submits: one job, or an array of jobs that differ in nothing that Slurm is told."""

    jobs: tuple[Job, ...]

    @property
    def name(self) -> str:
        """Slurm's name of it; begins with that of its first job."""
        first, others = self.jobs[0].name, len(self.jobs) - 1
        return f"{first}-and-{others}-more" if others else first

    @property
    def is_array(self) -> bool:
        return len(self.jobs) > 1

    def ids(self, number: int) -> list[str]:
        """Of its jobs, where `number` is what sbatch printed. Never the bare number of an array: it means all."""
        return [f"{number}_{index}" for index in range(len(self.jobs))] if self.is_array else [str(number)]


def make_batches(jobs: Sequence[Job], largest_array: int) -> list[Batch]:
    """Arrays of jobs alike, in the order in which they should start.

    By priority, then the widest first, since narrow ones fill the gaps that wide ones leave, then the longest.
    """
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (-job.priority, -job.num_nodes, -job.num_ranks, -job.time_limit_seconds)):
        alike.setdefault(_what_slurm_is_told(job), []).append(job)
    return [
        Batch(tuple(same[begin : begin + largest_array]))
        for same in alike.values()
        for begin in range(0, len(same), largest_array)
    ]


def _what_slurm_is_told(job: Job) -> tuple[object, ...]:
    """Equal for jobs that one script can start; the folders of a container are in it."""
    minutes = time_limit_minutes(job)
    environment = tuple(sorted(job.environment.items()))
    shape = (job.num_nodes, job.ranks_per_node, job.starts_ranks, minutes, job.priority)
    # The options of a container name folders of the job, so such jobs go one by one.
    return (*shape, environment, job.excluded_nodes, job.image, job.name if job.image else "")


def time_limit_minutes(job: Job) -> int:
    """Slurm counts in minutes."""
    return max(1, math.ceil(job.time_limit_seconds / 60))


def minutes_asked_for(job: Job, settings: SlurmSettings) -> int:
    """With time to write a checkpoint: the signal that asks for it must not come before the job's own limit."""
    return time_limit_minutes(job) + math.ceil((settings.grace_seconds + LATE_SECONDS) / 60)


def batch_script(
    batch: Batch, settings: SlurmSettings, folder: Path, working_folder: Path, excluded: Sequence[str] = ()
) -> str:
    """The script for sbatch. `folder`: where the launcher keeps `commands_text` and the links to logs.

    `excluded`: nodes that Slurm knows, those of the batch's jobs among them.
    """
    job = batch.jobs[0]
    text = ["#!/bin/bash", *_directives(batch, settings, folder, excluded), _SIGNALS]
    if batch.is_array:
        commands = _quote(str(commands_file(folder, batch)))
        text += [
            "# This task's line sets run_folder and the command.",
            f'mapfile -t -s "$SLURM_ARRAY_TASK_ID" -n 1 line <{commands} && eval "${{line[0]}}"',
        ]
    else:
        text += [_command_line(job)]
    text += pyxis_preamble(job) if settings.container == "pyxis" else []
    exports = {**job.environment, **image_environment(job), FAILURE_FOLDER_VARIABLE: ""}
    for name, value in exports.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f'job {job.name}: environment has "{name}", which is no name of a variable; rename it')
        shown = '"$run_folder/ranks"' if name == FAILURE_FOLDER_VARIABLE else _quote(value)
        text += [f"export {name}={shown}"]
    text += [
        f"cd {_quote(str(working_folder))} || exit 1",
        f'TZ=UTC printf -- \'{START_MARK}%(%FT%TZ)T as job %s on %s\\n\' -1 "$SLURM_JOB_ID" "$SLURM_JOB_NODELIST"',
        "# What an earlier start of this job left.",
        '[ ! -d "$run_folder/ranks" ] || rm -f "$run_folder"/ranks/rank[0-9]*.*',
        "",
        _LIFE.format(
            step=_step(job, settings, working_folder),
            preempted=EXIT_PREEMPTED,
            # After it a stop is the time limit's, and another start would meet it again.
            limit=time_limit_minutes(job) * 60,
            time_limit_mark=TIME_LIMIT_MARK,
        ),
    ]
    return "\n".join(text)


_SIGNALS = f"""\
set -u
# Slurm's signals end `wait` and reach the ranks as SIGUSR2: they write a checkpoint and end with {EXIT_PREEMPTED}.
asked= interrupted= child=
stop() {{
    interrupted=1 asked=${{asked:-$1}}
    [ -z "$child" ] || kill -USR2 "$child" 2>/dev/null
}}
trap 'stop USR2' USR2
trap 'stop TERM' TERM
"""

_LIFE = """\
{step} </dev/null &
child=$!
[ -z "$asked" ] || kill -USR2 "$child" 2>/dev/null
code=127
while true; do
    interrupted=
    wait "$child"
    now=$?
    # 127: the child's end was told before.
    [ "$now" -eq 127 ] || code=$now
    [ -n "$interrupted" ] && [ "$now" -ne 127 ] || break
done

# Stopped, but not cancelled. 140: before its handler was there.
if [ "$asked" != TERM ] && {{ [ "$code" -eq {preempted} ] || [ "$code" -eq 140 ]; }}; then
    if [ "$SECONDS" -ge {limit} ]; then
        echo "{time_limit_mark}"
        exit {preempted}
    fi
    # Preempted: the same job waits for nodes and goes on.
    id=$SLURM_JOB_ID
    # A task of an array by both numbers: one alone would mean all tasks.
    [ -z "${{SLURM_ARRAY_JOB_ID:-}}" ] || id=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
    trap - TERM USR2
    # Slurm ends this start; where it refuses, the controller submits the job again.
    scontrol requeue "$id" && sleep 120
fi
exit "$code"
"""


def commands_text(batch: Batch) -> str:
    """A line a job of an array, by index."""
    return "".join(f"{_command_line(job)}\n" for job in batch.jobs)


def commands_file(folder: Path, batch: Batch) -> Path:
    return folder / f"{batch.name}.commands"


def log_links(folder: Path, batch: Batch) -> Path:
    """Folder of links 0, 1, …, each to the job.log of a job of an array: Slurm's own words go there too."""
    return folder / f"{batch.name}.logs"


def _directives(batch: Batch, settings: SlurmSettings, folder: Path, excluded: Sequence[str]) -> list[str]:
    job = batch.jobs[0]
    output = log_links(folder, batch) / "%a" if batch.is_array else job.run_folder / "job.log"
    pattern = str(output.parent).replace("%", "%%") + "/" + output.name
    nice = max(0, NICE_WITHOUT_PRIORITY - NICE_PER_PRIORITY * job.priority)
    tasks = job.ranks_per_node if job.starts_ranks else 1
    # One process for all its ranks has the processors of as many.
    cpus = settings.cpus_per_rank * (1 if job.starts_ranks else job.ranks_per_node)
    options: list[tuple[str, str | int]] = [
        ("job-name", batch.name),
        ("output", pattern),
        ("open-mode", "append"),
        ("nodes", job.num_nodes),
        ("ntasks-per-node", tasks),
        ("cpus-per-task", cpus),
        ("gpus-per-node", settings.gpus_per_node),
        ("time", minutes_asked_for(job, settings)),
        ("signal", f"B:USR2@{settings.grace_seconds}"),
        ("nice", nice),
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("exclude", ",".join(sorted(excluded))),
        ("array", f"0-{len(batch.jobs) - 1}" if batch.is_array else ""),
    ]
    lines = [f"#SBATCH --{name}={_escape(str(value))}" for name, value in options if value not in ("", 0)]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {_escape(option)}" for option in settings.options)]


def _command_line(job: Job) -> str:
    argv = command_in_image(job) if job.image else job.argv
    return f"run_folder={_quote(str(job.run_folder))}; set -- {' '.join(_quote(word) for word in argv)}"


def _step(job: Job, settings: SlurmSettings, working_folder: Path) -> str:
    """What runs the command: srun once a rank, or the batch shell itself for one process."""
    if not job.starts_ranks and not (job.image and settings.container == "pyxis"):
        words = _docker(job, settings, working_folder) if job.image else []
        return " ".join([*words, '"$@"'])
    tasks = job.num_ranks if job.starts_ranks else 1
    words = ["srun", f"--nodes={job.num_nodes if job.starts_ranks else 1}", f"--ntasks={tasks}"]
    if job.starts_ranks:
        words += [f"--ntasks-per-node={job.ranks_per_node}"]
    words += [f"--cpus-per-task={settings.cpus_per_rank}"] if settings.cpus_per_rank else []
    words += ["--kill-on-bad-exit=0", f"--wait={END_WAIT_SECONDS}"]
    if job.image and settings.container == "pyxis":
        words += [_quote(option) for option in pyxis_words(job, working_folder)]
    elif job.image:
        words += _docker(job, settings, working_folder)
    return " ".join([*words, '"$@"'])


def _docker(job: Job, settings: SlurmSettings, working_folder: Path) -> list[str]:
    if settings.container != "docker":
        raise UserError(
            f'job {job.name}: has image {job.image}, but slurm.container is empty; set it to "pyxis" or "docker"'
        )
    return [_quote(word) for word in docker_words(job, working_folder)]


def _quote(text: str) -> str:
    """One word for bash, on one line."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        escaped = "".join(
            f"\\x{ord(character):02x}" if ord(character) < 32 or ord(character) == 127 else character
            for character in text.replace("\\", "\\\\").replace("'", "\\'")
        )
        return f"$'{escaped}'"
    return shlex.quote(text)


def _escape(text: str) -> str:
    """One word on an #SBATCH line, where "#" begins a comment."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{text!r}: control characters cannot be given to sbatch; choose another name")
    return re.sub(r"([^A-Za-z0-9_@%+=:,./\[\]~-])", r"\\\1", text)
