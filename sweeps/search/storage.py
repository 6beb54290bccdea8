"""Where a search keeps its trials: a journal file of one controller, or a PostgreSQL database of several."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from perception.errors import UserError

STALE_LOCK_SECONDS = 5.0
"""A lock is held for milliseconds; an older one is of a process that was killed."""


@dataclass(frozen=True)
class Storage:
    """Either of the two; the URL, which holds a password, is never shown."""

    journal: Path | None = None
    url: str = field(default="", repr=False)

    @property
    def shared(self) -> bool:
        return self.journal is None


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
        if lock.exists() and time.time() - lock.stat().st_mtime > STALE_LOCK_SECONDS:
            lock.unlink()
            lines.append(f"{path}: lock of a controller that was killed is removed")
        if path.exists():
            lines += _repair(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be prepared ({error.strerror})") from None
    return lines


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
