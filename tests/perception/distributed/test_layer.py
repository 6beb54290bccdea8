"""One contract for every engine: the scenarios, run once by real ranks of each, reported one by one.

Each engine runs them twice: gradients summed by the engine itself, and by the ranks of a host in shared memory.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.perception.distributed import hard_large_scenarios, scenarios
from tests.perception.distributed.scenario_tools import LOCAL_REDUCTION_VARIABLE
from tests.ranks import launch_script, read_reports

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make setup with ENGINE unset"
)
FAST = [("solo", "auto", 1, "engine"), ("torch", "gloo", 2, "shared_memory")]
SLOW = [
    ("horovod", "mpi", 2, "engine"),
    ("torch", "gloo", 2, "engine"),
    ("torch", "gloo", 4, "engine"),
    ("torch", "gloo", 4, "shared_memory"),
    ("horovod", "mpi", 2, "shared_memory"),
    ("horovod", "mpi", 4, "engine"),
    ("horovod", "mpi", 4, "shared_memory"),
    ("horovod", "gloo", 2, "engine"),
    ("horovod", "gloo", 2, "shared_memory"),
    ("horovod", "gloo", 4, "engine"),
]


def variant(engine: str, transport: str, ranks: int, local_reduction: str) -> Any:
    marks = [needs_horovod] if engine == "horovod" else []
    if (engine, transport, ranks, local_reduction) in SLOW:
        marks.append(pytest.mark.slow)
    name = "solo" if ranks == 1 else f"{engine}-{transport}-{ranks}-{local_reduction}"
    return pytest.param(engine, transport, ranks, local_reduction, id=name, marks=marks)


on_every_engine = pytest.mark.parametrize(
    ("engine", "transport", "ranks", "local_reduction"), [variant(*words) for words in FAST + SLOW]
)


@cache
def reports(
    engine: str, transport: str, ranks: int, local_reduction: str, suite: str, only: str = "", timeout_seconds: int = 60
) -> list[dict[str, Any]]:
    """Run a suite once, or one scenario of it; starting ranks is what takes time."""
    folder = Path(mkdtemp(prefix="scenarios-"))
    launched = launch_script(
        Path(scenarios.__file__),
        [str(folder), engine, transport, str(timeout_seconds), suite, *([only] if only else [])],
        ranks,
        engine,
        transport,
        folder,
        environment={LOCAL_REDUCTION_VARIABLE: local_reduction},
    )
    last = launched.output.splitlines()[-1:]
    assert launched.exit_code == 0, f"{last}\n{launched.errors}"
    return read_reports(folder, ranks)


def check(scenario: str, found: list[dict[str, Any]], engine: str) -> None:
    for rank, report in enumerate(found):
        assert report["engine"] == engine and report["size"] == len(found)
        assert scenario in report["ran"]
        assert scenario not in report["failures"], f"rank {rank}:\n{report['failures'][scenario]}"


@on_every_engine
@pytest.mark.parametrize("scenario", list(scenarios.scenarios_of("fast")))
def test_scenario(scenario: str, engine: str, transport: str, ranks: int, local_reduction: str) -> None:
    check(scenario, reports(engine, transport, ranks, local_reduction, "fast"), engine)


@pytest.mark.slow
@on_every_engine
@pytest.mark.parametrize("scenario", list(scenarios.scenarios_of("slow")))
def test_slow_scenario(scenario: str, engine: str, transport: str, ranks: int, local_reduction: str) -> None:
    check(scenario, reports(engine, transport, ranks, local_reduction, "slow"), engine)


@pytest.mark.slow
@on_every_engine
@pytest.mark.parametrize("scenario", list(scenarios.scenarios_of("alone")))
def test_scenario_that_could_hang(scenario: str, engine: str, transport: str, ranks: int, local_reduction: str) -> None:
    check(scenario, reports(engine, transport, ranks, local_reduction, "alone", scenario, 20), engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "transport", "ranks", "local_reduction"), [variant(*words) for words in FAST + SLOW if words[2] == 2]
)
def test_a_bucket_of_one_gigabyte(engine: str, transport: str, ranks: int, local_reduction: str) -> None:
    available, needed = hard_large_scenarios.available_bytes(), hard_large_scenarios.NEEDED_BYTES
    if available < needed:
        pytest.skip(f"{needed / 1e9:.0f} GB of memory are needed, {available / 1e9:.0f} GB are free")
    check("a_bucket_of_one_gigabyte", reports(engine, transport, ranks, local_reduction, "large"), engine)
