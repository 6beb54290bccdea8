"""How far each rank of a host has come, a word when one keeps the others waiting, and an end when it is too long.

A waiting rank sits in a communication library that may never return; a thread looks once in a
while how long that has taken. It knows from counters in shared memory which ranks are behind,
and at what. No torch here.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from perception.distributed import failure

WAITED_TOO_LONG = "slow, stopped or hanging? distributed.timeout_seconds"
"""In the last words of a rank that another one kept waiting."""


class Counters(Protocol):
    """A count for each rank of this host that all of them see."""

    ranks: tuple[int, ...]

    def publish(self, count: int) -> None: ...

    def count(self, place: int) -> int: ...


class StallWatch:
    """Counts the collective calls of this rank, and watches its waiting.

    After `warning_seconds` a line on standard error names the late ranks and what they have not
    reached; after `timeout_seconds` the process ends with that line as its last words. 0: never.
    """

    def __init__(self, rank: int, size: int, warning_seconds: float = 0.0, timeout_seconds: float = 0.0) -> None:
        self._rank, self._size = rank, size
        self._warning_seconds, self._timeout_seconds = warning_seconds, timeout_seconds
        self._counters: Counters | None = None
        self._count = 0
        self._recent: deque[str] = deque(maxlen=256)
        self._since: float | None = None
        self._joining: tuple[float, str] | None = None
        """Until when this rank must have joined the others, and what to say if it has not."""
        if size > 1 and (warning_seconds or timeout_seconds):
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            threading.Thread(target=_watch, args=(weakref.ref(self), stop), name="stall-watch", daemon=True).start()

    def attach(self, counters: Counters) -> None:
        """From now on the ranks of this host see each other's counts. All of them attach after the same call."""
        self._count = 0
        self._counters = counters

    def reached(self, what: str) -> None:
        """This rank begins a collective call, or hands over a bucket."""
        self._count += 1
        self._recent.append(what)
        if self._counters is not None:
            self._counters.publish(self._count)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        before, self._since = self._since, time.monotonic()
        try:
            yield
        finally:
            self._since = before

    @contextmanager
    def joining(self, limit_seconds: float, words: str) -> Iterator[None]:
        """While ranks meet, which may never return: after the limit, end the process as a UserError would."""
        self._joining = (time.monotonic() + limit_seconds, words)
        try:
            yield
        finally:
            self._joining = None

    def late_ranks(self) -> list[str]:
        """Ranks of this host that are behind this one, each with what it has not reached."""
        if self._counters is None:
            return []
        late = []
        for place, rank in enumerate(self._counters.ranks):
            behind = self._count - self._counters.count(place)
            if behind > 0:
                what = f", which has not reached {self._recent[-behind]}" if behind <= len(self._recent) else ""
                late.append(f"rank {rank}{what}")
        return late

    def line(self, seconds: float) -> str:
        late = self.late_ranks()
        elsewhere = self._counters is not None and len(self._counters.ranks) < self._size
        whom = "; ".join(late) if late else "ranks of other hosts" if elsewhere else "another rank"
        return f"rank {self._rank} has waited {seconds:.0f} s for {whom}: slow, stopped or hanging?"

    def look(self, reported: float | None) -> float | None:
        """Warn or end if it is time; returns the beginning of the wait that has been reported."""
        joining = self._joining
        if joining is not None and time.monotonic() >= joining[0]:
            failure.end_process(self._rank, f"error: {joining[1]}", failure.EXIT_USER_ERROR)
        since = self._since
        if since is None:
            return None
        seconds = time.monotonic() - since
        if self._timeout_seconds and seconds >= self._timeout_seconds:
            failure.end_process(
                self._rank, f"{self.line(seconds)} distributed.timeout_seconds = {self._timeout_seconds:g} is over."
            )
        if self._warning_seconds and seconds >= self._warning_seconds and since != reported:
            print(self.line(seconds), file=sys.stderr, flush=True)
            return since
        return reported

    @property
    def period_seconds(self) -> float:
        """How often to look."""
        limits = [limit for limit in (self._warning_seconds, self._timeout_seconds) if limit]
        return min(1.0, *(limit / 4 for limit in limits))


def _watch(watch: weakref.ref[StallWatch], stop: threading.Event) -> None:
    reported: float | None = None
    watched = watch()
    while watched is not None:
        period, watched = watched.period_seconds, None
        if stop.wait(period):
            return
        watched = watch()
        if watched is not None:
            reported = watched.look(reported)
