"""A rank dies, hangs, is stopped or slow amid a backward: all end in the stated time, and what is shown names it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.perception.distributed import failing_rank
from tests.perception.distributed.scenario_tools import LOCAL_REDUCTION_VARIABLE
from tests.perception.distributed.test_layer import needs_horovod
from tests.ranks import launch_script

TIMEOUT_SECONDS = 12
LAUNCHER_SECONDS = 10
"""The launcher's patience: 5 s of grace after a rank has failed, 5 s more after SIGTERM."""
MARGIN_SECONDS = 15
"""For a busy machine, and for ranks that look at the clock now and then."""

pytestmark = pytest.mark.slow
ENGINES = [
    pytest.param("torch", "gloo", "engine", id="torch-gloo-engine"),
    pytest.param("torch", "gloo", "shared_memory", id="torch-gloo-shared_memory"),
    pytest.param("horovod", "mpi", "engine", id="horovod-mpi-engine", marks=needs_horovod),
    pytest.param("horovod", "mpi", "shared_memory", id="horovod-mpi-shared_memory", marks=needs_horovod),
    pytest.param("horovod", "gloo", "engine", id="horovod-gloo-engine", marks=needs_horovod),
]
on_every_engine = pytest.mark.parametrize(("engine", "transport", "local_reduction"), ENGINES)


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    shown: str
    """Standard error of the run: what a user sees."""
    output: str
    logs: str
    """What the ranks other than 0 wrote."""
    seconds: float
    """From the misbehaviour to the end of the run."""


@cache
def outcome(
    engine: str,
    transport: str,
    local_reduction: str,
    ranks: int,
    behaviour: str,
    who: int,
    num_steps: int = 1000,
    *settings: str,
) -> Outcome:
    folder = Path(mkdtemp(prefix="failures-"))
    words = [f"engine={engine}", f"transport={transport}", f"timeout_seconds={TIMEOUT_SECONDS}", *settings]
    launched = launch_script(
        Path(failing_rank.__file__),
        [str(folder), behaviour, str(who), str(num_steps), *words],
        ranks,
        engine,
        transport,
        folder,
        timeout_seconds=120,
        environment={LOCAL_REDUCTION_VARIABLE: local_reduction},
    )
    seconds = time.time() - float((folder / "began").read_text())
    logs = "".join(path.read_text() for path in sorted((folder / "failures").glob("rank*.log")))
    return Outcome(launched.exit_code, launched.errors, launched.output, logs, seconds)


@on_every_engine
@pytest.mark.parametrize(
    ("behaviour", "ranks", "who", "exit_code", "words"),
    [
        ("exit", 2, 1, 1, "rank 1 of 2 ended with exit code 3"),
        ("kill", 4, 2, 137, r"rank 2 of 4 died of signal 9 \(SIGKILL\)"),
        ("kill", 2, 0, 137, r"rank 0 of 2 died of signal 9 \(SIGKILL\)"),
    ],
)
def test_a_rank_that_dies_amid_backward(
    engine: str,
    transport: str,
    local_reduction: str,
    behaviour: str,
    ranks: int,
    who: int,
    exit_code: int,
    words: str,
) -> None:
    ended = outcome(engine, transport, local_reduction, ranks, behaviour, who)
    assert ended.exit_code == exit_code, ended.shown
    assert re.search(words, ended.shown.splitlines()[-1])
    assert ended.seconds < LAUNCHER_SECONDS + MARGIN_SECONDS, "nobody need wait for a timeout where a process has ended"


@on_every_engine
@pytest.mark.parametrize(
    ("behaviour", "ranks", "who"), [("hang", 2, 1), ("stop", 2, 1), ("stop", 2, 0), ("stop", 4, 2)]
)
def test_a_rank_that_hangs_or_is_stopped(
    engine: str, transport: str, local_reduction: str, behaviour: str, ranks: int, who: int
) -> None:
    ended = outcome(engine, transport, local_reduction, ranks, behaviour, who)
    assert ended.exit_code not in (0, 2), ended.shown
    assert ended.seconds < TIMEOUT_SECONDS + LAUNCHER_SECONDS + MARGIN_SECONDS
    last = ended.shown.splitlines()[-1]
    # "rank 1 of 2 ended ..." of the rank that waited would not do.
    assert re.search(rf"waited .*for rank {who}\b", last), ended.shown


@on_every_engine
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_reported_and_waited_for(engine: str, transport: str, local_reduction: str, ranks: int) -> None:
    who = ranks - 1
    ended = outcome(engine, transport, local_reduction, ranks, "slow", who, 6, "stall_warning_seconds=3")
    assert ended.exit_code == 0, ended.shown
    assert "rank 0 ends after step 5" in ended.output
    reports = [line for line in (ended.shown + ended.logs).splitlines() if " has waited " in line]
    lines = [line for line in reports if re.search(rf"for rank {who}, .*bucket\d+", line)]
    assert lines, ended.shown + ended.logs
    assert ended.seconds < 10 + MARGIN_SECONDS
    assert lines == reports, "nobody else was late"
