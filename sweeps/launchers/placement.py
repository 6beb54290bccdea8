"""Which waiting jobs start on which slots of a host: all their slots or none, the largest first, none kept waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    name: str
    num_slots: int
    priority: int
    order: int
    """The lower was submitted earlier."""
    waited_seconds: float = 0.0


def place(
    waiting: Sequence[Waiting], free: Sequence[int], reserve_after_seconds: float
) -> list[tuple[str, tuple[int, ...]]]:
    """Jobs to start now, each with its slots.

    By priority, and among equals the largest first; smaller ones fill what is left. One that has waited for
    `reserve_after_seconds` goes before its equals, and where it does not fit nothing is started behind it: slots
    gather until it does.
    """
    left = sorted(free)
    started: list[tuple[str, tuple[int, ...]]] = []

    def rank(job: Waiting) -> tuple[int, bool, int, int]:
        overdue = job.waited_seconds >= reserve_after_seconds
        return (-job.priority, not overdue, 0 if overdue else -job.num_slots, job.order)

    for job in sorted(waiting, key=rank):
        if job.num_slots <= len(left):
            chosen = choose_slots(left, job.num_slots)
            left = [slot for slot in left if slot not in chosen]
            started.append((job.name, chosen))
        elif job.waited_seconds >= reserve_after_seconds:
            break
    return started


def choose_slots(free: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the free slots: the smallest run of neighbours that holds them, since neighbours share a processor.

    >>> choose_slots([0, 1, 2, 5, 6], 2)
    (5, 6)
    """
    runs: list[list[int]] = []
    for slot in sorted(free):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    fitting = [run for run in runs if len(run) >= count]
    if fitting:
        return tuple(min(fitting, key=lambda run: (len(run), run[0]))[:count])
    # In pieces, of which the largest come first.
    pieces = sorted(runs, key=lambda run: (-len(run), run[0]))
    return tuple(sorted([slot for run in pieces for slot in run][:count]))
