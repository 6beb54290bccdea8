"""Signals that ask a run to stop well: checkpoint at the next step boundary, exit code 75."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Set by a signal; the loop tells the other ranks and all stop after the same step."""

    def __init__(self) -> None:
        self.requested = False
        self.cause = ""

    def listen(self) -> None:
        """Take SIGTERM, SIGUSR2 and SIGINT as requests; a second SIGINT interrupts at once."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.cause = f"{signal.Signals(number).name} received"
