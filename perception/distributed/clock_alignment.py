"""How far a rank's clock is from rank 0's, so that times taken on several hosts can be compared.

`time.perf_counter` counts from an arbitrary moment on each host. Processes of one boot and one
time namespace read the same counter, so their offset is 0 exactly. Elsewhere the offset is
estimated as Cristian ("Probabilistic clock synchronization", Distributed Computing 3, 1989) and
NTP do: rank 0 reads its clock between two moments of this rank's, and of several such round
trips the shortest says most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from perception.distributed.communicator import Communicator

_NUM_ROUNDS = 16


@dataclass(frozen=True)
class ClockOffset:
    """What to add to this rank's `time.perf_counter()` to get rank 0's, when it was measured."""

    offset_seconds: float
    error_seconds: float
    """The true offset is no further away than this; 0 where both read the same clock."""


def clock_offset_seconds(communicator: Communicator) -> float:
    """Add it to this rank's `time.perf_counter()` to get rank 0's. Collective: every rank calls it."""
    return clock_offset(communicator).offset_seconds


def clock_offset(
    communicator: Communicator, clock: Callable[[], float] = time.perf_counter, clock_name: str | None = None
) -> ClockOffset:
    """This rank's offset and a bound on its error; collective: every rank calls it.

    `clock_name` tells which clock this rank reads: ranks of equal names share one. By default it
    is derived from the host's boot and the process's time namespace.

    All ranks take part in each round, so the cost does not grow with their number: one gathering
    where all clocks are one, else 32 more small calls. Oscillators of different hosts drift apart
    by some 10 microseconds a second where no time service disciplines them.
    """
    name = shared_clock_name() if clock_name is None else clock_name
    names = communicator.allgather_object(name)
    # An empty name is an unknown clock, and equal to none. Every rank decides alike.
    if communicator.size == 1 or (name and set(names) == {name}):
        return ClockOffset(0.0, 0.0)
    best = ClockOffset(0.0, float("inf"))
    for _ in range(_NUM_ROUNDS):
        sent = clock()
        # Rank 0 leaves the barrier after every rank has entered it, so it reads its clock after `sent`
        # and, since it tells the reading, before `received`.
        communicator.barrier()
        reading = float(communicator.broadcast(torch.tensor([clock()], dtype=torch.float64)))
        received = clock()
        error = (received - sent) / 2
        if error < best.error_seconds:
            best = ClockOffset(reading - (sent + received) / 2, error)
    if communicator.is_first or (name and name == names[0]):
        return ClockOffset(0.0, 0.0)
    return best


def shared_clock_name() -> str:
    """Equal for processes that read the same CLOCK_MONOTONIC; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        # A container may have a clock of its own on the same kernel; kernels before 5.6 know of no such thing.
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:
        namespace = ""
    return f"{boot} {namespace}"
