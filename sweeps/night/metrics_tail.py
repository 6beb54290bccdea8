"""Evaluations of a job, from its metrics.jsonl: as they come, each byte once, or when it has ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20
"""At a time: a file of days is read over several calls."""


@dataclass
class MetricsTail:
    path: Path
    metric: str
    """Without its prefix `validation/`."""
    last_samples: int = -1
    """Evaluations up to here are known already, also by an earlier controller."""
    _offset: int = 0
    _inode: int = field(default=0, repr=False)

    def read(self) -> Iterator[tuple[int, float]]:
        """(samples, value) of evaluations that are new, each number of samples once, whole lines only.

        A run that is resumed writes its file anew, without what it will compute again: it is then read from the start.
        """
        try:
            status = self.path.stat()
        except OSError:
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        if status.st_size == self._offset:
            return
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        key = f"validation/{self.metric}"
        # Most lines are of steps, not of evaluations: they need not be parsed.
        marked = key.encode()
        for line in whole.split(b"\n"):
            if marked not in line:
                continue
            found = _evaluation(_object(line), key)
            if found is not None and found[0] > self.last_samples:
                self.last_samples = found[0]
                yield found


def first_reached(path: Path, metric: str, value: float) -> tuple[float, int] | None:
    """(seconds, samples) of the first evaluation that reached the value; None where none did."""
    marked = f"validation/{metric}".encode()
    try:
        with path.open("rb") as file:
            rows = [_object(line) for line in file if marked in line]
    except OSError:
        return None
    for row in rows:
        found = _evaluation(row, f"validation/{metric}")
        if found is not None and found[1] >= value and _is_finite(row.get("seconds")):
            return float(row["seconds"]), found[0]
    return None


def _object(line: bytes) -> dict[str, Any]:
    """{} for a line that is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _evaluation(row: dict[str, Any], key: str) -> tuple[int, float] | None:
    """None for a value that is not finite (telemetry writes such a one as a text)."""
    try:
        samples, value = int(row["samples"]), row[key]
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return (samples, float(value)) if _is_finite(value) else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
