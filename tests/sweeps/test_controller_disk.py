"""What a controller forces to the disk, and what one that was killed leaves there for the next."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from sweeps.night.events import JobPlanned, SubmissionAnnounced
from sweeps.night.journal import Journal, read_journal
from sweeps.search.search import Search, open_search
from sweeps.search.storage import STALE_LOCK_SECONDS, Storage
from tests.sweeps.night_cases import make_plan


def opened(path: Path) -> Search:
    space = make_plan({}).models[0].space
    return open_search(space, ["maximize"], Storage(journal=path), "s", "random", owner="night")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """File and size of each that is forced to the disk."""
    sizes: list[tuple[str, int]] = []
    real = os.fdatasync

    def watched(descriptor: int) -> None:
        sizes.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", watched)
    return sizes


def test_a_suggestion_or_result_is_forced_to_the_disk_once_and_as_a_whole(
    tmp_path: Path, synced: list[tuple[str, int]]
) -> None:
    path = tmp_path / "search" / "journal.log"
    search = opened(path)
    for _ in range(3):
        suggestion = search.ask()
        assert suggestion is not None
        assert synced == [(str(path), path.stat().st_size)]
        synced.clear()
        search.report(suggestion.number, 100, 0.5)
        search.tell(suggestion.number, [0.5], "complete")
        assert len(synced) == 2 and synced[-1] == (str(path), path.stat().st_size)
        synced.clear()
    assert search.tell(0, [0.5], "complete") == "complete"
    assert not synced, "nothing was written"
    again = opened(path)
    assert again.trials() == search.trials() and len(again.trials()) == 3


def test_plans_are_forced_to_the_disk_with_their_announcement(tmp_path: Path, synced: list[tuple[str, int]]) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    plan = JobPlanned(1.0, "lane-0001", "lane", "trial", ("python",), "hash")
    journal.append([plan])
    journal.append([plan, plan])
    assert not synced
    # A killed controller has lost none of it.
    assert read_journal(journal.path) == [plan] * 3
    journal.append([SubmissionAnnounced(2.0, "lane-0001", 1, "x.lane-0001.1")])
    assert synced == [(str(journal.path), journal.path.stat().st_size)]
    journal.append([plan, SubmissionAnnounced(2.0, "lane-0001", 1, "x.lane-0001.1")])
    assert len(synced) == 2
    journal.close()


@pytest.mark.slow
def test_the_lock_of_a_controller_that_was_killed_just_now_is_waited_for_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    lock = path.with_name("journal.log.lock")
    lock.touch()
    began = time.monotonic()
    search = opened(path)
    assert search.ask() is not None
    assert time.monotonic() - began < STALE_LOCK_SECONDS + 2
    assert search.repairs == (f"{path}: lock of a controller that was killed is removed",)
    # One that is let go of meanwhile was of somebody who lives.
    lock.touch()
    timer = threading.Timer(0.2, lock.unlink)
    timer.start()
    assert opened(path).repairs == ()
    timer.join()
