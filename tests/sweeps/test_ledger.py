"""The scaling ledger: factors are ratios of medians, intervals hold as often as they say, what is lost adds up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.ledger import ledger
from sweeps.ledger.ledger import LOST, MEASURED, ScalingRow, ratio_interval, scaling_table
from sweeps.record import JobRecord
from tests.sweeps.simulated_nights import scaling_job

SPEEDS = st.floats(1e-3, 1e6)
SHARE = st.floats(0, 0.3)


def row_of(rows: list[ScalingRow], ranks: int, **fields: Any) -> ScalingRow:
    (row,) = [
        row
        for row in rows
        if row.num_ranks == ranks and all(getattr(row, key) == value for key, value in fields.items())
    ]
    return row


def test_a_factor_is_the_ratio_of_medians() -> None:
    jobs = [scaling_job("2026-11-30", 1, speed) for speed in (98.0, 100.0, 140.0)]
    jobs += [scaling_job("2026-11-30", 8, speed) for speed in (690.0, 700.0, 710.0)]
    rows = scaling_table(jobs)
    assert [row.num_ranks for row in rows] == [1, 8]
    one, eight = rows
    assert one.images_per_second == 100 and one.scaling_factor == 1 and (one.low, one.high) == (1, 1)
    assert eight.scaling_factor == 7.0 and eight.ratio_to_ideal == 7 / 8
    assert eight.runs == (690.0, 700.0, 710.0)
    # All nine pairs, as three and three runs allow no less; that holds with 18 of 20 orders.
    assert (eight.low, eight.high) == (690 / 140, 710 / 98) and eight.confidence == pytest.approx(0.9)


def test_each_cause_is_charged_with_what_it_takes_longer() -> None:
    """On one rank 100 ms, 2 of them waiting for data; on four 125 ms: 10 for data, 8 exposed, 5 for the slowest."""
    one = scaling_job("n", 1, 80.0, lost_scaling={"data": 0.02, "exposed_allreduce": 0.0, "straggler": 0.0})
    shares = {"data": 10 / 125, "exposed_allreduce": 8 / 125, "straggler": 5 / 125}
    four = scaling_job("n", 4, 4 * 64.0, lost_scaling=shares)
    row = row_of(scaling_table([one, four]), 4)
    assert row.ratio_to_ideal == pytest.approx(0.8)
    expected = {"data": 8 / 125, "exposed_allreduce": 8 / 125, "straggler": 5 / 125, "compute": 4 / 125}
    assert row.lost == pytest.approx(expected)
    assert row.shares == pytest.approx(shares)


@given(
    speeds=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), SPEEDS, SHARE, SHARE, SHARE), min_size=1, max_size=12),
)
def test_what_is_lost_adds_up_to_what_is_missing(speeds: list[tuple[int, float, float, float, float]]) -> None:
    jobs = [
        scaling_job("n", ranks, speed, lost_scaling=dict(zip(MEASURED, shares, strict=True)))
        for ranks, speed, *shares in speeds
    ]
    rows = scaling_table(jobs)
    assert sum(len(row.runs) for row in rows) == len(jobs)
    for row in rows:
        one = [speed for ranks, speed, *_ in speeds if ranks == 1]
        if not one:
            assert row.scaling_factor is None and row.lost == {} and row.ratio_to_ideal is None
            continue
        mine = [speed for ranks, speed, *_ in speeds if ranks == row.num_ranks]
        factor = statistics.median(mine) / statistics.median(one)
        assert row.scaling_factor == pytest.approx(factor)
        assert set(row.lost) == set(LOST)
        assert sum(row.lost.values()) == pytest.approx(1 - factor / row.num_ranks, abs=1e-9, rel=1e-9)
        if row.low is not None and row.high is not None:
            assert row.low <= factor * (1 + 1e-12) and factor <= row.high * (1 + 1e-12)
        json.dumps(row.to_json())


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 2), (3, 3), (3, 4), (4, 4), (5, 5), (6, 3), (5, 1)])
def test_an_interval_holds_as_often_as_it_says(first: int, second: int) -> None:
    """Of all orders in which two equal samples can come, the interval has 1 inside in the share that is stated."""
    values = [1.1**place for place in range(first + second)]
    # The wider interval by which the ratio of medians is always inside is not counted on: values are even spaced.
    holds = total = 0
    for chosen in itertools.combinations(range(first + second), first):
        mine = [values[place] for place in chosen]
        others = [value for place, value in enumerate(values) if place not in chosen]
        interval = ratio_interval(mine, others)
        assert interval is not None
        low, high, confidence = interval
        holds += low < 1 < high
        total += 1
    assert holds / total >= confidence - 1e-12
    assert holds / total <= confidence + 0.05
    if math.comb(first + second, first) >= 40:
        assert confidence >= 0.95, "there are orders enough"


@given(mine=st.lists(SPEEDS, min_size=1, max_size=6), others=st.lists(SPEEDS, min_size=1, max_size=6), unit=SPEEDS)
def test_an_interval_depends_on_ratios_alone(mine: list[float], others: list[float], unit: float) -> None:
    interval = ratio_interval(mine, others)
    scaled = ratio_interval([value * unit for value in mine], others)
    if interval is None:
        assert scaled is None and len(mine) == len(others) == 1
        return
    assert scaled == pytest.approx((interval[0] * unit, interval[1] * unit, interval[2]))


def test_an_interval_gets_narrower_with_more_runs() -> None:
    widths = []
    for count in (3, 5, 9):
        values = [100 * (1 + 0.01 * (place - count // 2) / (count // 2)) for place in range(count)]
        interval = ratio_interval(values, values)
        assert interval is not None and interval[0] < 1 < interval[1]
        widths.append(interval[1] - interval[0])
    assert widths[0] > widths[1] > widths[2]


def test_series_are_kept_apart_by_what_makes_them_incomparable() -> None:
    """Hardware, image, work of a step, nodes; speed settings and revisions are what is to be compared."""
    same = [
        scaling_job("n", 8, 700.0),
        scaling_job("n", 8, 701.0, parameters={"distributed.bucket_mib": 1.0, "data.workers_per_rank": 2}),
        scaling_job("n", 8, 702.0, git_revision="ab", seed=4, parameters={"train.num_samples": 5}),
    ]
    others = [
        scaling_job("n", 8, 1.0, hardware="8 x NVIDIA A100"),
        scaling_job("n", 8, 2.0, image="sha256:1"),
        scaling_job("n", 8, 3.0, num_nodes=2),
        scaling_job("n", 8, 4.0, model="sign"),
        scaling_job("n", 8, 5.0, parameters={"train.batch_size_per_rank": 3}),
        scaling_job("n", 8, 6.0, parameters={"model.input_width": 320}),
        scaling_job("n-2", 8, 7.0),
    ]
    rows = scaling_table([*same, *others])
    assert sorted(len(row.runs) for row in rows) == [1] * len(others) + [3]
    (row,) = [row for row in rows if len(row.runs) == 3]
    assert row.configuration == "" and row.git_revisions == ("ab",)
    assert row.settings == {"distributed.bucket_mib": 1.0, "data.workers_per_rank": 2}


def test_ranks_of_two_nodes_are_compared_with_one_rank_too() -> None:
    rows = scaling_table([scaling_job("n", 1, 10.0), scaling_job("n", 16, 120.0, num_nodes=2)])
    assert row_of(rows, 16).scaling_factor == 12.0


def test_what_is_in_no_row_is_counted_by_reason() -> None:
    jobs = [
        scaling_job("n", 1, 100.0),
        scaling_job("n", 2, 100.0, status="failed"),
        scaling_job("n", 2, 100.0, status="lost"),
        scaling_job("n", 2, 100.0, status=""),
        dataclasses.replace(scaling_job("n", 2, 100.0), images_per_second=None),
        scaling_job("n", 2, 0.0),
        scaling_job("n", 2, float("nan")),
        scaling_job("n", 2, 100.0, status="answered"),
        scaling_job("n", 2, 100.0, kind="trial"),
    ]
    assert [row.num_ranks for row in scaling_table(jobs)] == [1]
    assert ledger.left_out(jobs) == {
        "ended as failed": 1,
        "ended as lost": 1,
        "ended as unknown": 1,
        "measured no throughput (too short)": 3,
        "answered by the record of an equal run": 1,
    }
    assert scaling_table([]) == [] and ledger.left_out([]) == {}


def test_a_run_too_short_to_split_its_time_has_no_shares() -> None:
    unknown: dict[str, Any] = {"data": None, "exposed_allreduce": None, "straggler": None}
    jobs = [scaling_job("n", ranks, ranks * 10.0, lost_scaling=unknown) for ranks in (1, 2)]
    assert [row.shares for row in scaling_table(jobs)] == [{}, {}]
    assert row_of(scaling_table(jobs), 2).lost == {}


def test_nights_are_in_order_of_time_or_else_of_their_names() -> None:
    names = ["2026-11-30", "2026-11-30.2", "2026-11-30.10", "2026-12-01"]
    jobs = [scaling_job(name, 1, 1.0) for name in reversed(names)]
    assert ledger.nights_in_order(jobs) == names
    began = dict(zip(["sunday", "monday", "a-test"], (3.0, 7.0, 5.0), strict=True))
    timed = [scaling_job(name, 1, 1.0, started_utc=time, submitted_utc=time - 1) for name, time in began.items()]
    assert ledger.nights_in_order(timed) == ["sunday", "a-test", "monday"]
    assert ledger.nights_in_order([*timed, jobs[0]]) == ["2026-12-01", "a-test", "monday", "sunday"]
    assert [row.night for row in scaling_table(timed)] == ["sunday", "a-test", "monday"]


def test_the_newest_rows_and_those_before_them() -> None:
    jobs = [scaling_job(f"2026-11-{day:02d}", ranks, day * 10.0 * ranks) for day in (9, 10, 11) for ranks in (1, 2)]
    jobs += [scaling_job("2026-11-08", 1, 5.0, model="sign")]
    rows = scaling_table(jobs)
    newest = ledger.latest_rows(rows)
    assert {(row.model, row.night) for row in newest} == {("lane-small", "2026-11-11"), ("sign", "2026-11-08")}
    before = ledger.row_before(rows, row_of(newest, 2))
    assert before is not None and (before.night, before.num_ranks) == ("2026-11-10", 2)
    assert ledger.row_before(rows, row_of(newest, 1, model="sign")) is None


def test_jobs_in_any_order_give_the_same_table() -> None:
    jobs = [
        scaling_job(night, ranks, speed * ranks, job=f"{night}-{ranks}-{speed}")
        for night in ("2026-11-29", "2026-11-30")
        for ranks in (1, 2, 4)
        for speed in (99.0, 100.0, 103.0)
    ]
    table = [dataclasses.replace(row, runs=tuple(sorted(row.runs))) for row in scaling_table(jobs)]
    again = [dataclasses.replace(row, runs=tuple(sorted(row.runs))) for row in scaling_table(list(reversed(jobs)))]
    assert table == again


def test_a_job_record_of_the_wrong_kind_is_no_row() -> None:
    assert scaling_table([JobRecord("n", "lane-small-1", "nightly", "lane-small", "champion", status="finished")]) == []
