"""The record of a run's generations, `generations.json` in its folder: each launch of its ranks is one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perception.run_folder import write_json


@dataclass(frozen=True)
class Generation:
    """One launch of a run's ranks. A run has several where ranks left or joined, and where it was resumed."""

    ranks: int
    global_batch: int
    batch_size_per_rank: int
    accumulation: int
    first_step: int
    last_step: int | None = None
    """The last that counts: those after it were trained again. Below `first_step`: none; None while it runs."""
    cause: str = ""
    """Why it ended; empty while it runs."""
    ended_unix_seconds: float | None = None
    """When a rank died or the last step ended; None where nobody saw it."""
    first_step_unix_seconds: float | None = None
    """When its first step ended."""
    downtime_seconds: float | None = None
    """From the end of the generation before to the end of this one's first step."""


def generations_file(run_folder: Path) -> Path:
    return run_folder / "generations.json"


def read_generations(run_folder: Path) -> list[Generation]:
    """Oldest first; none where the file is missing or not readable."""
    try:
        return [Generation(**entry) for entry in json.loads(generations_file(run_folder).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def begin_generation(run_folder: Path, new: Generation) -> None:
    """Append `new`; what earlier ones did after the step before its first does not count."""
    taken_up = new.first_step - 1
    earlier = []
    for old in read_generations(run_folder):
        last = taken_up if old.last_step is None else min(old.last_step, taken_up)
        cause = old.cause or "ended without a word: killed, or its host went down"
        earlier.append(replace(old, last_step=max(last, old.first_step - 1), cause=cause))
    _write(run_folder, [*earlier, new])


def record_first_step(run_folder: Path) -> float | None:
    """The last generation trains; returns its downtime in seconds, None for the first or where it is not known."""
    *earlier, last = read_generations(run_folder)
    now = time.time()
    ended = earlier[-1].ended_unix_seconds if earlier else None
    last = replace(last, first_step_unix_seconds=now, downtime_seconds=None if ended is None else now - ended)
    _write(run_folder, [*earlier, last])
    return last.downtime_seconds


def end_generation(run_folder: Path, cause: str, ended_unix_seconds: float, last_step: int | None = None) -> None:
    """Record why and when the last generation ended, and its last step where that is known."""
    every = read_generations(run_folder)
    if every:
        last = replace(every[-1], cause=cause, ended_unix_seconds=ended_unix_seconds, last_step=last_step)
        _write(run_folder, [*every[:-1], last])


def generations_json(run_folder: Path) -> list[dict[str, Any]]:
    """For `result.json`."""
    return [asdict(generation) for generation in read_generations(run_folder)]


def _write(run_folder: Path, generations: Sequence[Generation]) -> None:
    write_json(generations_file(run_folder), [asdict(generation) for generation in generations])
