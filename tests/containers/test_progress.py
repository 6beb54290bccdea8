"""Progress on a terminal and without one."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from containers.progress import (
    BarProgress,
    NoProgress,
    PlainProgress,
    Progress,
    bar,
    format_bytes,
    format_remaining,
    progress_for,
)

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(progress: Progress, clock: Clock) -> None:
    progress.layers({A: 10_000_000, B: 2_000_000, C: 500_000})
    progress.layer(C, "there", 500_000)
    for second in range(1, 11):
        clock.now += 1
        progress.layer(A, "fetching", second * 1_000_000)
        progress.layer(B, "fetching", second * 200_000)
    progress.layer(A, "fetched", 10_000_000)
    progress.say("a note")
    clock.now += 1
    progress.layer(A, "done", 10_000_000)
    progress.layer(B, "done", 2_000_000)
    progress.close()


def test_lines_without_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    drive(PlainProgress(stream, clock), clock)
    assert stream.getvalue().splitlines() == [
        "cccccccccccc: is in the engine, 500 kB",
        "6.3 MB of 12.5 MB, 920 kB/s, 7 s left, 1 of 3 layers in the engine",
        "12.3 MB of 12.5 MB, 1.2 MB/s, 0 s left, 1 of 3 layers in the engine",
        "aaaaaaaaaaaa: fetched, 10.0 MB",
        "a note",
    ]


class Screen:
    """What a terminal would show, of what it is sent."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]

    def write(self, text: str) -> int:
        for part in re.split(r"(\x1b\[[0-9]*[AJ]|\n)", text):
            if part == "\n":
                self.lines.append("")
            elif part.endswith("A") and part.startswith("\x1b"):
                count = int(part[2:-1])
                assert count < self.rows, "what has scrolled off cannot be reached"
                assert self.lines[-1] == ""
                self.cursor = len(self.lines) - 1 - count
            elif part == "\x1b[J":
                self.lines = [*self.lines[: self.cursor], ""]
            elif part:
                assert "\x1b" not in part
                assert len(part) < self.columns, "a wrapped line cannot be redrawn"
                self.lines[-1] += part
        return len(text)

    def flush(self) -> None:
        pass


def bars(screen: Screen, clock: Clock) -> BarProgress:
    return BarProgress(screen, clock, lambda: os.terminal_size((screen.columns, screen.rows)))  # type: ignore[arg-type]


def test_bars_are_redrawn_in_place() -> None:
    screen, clock = Screen(100, 24), Clock()
    drive(bars(screen, clock), clock)
    assert screen.lines == [
        "a note",
        "aaaaaaaaaaaa done       [####################] 10.0 MB of 10.0 MB",
        "bbbbbbbbbbbb done       [####################] 2.0 MB of 2.0 MB",
        "cccccccccccc there      [####################] 500 kB of 500 kB",
        "12.5 MB of 12.5 MB, 3 of 3 layers in the engine",
        "",
    ]


def test_while_it_runs_there_are_a_total_a_rate_and_a_time() -> None:
    screen, clock = Screen(100, 24), Clock()
    progress = bars(screen, clock)
    progress.layers({A: 10_000_000})
    for second in range(5):
        clock.now += 1
        progress.layer(A, "fetching", second * 1_000_000)
    assert screen.lines[-2] == "4.0 MB of 10.0 MB, 800 kB/s, 8 s left, 0 of 1 layers in the engine"


@settings(deadline=None, max_examples=60)
@given(
    columns=st.integers(1, 120),
    rows=st.integers(4, 30),
    sizes=st.lists(st.integers(0, 10**12), min_size=1, max_size=40),
    steps=st.lists(st.tuples(st.integers(0, 39), st.sampled_from(["fetching", "done", "there"])), max_size=30),
)
def test_whatever_the_screen_nothing_wraps_or_scrolls_out_of_reach(
    columns: int, rows: int, sizes: list[int], steps: list[tuple[int, str]]
) -> None:
    screen, clock = Screen(max(columns, 22), rows), Clock()
    progress = bars(screen, clock)
    digests = [f"sha256:{number:064x}" for number in range(len(sizes))]
    progress.layers(dict(zip(digests, sizes, strict=True)))
    for number, phase in steps:
        clock.now += 0.5
        place = number % len(sizes)
        progress.layer(digests[place], phase, sizes[place] // 2)
    progress.say("note")
    progress.close()
    assert screen.lines.count("note") == 1


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**13), st.integers(1, 10**13), st.integers(1, 200))
def test_a_bar_keeps_its_width(received: int, size: int, width: int) -> None:
    assert len(bar(A, "fetching", min(received, size), size, width)) <= width


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**15))
def test_sizes_are_short(count: int) -> None:
    assert len(format_bytes(count)) <= 10


def test_remaining_times() -> None:
    assert format_remaining(7200, 1.0) == "2 h 00 min left"


def test_the_kind_fits_the_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main, other = pty.openpty()
    with os.fdopen(other, "w") as terminal, (tmp_path / "file").open("w") as file:
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(progress_for(terminal), BarProgress)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(progress_for(terminal), PlainProgress)
        assert isinstance(progress_for(file), PlainProgress)
    os.close(main)
    assert isinstance(progress_for(sys.__stderr__ if not sys.__stderr__ else io.StringIO()), PlainProgress)


def test_nobody_looks() -> None:
    drive(NoProgress(), Clock())
