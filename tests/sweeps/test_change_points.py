"""Regressions: quiet nights are quiet, slowdowns are found in their first night, and the cause is the one planted."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.ledger.change_points import Regression, regressions, series_of
from sweeps.ledger.ledger import LOST
from sweeps.ledger.level_shifts import PELT_NIGHTS, Sensitivity, difference_noise, worse_level
from sweeps.record import JobRecord
from tests.sweeps.simulated_nights import Noise, Slowdown, night_name, scaling_job, simulated_nights

CALM, USUAL, ROUGH = Noise(0.005, 0.005), Noise(0.01, 0.01), Noise(0.04, 0.03)


def flat(nights: Iterable[Sequence[JobRecord]]) -> list[JobRecord]:
    return [job for jobs in nights for job in jobs]


def alarms(nights: Sequence[Sequence[JobRecord]], first: int = 1) -> list[tuple[int, list[Regression]]]:
    """Morning by morning, from night number `first` on: what was new."""
    found = []
    for number in range(first, len(nights)):
        new = [regression for regression in regressions(flat(nights[: number + 1])) if regression.is_new]
        if new:
            found.append((number, new))
    return found


# --- Levels


SENSITIVITY = Sensitivity(least_change=0.05, least_noise=0.01)


def test_fewer_than_three_nights_before_judge_none() -> None:
    assert worse_level([1.0, 1.0, 0.1], SENSITIVITY, True) is None
    shift = worse_level([1.0, 1.0, 1.0, 0.1], SENSITIVITY, True)
    assert shift is not None and (shift.before, shift.after, shift.begin) == (1.0, 0.1, 3)
    assert worse_level([], SENSITIVITY, True) is None


@pytest.mark.parametrize("count", [5, 9, 10, 25])
def test_a_level_that_fell_is_found_with_its_first_night(count: int) -> None:
    up_and_down = [0.002 * (-1) ** night for night in range(count)]
    for length in (1, 2, 4):
        if count - length < 4:
            continue
        values = [value - (0.3 if night >= count - length else 0.0) for night, value in enumerate(up_and_down)]
        shift = worse_level(values, SENSITIVITY, True)
        assert shift is not None and shift.begin == count - length
        assert shift.before == pytest.approx(0, abs=0.003) and shift.after == pytest.approx(-0.3, abs=0.003)
        assert worse_level(values, SENSITIVITY, False) is None
        mirrored = worse_level([-value for value in values], SENSITIVITY, False)
        assert mirrored is not None and mirrored.begin == shift.begin and mirrored.after == -shift.after


@pytest.mark.parametrize("count", [8, 20])
def test_what_has_recovered_is_no_regression(count: int) -> None:
    for dip in ((4,), (4, 5), (3,)):
        assert worse_level([0.7 if night in dip else 1.0 for night in range(count)], SENSITIVITY, True) is None


def test_a_single_good_night_does_not_make_the_next_a_regression() -> None:
    for count in (6, 12):
        assert worse_level([2.0 if night == count - 2 else 1.0 for night in range(count)], SENSITIVITY, True) is None


def test_a_level_that_was_left_for_a_better_one_is_no_regression_until_it_comes_back() -> None:
    values = [1.0] * 6 + [1.5] * 6
    assert worse_level(values, SENSITIVITY, True) is None
    shift = worse_level([*values, 1.0], SENSITIVITY, True)
    assert shift is not None and (shift.begin, shift.before, shift.after) == (12, 1.5, 1.0)


def test_a_second_fall_is_told_from_the_first_and_a_partial_recovery_stays_one() -> None:
    down_twice = [1.0] * 6 + [0.8] * 6 + [0.6]
    shift = worse_level(down_twice, SENSITIVITY, True)
    assert shift is not None and (shift.begin, shift.before) == (12, 0.8)
    half_back = [1.0] * 6 + [0.6] * 6 + [0.8] * 4
    shift = worse_level(half_back, SENSITIVITY, True)
    assert shift is not None and (shift.begin, shift.before, shift.after) == (6, 1.0, 0.8)


def test_a_slow_drift_is_found_in_the_end() -> None:
    values = [1 - 0.01 * night for night in range(30)]
    assert worse_level(values, SENSITIVITY, True) is not None


@given(
    values=st.lists(st.floats(-10, 10), min_size=4, max_size=30),
    unit=st.floats(0.01, 100),
    offset=st.floats(-100, 100),
)
def test_units_do_not_matter(values: list[float], unit: float, offset: float) -> None:
    values = [round(value, 3) for value in values]
    shift = worse_level(values, SENSITIVITY, True)
    scaled = worse_level(
        [value * unit + offset for value in values],
        Sensitivity(SENSITIVITY.least_change * unit, SENSITIVITY.least_noise * unit),
        True,
    )
    # A change that is at its threshold to the last bit may fall on either side.
    if shift is None or scaled is None:
        assert shift is scaled or min(values) < max(values)
    else:
        assert scaled.before == pytest.approx(shift.before * unit + offset, abs=1e-6 * unit + 1e-9)


@given(st.floats(-10, 10), st.integers(0, 30), st.booleans())
def test_a_constant_series_never_alarms(value: float, count: int, higher_is_better: bool) -> None:
    assert worse_level([value] * count, SENSITIVITY, higher_is_better) is None


def test_noise_from_differences_ignores_a_change_of_level() -> None:
    steady = [0.01 * (-1) ** night for night in range(12)]
    fallen = [value - (1.0 if night >= 7 else 0.0) for night, value in enumerate(steady)]
    assert difference_noise([fallen]) == pytest.approx(difference_noise([steady]))
    assert difference_noise([]) == difference_noise([[1.0]]) == 0.0


# --- Quiet nights


def test_twenty_quiet_nights_raise_no_alarm() -> None:
    assert alarms(simulated_nights(20, 0, USUAL)) == []


def rate_of_false_alarms(count: int, noise: Noise) -> float:
    alarmed = [seed for seed in range(count) if alarms(simulated_nights(20, seed, noise))]
    print(f"{noise}: {len(alarmed)} of {count} histories of twenty quiet nights raised an alarm: {alarmed}")
    return len(alarmed) / count


@pytest.mark.services
@pytest.mark.parametrize("noise", [USUAL, ROUGH])
def test_false_alarms_are_rare(noise: Noise) -> None:
    """Of fifty histories of twenty quiet nights each, with some eighteen series to alarm in."""
    assert rate_of_false_alarms(50, noise) <= 0.04


# --- Planted slowdowns


@pytest.mark.parametrize("cause", LOST)
@pytest.mark.parametrize("first", [5, 14])
def test_a_slowdown_is_found_in_its_first_night_and_its_cause_named(cause: str, first: int) -> None:
    nights = simulated_nights(first + 2, 5, CALM, [Slowdown(cause, 0.2, first)])
    assert alarms(nights[:first]) == []
    every = regressions(flat(nights[: first + 1]))
    throughput = [found for found in every if found.series.quantity == "images_per_second"]
    on_one_too = cause in ("data", "compute")
    assert [found.series.num_ranks for found in throughput] == ([1, 2, 4, 8] if on_one_too else [2, 4, 8])
    for found in every:
        assert found.is_new and found.cause == cause and found.first_night == night_name(first)
        if found.series.quantity == "images_per_second":
            assert found.change == pytest.approx(-0.2, abs=0.04)
            assert found.rises[cause] == pytest.approx(0.25, abs=0.05)
    factors = [found for found in every if found.series.quantity == "scaling_factor"]
    assert len(factors) == (0 if on_one_too else 3)
    shares = {found.series.quantity for found in every if found.series.is_share}
    assert shares == ({f"share_{cause}"} if cause != "compute" else set())
    # The night after, it is known; it is not forgotten.
    after = regressions(flat(nights))
    assert len(after) >= len(throughput)
    assert not any(found.is_new for found in after if found.series.quantity == "images_per_second")
    assert {found.first_night for found in after if found.series.quantity == "images_per_second"} == {night_name(first)}


@pytest.mark.parametrize("first", [6, 12])
def test_a_tenth_less_is_found_where_nights_are_calm(first: int) -> None:
    nights = simulated_nights(first + 1, 3, CALM, [Slowdown("straggler", 0.1, first)])
    ((number, new),) = alarms(nights)
    assert number == first and {found.cause for found in new} == {"straggler"}


def test_what_is_mended_is_no_regression_any_more() -> None:
    nights = simulated_nights(14, 1, CALM, [Slowdown("data", 0.3, 6, last=8)])
    assert any(found.is_new for found in regressions(flat(nights[:7])))
    assert regressions(flat(nights)) == []


@pytest.mark.services
@pytest.mark.parametrize("cause", ["straggler", "compute"])
def test_power(cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How often a slowdown is found in its first night; computing that is slower shows in throughput alone."""
    found: Counter[tuple[Noise, float, int]] = Counter()
    count = 20
    for noise in (USUAL, Noise(0.02, 0.02), ROUGH):
        for share in (0.1, 0.2):
            for first in (3, 5, 8, 15):
                for seed in range(count):
                    nights = simulated_nights(first + 1, seed, noise, [Slowdown(cause, share, first)])
                    found[noise, share, first] += bool(alarms(nights, first))
    with capsys.disabled():
        for (noise, share, first), hits in found.items():
            print(f"{cause}, {noise} {share:.0%} after {first} nights: {hits} of {count}")
    for first in (5, 8, 15):
        assert found[USUAL, 0.2, first] == count
    assert found[USUAL, 0.1, 15] >= 0.9 * count


# --- What belongs together


def quiet(count: int = 6, **fields: object) -> list[list[JobRecord]]:
    return [
        [dataclasses.replace(job, **fields) for job in jobs]  # type: ignore[arg-type]
        for jobs in simulated_nights(count, 0, CALM)
    ]


def slower(jobs: Iterable[JobRecord], share: float = 0.5) -> list[JobRecord]:
    return [
        dataclasses.replace(job, images_per_second=job.images_per_second * (1 - share))
        for job in jobs
        if job.images_per_second is not None
    ]


def test_other_hardware_or_image_begins_a_series_of_its_own() -> None:
    nights = quiet()
    for other in ({"hardware": "8 x NVIDIA A100"}, {"image": "sha256:2"}, {"parameters": {"model.input_width": 999}}):
        tonight = [dataclasses.replace(job, **other) for job in slower(nights[-1])]  # type: ignore[arg-type]
        assert regressions(flat([*nights[:-1], tonight])) == []
    assert regressions(flat([*nights[:-1], slower(nights[-1])])) != []


def test_a_series_that_did_not_run_tonight_is_not_new() -> None:
    nights = quiet()
    nights[-1] = slower(nights[-1])
    assert all(found.is_new for found in regressions(flat(nights)))
    tonight = [scaling_job("2026-11-30", 1, 50.0, model="sign")]
    found = regressions(flat([*nights, tonight]))
    assert found and not any(regression.is_new for regression in found)


def test_what_else_changed_is_named() -> None:
    nights = quiet(parameters={"train.batch_size_per_rank": 4}, nodes=("dgx1",), git_revision="a" * 40)
    nights[-1] = [
        dataclasses.replace(
            job,
            parameters={"train.batch_size_per_rank": 4, "distributed.bucket_mib": 0.01},
            git_revision="b" * 40,
            nodes=("dgx2",),
            data_manifest="12+34",
        )
        for job in slower(nights[-1])
    ]
    for found in regressions(flat(nights)):
        assert found.differences == (
            "revision aaaaaaaaaa → bbbbbbbbbb",
            "distributed.bucket_mib default → 0.01",
            "other training data",
            "nodes dgx1 → dgx2",
        )


def test_a_faster_single_rank_is_said_where_it_lowers_the_factor() -> None:
    nights = quiet()
    nights[-1] = [
        dataclasses.replace(job, images_per_second=job.images_per_second * 1.5)
        if job.images_per_second is not None and job.num_ranks == 1
        else job
        for job in nights[-1]
    ]
    found = regressions(flat(nights))
    assert {regression.series.quantity for regression in found} == {"scaling_factor"}
    assert all(regression.differences[0].startswith("one rank by itself 7") for regression in found)


def test_runs_that_did_not_measure_their_time_have_no_cause() -> None:
    nights = quiet(lost_scaling={})
    nights[-1] = slower(nights[-1])
    found = regressions(flat(nights))
    assert {regression.series.quantity for regression in found} == {"images_per_second"}
    assert {regression.cause for regression in found} == {""} and all(not found.rises for found in found)
    assert "cause" not in found[0].text()


def champion(night: int, value: float, metric: str = "culane_f1_50", **fields: object) -> JobRecord:
    record = JobRecord(
        night_name(night), f"champion-{value}", "nightly", "lane-small", "champion", objective_name=metric
    )
    return dataclasses.replace(record, objective=value, **{"status": "finished", **fields})  # type: ignore[arg-type]


def test_a_champion_that_got_worse_is_found() -> None:
    values = [0.850, 0.853, 0.848, 0.851, 0.852, 0.82]
    jobs = [champion(night, value + spread) for night, value in enumerate(values) for spread in (-0.002, 0.0, 0.002)]
    (found,) = regressions(jobs)
    assert found.is_new and found.cause == "" and found.series.quantity == "culane_f1_50"
    assert (found.before, found.after) == (pytest.approx(0.851), pytest.approx(0.82))
    text = f"lane-small on 1 rank: culane_f1_50 of the champion 0.8510 → 0.8200 (-3.1 points) since {night_name(5)}"
    assert found.text() == text
    for other in ({"kind": "trial"}, {"status": "pruned"}, {"status": "target_reached"}, {"status": "answered"}):
        assert regressions([dataclasses.replace(job, **other) for job in jobs]) == []  # type: ignore[arg-type]
    upwards = [dataclasses.replace(job, objective=1 - (job.objective or 0)) for job in jobs]
    assert regressions(upwards) == []


def test_fewer_misses_are_better() -> None:
    values = [0.05, 0.05, 0.05, 0.05, 0.09]
    (found,) = regressions([champion(night, value, "tusimple_fn") for night, value in enumerate(values)])
    assert found.after == 0.09
    lower = [0.09, 0.09, 0.09, 0.09, 0.05]
    assert regressions([champion(night, value, "tusimple_fn") for night, value in enumerate(lower)]) == []


def test_accuracy_on_other_validation_data_is_not_compared() -> None:
    jobs = [champion(night, 0.85, data_manifest=f"{night}+77") for night in range(5)]
    assert len(regressions([*jobs, champion(5, 0.7, data_manifest="9+77")])) == 1
    assert regressions([*jobs, champion(5, 0.7, data_manifest="9+78")]) == []


def test_objectives_that_are_no_accuracy_are_left_to_the_throughput_series() -> None:
    assert series_of([champion(night, 100.0, "images_per_second") for night in range(5)]) == []


def test_a_regression_in_words_and_figures() -> None:
    nights = []
    for night in range(5):
        shares = {"data": 0.02 if night < 4 else 0.3, "exposed_allreduce": 0.0, "straggler": 0.0}
        nights.append([scaling_job(night_name(night), 2, 100.0 if night < 4 else 60.0, lost_scaling=shares)])
    throughput, share = regressions(flat(nights))
    assert throughput.text() == (
        "lane-small on 2 ranks: throughput 100.0 → 60.0 images/s (-40.0 %) since 2026-11-05; "
        "cause: waiting for data (+48.0 % of a step)"
    )
    assert share.text() == (
        "lane-small on 2 ranks: share of a step waiting for data 2.0 → 30.0 % (+28.0 points) since 2026-11-05; "
        "cause: waiting for data (+48.0 % of a step)"
    )
    assert throughput.rule == "median and k sigma, k = 6.5" and throughput.noise == 0.01
    assert len(nights) < PELT_NIGHTS
    values = json.loads(json.dumps(throughput.to_json()))
    assert values["change"] == pytest.approx(-0.4) and values["is_new"] and values["text"] == throughput.text()
    assert values["series"]["points"][4] == {
        "night": "2026-11-05",
        "value": 60.0,
        "error_variance": 0.0,
        "degrees_of_freedom": 0,
    }
