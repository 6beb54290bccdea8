"""A night of many stand-in jobs driven by `python -m sweeps nightly`, on 64 emulated 8-GPU nodes of a real Slurm.

    python tests/sweeps/measure_controller_night.py [--jobs 1000] [--nodes 64] [--night whole|troubled] [--fifo]
    python tests/sweeps/measure_controller_night.py --night kept --keep FOLDER --fifo

The jobs are of 1, 2 and 4 nodes (six, three and one of ten) and 5 to 60 seconds, and only sleep (sized_stand_in.py). A
troubled night: one node of twenty fails, one job of ten is preempted by another partition's, and the controller is
killed ten times. `--fifo`: afterwards the same jobs in the order in which they were planned, one by one, by a scheduler
that starts them strictly in turn; also of a night that an earlier call kept. One line of JSON each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sweeps.job import Job  # noqa: E402
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience  # noqa: E402
from sweeps.night.events import Submitted  # noqa: E402
from sweeps.night.journal import JournalReader, read_journal  # noqa: E402
from sweeps.night.night import NightFolder, find_nights  # noqa: E402
from sweeps.night.planned_jobs import launcher_job  # noqa: E402
from sweeps.night.state import NightState, fold  # noqa: E402
from sweeps.planning.plan import load_plan  # noqa: E402
from tests.slurm_cluster import slurm_cluster  # noqa: E402
from tests.sweeps.controller_night import (  # noqa: E402
    GPUS_PER_NODE,
    Controllers,
    Figures,
    Setting,
    bound_seconds,
    write_plan,
)
from tests.sweeps.measure_slurm_night import is_finished, run_night  # noqa: E402
from tests.sweeps.night_trouble import Mischief, Trouble, TroubleFigures, problems_of, trouble_figures  # noqa: E402

MOST_SECONDS = 5400


def run_controllers(folder: Path, setting: Setting, trouble: Trouble | None) -> tuple[NightFolder, Figures, Mischief]:
    """The night in this Slurm from its plan to its report."""
    plan, root = folder / "night.toml", folder / "nights"
    write_plan(plan, setting, "nightly" if trouble is None else "scavenge")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SIZED_STAND_IN_SCALE": str(setting.scale)}
    controllers = Controllers(plan, root, environment, setting.profile)
    mischief = Mischief(trouble or Trouble(0, 0, 0), setting, controllers)
    load, began = os.getloadavg()[0], time.time()
    controllers.begin()
    try:
        while not controllers.has_ended() and not find_nights(root):
            time.sleep(0.05)
        night = find_nights(root)[0].folder
        _look_on(night, controllers, mischief, began)
    finally:
        controllers.end()
    whole = time.time() - began
    events = read_journal(night.journal)
    state = fold(events)
    if state.closed is None:
        raise RuntimeError(controllers.log_file.read_text())
    submitted = max(event.utc for event in events if isinstance(event, Submitted) and event.attempt == 1)
    records = state.records
    makespan = max(record.ended_utc or 0.0 for record in records) - began
    bound, number = bound_seconds(state, setting), len(records)
    own = state.closed.controller_cpu_seconds
    figures = Figures(
        num_jobs=number,
        num_nodes=setting.num_nodes,
        statuses=dict(Counter(record.status for record in records)),
        submit_seconds=round(submitted - began, 2),
        makespan_seconds=round(makespan, 1),
        bound_seconds=round(bound, 1),
        efficiency=round(bound / makespan, 4),
        whole_seconds=round(whole, 1),
        controller_cpu_milliseconds_per_job=None if controllers.num_kills else round(1000 * own / number, 2),
        command_cpu_milliseconds_per_job=round(1000 * controllers.cpu_seconds / number, 2),
        load=round(load, 1),
    )
    return night, figures, mischief


def _look_on(night: NightFolder, controllers: Controllers, mischief: Mischief, began: float) -> None:
    reader, state, num_events = JournalReader(night.journal), NightState(), 0
    while not controllers.has_ended():
        for event in reader.read():
            state.apply(event)
            num_events += 1
        mischief.look(state, num_events)
        if time.time() - began > MOST_SECONDS:
            raise RuntimeError(f"the night has not ended after {MOST_SECONDS} s: {controllers.log_file.read_text()}")
        time.sleep(0.2)


def measure_fifo(folder: Path, night: NightFolder, setting: Setting) -> dict[str, object]:
    """The jobs of a night in the order in which it planned them, without a controller."""
    plan, state = load_plan(night.plan), fold(read_journal(night.journal))
    jobs = [
        _alone(folder, launcher_job(j.planned, j.name, plan.model(j.planned.model), "", ()))
        for j in state.jobs.values()
    ]
    with _cluster(folder, setting, scheduler="builtin"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIZED_STAND_IN_SCALE", str(setting.scale))
        launcher = SlurmLauncher(plan.slurm, folder / "launcher", SlurmPatience())
        submitted, makespan, _ = run_night(launcher, jobs, one_by_one=True)
    bound = bound_seconds(state, setting)
    return {
        "order": "fifo",
        "num_finished": sum(is_finished(job) for job in jobs),
        "submit_seconds": round(submitted, 2),
        "makespan_seconds": round(makespan, 1),
        "bound_seconds": round(bound, 1),
        "efficiency": round(bound / makespan, 4),
    }


def _alone(folder: Path, job: Job) -> Job:
    """With a run folder of its own, and as the night starts it: one process for all ranks."""
    run_folder = folder / "jobs" / job.name
    argv = [str(run_folder) if job.argv[place - 1] == "--out" else word for place, word in enumerate(job.argv)]
    return replace(job, argv=tuple(argv), run_folder=run_folder, starts_ranks=False)


@contextlib.contextmanager
def _cluster(folder: Path, setting: Setting, **options: Any) -> Iterator[None]:
    """Slurm, as this process and its children find its programs."""
    with (
        slurm_cluster(folder / "slurm", setting.num_nodes, setting.port, GPUS_PER_NODE, **options) as environment,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, environment[name])
        yield


def measure_whole(folder: Path, setting: Setting) -> tuple[NightFolder, Figures]:
    with _cluster(folder, setting):
        night, figures, _ = run_controllers(folder, setting, None)
    return night, figures


def measure_troubled(folder: Path, setting: Setting, trouble: Trouble) -> tuple[NightFolder, Figures, TroubleFigures]:
    with _cluster(folder, setting, accounting=True, return_to_service=0):
        night, figures, mischief = run_controllers(folder, setting, trouble)
        return night, figures, trouble_figures(night, mischief)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--night", choices=("whole", "troubled", "kept"), default="whole")
    parser.add_argument("--fifo", action="store_true", help="afterwards the same jobs in plain FIFO")
    parser.add_argument("--scale", type=float, default=1.0, help="of the jobs' lengths")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--port", type=int, help="the first that Slurm takes; by default free ones")
    parser.add_argument("--profile", type=Path, help="file for cProfile's figures of the controller")
    parser.add_argument("--keep", type=Path, help="folder for the night; by default one that is removed afterwards")
    options = parser.parse_args(arguments)
    if options.night == "kept" and options.keep is None:
        parser.error("--night kept: give --keep, the folder of an earlier call")
    setting = Setting(options.jobs, options.nodes, options.scale, options.port, options.profile)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="controller-night-")))
        folder = folder.absolute()
        if options.night == "troubled":
            # One of twenty and one of ten, rounded up.
            trouble = Trouble(options.kills, -(-options.nodes // 20), -(-options.jobs // 10))
            night, figures, more = measure_troubled(folder / "night", setting, trouble)
            problems = problems_of(figures, more, setting, trouble)
            print(json.dumps({**asdict(figures), **asdict(more), "problems": problems}), flush=True)
            if problems:
                return 1
        elif options.night == "kept":
            night = find_nights(folder / "night" / "nights")[-1].folder
        else:
            night, figures = measure_whole(folder / "night", setting)
            print(json.dumps(asdict(figures)), flush=True)
        if options.fifo:
            print(json.dumps(measure_fifo(folder / "fifo", night, setting)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
