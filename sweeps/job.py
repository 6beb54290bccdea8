"""A job as launchers take it, and how it stands: argv and plain values, never pickles. No torch, no Optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["pending", "running", "ended", "lost"]
"""As the launcher sees it; "ended" says nothing of success, which `result.json` alone tells. lost: the launcher
knows nothing of it any more."""

START_MARK = "--- started "
"""Begins the line that a launcher writes to job.log before each start of a job."""
TIME_LIMIT_MARK = "--- stopped at its time limit"
"""Begins the line that a launcher writes there after it stopped a job because its time was up."""


@dataclass(frozen=True)
class Job:
    """One attempt of one training run, on `num_nodes` nodes of `ranks_per_node` ranks each."""

    name: str
    """Unique in its night, of letters, digits, dots and dashes, e.g. lane-small-0017.2 (the second attempt): the
    launcher's tag, by which a restarted controller finds it again."""
    argv: tuple[str, ...]
    """What is run, without how its ranks are started: that is the launcher's business."""
    run_folder: Path
    """Absolute; its output goes to job.log there; the job's result is its result.json."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    starts_ranks: bool = True
    """argv takes `--ranks N` (the local launcher adds it) or finds its ranks in Slurm's environment (srun starts one
    a slot). False: one process for the whole job."""
    time_limit_seconds: float = 86_400.0
    priority: int = 0
    """Higher is started first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own; no secrets: they would show in scripts."""
    image: str = ""
    """Container image reference; empty: run on the host."""
    excluded_nodes: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class JobStatus:
    """What a launcher knows of a job it was given."""

    name: str
    id: str
    """The launcher's own: a process id with its start time, or Slurm's job id."""
    state: State
    reason: str = ""
    """The launcher's words where it has any: PREEMPTED, NODE_FAIL, TIMEOUT, OUT_OF_MEMORY, exit code 2 …"""
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    started_utc: float | None = None
    """Seconds since the epoch, of the latest start; None before it."""
    ended_utc: float | None = None
    allocated_seconds: float = 0.0
    """Wall time for which this job has held its nodes so far, over all its starts (a requeued job has several)."""
    num_starts: int = 0
