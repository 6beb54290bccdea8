"""`python -m pipelines` of which the first rank stands still after a step until a signal asks it to stop.

For tests that stop real training: however fast the machine is, the run cannot have ended before. HELD_AFTER_STEP is the
step. HELD_FILE names a file that is made when the run stands; where it is there, a run goes on as ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from perception.stopping import StopRequest
from perception.telemetry import RunTelemetry
from pipelines.__main__ import main
from pipelines.commands import run_program

_log, _on_signal = RunTelemetry.log, StopRequest._on_signal
_received: list[int] = []


def held_log(telemetry: RunTelemetry, step: int, values: dict[str, Any]) -> None:
    _log(telemetry, step, values)
    file = Path(os.environ["HELD_FILE"])
    if step == int(os.environ["HELD_AFTER_STEP"]) and not file.exists():
        file.touch()
        while not _received:
            time.sleep(0.01)


def noted_signal(stop: StopRequest, number: int, frame: FrameType | None) -> None:
    _on_signal(stop, number, frame)
    _received.append(number)


if __name__ == "__main__":
    RunTelemetry.log = held_log  # type: ignore[method-assign]
    StopRequest._on_signal = noted_signal  # type: ignore[method-assign]
    sys.exit(run_program(main))
