"""The time a controller lives by, and the signals that stop it: a seam, so that tests can make nights of seconds."""

from __future__ import annotations

import resource
import signal
import threading
import time
from types import FrameType
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch, UTC."""

    def wait(self, seconds: float) -> None:
        """At most so long: a signal ends it."""


class SystemClock:
    def __init__(self) -> None:
        self._woken = threading.Event()

    def now(self) -> float:
        return time.time()

    def wait(self, seconds: float) -> None:
        self._woken.wait(seconds)

    def wake(self) -> None:
        """End this wait, and every later one at once."""
        self._woken.set()


class StopSignals:
    """SIGTERM, a closed terminal, the first Ctrl-C: stop and leave the jobs running; a second Ctrl-C: end them too."""

    def __init__(self, clock: SystemClock | None = None) -> None:
        self._clock = clock
        self.cause = ""
        self.cancel_jobs = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Where nohup had it ignored it stays so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.cause and number == signal.SIGINT:
            if self.cancel_jobs:
                raise KeyboardInterrupt
            self.cancel_jobs = True
        self.cause = self.cause or f"{signal.Signals(number).name} received"
        if self._clock is not None:
            self._clock.wake()


def cpu_seconds() -> float:
    """Of this process; what the programs that it starts use is not the controller's."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
