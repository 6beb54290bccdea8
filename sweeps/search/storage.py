"""Where a search keeps its trials: a journal file of one controller, or a PostgreSQL database of several."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from perception.errors import UserError

STALE_LOCK_SECONDS = 2.0
"""A lock is held for milliseconds; an older one is of a process that was killed."""

_PAUSES_SECONDS = (0.2, 0.5, 1.0)
"""Before the tables of a database are looked for again, which another controller was making."""


@dataclass(frozen=True)
class Storage:
    """Either of the two; the URL, which holds a password, is never shown."""

    journal: Path | None = None
    url: str = field(default="", repr=False)

    @property
    def shared(self) -> bool:
        return self.journal is None


class JournalFile(JournalFileBackend):
    """Optuna's journal of one controller, forced to the disk once a suggestion or result and not once a value.

    A process that is killed loses nothing that it wrote. A power cut may take what `sync` has not seen: nobody has
    been told of that yet.
    """

    def __init__(self, path: Path) -> None:
        self._file = path
        self._file_lock = JournalFileOpenLock(str(path), grace_period=10)
        self._is_synced = True
        super().__init__(str(path), lock_obj=self._file_lock)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        # optuna-dashboard may write notes of people.
        self._file_lock.acquire()
        try:
            with self._file.open("ab") as file:
                file.write(lines.encode())
        finally:
            self._file_lock.release()
        self._is_synced = False

    def sync(self) -> None:
        if not self._is_synced:
            with self._file.open("rb") as file:
                os.fdatasync(file.fileno())
            self._is_synced = True


def choose_storage(
    kind: Literal["journal", "postgresql"], url_variable: str, journal: Path, environment: Mapping[str, str]
) -> Storage:
    """What the plan's [search] names. Raises UserError where the variable is missing or is of no PostgreSQL."""
    if kind == "journal":
        return Storage(journal=journal)
    url = environment.get(url_variable, "")
    if not url:
        raise UserError(
            f"search.storage = postgresql: environment variable {url_variable} is not set; "
            "give it as postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    scheme = url.partition("://")[0]
    if scheme.startswith("sqlite"):
        raise UserError(
            f"{url_variable}: SQLite is locked when several write to it: take a PostgreSQL URL, or storage = journal"
        )
    if scheme not in ("postgresql", "postgresql+psycopg"):
        raise UserError(f"{url_variable}: must begin with postgresql://, not {scheme[:20]}://")
    return Storage(url=url)


def prepare_journal(path: Path) -> list[str]:
    """Make its folder, cut a half-written end, remove a dead controller's lock; say what was done."""
    lines = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock")
        if _stays(lock):
            lock.unlink(missing_ok=True)
            lines.append(f"{path}: lock of a controller that was killed is removed")
        if path.exists():
            lines += _repair(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be prepared ({error.strerror})") from None
    return lines


def _stays(lock: Path) -> bool:
    """Whether nobody lives who would let go of it; waits as long as a lock may be held to find that out."""
    taken = _time_of(lock)
    if taken is None:
        return False
    deadline = time.monotonic() + STALE_LOCK_SECONDS - max(0.0, time.time() - taken)
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if _time_of(lock) != taken:
            return False
    return True


def _time_of(lock: Path) -> float | None:
    """When it was taken; None: it is free."""
    try:
        return lock.lstat().st_mtime
    except FileNotFoundError:
        return None


def _repair(path: Path) -> list[str]:
    """A journal ends in a whole line: what was written half when the power or the process went is cut off.

    Raises UserError for damage anywhere else, which no kill explains.
    """
    kept = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not _is_whole(line):
                if file.read(1):
                    raise UserError(f"{path}: line {number} is damaged; restore the file, or begin another night")
                break
            kept += len(line)
    lost = path.stat().st_size - kept
    if not lost:
        return []
    with path.open("r+b") as file:
        file.truncate(kept)
        os.fsync(file.fileno())
    return [f"{path}: {lost} bytes of a half-written last line are cut off"]


def _is_whole(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _open_database(url: str) -> RDBStorage:
    options = {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
    for pause_seconds in _PAUSES_SECONDS:
        try:
            return RDBStorage(url, engine_kwargs=options)
        except Exception as error:
            # Nights that begin together over an empty database all make its tables, and one of them is first.
            if type(error).__name__ not in ("IntegrityError", "ProgrammingError"):
                raise
            time.sleep(pause_seconds)
    return RDBStorage(url, engine_kwargs=options)


def open_storage(storage: Storage) -> tuple[BaseStorage, Callable[[], None], tuple[str, ...]]:
    """Open it, with what forces it to the disk and a line on each thing that was mended.

    Raises UserError where it is damaged or cannot be reached.
    """
    if storage.journal is not None:
        lines = prepare_journal(storage.journal)
        try:
            file = JournalFile(storage.journal)
            return JournalStorage(file), file.sync, tuple(lines)
        except OSError as error:
            raise UserError(f"{storage.journal}: cannot be opened ({error.strerror})") from None
    # psycopg is the driver that is installed; plain postgresql:// means another one.
    url = "postgresql+psycopg://" + storage.url.partition("://")[2]
    try:
        return _open_database(url), lambda: None, ()
    except ImportError:
        raise UserError("PostgreSQL needs sqlalchemy and psycopg: pip install sqlalchemy 'psycopg[binary]'") from None
    except Exception as error:
        if not type(error).__module__.startswith(("sqlalchemy", "psycopg")):
            raise
        # Only what the server said of itself: never the URL.
        raise UserError(
            f"the search's database cannot be used ({type(error).__name__}): check that it runs, and the URL's user, "
            "password and database"
        ) from None
