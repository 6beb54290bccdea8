"""Evaluations of a running job, read as they come."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.night.metrics_tail import MetricsTail, first_reached


def line(samples: int, value: object, step: int = 0) -> str:
    return json.dumps({"step": step or samples, "samples": samples, "validation/f1": value}) + "\n"


def test_each_evaluation_comes_once_and_lines_of_steps_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, "f1")
    assert list(tail.read()) == []
    path.write_text('{"step": 1, "loss": 2.0}\n' + line(100, 0.25) + '{"step": 2, "loss": 1.0}\n')
    assert list(tail.read()) == [(100, 0.25)]
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write(line(200, 0.5) + line(300, 0.75)[:-5])
    assert list(tail.read()) == [(200, 0.5)]
    with path.open("a") as file:
        file.write(line(300, 0.75)[-5:])
    assert list(tail.read()) == [(300, 0.75)]


def test_a_run_that_is_resumed_writes_its_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(100, 0.1) + line(200, 0.2) + line(300, 0.3))
    tail = MetricsTail(path, "f1")
    assert len(list(tail.read())) == 3
    new = tmp_path / "new"
    new.write_text(line(100, 0.1) + line(200, 0.2))
    new.replace(path)
    assert list(tail.read()) == []
    with path.open("a") as file:
        # Computed again, then on.
        file.write(line(300, 0.3) + line(400, 0.4))
    assert list(tail.read()) == [(400, 0.4)]


def test_what_an_earlier_controller_knew_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(100, 0.1) + line(200, 0.2))
    assert list(MetricsTail(path, "f1", last_samples=100).read()) == [(200, 0.2)]


def test_values_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        '{"validation/f1": 0.5}\n',
        'validation/f1 {"\n',
        '["validation/f1"]\n',
        '{"samples": null, "validation/f1": 1}\n',
    ]
    path.write_text("".join(rows) + line(1, "nan") + line(2, True) + line(3, None) + line(4, 0.5))
    assert list(MetricsTail(path, "f1").read()) == [(4, 0.5)]


@given(cuts=st.lists(st.integers(1, 40), max_size=60))
@settings(deadline=None, max_examples=50)
def test_however_it_is_written_every_line_comes_once(cuts: list[int], tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    expected = [(samples, samples / 8) for samples in range(10, 200, 10)]
    data = "".join(line(samples, value) for samples, value in expected).encode()
    tail, found = MetricsTail(path, "f1"), []
    begin = 0
    for size in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[begin : begin + size])
        begin += size
        found += list(tail.read())
    assert found == expected


def test_the_first_evaluation_that_reaches_a_value_is_told_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert first_reached(path, "f1", 0.5) is None
    rows = [(100, 0.2, 1.0), (200, float("nan"), 2.0), (300, 0.5, 3.0), (400, 0.4, 4.0), (500, 0.9, 5.0)]
    lines = [json.dumps({"samples": n, "validation/f1": value, "seconds": time}) for n, value, time in rows]
    path.write_text("\n".join(["half a line of validation/f1", '{"step": 1, "loss": 2.0}', *lines]))
    assert first_reached(path, "f1", 0.5) == (3.0, 300)
    assert first_reached(path, "f1", 0.6) == (5.0, 500)
    assert first_reached(path, "f1", 0.95) is None and first_reached(path, "f", 0.1) is None
