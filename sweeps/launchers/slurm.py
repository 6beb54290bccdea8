"""Jobs as batch scripts of Slurm. The folder holds each batch's script and what was submitted under which number.

Slurm alone starts, queues again and ends jobs; a restarted controller reads the folder and asks Slurm how they stand.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perception.errors import UserError
from sweeps.job import Job, JobStatus
from sweeps.launchers.container_argv import pinned
from sweeps.launchers.launcher import LauncherError, inherited_environment
from sweeps.launchers.slurm_commands import SlurmRefused, run_slurm, slurm_environment
from sweeps.launchers.slurm_entry import Entry
from sweeps.launchers.slurm_files import (
    Submission,
    append_ended,
    read_ended,
    read_submissions,
    submission_file,
    write_batch,
    write_submission,
)
from sweeps.launchers.slurm_nodes import SINFO, Node, describe_nodes, read_sinfo, slots_of
from sweeps.launchers.slurm_script import Batch, batch_script, make_batches
from sweeps.launchers.slurm_state import SACCT, SlurmJob, read_sacct, read_scontrol, read_squeue
from sweeps.planning.plan import SlurmSettings

LARGEST_ARRAY = 500
"""Below Slurm's MaxArraySize, which is 1001 unless a site changed it."""
MAX_IDS_A_CALL = 200


@dataclass(frozen=True)
class SlurmPatience:
    """How long Slurm is waited for, in seconds, and how often."""

    command: float = 60.0
    """For an answer of one of its programs."""
    poll: float = 2.0
    """Between two questions, at least; more where an answer takes long to read."""
    accounting: float = 10.0
    """Between two questions to sacct."""
    settle: float = 30.0
    """After a preemption or a node's failure, for Slurm to queue the job again."""
    lost: float = 60.0
    """A job that nobody knows any more is lost after so long."""
    unsure: float = 5.0
    """Slurm may still work on a submission that it was sent before: it is given up only after so long."""
    nodes: float = 60.0
    """Between two looks at the nodes."""
    releases: int = 3
    """Of a job held because its launch failed; then the node is excluded, and it is released once more."""


class SlurmLauncher:
    """Jobs of this user on a Slurm cluster."""

    name = "slurm"

    def __init__(
        self,
        settings: SlurmSettings,
        folder: Path,
        patience: SlurmPatience | None = None,
        secret_variables: Collection[str] = (),
    ) -> None:
        """`folder`: seen by every node under the same path, as are the jobs' run folders.

        `secret_variables`: of the environment, not for jobs, nor for Slurm, which stores what sbatch sees.
        """
        self._settings = settings
        self._folder = folder.absolute()
        self._patience = patience or SlurmPatience()
        self._environ = slurm_environment(inherited_environment(os.environ, secret_variables))
        self._submissions: dict[str, Submission] = {}
        self._entries: dict[str, Entry] = {}
        self._live: dict[str, Entry] = {}
        self._ended: dict[str, JobStatus] = {}
        self._dropped: set[str] = set()
        """Batches that Slurm seemed not to have been given."""
        self._excluded: set[str] = set()
        self._next_query = self._next_accounting = self._nodes_until = 0.0
        self._nodes: list[Node] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); give another --root") from None

    # What there is

    def num_slots(self) -> int:
        return sum(slots_of(node, self._settings.cpus_per_rank) for node in self._nodes_up())

    def num_nodes(self) -> int:
        return len(self._nodes_up())

    def hardware(self) -> str:
        return describe_nodes(self._nodes_up())

    def _nodes_up(self) -> list[Node]:
        now = time.monotonic()
        if now >= self._nodes_until:
            partition = self._settings.partition
            try:
                listed = self._run([*SINFO, *([f"--partition={partition}"] if partition else [])])
            except SlurmRefused as refused:
                raise UserError(f"{refused}; check slurm.partition in the plan") from None
            self._nodes = read_sinfo(listed)
            if not self._nodes:
                raise UserError(f'slurm.partition = "{partition}" has no nodes; `sinfo` lists the partitions')
            self._nodes_until = now + self._patience.nodes
        return [node for node in self._nodes if node.is_up and node.name not in self._excluded]

    # Submitting

    def submit(self, job: Job) -> str:
        return self.submit_many([job])[0]

    def submit_many(self, jobs: Sequence[Job]) -> list[str]:
        for job in jobs:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job.name):
                raise UserError(f'job name "{job.name}": must be of letters, digits, dots and dashes')
            if not job.argv:
                raise UserError(f"job {job.name}: argv is empty; give a command")
        self._settle_unconfirmed()
        new = {job.name: pinned(job) for job in jobs if job.name not in self._entries}
        for batch in make_batches(list(new.values()), LARGEST_ARRAY):
            self._submit(batch)
        return [self._entries[job.name].id for job in jobs]

    def _submit(self, batch: Batch) -> None:
        submission = Submission(batch, time.time())
        excluded = self._excluded_for(batch)
        text = batch_script(batch, self._settings, self._folder, Path.cwd(), excluded)
        script = write_batch(self._folder, submission, text)
        self._submissions[batch.name] = submission
        try:
            # The folder tells apart jobs of the same name that another controller submitted.
            printed = self._run(["sbatch", "--parsable", f"--comment={self._folder}", str(script)])
            number = int(printed.strip().split(";")[0])
        except SlurmRefused as refused:
            del self._submissions[batch.name]
            submission_file(self._folder, batch.name).unlink(missing_ok=True)
            raise UserError(
                f"{script}: sbatch refuses it ({refused.words}); check slurm.partition, account, qos, gpus_per_node "
                "and options in the plan"
            ) from None
        self._confirm(submission, number)

    def _confirm(self, submission: Submission, number: int) -> None:
        submission.number = number
        for job, id_ in zip(submission.batch.jobs, submission.batch.ids(number), strict=True):
            entry = Entry(job.name, id_, submission.batch.name, submission.announced_utc, self._patience.settle)
            self._entries[job.name] = self._live[job.name] = entry
        with contextlib.suppress(OSError):
            # If it cannot be written, the number is found again by the name.
            write_submission(self._folder, submission)

    def _excluded_for(self, batch: Batch) -> list[str]:
        """Nodes that Slurm knows, of those that its jobs are not to have: it refuses a name that it does not know."""
        wanted = self._excluded.union(*(job.excluded_nodes for job in batch.jobs))
        if not wanted:
            return []
        self._nodes_up()
        return sorted(wanted & {node.name for node in self._nodes})

    def _settle_unconfirmed(self) -> None:
        """Find out whether what was announced reached Slurm; what did not is forgotten, to be submitted again."""
        unconfirmed = [each for each in self._submissions.values() if each.number is None]
        if not unconfirmed:
            return
        now = time.time()
        known = self._everything()
        since = min(each.announced_utc for each in unconfirmed)
        names = [each.batch.name for each in unconfirmed]
        # Accounting may be down or not there at all; slurmctld knows all but what ended long ago.
        with contextlib.suppress(SlurmRefused, LauncherError):
            known += self._accounted(since, [f"--name={','.join(names)}"])
        unsure = []
        for submission in unconfirmed:
            numbers = sorted(int(job.id.partition("_")[0]) for job in known if self._is_of(job, submission))
            if numbers:
                self._confirm(submission, numbers[0])
                continue
            submission.absent_since = submission.absent_since or now
            if now - submission.absent_since < self._patience.unsure:
                unsure.append(submission.batch.name)
                continue
            del self._submissions[submission.batch.name]
            self._dropped.add(submission.batch.name)
            submission_file(self._folder, submission.batch.name).unlink(missing_ok=True)
        if unsure:
            raise LauncherError(f"whether Slurm was given {unsure[0]} is not known yet ({len(unsure)} such)")

    def _is_of(self, job: SlurmJob, submission: Submission) -> bool:
        return job.name == submission.batch.name and job.comment in ("", str(self._folder))

    # Watching

    def poll(self) -> dict[str, JobStatus]:
        if self._live and time.monotonic() >= self._next_query:
            began, began_cpu = time.monotonic(), _cpu_seconds()
            with contextlib.suppress(LauncherError):
                self._settle_unconfirmed()
            self._look()
            # Of this process's and its children's time at most a twentieth goes into asking.
            cost = 20 * (_cpu_seconds() - began_cpu)
            self._next_query = began + max(self._patience.poll, cost)
        return {**self._ended, **{name: entry.status() for name, entry in self._live.items()}}

    def _look(self) -> None:
        now = time.time()
        everything = self._everything()
        seen = {job.id: job for job in everything}
        missing = []
        for entry in list(self._live.values()):
            job = seen.get(entry.id)
            if job is not None and job.name == entry.batch_name:
                entry.see(job, now)
                if job.is_held_after_failed_launch:
                    self._release(entry)
            else:
                missing.append(entry)
        self._cancel_twins(everything)
        ended = [entry for entry in self._live.values() if entry.has_ended(now)]
        self._account(missing, [entry for entry in ended if entry.missed_starts()], now)
        for entry in list(self._live.values()):
            if entry.has_ended(now):
                self._end(entry)

    def _account(self, missing: list[Entry], restarted: list[Entry], now: float) -> None:
        """What squeue does not tell: the end of jobs that it has forgotten, all starts of those that had several."""
        asked = [*missing, *restarted]
        if not asked or (time.monotonic() < self._next_accounting and not restarted):
            return
        self._next_accounting = time.monotonic() + self._patience.accounting
        starts: dict[str, list[SlurmJob]] = {}
        # Without accounting there is no answer, and what squeue told has to do.
        with contextlib.suppress(SlurmRefused, LauncherError):
            since = min(entry.submitted_utc for entry in asked)
            for begin in range(0, len(asked), MAX_IDS_A_CALL):
                some = asked[begin : begin + MAX_IDS_A_CALL]
                ids = ",".join(entry.id for entry in some)
                for job in self._accounted(since, [f"--jobs={ids}"]):
                    starts.setdefault(job.id, []).append(job)
        for entry in asked:
            own = [job for job in starts.get(entry.id, []) if job.name == entry.batch_name]
            if own:
                entry.see_starts(own, now)
            elif entry in missing:
                self._ask_for_one(entry, now)

    def _ask_for_one(self, entry: Entry, now: float) -> None:
        try:
            jobs = read_scontrol(self._run(["scontrol", "show", "job", "--oneliner", entry.id]))
        except SlurmRefused:
            jobs = []
        own = [job for job in jobs if job.id == entry.id and job.name == entry.batch_name]
        if own:
            entry.see(own[0], now)
        else:
            entry.miss(now, self._patience.lost)

    def _end(self, entry: Entry) -> None:
        status = entry.status()
        self._ended[entry.name] = status
        del self._live[entry.name]
        append_ended(self._folder, status)

    def _release(self, entry: Entry) -> None:
        """Slurm holds a job whose launch failed until somebody releases it."""
        entry.num_releases += 1
        nodes = entry.last_nodes()
        if entry.num_releases > self._patience.releases:
            if not nodes or entry.num_releases > self._patience.releases + 1:
                self.cancel(entry.name)
                entry.gave_up = "launch failed requeued held"
                return
            self.exclude(nodes)
            bad = ",".join(self._excluded_for(self._submissions[entry.batch_name].batch))
            self._try(["scontrol", "update", f"JobId={entry.id}", f"ExcNodeList={bad}"])
        self._try(["scontrol", "release", entry.id])

    def _cancel_twins(self, everything: Iterable[SlurmJob]) -> None:
        """A batch that was submitted again because Slurm did not answer, though it had heard: the later one goes."""
        for job in everything:
            if job.kind == "ended" or job.comment != str(self._folder):
                continue
            submission = self._submissions.get(job.name)
            number = int(job.id.partition("_")[0])
            is_later = submission is not None and submission.number is not None and number > submission.number
            if is_later or (submission is None and job.name in self._dropped):
                self._try(["scancel", str(number)])

    # Ending, taking over

    def cancel(self, name: str) -> None:
        if name not in self._entries:
            self._settle_unconfirmed()
        entry = self._live.get(name)
        if entry is None:
            return
        try:
            self._run(["scancel", entry.id])
        except SlurmRefused as refused:
            if not refused.is_of_unknown_job():
                raise LauncherError(f"job {name}: cannot be cancelled ({refused})") from None
        self._next_query = 0.0

    def adopt(self, prefix: str) -> dict[str, JobStatus]:
        ended = read_ended(self._folder)
        for submission in read_submissions(self._folder):
            if submission.batch.name in self._submissions:
                continue
            if any(job.name.startswith(prefix) for job in submission.batch.jobs):
                self._submissions[submission.batch.name] = submission
                if submission.number is not None:
                    self._confirm(submission, submission.number)
        self._settle_unconfirmed()
        for name in [name for name in self._live if name in ended]:
            self._ended[name] = ended[name]
            del self._live[name]
        self._next_query = self._next_accounting = 0.0
        return {name: status for name, status in self.poll().items() if name.startswith(prefix)}

    def exclude(self, nodes: Sequence[str]) -> None:
        new = set(nodes) - self._excluded
        self._excluded |= new
        if not new:
            return
        waiting = {entry.batch_name for entry in self._live.values() if entry.status().state == "pending"}
        for name in sorted(waiting):
            submission = self._submissions[name]
            bad = ",".join(self._excluded_for(submission.batch))
            self._try(["scontrol", "update", f"JobId={submission.number}", f"ExcNodeList={bad}"])

    def close(self) -> None:
        """Jobs are Slurm's; nothing is held here."""

    # Slurm's programs

    def _run(self, argv: Sequence[str]) -> str:
        return run_slurm(argv, self._environ, self._patience.command)

    def _try(self, argv: Sequence[str]) -> None:
        """Something that can be done at the next look as well."""
        with contextlib.suppress(SlurmRefused, LauncherError):
            self._run(argv)

    def _everything(self) -> list[SlurmJob]:
        """All jobs that slurmctld holds; those that ended stay for some minutes."""
        try:
            return read_squeue(self._run(["squeue", "--json", "--states=all"]))
        except (SlurmRefused, ValueError):
            # Built without JSON, or of a version that writes it in another way.
            try:
                return read_scontrol(self._run(["scontrol", "show", "job", "--oneliner"]))
            except SlurmRefused as refused:
                raise LauncherError(str(refused)) from None

    def _accounted(self, since: float, options: Sequence[str]) -> list[SlurmJob]:
        """sacct looks no further back than midnight unless it is told to."""
        begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 3600))
        return read_sacct(self._run([*SACCT, f"--starttime={begin}", *options]))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
