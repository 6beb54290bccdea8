"""The journal: what was appended is read again, whatever a kill or a full disk left at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.job import JobStatus
from sweeps.night import events
from sweeps.night.events import (
    AttemptEnded,
    BestChosen,
    CancelAsked,
    ClosingBegun,
    ControllerStarted,
    ControllerStopped,
    EndAsked,
    Event,
    JobConcluded,
    JobPlanned,
    Measured,
    ModelDone,
    NightClosed,
    NightOpened,
    NodeExcluded,
    Noted,
    StatusSeen,
    StopOrdered,
    SubmissionAnnounced,
    Submitted,
    TwinFailed,
)
from sweeps.night.journal import Journal, JournalReader, read_journal
from sweeps.record import JobRecord, NightRecord

NIGHT = NightRecord("2026-11-30", "demo", "name = 'demo'\n", "local", 4, "4 x fake", "", "abc", 1.5, notes=("a", "b"))
RECORD = JobRecord("2026-11-30", "lane-0001", "demo", "lane", "trial", 3, parameters={"optim.lr": 1e-3}, nodes=("n0",))
STATUS = JobStatus("x.lane-0001.1", "17", "ended", "exit code 1", 1, ("n0", "n1"), 2.0, 3.0, 1.0, 2)
ENDED = AttemptEnded(9.0, "lane-0001", 1, "conclude", "code", "ValueError", "n0", 8.0, 2.0, 500)
EVERY: list[Event] = [
    NightOpened(1.0, NIGHT),
    ControllerStarted(2.0, 77, "host"),
    ControllerStopped(2.5, "SIGTERM", 1.25),
    JobPlanned(3.0, "lane-0001", "lane", "trial", ("python", "-m", "x"), "hash", 3, {"optim.lr": 1e-3}),
    SubmissionAnnounced(4.0, "lane-0001", 1, "x.lane-0001.1", ("n7",)),
    Submitted(5.0, "lane-0001", 1, "17"),
    StatusSeen(6.0, "lane-0001", 1, STATUS, 4.0, 100, 7.0),
    Measured(7.0, "lane-0001", 100, 0.25),
    StopOrdered(7.5, "lane-0001", "asha"),
    CancelAsked(8.0, "lane-0001", "deadline"),
    EndAsked(8.5, "lane-0001", 1),
    ENDED,
    JobConcluded(10.0, RECORD, ENDED),
    JobConcluded(10.0, RECORD),
    TwinFailed(11.0, "lane-0002"),
    NodeExcluded(12.0, "n0", "ECC"),
    Noted(13.0, "a \u2028 line – ünïcode"),
    ModelDone(14.0, "lane", "budget"),
    BestChosen(14.5, "lane", "lane-0001"),
    ClosingBegun(15.0, "deadline"),
    NightClosed(16.0, NIGHT),
]


def test_every_kind_of_event_is_in_the_list() -> None:
    assert {type(event) for event in EVERY} == set(events.KINDS.values())


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(EVERY[:5])
    journal.append([])
    journal.append(EVERY[5:])
    journal.close()
    assert read_journal(tmp_path / "journal.jsonl") == EVERY
    assert journal.size == (tmp_path / "journal.jsonl").stat().st_size
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["event"] for line in lines[:-1]] == [type(event).__name__ for event in EVERY]


@given(cut=st.integers(0, 4000), garbage=st.sampled_from([b"", b"\0\0\0", b'{"event": "Not', b"\0" * 50 + b"\n"]))
@settings(max_examples=60, deadline=None)
def test_cut_anywhere_it_is_a_prefix(cut: int, garbage: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whole lines stay, half a line goes, and what is appended afterwards is readable."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path)
    journal.append(EVERY)
    journal.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(min(cut, size))
        file.seek(0, 2)
        file.write(garbage)
    again = Journal(path)
    kept = read_journal(path)
    assert kept == EVERY[: len(kept)]
    assert again.cut_bytes + again.size == min(cut, size) + len(garbage)
    again.append([Noted(99.0, "after")])
    again.close()
    assert read_journal(path) == [*kept, Noted(99.0, "after")]


def test_a_reader_that_looks_on_takes_each_event_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    reader = JournalReader(path)
    seen: list[Event] = []
    for event in EVERY:
        journal.append([event])
        seen += reader.read()
    # A line that is being written is left for the next call.
    with path.open("ab") as file:
        file.write(b'{"event": "No')
    assert not list(reader.read())
    journal.close()
    assert seen == EVERY


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json\n", "line 2: not JSON"),
        (b"[1]\n", "line 2: not a JSON object"),
        (b'{"event": "FutureEvent", "utc": 1}\n', 'event "FutureEvent" is unknown'),
        (b'{"event": "Noted", "utc": 1, "text": "x", "colour": 1}\n', "field colour of Noted is unknown"),
        (b'{"event": "Noted"}\n', "not an event"),
    ],
)
def test_damage_in_the_middle_is_named(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    good = Journal(path)
    good.append([Noted(1.0, "first")])
    good.close()
    path.write_bytes(path.read_bytes() + line + path.read_bytes())
    with pytest.raises(UserError, match=words):
        read_journal(path)


def test_a_full_disk_is_one_line_and_the_journal_stays_whole(small_disk: Path) -> None:
    path = small_disk / "journal.jsonl"
    journal = Journal(path)
    journal.append(EVERY[:3])
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(b"x" * 4096):
            pass
    long = [Noted(1.0, "y" * 1000)] * 100
    with pytest.raises(UserError, match=r"journal\.jsonl: cannot be written \(No space left.*--resume"):
        journal.append(long)
    assert read_journal(path) == EVERY[:3]
    filler.unlink()
    journal.append([Noted(2.0, "room again")])
    assert read_journal(path) == [*EVERY[:3], Noted(2.0, "room again")]
    journal.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be opened"):
        Journal(tmp_path / "none" / "journal.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_journal(tmp_path / "journal.jsonl")


def test_events_are_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def watched(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", watched)
    journal = Journal(tmp_path / "journal.jsonl")
    batches: Sequence[Sequence[Event]] = [EVERY[:2], EVERY[2:7]]
    for batch in batches:
        journal.append(batch)
    journal.close()
    # One sync a batch, after all of it was written.
    assert len(synced) == 2 and synced[-1] == (tmp_path / "journal.jsonl").stat().st_size
