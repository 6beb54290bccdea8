"""Nodes that fail more or are slower than others stand out; equal nodes do not, however many there are."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from sweeps.ledger.node_health import NodeHealth, node_health
from sweeps.record import JobRecord
from tests.sweeps.simulated_nights import scaling_job


def nights(
    seed: int,
    num_nodes: int = 16,
    count: int = 400,
    failing: dict[str, float] | None = None,
    slow: dict[str, float] | None = None,
) -> list[JobRecord]:
    """Jobs of one node each, of which 2 % fail anywhere; speeds differ by 2 %."""
    draw = random.Random(seed)
    jobs = []
    for number in range(count):
        node = f"dgx{draw.randrange(num_nodes)}"
        job = scaling_job(f"night-{number % 4}", 8, 700 * draw.gauss(1, 0.02), job=f"job-{number}", nodes=(node,))
        job = dataclasses.replace(
            job, images_per_second=(job.images_per_second or 0) * (1 - (slow or {}).get(node, 0.0))
        )
        if draw.random() < (failing or {}).get(node, 0.02):
            job = dataclasses.replace(job, status="failed", failure="hardware", images_per_second=None)
        jobs.append(job)
    return jobs


def standing_out(rows: list[NodeHealth]) -> list[str]:
    return [row.node for row in rows if row.remarks]


def test_equal_nodes_do_not_stand_out() -> None:
    for seed in range(15):
        assert standing_out(node_health(nights(seed))) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_fails_half_its_jobs_stands_out(seed: int) -> None:
    rows = node_health(nights(seed, failing={"dgx3": 0.5}))
    assert standing_out(rows) == ["dgx3"] and rows[0].node == "dgx3"
    assert f"{rows[0].num_own_failures} of {rows[0].num_jobs} jobs failed on it; elsewhere" in rows[0].remarks[0]
    assert rows[0].failures == {"hardware": rows[0].num_own_failures}


@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_is_a_tenth_slower_stands_out(seed: int) -> None:
    rows = node_health(nights(seed, slow={"dgx5": 0.1}))
    assert standing_out(rows) == ["dgx5"]
    assert (
        rows[0].slowness == pytest.approx(0.1, abs=0.02) and "% slower than others in equal jobs" in rows[0].remarks[0]
    )


def test_failures_that_no_node_is_to_blame_for_are_counted_and_no_mark() -> None:
    jobs = [
        dataclasses.replace(job, status="failed", failure="code") if job.nodes == ("dgx1",) else job
        for job in nights(0)
    ]
    rows = {row.node: row for row in node_health(jobs)}
    assert rows["dgx1"].failures["code"] == rows["dgx1"].num_jobs and rows["dgx1"].num_own_failures == 0
    assert rows["dgx1"].remarks == ()


def test_a_job_counts_for_each_of_its_nodes() -> None:
    job = dataclasses.replace(scaling_job("n", 16, 1.0), nodes=("a", "b"), failure="node", status="failed")
    assert [(row.node, row.num_jobs, row.failures) for row in node_health([job])] == [
        ("a", 1, {"node": 1}),
        ("b", 1, {"node": 1}),
    ]


def test_a_single_node_and_none_at_all() -> None:
    assert node_health([]) == [] and node_health([scaling_job("n", 1, 1.0)]) == []
    (row,) = node_health([dataclasses.replace(scaling_job("n", 1, 1.0), nodes=("here",))])
    assert row.slowness is None and row.remarks == () and json.dumps(row.to_json())


def test_thousands_of_jobs_on_few_nodes() -> None:
    jobs = nights(0, num_nodes=2, count=8000, failing={"dgx1": 0.1})
    assert standing_out(node_health(jobs)) == ["dgx1"]
