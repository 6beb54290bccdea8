"""Nodes of a night as the report shows them: those that stand out, then those with most failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.ledger.node_health import NodeHealth, node_health
from sweeps.record import JobRecord

NUM_NODES = 20


@dataclass(frozen=True)
class NodesView:
    num_nodes: int
    num_healthy: int
    """About which there is no remark."""
    nodes: tuple[NodeHealth, ...]
    """Those with a remark first, then by failures; at most NUM_NODES."""
    num_jobs_without_node: int
    """That ran, and whose record does not say where."""


def nodes_of(jobs: Sequence[JobRecord]) -> NodesView:
    """Of the night alone: a node that was mended yesterday is not blamed today."""
    found = node_health(jobs)
    order = sorted(
        found,
        key=lambda h: (not h.remarks, -h.num_own_failures, -sum(h.failures.values()), -(h.slowness or 0.0), h.node),
    )
    return NodesView(
        num_nodes=len(found),
        num_healthy=sum(not health.remarks for health in found),
        nodes=tuple(order[:NUM_NODES]),
        num_jobs_without_node=sum(not job.nodes and job.num_starts > 0 for job in jobs),
    )
