"""A night of many stand-in jobs on 64 emulated 8-GPU nodes: how fast it is submitted, and how well it fills them.

    python tests/sweeps/measure_slurm_night.py [--jobs 1000] [--nodes 64] [--order ours|fifo|both] [--seed 0]

The jobs are of 1, 2 and 4 nodes and 5 to 60 seconds, and only sleep (slurm_stand_in.sh). `fifo`: the same jobs in the
order in which they are drawn, by a scheduler that starts them strictly in turn. One line of JSON an order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sweeps.job import Job, JobStatus  # noqa: E402
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience  # noqa: E402
from sweeps.planning.plan import SlurmSettings  # noqa: E402
from tests.slurm_cluster import slurm_cluster  # noqa: E402

STAND_IN = Path(__file__).with_name("slurm_stand_in.sh")


@dataclass(frozen=True)
class Figures:
    order: str
    num_jobs: int
    num_nodes: int
    submit_seconds: float
    makespan_seconds: float
    """From the first submission to the last end."""
    bound_seconds: float
    """max(sum of nodes times seconds / nodes, longest job): no order can be faster."""
    efficiency: float
    launcher_cpu_milliseconds_per_job: float
    """Of this process and of the programs of Slurm that it ran."""
    num_finished: int
    """By their result.json."""


def draw_jobs(
    folder: Path, count: int, seed: int, seconds: tuple[int, int] = (5, 60), checkpoint_every: int | None = None
) -> list[tuple[Job, int]]:
    """Jobs with the seconds that each takes; in six of ten cases one node, in three two, in one four."""
    chance = random.Random(seed)
    jobs = []
    for number in range(count):
        takes, num_nodes = chance.randint(*seconds), chance.choices((1, 2, 4), (6, 3, 1))[0]
        name = f"night.stand-in-{number:04}.1"
        run_folder = folder / "jobs" / name
        argv = ["bash", str(STAND_IN), str(run_folder), str(takes)]
        argv += [str(checkpoint_every)] if checkpoint_every else []
        job = Job(
            name,
            tuple(argv),
            run_folder,
            num_nodes=num_nodes,
            ranks_per_node=8,
            starts_ranks=False,
            # What a job is expected to take tells the launcher which are the longest.
            time_limit_seconds=float(takes) + 60,
        )
        jobs.append((job, takes))
    return jobs


def lower_bound(jobs: Sequence[tuple[Job, int]], num_nodes: int) -> float:
    work = sum(job.num_nodes * takes for job, takes in jobs)
    return max(work / num_nodes, max(takes for _, takes in jobs))


def run_night(
    launcher: SlurmLauncher, jobs: Sequence[Job], one_by_one: bool
) -> tuple[float, float, dict[str, JobStatus]]:
    """Seconds for submission and until the last end, and how the jobs ended."""
    began = time.time()
    if one_by_one:
        for job in jobs:
            launcher.submit(job)
    else:
        launcher.submit_many(jobs)
    submitted = time.time() - began
    while True:
        statuses = launcher.poll()
        if all(status.state in ("ended", "lost") for status in statuses.values()):
            break
        time.sleep(0.5)
    last = max(status.ended_utc or 0.0 for status in statuses.values())
    return submitted, last - began, statuses


def is_finished(job: Job) -> bool:
    try:
        return bool(json.loads((job.run_folder / "result.json").read_text())["status"] == "finished")
    except (OSError, ValueError, KeyError):
        return False


def measure(folder: Path, order: str, num_jobs: int, num_nodes: int, seed: int, port: int) -> Figures:
    drawn = draw_jobs(folder, num_jobs, seed)
    jobs = [job for job, _ in drawn]
    scheduler = "builtin" if order == "fifo" else "backfill"
    with slurm_cluster(
        folder / "slurm",
        num_nodes,
        port,
        gpus_per_node=8,
        scheduler=scheduler,  # type: ignore[arg-type]
    ) as environment:
        os.environ.update({name: environment[name] for name in ("SLURM_CONF", "PATH")})
        settings = SlurmSettings(partition="nightly", gpus_per_node=8, grace_seconds=10)
        launcher = SlurmLauncher(settings, folder / "launcher", SlurmPatience())
        before = _cpu_seconds()
        submitted, makespan, _ = run_night(launcher, jobs, one_by_one=order == "fifo")
        cpu = _cpu_seconds() - before
    bound = lower_bound(drawn, num_nodes)
    return Figures(
        order=order,
        num_jobs=num_jobs,
        num_nodes=num_nodes,
        submit_seconds=round(submitted, 2),
        makespan_seconds=round(makespan, 1),
        bound_seconds=round(bound, 1),
        efficiency=round(bound / makespan, 4),
        launcher_cpu_milliseconds_per_job=round(1000 * cpu / num_jobs, 2),
        num_finished=sum(is_finished(job) for job in jobs),
    )


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--order", choices=("ours", "fifo", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=17017)
    options = parser.parse_args()
    for order in ("ours", "fifo") if options.order == "both" else (options.order,):
        with tempfile.TemporaryDirectory(prefix="slurm-night-") as folder:
            figures = measure(Path(folder), order, options.jobs, options.nodes, options.seed, options.port)
        print(json.dumps(asdict(figures)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
