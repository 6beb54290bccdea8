"""Where the time of real steps goes: whole steps are explained, a slow rank is named, the trace shows it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from perception.step_clock import CAUSES, UNTIMED_STEPS
from tests.pipelines import time_split_ranks
from tests.pipelines import training_runs as runs
from tests.ranks import launch_script, read_reports

needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")


def assert_whole(record: dict[str, Any]) -> None:
    parts = [record[f"seconds_{cause}"] for cause in CAUSES]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(record["seconds_step"], rel=1e-6)


def spans(trace: Path, rank: int, row: str) -> list[tuple[float, float]]:
    """(begin, end) in seconds, in the order of time."""
    events = json.loads(trace.read_text())["traceEvents"]
    times = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["pid"] == rank and e.get("cat") == row]
    return sorted(times)


@pytest.mark.slow
def test_one_rank_loses_nothing_to_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = runs.train(out, tmp_path, train__num_samples=40, train__trace_steps=2, train__accumulation=2)
    assert done.returncode == 0, done.stderr
    records = runs.metrics(out)
    for record in records:
        assert_whole(record)
        assert "slowest_rank" not in record
        assert record["seconds_straggler"] == 0 and record["seconds_exposed_allreduce"] < 0.01 * record["seconds_step"]
    lost = runs.result(out)["lost_scaling"]
    assert set(lost) == {"data", "exposed_allreduce", "straggler"}
    assert 0 < lost["data"] < 1 and lost["straggler"] == 0
    shown = [line for line in done.stdout.splitlines() if line.startswith("lost scaling by cause: ")]
    assert len(shown) == 1 and f"data {100 * lost['data']:.1f} %" in shown[0]
    assert f"wrote {out / 'trace.json'}: step 6 to step 7, 1 rank; open it at https://ui.perfetto.dev" in done.stdout
    assert len(spans(out / "trace.json", 0, "forward")) == 4, "two micro-batches in each of two steps"
    steps = spans(out / "trace.json", 0, "step")
    for row in ("data", "forward", "backward", "optimizer"):
        for begin, end in spans(out / "trace.json", 0, row):
            assert any(first - 1e-6 <= begin <= end <= last + 1e-6 for first, last in steps)


@pytest.mark.slow
def test_a_run_too_short_to_measure_says_so(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = runs.train(out, tmp_path, train__num_samples=8, train__trace_steps=1)
    assert done.returncode == 0, done.stderr
    assert runs.result(out)["lost_scaling"] == {"data": None, "exposed_allreduce": None, "straggler": None}
    assert "lost scaling by cause: not measured" in done.stdout
    assert "no trace: the run ended after 4 steps" in done.stdout and not (out / "trace.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "transport"),
    [("torch", "gloo"), pytest.param("horovod", "mpi", marks=needs_horovod)],
)
def test_a_rank_that_is_slow_to_load_is_seen_by_all(tmp_path: Path, engine: str, transport: str) -> None:
    """Rank 1 loads two images in 0.2 s more: it waits for data, rank 0 for it, and half of each is the mean."""
    slow = 0.2
    launched = launch_script(
        Path(time_split_ranks.__file__),
        [str(tmp_path), engine, transport, str(slow / 2)],
        2,
        engine,
        transport,
        tmp_path,
        environment={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert launched.exit_code == 0, launched.errors
    first, second = read_reports(tmp_path, 2)
    assert first["summary"] == second["summary"] and first["mean"] == second["mean"]
    assert "most often rank 1" in first["summary"][1]
    timed = first["records"][UNTIMED_STEPS + 1 :]
    for mine, theirs in zip(timed, second["records"][UNTIMED_STEPS + 1 :], strict=True):
        assert_whole(mine)
        assert all(mine[f"seconds_{cause}"] == theirs[f"seconds_{cause}"] for cause in CAUSES)
    assert sum(record["slowest_rank"] == 1 for record in timed) > 0.9 * len(timed)
    mean = first["mean"]
    assert mean["data"] > 0.9 * slow / 2
    assert mean["straggler"] == pytest.approx(slow / 2, rel=0.3)
    assert mean["straggler"] > 2 * mean["exposed_allreduce"]
    trace = tmp_path / "run" / "trace.json"
    assert [len(spans(trace, rank, "step")) for rank in (0, 1)] == [3, 3]
    for (begin, end), (their_begin, their_end) in zip(spans(trace, 0, "step"), spans(trace, 1, "step"), strict=True):
        # Both ranks are in the same step at the same time, on one clock.
        assert max(begin, their_begin) + 0.9 * slow < min(end, their_end)
    assert spans(trace, 0, "buckets") and spans(trace, 1, "buckets")
