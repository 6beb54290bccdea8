"""Which of several ranks that failed is shown: the one that the others met the end of, or waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from perception.distributed import failure
from perception.distributed.stall_watch import StallWatch
from pipelines.rank_report import End, RankEnd, conclude, is_consequence


def waited_too_long(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the stall watch really says, so that its words and what is looked for do not drift apart."""
    told: list[str] = []
    watch = StallWatch(0, 1, timeout_seconds=1e-9)
    monkeypatch.setattr(failure, "end_process", lambda rank, words: told.append(words))
    with watch.waiting():
        watch.look(None)
    return told[0]


@pytest.mark.parametrize("by", ["is gone", "waited"])
def test_the_guilty_rank_is_named_though_it_ended_later(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "RuntimeError: rank 1 is gone: its process has ended"
    words = gone if by == "is gone" else waited_too_long(monkeypatch)
    failure.traceback_file(tmp_path, 0).write_text(f"{words}\n")
    failure.traceback_file(tmp_path, 1).write_text("ValueError: broken\n")
    assert is_consequence(0, tmp_path) and not is_consequence(1, tmp_path)
    outcome = conclude([RankEnd(End.STATUS, 1, 1.0), RankEnd(End.STATUS, 1, 2.0)], tmp_path, ())
    assert outcome.lines[-1].startswith("rank 1 of 2 ended with exit code 1: ValueError: broken")


def test_who_waited_is_shown_where_nobody_else_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = waited_too_long(monkeypatch)
    failure.traceback_file(tmp_path, 0).write_text(f"{words}\n")
    killed = RankEnd(End.STATUS, -9, 9.0, by_launcher=True)
    outcome = conclude([RankEnd(End.STATUS, 1, 1.0), killed], tmp_path, ())
    assert outcome.exit_code == 1 and words in outcome.lines[-1]
