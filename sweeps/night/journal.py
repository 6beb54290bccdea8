"""The journal of a night: JSON lines that one process appends, synced to the disk, whole or cut at the next start."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perception.errors import UserError
from perception.run_folder import sync_folder
from sweeps.night.events import Event, JobPlanned, from_row, to_row

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Tail:
    """What a journal ends with."""

    num_whole_bytes: int
    num_cut_bytes: int
    """Of a line that a killed process had only half written."""


class Journal:
    """Open for appending; there must be one writer (the night's lock sees to that)."""

    def __init__(self, path: Path) -> None:
        """Make it, or open it and cut a half-written last line; `cut_bytes` says how much that was."""
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            tail = _tail(path)
            if tail.num_cut_bytes:
                os.ftruncate(descriptor, tail.num_whole_bytes)
                os.fsync(descriptor)
            sync_folder(path.parent)
        except OSError as error:
            raise UserError(f"{path}: cannot be opened ({error.strerror}); give another --root") from None
        self.cut_bytes = tail.num_cut_bytes
        self._descriptor = descriptor
        self._size = tail.num_whole_bytes

    def append(self, events: Sequence[Event]) -> None:
        """All of them with one sync; afterwards they are on the disk, as is all that was appended before.

        Plans alone are not forced there, since a thousand are drawn up at once: what follows from them, their
        announcement, is. Of those that a power cut takes the search still knows the trials, and they are planned again.
        Raises UserError where they cannot be written, and takes back what was written of them.
        """
        if not events:
            return
        data = b"".join(json.dumps(to_row(event), ensure_ascii=False).encode() + b"\n" for event in events)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._size + written)
            if not all(isinstance(event, JobPlanned) for event in events):
                os.fdatasync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); make room there, then go on with --resume"
            ) from None
        self._size += len(data)

    @property
    def size(self) -> int:
        """Bytes; it grows with every event."""
        return self._size

    def close(self) -> None:
        os.close(self._descriptor)


class JournalReader:
    """Reads what has come since the last call; for whoever looks on while the controller writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._num_lines = 0

    def read(self) -> Iterator[Event]:
        """Whole lines only: one that is being written comes with the next call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); is it a night of this root?") from None
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self._num_lines += 1
            yield _parse(line, f"{self.path}: line {self._num_lines}")


def read_journal(path: Path) -> list[Event]:
    """All whole lines; a half-written last one is left out."""
    return list(JournalReader(path).read())


def _parse(line: bytes, where: str) -> Event:
    try:
        row = json.loads(line)
    except ValueError:
        raise UserError(
            f"{where}: not JSON, and not the last line, so no killed process left it: the file was damaged; "
            "put back a copy, or begin another night"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object; put back a copy of the file, or begin another night")
    return from_row(row, where)


def _tail(path: Path) -> Tail:
    """Where the last whole line ends: lines are JSON objects, so a whole one ends in `}` and a newline."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = size
        while end:
            begin = max(0, end - _CHUNK_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return _without_torn_line(path, begin + newline + 1, size)
            end = begin
    return Tail(0, size)


def _without_torn_line(path: Path, end: int, size: int) -> Tail:
    """A power cut can leave a last line of the right length whose content never reached the disk: it goes too."""
    with path.open("rb") as file:
        begin = end - 1
        found = -1
        while begin and found < 0:
            chunk_begin = max(0, begin - _CHUNK_BYTES)
            file.seek(chunk_begin)
            found = file.read(begin - chunk_begin).rfind(b"\n")
            begin = chunk_begin
        last_begin = begin + found + 1 if found >= 0 else 0
        file.seek(last_begin)
        line = file.read(end - last_begin)
    try:
        json.loads(line)
    except ValueError:
        return Tail(last_begin, size - last_begin)
    return Tail(end, size - end)
