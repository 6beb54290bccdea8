"""Many stand-in jobs of mixed sizes through `python -m sweeps nightly`: the plan, and the command's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sweeps.night.state import NightState
from tests.sweeps.sized_stand_in import length_seconds

ROOT = Path(__file__).resolve().parents[2]
GPUS_PER_NODE = 8
SHAPES = (("sign-full", 4, 0.1), ("lane", 2, 0.3), ("lane-small", 1, 0.436), ("sign", 1, 0.164))
"""Model, nodes, share of the jobs. Of the jobs on one node those of sign take 5 to 20 s, the others 20 to 60."""
SAMPLES = {"sign-full": 130_000, "lane": 65_000, "lane-small": 40_000, "sign": 12_500}
"""A thousand a second on each node: what the plan lets the controller expect of a model's jobs."""
PLAN = """
name = "night"
launcher = "slurm"
[budget]
max_jobs = {num_jobs}
early_end = false
[slurm]
partition = "{partition}"
gpus_per_node = 8
grace_seconds = 10
[retention]
min_free_gib = 0.0
"""
MODEL = """
[[models]]
model = "{model}"
objectives = ["{metric}"]
num_samples = {num_samples}
num_nodes = {num_nodes}
ranks_per_node = 8
share = {share}
max_trials = {num_trials}
default_repeats = 1
champion_repeats = 0
sampler = "random"
time_limit_minutes = 2
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
[models.space."optim.weight_decay"]
low = 1e-6
high = 1e-2
log = true
[models.space."optim.warmup_samples"]
low = 0
high = 2000
[models.space."train.batch_size_per_rank"]
choices = [4, 8]
[models.space."augment.enabled"]
choices = [true, false]
"""


@dataclass(frozen=True)
class Setting:
    num_jobs: int = 1000
    num_nodes: int = 64
    scale: float = 1.0
    """Of the lengths of the jobs."""
    port: int | None = None
    """The first of one more than there are nodes; None: free ones."""
    profile: Path | None = None
    """Where cProfile writes what it saw of the controller; killed ones leave none."""


@dataclass(frozen=True)
class Figures:
    """Of a night through the controller; times count from the start of its process."""

    num_jobs: int
    num_nodes: int
    statuses: dict[str, int]
    submit_seconds: float
    """Until the last of them was planned and given to Slurm."""
    makespan_seconds: float
    """Until the last end."""
    bound_seconds: float
    """max(sum of nodes times seconds / nodes, longest job): no order can be faster."""
    efficiency: float
    whole_seconds: float
    """Until the report was written and the command had ended."""
    controller_cpu_milliseconds_per_job: float | None
    """Of the controller alone, as it accounts for it; None where some were killed."""
    command_cpu_milliseconds_per_job: float
    """Of all its processes: start, controller, Slurm's programs, report."""
    load: float
    """Mean over a minute, when the night began."""


@dataclass
class Controllers:
    """The night's command, started again whenever it was killed."""

    plan: Path
    root: Path
    environment: Mapping[str, str]
    profile: Path | None = None
    cpu_seconds: float = 0.0
    num_kills: int = 0
    code: int | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def log_file(self) -> Path:
        return self.root.parent / "controllers.log"

    def begin(self) -> None:
        profiled = ["-m", "cProfile", "-o", str(self.profile)] if self.profile else []
        script = str(Path(__file__).with_name("sized_stand_in_night.py"))
        words = [sys.executable, *profiled, script, "nightly", str(self.plan), "--root", str(self.root)]
        words += ["--resume"] if self.num_kills else []
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(words, env=self.environment, cwd=ROOT, stdout=log, stderr=log)

    def has_ended(self) -> bool:
        self._wait(os.WNOHANG)
        return self.code is not None

    def kill(self) -> None:
        """And start the next one."""
        if self.has_ended():
            return
        assert self.process is not None
        self.process.kill()
        self._wait(0)
        self.num_kills += 1
        self.code = None
        self.begin()

    def end(self) -> None:
        """For good, where a measurement has failed."""
        if not self.has_ended() and self.process is not None:
            self.process.kill()
            self._wait(0)

    def _wait(self, options: int) -> None:
        if self.code is not None or self.process is None:
            return
        pid, status, used = os.wait4(self.process.pid, options)
        if pid:
            self.process.returncode = self.code = os.waitstatus_to_exitcode(status)
            self.cpu_seconds += used.ru_utime + used.ru_stime


def write_plan(path: Path, setting: Setting, partition: str) -> None:
    text = PLAN.format(num_jobs=setting.num_jobs, partition=partition)
    left = setting.num_jobs
    for place, (model, num_nodes, share) in enumerate(SHAPES):
        number = left if place == len(SHAPES) - 1 else round(share * setting.num_jobs)
        left -= number
        text += MODEL.format(
            model=model,
            metric="ap50" if model.startswith("sign") else "culane_f1_50",
            num_samples=SAMPLES[model],
            num_nodes=num_nodes,
            # So that all kinds are drawn side by side.
            share=share * num_nodes,
            num_trials=number - 1,
        )
    path.write_text(text)


def bound_seconds(state: NightState, setting: Setting) -> float:
    work = [
        (job.planned.num_nodes, length_seconds(list(job.planned.argv), setting.scale)) for job in state.jobs.values()
    ]
    return max(sum(nodes * seconds for nodes, seconds in work) / setting.num_nodes, max(seconds for _, seconds in work))
