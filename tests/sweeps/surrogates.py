"""Recorded learning curves, and searches over them with simulated workers: no training, no clock."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.planning.plan import Pruning
from sweeps.search.pruning import decide

FOLDER = Path(__file__).with_name("recorded_curves")


@dataclass(frozen=True)
class Recorded:
    """One configuration that was really trained."""

    curve: dict[int, float]
    """Samples → validation accuracy; the last is that of the whole training."""
    seconds: float
    """Of the whole training, evenly spread over its samples."""

    @property
    def final(self) -> float:
        return self.curve[max(self.curve)]


@dataclass(frozen=True)
class Spent:
    """What a search over recorded curves came to."""

    rank_seconds: float
    """Of all workers together, until the search ended."""
    best: float
    """Of trials that ran to their end."""
    num_trials: int
    num_whole: int


def load(problem: str) -> list[Recorded]:
    lines = [json.loads(line) for line in (FOLDER / f"{problem}.jsonl").read_text(encoding="utf-8").splitlines()]
    step = lines[0]["samples_per_point"]
    return [
        Recorded({step * (place + 1): value for place, value in enumerate(row["curve"])}, row["seconds"])
        for row in lines[1:]
    ]


def in_random_order(recorded: Sequence[Recorded], seed: int) -> list[Recorded]:
    order = list(recorded)
    random.Random(seed).shuffle(order)
    return order


def random_search(candidates: Sequence[Recorded]) -> Spent:
    """Train every candidate to its end."""
    best = max(candidate.final for candidate in candidates)
    return Spent(sum(candidate.seconds for candidate in candidates), best, len(candidates), len(candidates))


def pruned_search(candidates: Sequence[Recorded], pruning: Pruning, num_workers: int, target: float) -> Spent:
    """Workers take candidates in turn, report at each point and end those that `decide` ends.

    Ends as soon as a trial that ran to its end has reached `target`, or when no candidate is left. Every worker counts
    until then, also one whose trial is cut off by the end.
    """
    num_samples = max(candidates[0].curve)
    points = sorted(candidates[0].curve)
    curves: dict[int, dict[int, float]] = {}
    best, num_whole, begun = 0.0, 0, 0
    begins: dict[int, float] = {}
    spent = 0.0
    # (time of the next report, trial, which report); ties go to the older trial.
    events: list[tuple[float, int, int]] = []

    def begin(now: float) -> None:
        nonlocal begun
        if begun < len(candidates):
            curves[begun], begins[begun] = {}, now
            heapq.heappush(events, (now + candidates[begun].seconds / len(points), begun, 0))
            begun += 1

    for _ in range(num_workers):
        begin(0.0)
    while events:
        now, trial, place = heapq.heappop(events)
        curves[trial][points[place]] = candidates[trial].curve[points[place]]
        whole = place == len(points) - 1
        if whole:
            num_whole += 1
            best = max(best, curves[trial][points[place]])
        if whole or decide(pruning, "maximize", num_samples, trial, curves).stop:
            spent += now - begins[trial]
            if whole and best >= target:
                cut_off = sum(now - begins[other] for _, other, _ in events)
                return Spent(spent + cut_off, best, begun, num_whole)
            begin(now)
        else:
            heapq.heappush(events, (now + candidates[trial].seconds / len(points), trial, place + 1))
    return Spent(spent, best, begun, num_whole)
