"""What starts jobs: one contract for the slots of this host and for Slurm, and a twin that starts none.

Tests of the contract: tests/sweeps/test_job_launchers.py, over every implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from perception.errors import UserError
from sweeps.job import Job, JobStatus


class LauncherError(Exception):
    """The scheduler does not answer. Nothing is known to be lost: wait, and ask for the same again.

    A submission that is repeated after it starts nothing twice, whether or not the first one arrived.
    """


def inherited_environment(environ: Mapping[str, str], secret_variables: Collection[str]) -> dict[str, str]:
    """What jobs see of a controller's environment: all but the variables that hold secrets."""
    return {name: value for name, value in environ.items() if name not in secret_variables}


class Launcher(Protocol):
    """Starts jobs and says how they stand; whether they succeeded is in their result.json alone.

    Jobs belong to no controller: they go on when it dies, and `adopt` gives them to the next one. A name stands for
    one job for ever: submitting it again returns its id and starts nothing.
    """

    name: str
    """As a plan names it: local, slurm."""

    def num_slots(self) -> int:
        """Ranks that can run at once on nodes that are up."""

    def num_nodes(self) -> int:
        """Nodes that are up."""

    def hardware(self) -> str:
        """Of one node, e.g. "8 x NVIDIA H100"."""

    def submit(self, job: Job) -> str:
        """Queue the job and return the launcher's id. UserError: it could never run here."""

    def submit_many(self, jobs: Sequence[Job]) -> list[str]:
        """`submit` for each, as fast as the scheduler takes them; ids in the order of `jobs`.

        Among equals of priority the widest and longest are started first. After an exception some may have been
        submitted: repeat the call with the same jobs.
        """

    def poll(self) -> dict[str, JobStatus]:
        """All jobs that were submitted or adopted, by name. Call it every few seconds: it also starts what waits."""

    def cancel(self, name: str) -> None:
        """Ask the job to stop (SIGTERM: it writes a checkpoint), and end it by force after a grace.

        Returns at once; `poll` tells when it has ended. Nothing happens to one that has ended.
        """

    def adopt(self, prefix: str) -> dict[str, JobStatus]:
        """Take over what an earlier controller submitted, of names that begin with `prefix`: pending, running, ended.

        What is not in the answer was never submitted.
        """

    def exclude(self, nodes: Sequence[str]) -> None:
        """Start nothing on these nodes from now on; what runs there goes on."""

    def close(self) -> None:
        """Let go; jobs run on."""


class NoLauncher:
    """Has no slots and takes no jobs."""

    name = "none"

    def num_slots(self) -> int:
        return 0

    def num_nodes(self) -> int:
        return 0

    def hardware(self) -> str:
        return ""

    def submit(self, job: Job) -> str:
        raise UserError(f'job {job.name}: launcher "none" has no slots; set launcher = "local" or "slurm" in the plan')

    def submit_many(self, jobs: Sequence[Job]) -> list[str]:
        return [self.submit(job) for job in jobs]

    def poll(self) -> dict[str, JobStatus]:
        return {}

    def cancel(self, name: str) -> None:
        pass

    def adopt(self, prefix: str) -> dict[str, JobStatus]:
        return {}

    def exclude(self, nodes: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass
