"""Evaluations of a running job, read from its metrics.jsonl as they come: each byte once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
            found = _evaluation(line, key)
            if found is not None and found[0] > self.last_samples:
                self.last_samples = found[0]
                yield found


def _evaluation(line: bytes, key: str) -> tuple[int, float] | None:
    """None for a line that is damaged, or whose value is not finite (telemetry writes such a one as a text)."""
    try:
        row = json.loads(line)
        samples, value = int(row["samples"]), row[key]
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return samples, float(value)
