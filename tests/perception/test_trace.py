"""The trace of a few steps: valid in the Chrome format, all ranks on one clock, only the steps asked for."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from perception.distributed import SoloCommunicator
from perception.step_clock import UNTIMED_STEPS, StepClock
from perception.trace import ROWS, Span, StepTrace, chrome_trace


def rows_of(trace: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Events by rank and name of their row, in the order of time."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    rows: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return {row: sorted(events, key=lambda event: event["ts"]) for row, events in rows.items()}


def test_a_process_a_rank_and_a_row_a_kind_from_the_earliest_moment_on() -> None:
    ranks = [
        [Span("forward", "forward", 50.001, 50.003), Span("backward", "backward", 50.003, 50.0075)],
        [Span("data", "data", 50.0, 50.002), Span("wait", "wait for the reduction", 50.002, 50.003)],
    ]
    trace = chrome_trace(ranks)
    assert json.loads(json.dumps(trace)) == trace
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    rows = rows_of(trace)
    assert set(rows) == {(0, "forward"), (0, "backward"), (1, "data"), (1, "wait")}
    (data,), (backward,) = rows[1, "data"], rows[0, "backward"]
    assert (data["ts"], data["dur"]) == (0.0, 2000.0)
    assert backward["ts"] == pytest.approx(3000.0, abs=0.01) and backward["dur"] == pytest.approx(4500.0, abs=0.01)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}


def test_buckets_in_flight_at_once_get_rows_of_their_own() -> None:
    times = [(1.0, 4.0), (2.0, 3.0), (2.5, 5.0), (3.0, 6.0), (4.0, 4.5)]
    spans = [Span("buckets", f"bucket {i} (2.1 MB)", begin, end) for i, (begin, end) in enumerate(times)]
    rows = rows_of(chrome_trace([spans]))
    assert [name for _, name in rows] == ["buckets", "buckets 2", "buckets 3"]
    for events in rows.values():
        for earlier, later in itertools.pairwise(events):
            assert earlier["ts"] + earlier["dur"] <= later["ts"]
    assert sum(len(events) for events in rows.values()) == 5


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


class Reducer:
    """Reports two buckets a step where it is asked to."""

    spans: list[tuple[str, float, float]] | None = None

    def finish(self) -> None:
        times = [time.perf_counter() for _ in range(4)]
        if self.spans is not None:
            self.spans += [("bucket 0 (1.0 MB)", times[0], times[2]), ("bucket 1 (2.5 MB)", times[1], times[3])]
            self.spans.append(("wait", times[0], times[3]))


class TwoRanks(SoloCommunicator):
    """Rank 0, with another that recorded the same half a second later on a clock that is alike."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.num_gathered = 0

    def allgather_object(self, value: Any) -> list[Any]:
        self.num_gathered += 1
        if isinstance(value, str):  # The name of the clock.
            return [value, value]
        later = [[row, name, begin + 0.5, end + 0.5] for row, name, begin, end in value]
        return [[list(row) for row in value], later]


def run(steps: int, wanted: int, path: Path, first: int = 1) -> tuple[list[str], TwoRanks, StepClock, Reducer]:
    """A loop as the trainer has it."""
    clock, reducer, communicator = StepClock(), Reducer(), TwoRanks()
    trace = StepTrace(wanted, clock, reducer, communicator)  # type: ignore[arg-type]
    lines = []
    for step in range(first, first + steps):
        clock.begin()
        for section in ("zero", "data", "forward", "backward", "finish", "update"):
            with clock.measuring(section):
                if section == "finish":
                    reducer.finish()
        clock.end(2, 1e-7, 0.0)
        if trace.after_step(step):
            lines.append(trace.write(path))
    if trace.is_due:
        lines.append(trace.write(path))
    return lines, communicator, clock, reducer


def test_the_steps_asked_for_after_the_first_five(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    lines, _, clock, reducer = run(UNTIMED_STEPS + 6, 2, path, first=41)
    assert lines == [f"wrote {path}: step 46 to step 47, 2 ranks; open it at https://ui.perfetto.dev"]
    assert clock.spans is None and reducer.spans is None, "recording goes on"
    rows = rows_of(json.loads(path.read_text()))
    expected = {(rank, row) for rank in (0, 1) for row in (*ROWS, "buckets 2")}
    assert set(rows) == expected
    assert [event["name"] for event in rows[1, "step"]] == ["step 46", "step 47"]
    assert [event["name"] for event in rows[0, "buckets"]] == ["bucket 0 (1.0 MB)"] * 2
    assert [event["name"] for event in rows[0, "wait"]] == ["wait for the reduction"] * 2
    for mine, theirs in zip(rows[0, "forward"], rows[1, "forward"], strict=True):
        assert theirs["ts"] - mine["ts"] == pytest.approx(5e5, abs=0.01)
    for first, last in zip(rows[0, "step"], rows[0, "optimizer"][2::3], strict=True):
        assert first["ts"] <= last["ts"] and last["ts"] + last["dur"] <= first["ts"] + first["dur"] + 0.01


def test_a_run_that_ends_before_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (line,), *_ = run(UNTIMED_STEPS + 2, 4, path)
    assert "step 6 to step 7, 2 ranks (the run ended before all 4)" in line and path.exists()
    path.unlink()
    (line,), *_ = run(UNTIMED_STEPS, 4, path)
    assert line == "no trace: the run ended after 5 steps, and the first 5 are left out" and not path.exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (line,), *_ = run(UNTIMED_STEPS + 3, 1, tmp_path / "none" / "trace.json")
    assert line.startswith("no trace: ") and "cannot be written (No such file or directory)" in line


def test_no_trace_asks_nothing_of_anyone(tmp_path: Path) -> None:
    lines, communicator, clock, reducer = run(UNTIMED_STEPS + 6, 0, tmp_path / "trace.json")
    assert lines == [] and list(tmp_path.iterdir()) == []
    assert communicator.num_gathered == 0 and clock.spans is None and reducer.spans is None
