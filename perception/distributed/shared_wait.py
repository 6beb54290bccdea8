"""Waiting for counters in shared memory: short spins, then sleep, with an eye on whether the others still live."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from perception.distributed.shared_segment import SharedSegment
from perception.distributed.stall_watch import StallWatch

_LIVENESS_SECONDS = 0.5
_YIELDS = 20
_SHORT_SLEEPS = 1000


def wait_until(
    late: Callable[[], Sequence[int]], work: Callable[[], bool], segment: SharedSegment, watch: StallWatch
) -> None:
    """Return once nobody is late; in between do `work()`, which tells whether there was any.

    `late()` gives the places of ranks that are waited for. Raises RuntimeError if one of them is gone.
    """
    if not late():
        return
    with watch.waiting():
        next_look = time.monotonic() + _LIVENESS_SECONDS
        turns = 0
        while True:
            if work():
                turns = 0
            if not late():
                return
            turns += 1
            if turns <= _YIELDS:
                os.sched_yield()
                continue
            # Asleep, a rank leaves its core to the ones it waits for.
            time.sleep(2e-5 if turns < _SHORT_SLEEPS else 5e-4)
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LIVENESS_SECONDS
                for place in late():
                    if not segment.is_alive(place):
                        raise RuntimeError(f"rank {segment.neighbours.ranks[place]} is gone: its process has ended")
