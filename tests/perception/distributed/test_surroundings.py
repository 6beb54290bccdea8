"""What a machine or a launcher can have wrong: ports, rank numbers, a /dev/shm that is too small."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.perception.distributed import failing_rank, reconnecting_rank
from tests.perception.distributed.scenario_tools import LOCAL_REDUCTION_VARIABLE
from tests.perception.distributed.test_failures import on_every_engine
from tests.perception.distributed.test_layer import needs_horovod
from tests.ranks import ROOT, Launched

TIMEOUT_SECONDS = 4
MARGIN_SECONDS = 45
"""For starting Python and torch on a busy machine."""

pytestmark = pytest.mark.slow
by_torchrun = pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=needs_horovod)])
"""Ranks that meet by MASTER_ADDR and MASTER_PORT, over Gloo."""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Somebody listens there already, and never says a word."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(16)
        yield int(other.getsockname()[1])


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    }


def start_together(engine: str, environments: Sequence[Mapping[str, str]]) -> list[Launched]:
    """Ranks without a launcher: each with its own environment; all must end in the stated time."""
    argv = [sys.executable, reconnecting_rank.__file__, engine, "gloo", str(TIMEOUT_SECONDS), "1"]
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        ended = []
        for process in processes:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS + MARGIN_SECONDS)
            ended.append(Launched(process.returncode, output, errors))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert time.monotonic() - began < TIMEOUT_SECONDS + MARGIN_SECONDS
    return ended


def last_line(ended: Launched) -> str:
    return ended.errors.strip().splitlines()[-1] if ended.errors.strip() else ""


@by_torchrun
def test_ranks_that_nothing_is_wrong_with(engine: str, port: int) -> None:
    ended = start_together(engine, [torchrun_variables(rank, 2, port) for rank in range(2)])
    assert [e.exit_code for e in ended] == [0, 0], ended
    assert all(e.output == "round 0: sum 3, mean 1.5\n" for e in ended)


@by_torchrun
def test_a_port_in_use(engine: str, taken_port: int) -> None:
    (ended,) = start_together(engine, [torchrun_variables(0, 2, taken_port)])
    assert ended.exit_code == 2
    assert str(taken_port) in last_line(ended) and "in use" in last_line(ended)


@by_torchrun
def test_a_port_of_somebody_who_never_answers(engine: str, taken_port: int) -> None:
    (ended,) = start_together(engine, [torchrun_variables(1, 2, taken_port)])
    assert ended.exit_code == 2
    assert str(taken_port) in last_line(ended) and "MASTER_PORT" in last_line(ended)


@by_torchrun
@pytest.mark.parametrize(
    "ranks", [pytest.param([1, 1], id="nobody is rank 0"), pytest.param([0, 0], id="two are rank 0")]
)
def test_equal_rank_numbers(engine: str, ranks: list[int], port: int) -> None:
    ended = start_together(engine, [torchrun_variables(rank, 2, port) for rank in ranks])
    for e in ended:
        assert e.exit_code == 2 and str(port) in last_line(e) and last_line(e).startswith("error: "), ended


@by_torchrun
def test_a_rank_that_was_never_started(engine: str, port: int) -> None:
    ended = start_together(engine, [torchrun_variables(rank, 3, port) for rank in range(2)])
    for e in ended:
        assert e.exit_code == 2 and "every rank" in last_line(e), ended


@by_torchrun
def test_ranks_that_disagree_about_their_number(engine: str, port: int) -> None:
    ended = start_together(engine, [torchrun_variables(0, 2, port), torchrun_variables(1, 3, port)])
    assert all(e.exit_code != 0 for e in ended), ended
    assert any(e.exit_code == 2 and last_line(e).startswith("error: ") for e in ended), ended


@by_torchrun
def test_a_master_that_has_no_address(engine: str, port: int) -> None:
    wrong = {**torchrun_variables(1, 2, port), "MASTER_ADDR": "no-such-host.invalid"}
    (ended,) = start_together(engine, [wrong])
    assert ended.exit_code == 2 and "no-such-host.invalid" in last_line(ended)


_WITHIN = """
import dataclasses, json, sys
from pathlib import Path
from tests.ranks import launch_script
script, arguments, ranks, engine, transport, folder = json.loads(sys.argv[1])
print(json.dumps(dataclasses.asdict(
    launch_script(Path(script), arguments, ranks, engine, transport, Path(folder), 100))))
"""


def train_with_small_shared_memory(
    engine: str, transport: str, local_reduction: str, ranks: int, folder: Path
) -> Launched:
    """Some steps in a private mount namespace whose /dev/shm holds one page; skips where none can be made."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a /dev/shm of its own needs root and unshare")
    mount = "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"a /dev/shm of its own cannot be mounted here: {tried.stderr.strip()}")
    words = [str(folder), "none", "-1", "5", f"engine={engine}", f"transport={transport}", "timeout_seconds=30"]
    task = json.dumps([failing_rank.__file__, words, ranks, engine, transport, str(folder)])
    argv = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", _WITHIN, task]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), LOCAL_REDUCTION_VARIABLE: local_reduction}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return Launched(**json.loads(done.stdout))


@on_every_engine
@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_memory_that_is_too_small(
    engine: str, transport: str, local_reduction: str, ranks: int, tmp_path: Path
) -> None:
    """Engines do without it, or say that they cannot; who asked for it is told what to do."""
    launched = train_with_small_shared_memory(engine, transport, local_reduction, ranks, tmp_path)
    if local_reduction == "engine" and transport != "mpi":
        assert launched.exit_code == 0, launched.errors
        return
    assert launched.exit_code == 2, launched.errors
    assert "/dev/shm" in last_line(launched) and "--shm-size" in last_line(launched)
    assert launched.errors.count("/dev/shm") == 1, "one rank's word is enough"


def test_shared_memory_is_an_offer(tmp_path: Path) -> None:
    """With `auto` a small /dev/shm costs speed, not the run, and that is said once."""
    launched = train_with_small_shared_memory("torch", "gloo", "auto", 2, tmp_path)
    assert launched.exit_code == 0, launched.errors
    assert launched.errors.count("/dev/shm") == 1 and "--shm-size" in launched.errors
