"""What tests of several parts share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL_DISK_BYTES = 1 << 20

EXHAUSTIVE = (
    r"test_layer\.py.*(torch-gloo-4|horovod-mpi-4|horovod-mpi-2-shared|horovod-gloo-2-engine|horovod-gloo-4)",
    r"test_layer\.py.*compiled.*(solo|torch-gloo-2-engine|horovod)",
    r"test_layer\.py.*gigabyte",
    r"test_failures\.py.*(torch-gloo-engine|horovod-mpi-shared_memory|horovod-gloo-engine)",
    r"test_failures\.py.*(waited_for\[4|\[4-|-4\]|-4-)",
    r"test_failures\.py::(test_a_rank_that_hangs|test_a_slow_rank).*(-2-0-|horovod-mpi|stop)",
    r"test_surroundings\.py.*(horovod|-4-|\[4-|equal_rank_numbers|no_address|disagree|never_answers)",
    r"test_network_loss\.py.*(horovod|4-1-0|2-2-1|is_named)",
    r"test_reconnection\.py.*(4-|-4\])",
    r"test_hierarchical\.py.*(horovod|test_scenario_on_two_hosts)",
    r"test_horovod_wheel\.py(?!.*test_fact.*mpi)",
    r"test_wire_formats\.py.*(regression_converges|converges-horovod|resumes_to_the_bit|another_wire_format)",
    r"test_elastic\.py.*(back\[horovod|a_change_of_generation|when_told|last_commit\[torch|would_come_again)",
    r"test_elastic\.py.*(equal_to_the_bit|a_crash_loop|too_few_ranks)",
    r"test_bench_allreduce\.py.*(a_whole_measurement|every_process|as_large_as)",
    r"test_replay\.py.*(horovod|torch-gloo)",
    r"test_launch\.py.*all_reduce\[3-horovod",
    r"test_(training|sign_runs)\.py.*two_ranks_equal_one\[torch",
    r"test_training\.py.*(to_the_bit\[2-|configuration_trains_as_it_is\[(lane|sign-full)\]|with_75\[(2-auto-15|1-solo)|to_all_processes\[(12|15))",
    r"test_training\.py::test_a_signal_during_the_measurement.*ready",
    r"test_training\.py::test_a_refused_resumption",
    r"test_sign_runs\.py.*begins_with_anothers",
    r"test_sign_export\.py.*pretrained",
    r"test_one_rank_cost\.py",
    r"test_hierarchical\.py.*two_levels_against_the_engine\[(gradients_of_twenty|unused_parameters_by)",
    r"test_night\.py.*(away_at_the_start|a_full_disk_is_one_line)",
    r"test_failures\.py::test_a_slow_rank_is_reported",
    r"test_time_split\.py.*slow_to_load",
    r"test_tune\.py.*(a_real_search|an_interrupt_leaves_nothing)",
    r"test_bench_allreduce\.py.*a_profile_is",
    r"test_bench_replay\.py.*eight_ranks",
    r"test_layer\.py.*slow_scenario\[(a_model_compiled|ten_thousand_parameters.*-engine)",
    r"test_hierarchical\.py.*two_levels_against_the_engine\[(narrow_and_wide|double_precision)_",
)
"""Tests, by name, that only `make test-all` runs: another engine or number of ranks, long, or racing the clock."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(re.search(pattern, item.nodeid) for pattern in EXHAUSTIVE):
            item.add_marker(pytest.mark.exhaustive)
        if item.get_closest_marker("slow") is not None:
            # Several processes each, and times that are asserted: one after the other, beside the fast ones.
            item.add_marker(pytest.mark.xdist_group("slow"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB that really gets full; skips where none can be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root and mount")
    folder = tmp_path / "small_disk"
    folder.mkdir()
    options = f"size={SMALL_DISK_BYTES}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
