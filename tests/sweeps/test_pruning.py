"""Which trials end early: rungs, ASHA, median, Hyperband's brackets, over made-up curves."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.planning.plan import Pruning
from sweeps.search.pruning import asha_decision, bracket_of, brackets, decide, expected_share, median_decision, rungs

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=30)
ASHA = Pruning("asha", min_samples=100, reduction_factor=3)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 100_000), st.integers(2, 5))
def test_rungs_rise_by_the_factor_and_end_before_the_whole(first: int, end: int, factor: int) -> None:
    found = rungs(first, end, factor)
    assert all(rung < end for rung in found)
    assert all(later == factor * earlier for earlier, later in itertools.pairwise(found))
    assert (found[0] == first and found[-1] * factor >= end) if first < end else found == ()


@settings(deadline=None)
@given(VALUES, st.integers(2, 5))
def test_of_those_that_passed_a_rung_together_one_in_so_many_goes_on(values: list[float], factor: int) -> None:
    curves = {number: {100: value} for number, value in enumerate(values)}
    going_on = [n for n in curves if not asha_decision(curves[n], _others(curves, n), [100], factor, "minimize").stop]
    kept = max(1, len(values) // factor)
    # Those equal to the last one that goes on go on too.
    assert going_on == [n for n, value in enumerate(values) if value <= sorted(values)[kept - 1]]


@settings(deadline=None)
@given(VALUES, st.integers(2, 5))
def test_the_first_and_every_new_best_go_on(values: list[float], factor: int) -> None:
    curves: dict[int, dict[int, float]] = {}
    for number, value in enumerate(values):
        curves[number] = {100: value}
        stop = decide(Pruning("asha", 100, factor), "maximize", 1000, number, curves).stop
        if value >= max(values[: number + 1]):
            assert not stop


@settings(deadline=None)
@given(VALUES, st.sampled_from(["asha", "median", "hyperband"]))
def test_less_is_better_mirrors_more_is_better(values: list[float], name: str) -> None:
    rules = Pruning(name, 100, 3)  # type: ignore[arg-type]
    up = {number: {100: value} for number, value in enumerate(values)}
    down = {number: {100: -value} for number, value in enumerate(values)}
    for number in up:
        assert decide(rules, "maximize", 1000, number, up).stop == decide(rules, "minimize", 1000, number, down).stop


@settings(deadline=None)
@given(VALUES, st.floats(0, 50), st.sampled_from(["asha", "median", "hyperband"]))
def test_a_better_value_never_ends_a_trial_that_would_go_on(values: list[float], gain: float, name: str) -> None:
    rules = Pruning(name, 100, 3)  # type: ignore[arg-type]
    curves = {number: {100: value} for number, value in enumerate(values)}
    better = {**curves, 0: {100: values[0] + gain}}
    if not decide(rules, "maximize", 1000, 0, curves).stop:
        assert not decide(rules, "maximize", 1000, 0, better).stop


@settings(deadline=None)
@given(VALUES, st.randoms(use_true_random=False))
def test_the_order_in_which_trials_are_listed_plays_no_part(values: list[float], random: object) -> None:
    curves = {number: {100: value} for number, value in enumerate(values)}
    turned = dict(reversed(list(curves.items())))
    for number in curves:
        assert decide(ASHA, "maximize", 1000, number, curves) == decide(ASHA, "maximize", 1000, number, turned)


def test_trials_that_come_late_are_judged_by_all_that_were_there_before() -> None:
    curves = {0: {100: 0.1}, 1: {100: 0.2}, 2: {100: 0.3}, 3: {100: 0.25}}
    decision = decide(ASHA, "maximize", 1000, 3, curves)
    assert decision.stop
    assert decision.cause == "asha: 0.25 at 100 samples is place 2 of 4, 1 goes on"


def test_a_trial_is_judged_only_at_the_rung_that_its_newest_report_passed() -> None:
    others = {1: {100: 0.9, 300: 0.9}, 2: {100: 0.8, 300: 0.8}, 3: {100: 0.7, 300: 0.7}}
    assert not decide(ASHA, "maximize", 1000, 0, {**others, 0: {50: 0.0}}).stop
    assert decide(ASHA, "maximize", 1000, 0, {**others, 0: {50: 0.0, 110: 0.0}}).stop
    # Between two rungs nothing is judged again, whoever came since.
    assert not decide(ASHA, "maximize", 1000, 0, {**others, 0: {110: 0.0, 200: 0.0}}).stop
    assert decide(ASHA, "maximize", 1000, 0, {**others, 0: {110: 0.0, 200: 0.0, 310: 0.0}}).stop


def test_a_rung_counts_at_the_first_report_at_or_after_it() -> None:
    # The other one was far better later, but not then.
    others = {1: {90: 0.0, 120: 0.3, 400: 0.9}}
    assert not decide(Pruning("asha", 100, 2), "maximize", 1000, 0, {**others, 0: {105: 0.4}}).stop


def test_a_trial_that_has_come_to_its_end_is_not_ended_early() -> None:
    curves = {0: {1000: 0.0}, **{n: {1000: 1.0} for n in range(1, 9)}}
    for name in ("asha", "median", "hyperband"):
        assert not decide(Pruning(name, 100, 3), "maximize", 1000, 0, curves).stop


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_trial_and_is_the_worst_for_others(value: float) -> None:
    curves = {0: {100: value}, 1: {100: 0.1}}
    assert decide(ASHA, "maximize", 1000, 0, curves).stop
    bad = {0: {100: math.nan}, 1: {100: math.nan}, 2: {100: 0.1}}
    assert not decide(ASHA, "minimize", 1000, 2, bad).stop


def test_without_pruning_nothing_ends() -> None:
    curves = {0: {100: 0.0}, **{n: {100: 1.0} for n in range(1, 9)}}
    assert not decide(Pruning(), "maximize", 1000, 0, curves).stop


def test_median_compares_the_best_so_far_with_the_others_best_by_the_same_samples() -> None:
    others = [{50: 0.5, 100: 0.2, 200: 0.9}, {100: 0.4}, {100: 0.6}, {100: 0.1}, {50: 0.99}]
    # Bests by 100 samples: .5, .4, .6, .1; the last one has not come so far.
    assert not median_decision({50: 0.45, 100: 0.3}, others, "maximize", 4).stop
    decision = median_decision({50: 0.2, 100: 0.35}, others, "maximize", 4)
    assert decision.stop and "worse than the median 0.45 of 4 trials" in decision.cause
    assert not median_decision({100: 0.0}, others, "maximize", 5).stop


@settings(deadline=None)
@given(st.integers(10, 50), st.integers(100, 1000), st.integers(2, 4))
def test_brackets_cost_about_the_same_and_every_trial_has_one(first: int, end: int, factor: int) -> None:
    of = brackets(Pruning("hyperband", first, factor), end)
    assert of[-1].rungs == () and of[0].rungs == rungs(first, end, factor)
    total = sum(bracket.num_trials for bracket in of)
    counted = Counter(bracket_of(number, of) for number in range(3 * total))
    assert [counted[index] for index in range(len(of))] == [3 * bracket.num_trials for bracket in of]
    # In any prefix each has its share, to within one trial.
    seen: Counter[int] = Counter()
    for number in range(min(total, 60)):
        seen[bracket_of(number, of)] += 1
        for index, bracket in enumerate(of):
            assert abs(seen[index] - (number + 1) * bracket.num_trials / total) < len(of)


def test_hyperband_compares_within_a_bracket_only() -> None:
    rules = Pruning("hyperband", 100, 3)
    of = brackets(rules, 1000)
    members = [number for number in range(60) if bracket_of(number, of) == 1]
    strangers = [number for number in range(60) if bracket_of(number, of) == 0]
    curves = {number: {100: 0.9, 300: 0.9} for number in strangers} | {members[0]: {100: 0.1, 300: 0.1}}
    # At 300, the first rung of its own bracket, it is alone.
    assert of[1].rungs[0] == 300
    assert not decide(rules, "maximize", 1000, members[0], curves).stop
    curves |= {number: {100: 0.9, 300: 0.9} for number in members[1:4]}
    assert decide(rules, "maximize", 1000, members[0], curves).stop


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(0, 2000))
def test_the_expected_share_is_what_synchronous_halving_trains(factor: int, seed: int) -> None:
    rules, end = Pruning("asha", 10, factor), 10 * factor**3
    count = factor**3
    trained, alive, before = 0, count, 0
    for rung in rungs(10, end, factor):
        trained, alive, before = trained + alive * (rung - before), alive // factor, rung
    trained += alive * (end - before)
    assert expected_share(rules, end) == pytest.approx(trained / (count * end))


def _others(curves: dict[int, dict[int, float]], number: int) -> list[dict[int, float]]:
    return [curve for other, curve in curves.items() if other != number]
