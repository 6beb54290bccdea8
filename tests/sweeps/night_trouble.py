"""What befalls a night of many jobs, and what of it may be seen afterwards: nodes fail, jobs are preempted, controllers
are killed, and no configuration, result or GPU-hour is lost or counted twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sweeps.launchers.slurm_state import expand_hosts
from sweeps.night.journal import read_journal
from sweeps.night.night import NightFolder
from sweeps.night.planned_jobs import run_folder_of
from sweeps.night.state import NightState, fold
from sweeps.planning.plan import Plan, load_plan, study_name
from sweeps.search.search import open_search
from sweeps.search.storage import Storage
from tests.sweeps.controller_night import GPUS_PER_NODE, SHAPES, Controllers, Figures, Setting, bound_seconds
from tests.sweeps.sized_stand_in import length_seconds
from tests.sweeps.stand_in import NUM_EVALUATIONS, NUM_STEPS

STEPS_A_CHECKPOINT = NUM_STEPS // NUM_EVALUATIONS


@dataclass(frozen=True)
class Trouble:
    num_kills: int = 10
    num_failing_nodes: int = 4
    num_preemptions: int = 100
    seed: int = 7


@dataclass(frozen=True)
class TroubleFigures:
    num_kills: int
    num_failed_nodes: int
    num_cut_off: int
    """Jobs whose processes were killed with a node, without a word to them."""
    num_preemptions: int
    """Jobs that had to make way."""
    num_jobs_started_again: int
    slurm_states: dict[str, int]
    """Of all starts, by Slurm's accounting."""
    num_configurations: int
    """That the searches asked for, with all their values."""
    num_told: int
    """Of them, those whose search knows a result."""
    num_results_twice: int
    """Jobs that came to their end more than once, and configurations with more than one record."""
    num_starts_again: int
    most_steps_lost: int
    """By one start; a job has 20 and writes a checkpoint each 5."""
    num_submitted: int
    """Numbers of Slurm's."""
    num_attempts: int
    reported_gpu_hours: float
    slurm_gpu_hours: float


class Mischief:
    """What befalls a night, at moments spread over it; the controller is killed while it plans and submits, too."""

    def __init__(self, trouble: Trouble, setting: Setting, controllers: Controllers) -> None:
        self._chance = random.Random(trouble.seed)
        self._trouble, self._setting, self._controllers = trouble, setting, controllers
        early = min(4, trouble.num_kills // 2)
        # In lines of the journal: planned one by one, then announced together, then submitted together.
        places = (0.1, 0.6, 1.2, 2.1)
        self._kill_lines = [int(place * setting.num_jobs) for place in places[:early]]
        self._due: list[tuple[float, Callable[[], bool]]] = []
        self._lengths: dict[str, float] = {}
        self._folders: dict[str, Path] = {}
        self._preempted: set[str] = set()
        nodes = self._chance.sample(range(setting.num_nodes), trouble.num_failing_nodes)
        self._failing = [f"node{number}" for number in nodes]
        self.num_failed_nodes = 0
        self.num_cut_off = 0
        """Jobs whose processes died with a node."""

    @property
    def num_kills(self) -> int:
        return self._controllers.num_kills

    @property
    def num_preemptions(self) -> int:
        return len(self._preempted)

    def look(self, state: NightState, num_events: int) -> None:
        if self._kill_lines and num_events >= self._kill_lines[0]:
            self._kill_lines.pop(0)
            self._controllers.kill()
        if not self._lengths and self._is_all_submitted(state):
            self._plan(state)
        now = time.time()
        later = []
        for when, do in self._due:
            if when > now or not do():
                later.append((when, do))
        self._due = later

    def _is_all_submitted(self, state: NightState) -> bool:
        jobs = state.jobs.values()
        return len(jobs) == self._setting.num_jobs and all(job.attempts and job.attempts[0].id for job in jobs)

    def _plan(self, state: NightState) -> None:
        """What comes is spread over the time that the jobs will take."""
        for job in state.jobs.values():
            length = length_seconds(list(job.planned.argv), self._setting.scale)
            self._lengths[job.attempts[0].id or ""] = length
            self._folders[job.attempts[0].id or ""] = run_folder_of(job.planned)
        bound = bound_seconds(state, self._setting)
        begin, seconds = time.time() + 2, 0.8 * bound

        def spread(number: int) -> list[float]:
            return [begin + seconds * (place + self._chance.random()) / number for place in range(number)]

        trouble = self._trouble
        num_kills = trouble.num_kills - self._controllers.num_kills - len(self._kill_lines)
        self._due += [(when, self._kill) for when in spread(num_kills)]
        self._due += [(when, self._preempt_one) for when in spread(trouble.num_preemptions)]
        for when, node in zip(spread(len(self._failing)), self._failing, strict=True):
            self._due.append((when, lambda node=node: self._fail(node)))  # type: ignore[misc]

    def _kill(self) -> bool:
        self._controllers.kill()
        return True

    def _fail(self, node: str) -> bool:
        """As when its power goes: nothing that runs there is told, and Slurm finds the node down."""
        for id in _slurm("squeue", "--noheader", "--states=RUNNING", f"--nodelist={node}", "--format=%i").split():
            if id in self._folders:
                self.num_cut_off += _kill_with_parents(self._folders[id])
        _slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        self.num_failed_nodes += 1
        return True

    def _preempt_one(self) -> bool:
        """A job of a partition that goes before the night's takes one of its nodes; False: none can be chosen now."""
        listed = _slurm("squeue", "--noheader", "--states=RUNNING", "--partition=scavenge", "--format=%i|%N|%M")
        able = []
        for line in listed.split():
            id, nodes, used = line.split("|")
            used_seconds = _seconds(used)
            left = self._lengths.get(id, 0.0) - used_seconds
            node = expand_hosts(nodes)[0]
            # Whoever wants a node that fails before he has it waits for ever.
            if id not in self._preempted and used_seconds >= 2 and left >= 5 and node not in self._failing:
                able.append((id, node))
        if not able:
            return False
        id, node = self._chance.choice(able)
        _slurm(
            "sbatch", "--partition=nightly", f"--nodelist={node}", f"--gpus-per-node={GPUS_PER_NODE}", "--time=1",
            "--job-name=preemptor", "--output=/dev/null", "--wrap=sleep 1",
        )  # fmt: skip
        self._preempted.add(id)
        return True


def trouble_figures(night: NightFolder, mischief: Mischief) -> TroubleFigures:
    """Read from what the night left behind, and from Slurm's accounting, while Slurm still runs."""
    state = fold(read_journal(night.journal))
    records = state.records
    again, most_lost, twice = 0, 0, 0
    for job in state.jobs.values():
        steps = _steps_of(run_folder_of(job.planned))
        twice += steps.count(NUM_STEPS) > 1
        # A start goes on after the step of its checkpoint: what it computes again was lost.
        lost = [before - after + 1 for before, after in itertools.pairwise(steps) if after <= before]
        again += len((run_folder_of(job.planned) / "starts.txt").read_text().splitlines()) - 1
        most_lost = max(most_lost, *lost) if lost else most_lost
    keys = Counter((record.config_hash, record.seed) for record in records)
    twice += sum(number > 1 for number in keys.values())
    asked, told = _searched(night, load_plan(night.plan))
    # Accounting is written some seconds later.
    time.sleep(6)
    listed = _slurm(
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", "--allusers",
        "--format=JobID,State,ElapsedRaw,AllocNodes,JobName", "--starttime=now-12hours",
    )  # fmt: skip
    rows = [line.split("|") for line in listed.splitlines()]
    own = [row for row in rows if row[4].startswith(f"{night.name}.")]
    report = json.loads((night.path / "report.json").read_text())
    return TroubleFigures(
        num_kills=mischief.num_kills,
        num_failed_nodes=mischief.num_failed_nodes,
        num_cut_off=mischief.num_cut_off,
        num_preemptions=mischief.num_preemptions,
        num_jobs_started_again=sum(record.num_starts > 1 for record in records),
        slurm_states=dict(Counter(row[1].split()[0] for row in own)),
        num_configurations=asked,
        num_told=told,
        num_results_twice=twice,
        num_starts_again=again,
        most_steps_lost=most_lost,
        num_submitted=len({row[0] for row in own}),
        num_attempts=sum(len(job.attempts) for job in state.jobs.values()),
        reported_gpu_hours=round(report["accounts"]["allocated"] / 3600, 4),
        slurm_gpu_hours=round(sum(int(row[2]) * int(row[3]) for row in own) * GPUS_PER_NODE / 3600, 4),
    )


def problems_of(figures: Figures, trouble: TroubleFigures, setting: Setting, wanted: Trouble) -> list[str]:
    """What a troubled night must not have done, in words; none where all is well."""
    num_trials = setting.num_jobs - len(SHAPES)
    came = Trouble(trouble.num_kills, trouble.num_failed_nodes, trouble.num_preemptions, wanted.seed)
    wrong = {
        "not the trouble that was wanted": came != wanted or trouble.num_starts_again < wanted.num_preemptions,
        "jobs without a finished result": figures.statuses != {"finished": setting.num_jobs},
        "configurations lost": trouble.num_configurations != num_trials or trouble.num_told != num_trials,
        "results twice": trouble.num_results_twice > 0,
        "more than a checkpoint interval lost": trouble.most_steps_lost > STEPS_A_CHECKPOINT,
        "submitted twice": trouble.num_submitted != trouble.num_attempts,
        "GPU-hours that are not Slurm's": abs(trouble.reported_gpu_hours / trouble.slurm_gpu_hours - 1) > 0.01,
    }
    return [problem for problem, is_so in wrong.items() if is_so]


def _searched(night: NightFolder, plan: Plan) -> tuple[int, int]:
    """Configurations that the searches asked for, and those of which they were told a result."""
    asked = told = 0
    for model in plan.models:
        search = open_search(
            model.space, model.directions, Storage(journal=night.search), study_name(model), "random", owner=night.name
        )
        # A trial that a kill left without its values was never a configuration.
        whole = [row for row in search.trials() if set(row.parameters) == set(model.space.names)]
        asked += len(whole)
        told += sum(row.state == "complete" for row in whole)
    return asked, told


def _kill_with_parents(run_folder: Path) -> bool:
    """The stand-in of a job, the job's script and what Slurm watches it with; False where it has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        pid = int((run_folder / "starts.txt").read_text().splitlines()[-1].split()[0])
        script = _parent(pid)
        watcher = _parent(script)
        if str(run_folder) in _command(pid) and "slurmstepd" in _command(watcher):
            for process in (watcher, script, pid):
                os.kill(process, signal.SIGKILL)
            return True
    return False


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def _steps_of(run_folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def _seconds(used: str) -> float:
    """Of Slurm's minutes:seconds, with hours before them where there are any."""
    total = 0
    for part in used.split(":"):
        total = 60 * total + int(part)
    return float(total)


def _slurm(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
