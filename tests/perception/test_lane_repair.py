"""Repair of one lane's points: every rule, and the contract for any points at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception.data.lane_repair import repair_points
from perception.data.sample import ReadReport

LANE = [[10, 90], [12, 80], [14, 70], [17, 60]]
NAN = float("nan")


@pytest.mark.parametrize(
    ("points", "lane", "anomalies"),
    [
        (LANE, LANE, {}),
        (LANE[::-1], LANE, {"points from top to bottom: reversed": 1}),
        ([LANE[2], LANE[0], LANE[3], LANE[1]], LANE, {"points in no order: ordered by y": 1}),
        ([LANE[0], LANE[0], *LANE[1:]], LANE, {"consecutive duplicate point: dropped": 1}),
        ([[NAN, 95], *LANE, [3, float("inf")]], LANE, {"point that is not finite: dropped": 2}),
        ([*LANE, [40, 60]], LANE, {"point whose y does not fall: dropped": 1}),
        # A bend: up, over the crest and down again far to the right.
        ([*LANE, [60, 61], [80, 72]], LANE, {"point whose y does not fall: dropped": 2}),
        ([[5, 9]], None, {"lane with fewer than two points: dropped": 1}),
        ([], None, {"lane with fewer than two points: dropped": 1}),
        (
            [[1, 5], [2, 5], [3, 5]],
            None,
            {"point whose y does not fall: dropped": 2, "lane with fewer than two points: dropped": 1},
        ),
    ],
)
def test_rules(points: list[Any], lane: list[Any] | None, anomalies: dict[str, int]) -> None:
    report = ReadReport()
    repaired = repair_points(np.array(points, dtype=np.float32).reshape(-1, 2), "a.json", report)
    assert (None if repaired is None else repaired.tolist()) == lane
    assert dict(report.anomalies) == anomalies
    assert set(report.examples.values()) <= {"a.json"}


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 60)), max_size=14))
def test_any_points_become_a_lane_by_the_contract_or_none(points: list[tuple[int, int]]) -> None:
    lane = repair_points(np.array(points, dtype=np.float32).reshape(-1, 2), "a.json", ReadReport())
    if lane is None:
        assert len({y for _, y in points}) < 2 or len(points) < 2
    else:
        assert len(lane) >= 2
        assert (np.diff(lane[:, 1]) < 0).all()
        assert {tuple(point) for point in lane.tolist()} <= set(points)


@given(st.lists(st.integers(0, 500), min_size=3, max_size=12, unique=True), st.randoms())
def test_shuffled_points_of_a_straight_lane_are_all_kept(ys: list[int], random: Any) -> None:
    lane = [(0.5 * y + 20, y) for y in sorted(ys, reverse=True)]
    shuffled = lane[:]
    random.shuffle(shuffled)
    repaired = repair_points(np.array(shuffled, dtype=np.float32), "a.json", ReadReport())
    assert repaired is not None
    assert [tuple(point) for point in repaired.tolist()] == lane
