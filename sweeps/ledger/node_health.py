"""Nodes over nights: which fail more than the others, and which are slower. Pure functions over `JobRecord`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sweeps.ledger.ledger import configuration_of
from sweeps.record import Failure, JobRecord

NODE_FAILURES: frozenset[Failure] = frozenset({"collective_timeout", "hardware", "node"})
"""That a node can be to blame for; others are counted, but are no mark against it."""
SURE = 0.001
"""A node stands out when chance alone would let any of as many equal nodes do so this seldom."""
LEAST_SLOWNESS = 0.05


@dataclass(frozen=True)
class NodeHealth:
    """What the records say of one node."""

    node: str
    num_jobs: int
    """That ran on it, alone or with other nodes."""
    failures: dict[str, int] = field(default_factory=dict)
    """By class; a job on several nodes counts for each of them, as its record does not tell which one failed."""
    num_own_failures: int = 0
    """Of NODE_FAILURES."""
    slowness: float | None = None
    """Median over its jobs of how much slower they were than equal jobs elsewhere; None: none to compare with."""
    num_compared: int = 0
    remarks: tuple[str, ...] = ()
    """Why a person should look at it; empty: nothing stands out."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def node_health(jobs: Iterable[JobRecord]) -> list[NodeHealth]:
    """Those that stand out first, then by name."""
    jobs = [job for job in jobs if job.nodes]
    ratios = _speed_ratios(jobs)
    num_jobs: Counter[str] = Counter()
    failures: dict[str, Counter[str]] = {}
    for job in jobs:
        for node in job.nodes:
            num_jobs[node] += 1
            if job.failure is not None:
                failures.setdefault(node, Counter())[job.failure] += 1
    own = {node: sum(failures.get(node, Counter())[kind] for kind in NODE_FAILURES) for node in num_jobs}
    rows = [
        NodeHealth(
            node=node,
            num_jobs=count,
            failures=dict(failures.get(node, Counter()).most_common()),
            num_own_failures=own[node],
            slowness=_slowness(ratios.get(node, [])),
            num_compared=len(ratios.get(node, [])),
            remarks=_remarks(node, num_jobs, own, ratios),
        )
        for node, count in num_jobs.items()
    ]
    return sorted(rows, key=lambda row: (not row.remarks, row.node))


def _speed_ratios(jobs: Iterable[JobRecord]) -> dict[str, list[float]]:
    """Node → for each of its jobs, throughput over the median of equal jobs that did not run on it."""
    equal: dict[tuple[object, ...], list[JobRecord]] = {}
    for job in jobs:
        if job.images_per_second and math.isfinite(job.images_per_second) and job.status != "answered":
            key = (job.model, job.hardware, job.image, configuration_of(job), job.num_ranks, job.num_nodes, job.night)
            equal.setdefault(key, []).append(job)
    ratios: dict[str, list[float]] = {}
    for group in equal.values():
        for node in {node for job in group for node in job.nodes}:
            mine = [job.images_per_second for job in group if node in job.nodes and job.images_per_second]
            others = [job.images_per_second for job in group if node not in job.nodes and job.images_per_second]
            if others:
                middle = statistics.median(others)
                ratios.setdefault(node, []).extend(speed / middle for speed in mine)
    return ratios


def _slowness(ratios: list[float]) -> float | None:
    return 1 - statistics.median(ratios) if ratios else None


def _remarks(node: str, num_jobs: Counter[str], own: dict[str, int], ratios: dict[str, list[float]]) -> tuple[str, ...]:
    remarks = []
    others = [other for other in num_jobs if other != node]
    num_others = sum(num_jobs[other] for other in others)
    if own[node] and num_others:
        # As if one job of the others had failed: a rate of 0 would make a single failure a proof.
        rate = min(1.0, (sum(own[other] for other in others) + 1) / (num_others + 1))
        if _tail(num_jobs[node], own[node], rate) < SURE / len(num_jobs):
            usual = f"{100 * sum(own[other] for other in others) / num_others:.1f} %"
            remarks.append(f"{own[node]} of {num_jobs[node]} jobs failed on it; elsewhere {usual}")
    mine = ratios.get(node, [])
    slowness = _slowness(mine)
    if slowness is not None and slowness >= LEAST_SLOWNESS:
        # A sign test: on an equal node a job is as often faster than others as slower.
        num_slower = sum(ratio < 1 for ratio in mine)
        if _tail(len(mine), num_slower, 0.5) < SURE / len(num_jobs):
            remarks.append(f"{100 * slowness:.1f} % slower than others in equal jobs ({len(mine)} compared)")
    return tuple(remarks)


def _tail(trials: int, successes: int, rate: float) -> float:
    """Chance of so many successes or more in independent trials; by logarithms, as there may be thousands."""
    rate = min(max(rate, 1e-12), 1 - 1e-12)
    whole = math.lgamma(trials + 1)
    logs = (
        whole
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(rate)
        + (trials - count) * math.log1p(-rate)
        for count in range(successes, trials + 1)
    )
    return sum(math.exp(value) for value in logs)
