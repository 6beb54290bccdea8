"""Ranks that mpirun, torchrun or Slurm started find themselves, and train as our own launcher's ranks do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.rank_commands import find_mpirun
from tests import slurm_cluster
from tests.pipelines import training_runs as runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
]
# Two nodes reduce by the engine, one host in shared memory: sums of two ranks are equal to the bit, but the norm,
# by which gradients would be clipped, is added up in another order.
SETTINGS = {**runs.TINY, "train.num_samples": 40, "optim.clip_norm": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """weights_sha256 of the same run by our own launcher."""
    out = tmp_path_factory.mktemp("own") / "run"
    done = runs.run(runs.command("train", "lane-small", "--ranks", "2", "--out", str(out), settings=SETTINGS), cache)
    assert done.returncode == 0, done.stderr
    return str(runs.result(out)["checkpoint"]["weights_sha256"])


def check(launcher: list[str], out: Path, cache: Path, expected: str, engine: str, env: dict[str, str]) -> None:
    words = runs.command("train", "lane-small", "--out", str(out), "--engine", engine, settings=SETTINGS)
    if launcher[-1] == "-m":
        words = words[2:]
    done = subprocess.run(
        [*launcher, *words],
        cwd=runs.ROOT,
        env={**runs.environment(cache), **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 ranks ({engine}" in done.stdout
    assert runs.result(out)["checkpoint"]["weights_sha256"] == expected


def test_mpirun(tmp_path: Path, cache: Path, expected: str) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launcher = [str(find_mpirun(os.environ)), *root, "-np", "2", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    check(launcher, tmp_path / "run", cache, expected, "horovod", {"OMPI_MCA_mpi_yield_when_idle": "1"})


@pytest.mark.parametrize("engine", ["torch", "horovod"])
def test_torchrun(tmp_path: Path, cache: Path, expected: str, engine: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29731", "-m"]
    check(launcher, tmp_path / "run", cache, expected, engine, {})


@pytest.mark.parametrize("engine", ["torch", "horovod"])
def test_srun_on_two_nodes(tmp_path: Path, cache: Path, expected: str, engine: str) -> None:
    """Without ssh and without MPI: Horovod over Gloo, met through the master address."""
    if slurm_cluster.missing():
        lacking = f"Slurm cannot be started here, missing: {', '.join(slurm_cluster.missing())}"
        if os.environ.get("CI"):
            pytest.fail(lacking)
        pytest.skip(lacking)
    with slurm_cluster.slurm_cluster(tmp_path / "slurm", 2) as environment:
        launcher = ["srun", "--nodes", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
        # Emulated nodes have names that nothing resolves.
        env = {**environment, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}
        check(launcher, tmp_path / "run", cache, expected, engine, env)
