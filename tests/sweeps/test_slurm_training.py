"""Real training through Slurm: two emulated nodes of two ranks, by Horovod, without ssh; preempted and resumed."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from sweeps.job import START_MARK, Job
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience
from sweeps.planning.plan import SlurmSettings
from tests import slurm_cluster
from tests.pipelines import training_runs as runs
from tests.sweeps.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
]
HELD_STEP = 4
# Four ranks add up in one order wherever they are if the engine alone reduces; in memory shared by the ranks of a
# host they would not.
SETTINGS = {
    **runs.TINY,
    "train.num_samples": 80,
    "train.checkpoint_every_steps": 1000,
    "distributed.local_reduction": "engine",
    "distributed.transport": "gloo",
}
# Emulated nodes have names that nothing resolves.
MEETING = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in runs.metrics(folder)]


def test_training_is_the_same_as_on_this_host_and_survives_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run on this host, and one on two nodes that is preempted half way and goes on: equal to the bit."""
    slurm_cluster.need()
    cache, local, held = tmp_path / "cache", tmp_path / "local", tmp_path / "held"
    words = ["train", "lane-small", "--ranks", "4", "--out", str(local), "--engine", "horovod"]
    done = runs.run(runs.command(*words, settings=SETTINGS), cache)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    words = ["train", "lane-small", "--out", str(folder), "--resume-if-possible", "--engine", "horovod"]
    python, _, _, *rest = runs.command(*words, settings=SETTINGS)
    environment = {**MEETING, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    job = Job(
        "run",
        (python, str(runs.ROOT / "tests/sweeps/held_training.py"), *rest),
        folder,
        num_nodes=2,
        ranks_per_node=2,
        time_limit_seconds=1800,
        environment={**environment, "HELD_FILE": str(held), "HELD_AFTER_STEP": str(HELD_STEP)},
    )

    def log() -> str:
        path = folder / "job.log"
        return path.read_text() if path.exists() else "no log"

    with slurm_cluster.slurm_cluster(tmp_path / "slurm", 2, port=17317) as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster[name])
        launcher = SlurmLauncher(SlurmSettings(grace_seconds=30), tmp_path / "launcher", SlurmPatience(poll=0.5))
        id = launcher.submit(job)
        wait_until(held.exists, f"a run that stands after step {HELD_STEP}", log)
        subprocess.run(["scancel", "--batch", "--signal=USR2", id], check=True)
        wait_until(lambda: launcher.poll()[job.name].state in ("ended", "lost"), "the end of the job", log)
        status = launcher.poll()[job.name]
    assert (status.exit_code, status.id, status.num_starts, status.nodes) == (0, id, 2, ("node0", "node1")), log()
    assert log().count(START_MARK) == 2 and "4 ranks (horovod" in log()
    # All ranks stopped after the next step: no work was lost.
    assert f"at step {HELD_STEP + 1}," in log().split("resumed from")[1], log()
    assert losses(folder) == losses(local)
    ours, locals_ = runs.result(folder), runs.result(local)
    assert ours["status"] == locals_["status"] == "finished"
    assert ours["checkpoint"]["weights_sha256"] == locals_["checkpoint"]["weights_sha256"]
