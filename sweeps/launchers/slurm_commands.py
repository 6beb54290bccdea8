"""Slurm's own programs, run one at a time, and what their refusals mean: wait and ask again, or a user's mistake."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from perception.errors import UserError
from sweeps.launchers.launcher import LauncherError

_AWAY = (
    "unable to contact slurm controller",
    "connection refused",
    "connection timed out",
    "socket timed out",
    "zero bytes were transmitted",
    "communication connection failure",
    "unable to establish",
    "in standby mode",
    "temporarily un",
    "transport endpoint",
    "authentication error",
    "munge",
    # Not a mistake in the job: there is room again once others have ended.
    "submitjob",
    "submit limit",
    "try again later",
)
UNKNOWN_JOB = ("invalid job id", "already completing or completed", "job is no longer pending")

_FOREIGN = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "PMI_", "PMIX_")


class SlurmRefused(Exception):
    """The program ended with an error of its own; Slurm is there."""

    def __init__(self, program: str, words: str) -> None:
        super().__init__(f"{program}: {words}")
        self.words = words

    def is_of_unknown_job(self) -> bool:
        return any(sign in self.words.lower() for sign in UNKNOWN_JOB)


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without an outer job's identity and options, which sbatch would take for this job's; with times as numbers.

    SLURM_JWT goes too: sacct does not work with it.
    """
    kept = {name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith(_FOREIGN)}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


def run_slurm(argv: Sequence[str], environ: Mapping[str, str], timeout_seconds: float) -> str:
    """Standard output. LauncherError where Slurm is away; SlurmRefused for any other failure."""
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f'launcher = "slurm": {argv[0]} is not installed here; run on a login node, or set launcher = "local"'
        ) from None
    except subprocess.TimeoutExpired:
        raise LauncherError(f"{argv[0]}: no answer within {timeout_seconds:.0f} s") from None
    except OSError as error:
        raise LauncherError(f"{argv[0]}: cannot be started now ({error.strerror})") from error
    if done.returncode == 0:
        return done.stdout
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    words = "; ".join(lines[-3:]) or f"exit code {done.returncode}"
    if any(sign in words.lower() for sign in _AWAY):
        raise LauncherError(f"{argv[0]}: {words}")
    raise SlurmRefused(argv[0], words)
