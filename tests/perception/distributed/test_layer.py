"""One contract for every engine: the scenarios, run once by real ranks of each, reported one by one."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.perception.distributed import scenarios
from tests.ranks import launch_script, read_reports

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make setup with ENGINE unset"
)
VARIANTS = [
    pytest.param("solo", "auto", 1, id="solo"),
    pytest.param("torch", "gloo", 2, id="torch-gloo-2"),
    pytest.param("horovod", "mpi", 2, id="horovod-mpi-2", marks=needs_horovod),
    pytest.param("horovod", "gloo", 2, id="horovod-gloo-2", marks=[needs_horovod, pytest.mark.slow]),
    pytest.param("torch", "gloo", 4, id="torch-gloo-4", marks=pytest.mark.slow),
    pytest.param("horovod", "mpi", 4, id="horovod-mpi-4", marks=[needs_horovod, pytest.mark.slow]),
]


@cache
def reports(engine: str, transport: str, ranks: int) -> list[dict[str, Any]]:
    """Run all scenarios once; starting ranks is what takes time."""
    folder = Path(mkdtemp(prefix="scenarios-"))
    launched = launch_script(
        Path(scenarios.__file__), [str(folder), engine, transport], ranks, engine, transport, folder
    )
    assert launched.exit_code == 0, launched.errors
    return read_reports(folder, ranks)


@pytest.mark.parametrize(("engine", "transport", "ranks"), VARIANTS)
@pytest.mark.parametrize("scenario", list(scenarios.SCENARIOS))
def test_scenario(scenario: str, engine: str, transport: str, ranks: int) -> None:
    for rank, report in enumerate(reports(engine, transport, ranks)):
        assert report["engine"] == engine and report["size"] == ranks
        assert scenario in report["ran"]
        assert scenario not in report["failures"], f"rank {rank}:\n{report['failures'][scenario]}"
