"""Nights of many jobs on 64 emulated 8-GPU nodes, whole and with nodes that fail and jobs that are preempted.

The full size is measured by measure_slurm_night.py, since it takes half an hour.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from sweeps.job import Job, JobStatus
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience
from sweeps.planning.plan import SlurmSettings
from tests import slurm_cluster
from tests.sweeps.measure_slurm_night import draw_jobs, is_finished, lower_bound, run_night

pytestmark = [pytest.mark.slow, pytest.mark.services]
SETTINGS = SlurmSettings(partition="nightly", gpus_per_node=8, grace_seconds=10)
NUM_NODES = 64
CHECKPOINT_EVERY_SECONDS = 2


def test_a_night_fills_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job ends once with its result; the jobs are so short that starting them is a good part of the time."""
    slurm_cluster.need()
    drawn = draw_jobs(tmp_path, 150, seed=1, seconds=(4, 24))
    jobs = [job for job, _ in drawn]
    with slurm_cluster.slurm_cluster(tmp_path / "slurm", NUM_NODES, port=17117, gpus_per_node=8) as environment:
        _enter(environment, monkeypatch)
        launcher = SlurmLauncher(SETTINGS, tmp_path / "launcher", SlurmPatience(poll=1.0))
        assert (launcher.num_nodes(), launcher.num_slots()) == (NUM_NODES, 8 * NUM_NODES)
        submitted, makespan, statuses = run_night(launcher, jobs, one_by_one=False)
    assert submitted < 30
    assert all(is_finished(job) for job in jobs)
    assert {status.state for status in statuses.values()} == {"ended"}
    assert {status.exit_code for status in statuses.values()} == {0}
    for job, takes in drawn:
        status = statuses[job.name]
        assert len(status.nodes) == job.num_nodes
        assert status.num_starts == 1
        assert takes <= status.allocated_seconds + 1
    bound = lower_bound(drawn, NUM_NODES)
    assert bound / makespan > 0.6, f"{makespan:.1f} s for a bound of {bound:.1f} s"


def test_failing_nodes_and_preemptions_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 64 nodes fail, one job of ten is preempted; what is accounted equals Slurm's own accounts."""
    slurm_cluster.need(accounting=True)
    drawn = draw_jobs(tmp_path, 100, seed=2, seconds=(8, 24), checkpoint_every=CHECKPOINT_EVERY_SECONDS)
    jobs = {job.name: job for job, _ in drawn}
    takes = {job.name: seconds for job, seconds in drawn}
    with slurm_cluster.slurm_cluster(
        tmp_path / "slurm", NUM_NODES, port=17217, gpus_per_node=8, accounting=True, return_to_service=0
    ) as environment:
        _enter(environment, monkeypatch)
        patience = SlurmPatience(poll=1.0, accounting=2.0, settle=20.0)
        launcher = SlurmLauncher(SETTINGS, tmp_path / "launcher", patience)
        launcher.submit_many(list(jobs.values()))
        chance = random.Random(3)
        failing, preempted = [f"node{number}" for number in chance.sample(range(NUM_NODES), 3)], set[str]()
        began = time.monotonic()
        seen: dict[str, set[str]] = {name: set() for name in jobs}
        while True:
            statuses = launcher.poll()
            for name, status in statuses.items():
                seen[name].add(status.state)
            if all(status.state in ("ended", "lost") for status in statuses.values()):
                break
            running = [
                name
                for name, status in statuses.items()
                if status.state == "running" and name not in preempted and status.allocated_seconds > 3
            ]
            if len(preempted) < 10 and running:
                name = chance.choice(running)
                # It may have ended at this moment.
                signalled = subprocess.run(["scancel", "--batch", "--signal=USR2", statuses[name].id], check=False)
                if signalled.returncode == 0:
                    preempted.add(name)
            if failing and len(preempted) > 3:
                _slurm("scontrol", "update", f"nodename={failing.pop()}", "state=down", "reason=test")
            assert time.monotonic() - began < 400, {n: s for n, s in statuses.items() if s.state != "ended"}
            time.sleep(0.5)
        _check_nothing_lost(jobs, takes, statuses)
        several = [status for status in statuses.values() if status.num_starts > 1]
        assert len(several) >= 8
        assert all("lost" not in states for states in seen.values())
        time.sleep(6)
        _check_accounts(jobs, statuses)


def _check_nothing_lost(jobs: dict[str, Job], takes: dict[str, int], statuses: dict[str, JobStatus]) -> None:
    for name, job in jobs.items():
        status = statuses[name]
        assert (status.state, status.exit_code) == ("ended", 0), status
        assert is_finished(job)
        starts = [line.split() for line in (job.run_folder / "starts.txt").read_text().splitlines()]
        # Always under the same number, and never begun anew: at most one interval and the seconds that are rounded
        # away are done again.
        assert len({number for _, number, _ in starts}) == 1
        begins = [int(seconds) for seconds, _, _ in starts]
        assert begins == sorted(begins)
        assert status.num_starts >= len(starts)
        nodes = [node for _, _, node in starts]
        assert status.nodes[0] == nodes[-1]
        assert status.allocated_seconds >= takes[name] - CHECKPOINT_EVERY_SECONDS * len(starts) - 1


def _check_accounts(jobs: dict[str, Job], statuses: dict[str, JobStatus]) -> None:
    """GPU-seconds held add up to what Slurm itself has written down."""
    ours = sum(8 * jobs[name].num_nodes * status.allocated_seconds for name, status in statuses.items())
    listed = _slurm(
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", "--format=ElapsedRaw,AllocNodes",
        "--starttime=now-1hour",
    )  # fmt: skip
    slurms = sum(8 * int(seconds) * int(nodes) for seconds, nodes in (line.split("|") for line in listed.split()))
    assert abs(ours - slurms) <= 0.01 * slurms, (ours, slurms)


def _enter(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, environment[name])


def _slurm(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ).stdout
