"""Ranks of two emulated hosts, two on each, reduce in two levels: as the engine alone does, and the whole contract."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from pipelines.rank_commands import find_mpirun
from tests.perception.distributed import scenarios
from tests.perception.distributed.scenario_tools import LOCAL_REDUCTION_VARIABLE
from tests.perception.distributed.test_layer import check, needs_horovod
from tests.ranks import ROOT, read_reports

NUM_HOSTS, RANKS_PER_HOST = 2, 2
NUM_RANKS = NUM_HOSTS * RANKS_PER_HOST
TIMEOUT_SECONDS = 60
# Ranks take their host from what mpirun says about it.
_AS_ON_TWO_HOSTS = f"""
export OMPI_COMM_WORLD_LOCAL_SIZE={RANKS_PER_HOST}
export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % {RANKS_PER_HOST}))
exec "$@"
"""
on_every_engine = pytest.mark.parametrize(
    ("engine", "transport"),
    [
        pytest.param("torch", "gloo", id="torch-gloo"),
        pytest.param("horovod", "gloo", id="horovod-gloo", marks=needs_horovod),
        pytest.param("horovod", "mpi", id="horovod-mpi", marks=needs_horovod),
    ],
)

pytestmark = pytest.mark.slow


@cache
def reports(engine: str, transport: str, suite: str, local_reduction: str = "shared_memory") -> list[dict[str, Any]]:
    """Run a suite once by ranks that take themselves to be on two hosts."""
    folder = Path(mkdtemp(prefix="hosts-"))
    argv = [sys.executable, scenarios.__file__, str(folder), engine, transport, str(TIMEOUT_SECONDS), suite]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        LOCAL_REDUCTION_VARIABLE: local_reduction,
    }
    if transport == "mpi":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = [str(find_mpirun(os.environ)), *root, "-np", str(NUM_RANKS), "--bind-to", "none"]
        argv = [*mpirun, "--map-by", ":OVERSUBSCRIBE", "sh", "-c", _AS_ON_TWO_HOSTS, "sh", *argv]
        environments = [{**environment, "OMPI_MCA_mpi_yield_when_idle": "1"}]
    else:
        port = _free_port()
        environments = [{**environment, **_as_torchrun_does(rank, port)} for rank in range(NUM_RANKS)]
    outputs = [folder / f"output{number}" for number in range(len(environments))]
    processes = []
    for path, variables in zip(outputs, environments, strict=True):
        with path.open("w") as file:
            processes.append(subprocess.Popen(argv, env=variables, cwd=ROOT, stdout=file, stderr=file))
    try:
        exit_codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert exit_codes == [0] * len(processes), "\n".join(path.read_text()[-4000:] for path in outputs)
    return read_reports(folder, NUM_RANKS)


def _as_torchrun_does(rank: int, port: int) -> dict[str, str]:
    host, local = divmod(rank, RANKS_PER_HOST)
    numbers = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": RANKS_PER_HOST}
    return {
        **{name: str(value) for name, value in {**numbers, "GROUP_RANK": host, "MASTER_PORT": port}.items()},
        **{"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@on_every_engine
@pytest.mark.parametrize("scenario", list(scenarios.scenarios_of("hierarchical")))
def test_two_levels_against_the_engine(scenario: str, engine: str, transport: str) -> None:
    check(scenario, reports(engine, transport, "hierarchical"), engine)


@on_every_engine
@pytest.mark.parametrize("scenario", list(scenarios.scenarios_of("fast")))
def test_scenario_on_two_hosts(scenario: str, engine: str, transport: str) -> None:
    check(scenario, reports(engine, transport, "fast", "auto"), engine)
