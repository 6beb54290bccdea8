"""Seats of this host, as all controllers on it share them: a file each, locked for as long as a job uses the seat.

The lock belongs to the open file, which the job's keeper inherits: the kernel lets go of it when the keeper has ended,
however that came about. Nothing is left to be cleaned up, and nobody has to be asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from perception.errors import UserError
from sweeps.launchers.launcher import LauncherError

HOST_FOLDER = Path("/tmp/roadfuse-seats")
"""Of all users: whatever their TMPDIR is. A file in it may be removed whenever nobody holds its lock."""


class Claims:
    """The slots of one controller that it has claimed and given to no job yet."""

    def __init__(self, folder: Path, seats: Sequence[Sequence[str]]) -> None:
        """`seats` of each slot."""
        self._folder = folder
        self._seats = seats
        self._locks: dict[int, list[int]] = {}
        """Slot → open, locked files of its seats."""
        self._turn: list[int] = []
        """Lock of the one controller that may keep slots: two could wait for each other's."""

    def take(self, slots: Iterable[int]) -> list[int]:
        """Claim those of these that no job on this host uses; returns all that are claimed now."""
        for slot in sorted(slots):
            locks = self._locks.get(slot) or claim(self._folder, self._seats[slot])
            if locks:
                self._locks[slot] = locks
        return sorted(self._locks)

    def locks(self, slots: Iterable[int]) -> list[int]:
        return [lock for slot in slots for lock in self._locks[slot]]

    def hand_over(self, slots: Iterable[int]) -> None:
        """A keeper has inherited the locks of these slots and alone holds them from now on."""
        for slot in slots:
            release(self._locks.pop(slot))

    def settle(self, keep: bool) -> None:
        """Let go of what is left; `keep`: for a job that has waited long for more slots than are free.

        Else the small jobs of other controllers would take one by one what a wide job waits for.
        """
        if keep and not self._turn:
            self._turn = claim(self._folder, ["turn"]) or []
        if keep and self._turn:
            return
        self.hand_over(list(self._locks))
        release(self._turn)
        self._turn = []


def claim(folder: Path, seats: Sequence[str]) -> list[int] | None:
    """Open, locked files of all of these seats; None where somebody else has one of them, and then none is held."""
    locks: list[int] = []
    try:
        for seat in seats:
            lock = _locked(folder / re.sub(r"[^A-Za-z0-9.-]", "_", seat))
            if lock is None:
                release(locks)
                return None
            locks.append(lock)
    except OSError as error:
        release(locks)
        if isinstance(error, (PermissionError, NotADirectoryError)):
            raise UserError(
                f"{folder}: seats of this host cannot be claimed there ({error.strerror}); "
                f"make it a folder that every user may write to: chmod 1777 {folder}"
            ) from None
        raise LauncherError(f"{folder}: seats of this host cannot be claimed now ({error.strerror})") from error
    return locks


def release(locks: Iterable[int]) -> None:
    """Close them here; a keeper that inherited them still holds the seats."""
    for lock in locks:
        os.close(lock)


def _locked(path: Path) -> int | None:
    while True:
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            os.close(file)
            raise
        # Whoever cleans temporary folders removed it in between: the next one to come locks another file.
        os.close(file)


def _opened(path: Path) -> int:
    """For reading, which is enough for a lock: another user's file can be locked too."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o1777)
    with contextlib.suppress(FileExistsError):
        file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.fchmod(file, 0o644)  # Whatever this user's umask is.
        return file
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
