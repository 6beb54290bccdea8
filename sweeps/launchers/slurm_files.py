"""What the Slurm launcher keeps on the disk, so that a restarted controller knows what was submitted and how it ended.

NAME.batch.json: the jobs of a batch and Slurm's number of it. NAME.sbatch: its script. NAME.commands and NAME.logs: of
an array, a line and a link to a log for each job. ended.jsonl: how jobs ended, since Slurm forgets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perception.errors import UserError
from sweeps.job import JobStatus
from sweeps.launchers.local import job_from_json
from sweeps.launchers.slurm_script import Batch, commands_file, commands_text, log_links


@dataclass
class Submission:
    batch: Batch
    announced_utc: float
    number: int | None = None
    """Slurm's; None: nobody knows whether sbatch was heard."""
    absent_since: float | None = None
    """When Slurm was first asked for it and knew nothing."""


def submission_file(folder: Path, batch_name: str) -> Path:
    return folder / f"{batch_name}.batch.json"


def write_batch(folder: Path, submission: Submission, script: str) -> Path:
    """All that sbatch needs, and the announcement before it; returns the script. UserError on a full disk."""
    batch = submission.batch
    path = folder / f"{batch.name}.sbatch"
    try:
        for job in batch.jobs:
            job.run_folder.mkdir(parents=True, exist_ok=True)
        if batch.is_array:
            _write(commands_file(folder, batch), commands_text(batch))
            _link_logs(log_links(folder, batch), batch)
        _write(path, script)
        write_submission(folder, submission)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror}); free some space") from None
    return path


def write_submission(folder: Path, submission: Submission) -> None:
    jobs = [{**dataclasses.asdict(job), "run_folder": str(job.run_folder)} for job in submission.batch.jobs]
    content = {"jobs": jobs, "announced_utc": submission.announced_utc, "number": submission.number}
    _write(submission_file(folder, submission.batch.name), json.dumps(content) + "\n")


def read_submissions(folder: Path) -> Iterator[Submission]:
    """UserError for a file that is none."""
    for path in sorted(folder.glob("*.batch.json")):
        try:
            content = json.loads(path.read_text())
            batch = Batch(tuple(job_from_json(job) for job in content["jobs"]))
            submission = Submission(batch, content["announced_utc"], content["number"])
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UserError(f"{path}: is no batch of this version ({error}); remove it to forget its jobs") from None
        yield submission


def append_ended(folder: Path, status: JobStatus) -> None:
    """Where it cannot be written, the next controller asks Slurm."""
    with contextlib.suppress(OSError), (folder / "ended.jsonl").open("a") as file:
        file.write(json.dumps(dataclasses.asdict(status)) + "\n")


def read_ended(folder: Path) -> dict[str, JobStatus]:
    path = folder / "ended.jsonl"
    statuses = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        # A line that was cut by a kill: Slurm is asked again.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            values = json.loads(line)
            statuses[values["name"]] = JobStatus(**{**values, "nodes": tuple(values["nodes"])})
    return statuses


def _link_logs(folder: Path, batch: Batch) -> None:
    folder.mkdir(exist_ok=True)
    for index, job in enumerate(batch.jobs):
        link = folder / str(index)
        link.unlink(missing_ok=True)
        link.symlink_to(job.run_folder / "job.log")


def _write(path: Path, text: str) -> None:
    """Whole or not at all. Not forced to the disk: a thousand jobs are submitted in seconds, and Slurm has them."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
