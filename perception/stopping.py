"""Signals that ask a run to stop well: checkpoint at the next step boundary, exit code 75."""

from __future__ import annotations

import signal
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
