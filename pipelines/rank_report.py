"""From how each rank ended: one exit code, and what to show last."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from perception.distributed import failure, stall_watch

TAIL_LINES = 20
INNOCENT = (0, failure.EXIT_PREEMPTED)

# A rank whose neighbour died meets one of these a moment later: it is not the cause.
_CONSEQUENCES = (
    "HorovodInternalError",
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "DistNetworkError",
    "DistBackendError",
    "gloo/transport",
    "is gone: its process has ended",
    stall_watch.WAITED_TOO_LONG,
)


class End(Enum):
    STATUS = auto()
    """The process ran and ended."""
    VANISHED = auto()
    """It ended with an innocent exit code, but not by an orderly shutdown."""
    NOT_STARTED = auto()


@dataclass(frozen=True)
class RankEnd:
    kind: End
    status: int
    """Exit code, or minus the signal's number."""
    time: float
    """On the system's monotonic clock, in seconds."""
    by_launcher: bool = False
    """After the launcher had begun to use force."""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind is not End.STATUS or self.status not in INNOCENT


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    lines: tuple[str, ...] = ()
    """For standard error."""


def conclude(ends: Sequence[RankEnd | None], folder: Path, stop_signals: Sequence[signal.Signals]) -> Outcome:
    """One outcome for all ranks, the dead rank's own words last. `ends` is in order of rank."""
    settled = {rank: end for rank, end in enumerate(ends) if end is not None}
    if stop_signals.count(signal.SIGINT) > 1:
        return Outcome(128 + signal.SIGINT, ("killed: no checkpoint was written by this stop",))
    if not any(end.failed for end in settled.values()):
        codes = {end.status for end in settled.values()}
        if len(codes) == 1:
            return Outcome(codes.pop())
    causes = [rank for rank, end in settled.items() if end.failed and not end.by_launcher]
    stopped = [rank for rank in causes if _stopped_by(settled[rank], stop_signals)]
    causes = [rank for rank in causes if rank not in stopped]
    if not causes and stopped:
        number = _stopped_by(settled[stopped[0]], stop_signals)
        assert number is not None
        return Outcome(128 + number, (f"stopped by {number.name} before the ranks could checkpoint",))
    if not causes:
        shown = ", ".join(f"rank {rank}: {end.status}" for rank, end in settled.items())
        return Outcome(1, (f"the ranks did not end alike (exit codes: {shown}); logs: {folder}",))
    cause = min(causes, key=lambda rank: (is_consequence(rank, folder), settled[rank].time, rank))
    if settled[cause].status == failure.EXIT_USER_ERROR:
        reporting = [rank for rank in causes if settled[rank].status == failure.EXIT_USER_ERROR]
        return Outcome(failure.EXIT_USER_ERROR, _user_error(reporting, folder))
    return _crash(cause, len(ends), settled[cause], folder)


def _stopped_by(end: RankEnd, stop_signals: Sequence[signal.Signals]) -> signal.Signals | None:
    """The forwarded signal that ended the rank, having met no handler."""
    for number in stop_signals:
        if end.status in (-number, 128 + number):
            return number
    return None


def is_consequence(rank: int, folder: Path) -> bool:
    """Whether the rank ended because another one had, or did not answer."""
    lines = _read_lines(failure.traceback_file(folder, rank)) or _read_lines(failure.log_file(folder, rank))
    return any(sign in line for line in lines[-3:] for sign in _CONSEQUENCES)


def _user_error(reporting: Sequence[int], folder: Path) -> tuple[str, ...]:
    """The message, once; what rank 0 printed itself was seen already."""
    for rank in reporting:
        lines = _read_lines(failure.traceback_file(folder, rank))
        if lines:
            return tuple(lines)
    if 0 in reporting:
        return ()
    return tuple(_read_lines(failure.log_file(folder, reporting[0]))[-TAIL_LINES:])


def _crash(rank: int, ranks: int, end: RankEnd, folder: Path) -> Outcome:
    """The last output of the rank, its traceback, and a line that says what became of it."""
    who = f"rank {rank} of {ranks}"
    if end.kind is End.NOT_STARTED:
        tail = _read_lines(folder / "mpirun.log")[-TAIL_LINES:]
        return Outcome(1, (*tail, f"{who} could not be started: {end.detail}; logs: {folder}"))
    words = _read_lines(failure.traceback_file(folder, rank))
    stacks = [
        line for line in _read_lines(failure.fault_file(folder, rank)) if not line.startswith("Extension modules")
    ]
    log = _read_lines(failure.log_file(folder, rank))[-TAIL_LINES:]
    shown: list[str] = []
    if log and not words:
        shown += [f"last output of {who}:", *log]
    shown += [f"{who} failed:", *(words or stacks)] if words or stacks else []
    if end.status < 0:
        number = -end.status
        hint = "; the kernel does so where memory runs out" if number == signal.SIGKILL else ""
        return Outcome(128 + number, (*shown, f"{who} died of signal {number} ({_name(number)}){hint}; logs: {folder}"))
    if end.kind is End.VANISHED:
        what = f"vanished with exit code {end.status}, without an orderly end"
    else:
        what = f"ended with exit code {end.status}"
    reason = f": {words[-1]}" if words else ""
    return Outcome(1, (*shown, f"{who} {what}{reason}; logs: {folder}"))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
