"""What a run tells while it runs: metrics.jsonl, TensorBoard, progress. One rank writes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch.utils.tensorboard import SummaryWriter

from perception.errors import UserError
from perception.gpu_follower import GpuFollower, NoFollower
from perception.run_folder import RunFolder, write_atomic


class Telemetry(Protocol):
    def begin(self, start_step: int) -> None:
        """Open the run folder's files; lines of steps after `start_step` (lost with a killed run) go."""

    def say(self, line: str) -> None:
        """A line for people, once for all ranks."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append a step's values to metrics.jsonl and TensorBoard."""

    def gpu_values(self) -> dict[str, float]:
        """What the GPUs that the first rank sees did since the last call; {} without GPUs."""

    def progress(self, samples: int, num_samples: int, images_per_second: float, loss: float) -> None: ...

    def close(self) -> None: ...


class SilentTelemetry:
    """For all ranks but the first."""

    def begin(self, start_step: int) -> None:
        return None

    def say(self, line: str) -> None:
        return None

    def log(self, step: int, values: dict[str, Any]) -> None:
        return None

    def gpu_values(self) -> dict[str, float]:
        return {}

    def progress(self, samples: int, num_samples: int, images_per_second: float, loss: float) -> None:
        return None

    def close(self) -> None:
        return None


class RunTelemetry:
    """Writes to a run folder and to the terminal: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, folder: RunFolder, gpus: GpuFollower | None = None) -> None:
        """Ready to `say`; `begin` opens the files. `gpus` is closed with it."""
        self._folder = folder
        self._gpus = gpus or NoFollower()
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None
        self._on_terminal = sys.stderr.isatty()
        self._last_line = 0.0
        self._bar_open = False

    def begin(self, start_step: int) -> None:
        dropped = keep_steps_until(self._folder.metrics, start_step)
        if dropped:
            self.say(f"metrics.jsonl: {dropped} lines past step {start_step} or half-written dropped")
        try:
            self._file = self._folder.metrics.open("a", encoding="utf-8")
            # purge_step hides what a killed run logged past its last checkpoint.
            self._events = SummaryWriter(str(self._folder.events), purge_step=start_step + 1)
        except OSError as error:
            raise UserError(f"{self._folder.metrics}: cannot be written ({error.strerror}): make room there") from None

    def say(self, line: str) -> None:
        self._end_bar()
        print(line, flush=True)

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self._file is None or self._events is None:
            raise RuntimeError("log before begin")
        try:
            self._file.write(json.dumps({"step": step, **_finite(values)}) + "\n")
            self._file.flush()
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(name, value, step)
        except OSError as error:
            raise UserError(
                f"{self._folder.metrics}: cannot be written ({error.strerror}): make room there, then --resume"
            ) from None

    def gpu_values(self) -> dict[str, float]:
        return self._gpus.take()

    def progress(self, samples: int, num_samples: int, images_per_second: float, loss: float) -> None:
        left = (num_samples - samples) / images_per_second if images_per_second > 0 else math.inf
        text = (
            f"{samples / num_samples:6.1%}  {samples}/{num_samples} images  {images_per_second:.1f} images/s  "
            f"loss {loss:.4f}  {_clock(left)} left"
        )
        if self._on_terminal:
            width = 24
            done = int(width * samples / num_samples)
            print(f"\r[{'#' * done}{'.' * (width - done)}] {text}\x1b[K", end="", file=sys.stderr, flush=True)
            self._bar_open = True
        elif time.monotonic() - self._last_line >= 10 or samples >= num_samples:
            self._last_line = time.monotonic()
            print(text, flush=True)

    def close(self) -> None:
        self._end_bar()
        self._gpus.close()
        # What a full disk refuses was reported by `log`; a second error here would hide the first.
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()

    def _end_bar(self) -> None:
        if self._bar_open:
            print(file=sys.stderr, flush=True)
            self._bar_open = False


def keep_steps_until(path: Path, step: int) -> int:
    """Drop lines of later steps, and a half-written last line, from a metrics.jsonl; returns how many."""
    if not path.exists():
        return 0
    kept = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and record.get("step", 0) <= step:
            kept.append(line)
    write_atomic(path, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept)


def memory_bytes() -> int:
    """Resident memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: write it as a text that says so."""
    return {
        name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
