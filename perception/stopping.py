"""What ends a run well at the next step boundary: signals, with exit code 75, and orders of who watches it, with 0."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
CHANGE_SIGNAL = signal.SIGRTMIN
"""From the launcher to a rank that trains: stop at the next commit, and go on with another number of ranks."""


class StopRequest:
    """Set by a signal; the loop tells the other ranks and all stop after the same step."""

    def __init__(self) -> None:
        self.requested = False
        self.change_requested = False
        """By the launcher, which starts the ranks again itself."""
        self.cause = ""

    def listen(self) -> None:
        """Take SIGTERM, SIGUSR2 and SIGINT as requests; a second SIGINT interrupts at once."""
        for number in (*STOP_SIGNALS, CHANGE_SIGNAL):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == CHANGE_SIGNAL:
            self.change_requested = True
            self.cause = self.cause or "the number of ranks changes"
            return
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.cause = f"{signal.Signals(number).name} received"

    def is_due(self, step: int, checkpoint_every_steps: int) -> bool:
        """True if the run is to stop after `step`: at once if asked from outside, with a checkpoint for a change."""
        return self.requested or (self.change_requested and step % checkpoint_every_steps == 0)


class StopOrder:
    """`control.json` of a run folder, {"stop": "pruned", "cause": "..."}: a sweep ends a run that will not be good.

    Looked for by the first rank alone, whose finding travels with the gradients: all ranks stop after the same step.
    """

    def __init__(self, path: Path, listens: bool) -> None:
        """`listens`: on the first rank."""
        self._path, self._listens = path, listens
        self.cause = ""

    def is_given(self) -> bool:
        """A look into the folder costs microseconds; a file that is no order is refused once, and never stops a run."""
        if not self._listens or not self._path.exists():
            return False
        try:
            order = json.loads(self._path.read_text(encoding="utf-8"))
            if order["stop"] != "pruned":
                raise ValueError(f'stop = {order["stop"]!r}, only "pruned" is known')
            self.cause = str(order.get("cause", ""))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._listens = False
            print(f"{self._path}: no order to stop ({error}); ignored", flush=True)
            return False
        return True
