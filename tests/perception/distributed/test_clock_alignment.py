"""Offsets between ranks' clocks: 0 exactly where they share one, right within the stated error where they do not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perception.distributed import SoloCommunicator
from perception.distributed.clock_alignment import ClockOffset, clock_offset, shared_clock_name
from tests.perception.distributed import clock_alignment_ranks
from tests.ranks import launch_script, read_reports

needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
ENGINES = [
    pytest.param("torch", "gloo", id="torch-gloo"),
    pytest.param("horovod", "mpi", id="horovod-mpi", marks=[needs_horovod, pytest.mark.slow]),
    pytest.param("horovod", "gloo", id="horovod-gloo", marks=[needs_horovod, pytest.mark.slow]),
]
SCRIPT = Path(clock_alignment_ranks.__file__)


def offsets(folder: Path, engine: str, transport: str, shifts: list[float | None]) -> list[dict[str, Any]]:
    arguments = [str(folder), engine, transport, json.dumps(shifts)]
    launched = launch_script(SCRIPT, arguments, len(shifts), engine, transport, folder)
    assert launched.exit_code == 0, launched.errors
    return read_reports(folder, len(shifts))


def test_one_rank_is_on_time() -> None:
    assert clock_offset(SoloCommunicator()) == ClockOffset(0.0, 0.0)


def test_processes_of_one_boot_share_a_clock_and_its_name() -> None:
    code = "from perception.distributed.clock_alignment import shared_clock_name as n; print(n())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == shared_clock_name().strip() != ""


@pytest.mark.slow
def test_ranks_of_one_host_are_aligned_already(tmp_path: Path) -> None:
    for report in offsets(tmp_path, "torch", "gloo", [None, None]):
        assert (report["offset"], report["error"], report["same"]) == (0.0, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport"), ENGINES)
def test_an_injected_offset_is_found_within_the_stated_error(tmp_path: Path, engine: str, transport: str) -> None:
    """Rank 2 reads the clock of rank 0, rank 1 one that is an hour late, rank 3 one that is ahead."""
    shifts = [-5.0, 3600.125, -5.0, -86400.5]
    reports = offsets(tmp_path, engine, transport, [*shifts])
    for rank in (0, 2):
        assert (reports[rank]["offset"], reports[rank]["error"]) == (0.0, 0.0)
    for rank in (1, 3):
        true_offset = shifts[rank] - shifts[0]
        assert 0 < reports[rank]["error"] < 0.2, "one round trip of sixteen took less than 0.4 s"
        # A float64 of a day's seconds resolves 15 ps.
        assert abs(reports[rank]["offset"] - true_offset) <= reports[rank]["error"] + 1e-9


_IN_A_NAMESPACE = """
import os, sys
if os.environ.get("RANK") == "1" or os.environ.get("HOROVOD_RANK") == "1":
    os.execvp("unshare", ["unshare", "--time", "--monotonic", "7000", "--fork", "--kill-child",
                          sys.executable, *sys.argv[1:]])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_rank_in_a_time_namespace_of_its_own(tmp_path: Path) -> None:
    """The same host and boot, and yet another clock: nothing is injected here."""
    probe = ["unshare", "--time", "--monotonic", "7000", "--fork", "true"]
    if shutil.which("unshare") is None or os.geteuid() != 0 or subprocess.run(probe, check=False).returncode != 0:
        pytest.skip("a time namespace needs root, unshare and Linux 5.6")
    script = tmp_path / "enter.py"
    script.write_text(_IN_A_NAMESPACE)
    arguments = [str(SCRIPT), str(tmp_path), "torch", "gloo", json.dumps([None, None])]
    launched = launch_script(script, arguments, 2, "torch", "gloo", tmp_path)
    assert launched.exit_code == 0, launched.errors
    first, shifted = read_reports(tmp_path, 2)
    assert first["name"] != shifted["name"] and first["offset"] == 0.0
    true_offset = shifted["late"] - first["late"]
    assert true_offset == pytest.approx(-7000, abs=0.1)
    # The two reports read the wall clock at different moments; a clock being set in between is no matter of ours.
    assert abs(shifted["offset"] - true_offset) <= shifted["error"] + 1e-3
    assert 0 < shifted["error"] < 0.2
