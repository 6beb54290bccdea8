"""Real training through Slurm: two emulated nodes of two ranks, by Horovod, without ssh; preempted and resumed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sweeps.job import START_MARK, Job, JobStatus
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience
from sweeps.planning.plan import SlurmSettings
from tests import slurm_cluster
from tests.pipelines import training_runs as runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
]
# Four ranks add up in one order wherever they are if the engine alone reduces; in memory shared by the ranks of a
# host they would not.
SETTINGS = {
    **runs.TINY,
    "train.num_samples": 160,
    "train.checkpoint_every_steps": 1000,
    "distributed.local_reduction": "engine",
    "distributed.transport": "gloo",
}
# Emulated nodes have names that nothing resolves.
MEETING = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}


def training_job(folder: Path, name: str, cache: Path) -> Job:
    run_folder = folder / name
    argv = runs.command(
        "train", "lane-small", "--out", str(run_folder), "--resume-if-possible", "--engine", "horovod",
        settings=SETTINGS,
    )  # fmt: skip
    environment = {**MEETING, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    return Job(
        name, tuple(argv), run_folder, num_nodes=2, ranks_per_node=2, time_limit_seconds=1800, environment=environment
    )


def wait_until_ended(launcher: SlurmLauncher, job: Job, seconds: float = 240) -> JobStatus:
    deadline = time.monotonic() + seconds
    while (status := launcher.poll()[job.name]).state not in ("ended", "lost"):
        assert time.monotonic() < deadline, (job.run_folder / "job.log").read_text()
        time.sleep(0.5)
    return status


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in runs.metrics(folder)]


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def test_training_is_the_same_as_on_this_host_and_survives_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_cluster.need()
    cache = tmp_path / "cache"
    local = tmp_path / "local"
    words = ["train", "lane-small", "--ranks", "4", "--out", str(local), "--engine", "horovod"]
    done = runs.run(runs.command(*words, settings=SETTINGS), cache)
    assert done.returncode == 0, done.stdout + done.stderr
    with slurm_cluster.slurm_cluster(tmp_path / "slurm", 2, port=17317) as environment:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, environment[name])
        launcher = SlurmLauncher(SlurmSettings(grace_seconds=30), tmp_path / "launcher", SlurmPatience(poll=0.5))

        whole = training_job(tmp_path, "whole", cache)
        launcher.submit(whole)
        status = wait_until_ended(launcher, whole)
        log = (whole.run_folder / "job.log").read_text()
        assert (status.exit_code, status.nodes) == (0, ("node0", "node1")), log
        assert "4 ranks (horovod" in log
        assert losses(whole.run_folder) == losses(local)
        assert (
            result(whole.run_folder)["checkpoint"]["weights_sha256"]
            == runs.result(local)["checkpoint"]["weights_sha256"]
        )

        stopped = training_job(tmp_path, "stopped", cache)
        id = launcher.submit(stopped)
        _wait_for_step(stopped.run_folder, 4)
        subprocess.run(["scancel", "--batch", "--signal=USR2", id], check=True)
        status = wait_until_ended(launcher, stopped)
    log = (stopped.run_folder / "job.log").read_text()
    assert (status.exit_code, status.id, status.num_starts) == (0, id, 2), log
    assert log.count(START_MARK) == 2
    assert "resumed from" in log
    whole_result, stopped_result = result(whole.run_folder), result(stopped.run_folder)
    assert stopped_result["status"] == whole_result["status"] == "finished"
    assert stopped_result["checkpoint"]["weights_sha256"] == whole_result["checkpoint"]["weights_sha256"]
    assert losses(stopped.run_folder) == losses(whole.run_folder)


def _wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step}: {(folder / 'job.log').read_text()}")
