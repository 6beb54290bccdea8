"""Checkpoints: atomic, complete, checked by hash when read; the last good ones are kept.

`step-00000500.pt` and `step-00000500.json` with its sha256 are written to temporary names,
synced, then renamed in this order. A checkpoint counts only if its JSON does and the hash
holds, so a truncated file is passed over for the one before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perception.errors import UserError
from perception.run_folder import sync_folder

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    sha256: str
    step: int
    samples: int
    metric: float | None
    """The primary metric, where it was evaluated at this step."""

    @property
    def record(self) -> Path:
        return self.path.with_suffix(".json")


def save_checkpoint(folder: Path, step: int, samples: int, content: dict[str, Any], metric: float | None) -> Checkpoint:
    """Write a checkpoint; afterwards it is complete or not there at all.

    Raises UserError on a full disk or a missing permission; earlier checkpoints stay intact.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    data = buffer.getbuffer()
    sha256 = hashlib.sha256(data).hexdigest()
    checkpoint = Checkpoint(folder / f"step-{step:08d}.pt", sha256, step, samples, metric)
    record = json.dumps({"sha256": sha256, "step": step, "samples": samples, "metric": metric}, indent=2) + "\n"
    new_file, new_record = (folder / f".{path.name}.{os.getpid()}" for path in (checkpoint.path, checkpoint.record))
    try:
        # Both are on the disk before either gets its name, so a full disk changes nothing.
        _write_synced(new_file, data)
        _write_synced(new_record, record.encode())
        new_file.replace(checkpoint.path)
        new_record.replace(checkpoint.record)
    except OSError as error:
        with contextlib.suppress(OSError):
            if not checkpoint.record.exists():
                checkpoint.path.unlink(missing_ok=True)
        raise UserError(_write_failure(folder, len(data), error)) from None
    finally:
        for temporary in (new_file, new_record):
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    sync_folder(folder)
    return checkpoint


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, tensors on the CPU; nothing in it is executed.

    Raises UserError for a missing, truncated or foreign file and for another format version.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(f"{path}: not a readable checkpoint ({type(error).__name__}); take an earlier one") from None
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"{path}: not a checkpoint of this project")
    if content["format"] != FORMAT:
        raise UserError(f"{path}: checkpoint format {content['format']}, this version reads {FORMAT}: use its version")
    return content


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Checkpoints that have a record, oldest first; their files are not read."""
    found = []
    for record in sorted(folder.glob("step-*.json")):
        try:
            raw = json.loads(record.read_text())
            checkpoint = Checkpoint(
                record.with_suffix(".pt"), raw["sha256"], int(raw["step"]), int(raw["samples"]), raw["metric"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(checkpoint)
    return found


def latest_good(folder: Path, warn: Callable[[str], None]) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest checkpoint whose file is whole, with its content; `warn` is told of each passed over.

    Raises UserError where it is whole but of another format version.
    """
    every = list_checkpoints(folder)
    for path in sorted(set(folder.glob("step-*.pt")) - {checkpoint.path for checkpoint in every}):
        warn(f"{path}: has no readable record (its writing was interrupted); passed over")
    for checkpoint in reversed(every):
        problem = _problem(checkpoint)
        if problem is None:
            return checkpoint, load_checkpoint(checkpoint.path)
        warn(f"{checkpoint.path}: {problem}; taking the checkpoint before it")
    return None


def set_aside_damaged(folder: Path, taken: Checkpoint) -> list[Path]:
    """Rename checkpoints newer than the one a run resumes from: passed over, they must not count as newest or best.

    Returns their new paths; whoever wants to can look at them.
    """
    moved = []
    for checkpoint in list_checkpoints(folder):
        if checkpoint.step > taken.step:
            aside = checkpoint.path.with_suffix(".damaged")
            if checkpoint.path.exists():
                checkpoint.path.replace(aside)
            checkpoint.record.unlink(missing_ok=True)
            moved.append(aside)
    return moved


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """The one with the highest metric; the newest where none was evaluated; None in an empty folder."""
    every = list_checkpoints(folder)
    evaluated = [checkpoint for checkpoint in every if checkpoint.metric is not None]
    if evaluated:
        return max(evaluated, key=lambda checkpoint: (checkpoint.metric or 0.0, checkpoint.step))
    return every[-1] if every else None


def remove_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best; what killed runs left half-written too."""
    every = list_checkpoints(folder)
    best = best_checkpoint(folder)
    for checkpoint in every[:-keep]:
        if best is None or checkpoint.path != best.path:
            checkpoint.record.unlink(missing_ok=True)
            checkpoint.path.unlink(missing_ok=True)
    without_record = [path for path in folder.glob("step-*.pt") if not path.with_suffix(".json").exists()]
    for leftover in [*folder.glob(".step-*"), *without_record]:
        leftover.unlink(missing_ok=True)


def _problem(checkpoint: Checkpoint) -> str | None:
    try:
        with checkpoint.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if found == checkpoint.sha256 else "is damaged or truncated (its sha256 differs from its record)"


def _write_synced(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_failure(folder: Path, num_bytes: int, error: OSError) -> str:
    last = list_checkpoints(folder)
    kept = f"the last good checkpoint is {last[-1].path.name}" if last else "no earlier checkpoint exists"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause = f"no space left for a checkpoint of {num_bytes / 1e6:.0f} MB"
    else:
        cause = f"the checkpoint cannot be written ({error.strerror})"
    return f"{folder}: {cause}; {kept}. Make room or permission there, then go on with --resume"
