"""The rule by which a search ends before its budget, against simulated searches whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sweeps.search.early_end import LEAST_TRIALS, noise_of, outlook

DRAWS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda r: r.gauss(0.5, 0.1),
    "uniform": lambda r: r.random(),
    "skewed to the top": lambda r: r.betavariate(8, 2),
    "skewed to the bottom": lambda r: r.betavariate(2, 8),
    "exponential": lambda r: r.expovariate(10),
}


@pytest.mark.parametrize("shape", list(DRAWS))
def test_a_search_that_was_ended_would_rarely_have_improved(shape: str) -> None:
    """The share of searches that were ended although the rest would have beaten the best by more than the noise."""
    noise, num_trials, wrong, ended = 0.1, 120, 0, 0
    for seed in range(100):
        generator = random.Random(f"{shape}/{seed}")
        values = [DRAWS[shape](generator) for _ in range(num_trials)]
        for done in range(LEAST_TRIALS, num_trials, 5):
            if outlook(values[:done], "maximize", noise, num_trials - done).end:
                ended += 1
                wrong += max(values[done:]) > max(values[:done]) + noise
                break
    # Of 200 searches of each kind, at a noise of .02, .05 and .1, 0 to 6 were.
    assert wrong <= 6
    if shape in ("uniform", "skewed to the top"):
        assert ended > 40


def test_a_search_far_above_its_noise_goes_on() -> None:
    generator = random.Random(0)
    values = [generator.gauss(0.5, 0.1) for _ in range(40)]
    view = outlook(values, "maximize", 0.001, 100)
    assert not view.end and view.probability > 0.2
    assert "100 more trials would beat the best" in view.reason


def test_nothing_is_judged_by_few_trials_or_by_few_values() -> None:
    assert not outlook([0.5] * (LEAST_TRIALS - 1), "maximize", 0.1, 5).end
    assert not outlook([0.5, 0.4] + [None] * 40, "maximize", 0.1, 5).end
    assert outlook([], "maximize", 0.1, 0).end


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=20, max_size=60), st.floats(0, 0.5), st.integers(1, 200))
@example([0.0] * 19 + [2.2e-311], 0.0, 1)
def test_it_is_a_probability_that_falls_with_the_noise_and_rises_with_the_budget(
    values: list[float], noise: float, left: int
) -> None:
    view = outlook(values, "maximize", noise, left)
    assert 0 <= view.probability <= 1
    assert outlook(values, "maximize", noise + 0.1, left).probability <= view.probability + 1e-12
    assert outlook(values, "maximize", noise, left + 10).probability >= view.probability - 1e-12


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(0, 1), min_size=20, max_size=60))
def test_less_is_better_mirrors_more_is_better(values: list[float | None]) -> None:
    mirrored = [None if value is None else -value for value in values]
    up, down = outlook(values, "maximize", 0.05, 10), outlook(mirrored, "minimize", 0.05, 10)
    assert up.probability == pytest.approx(down.probability)


def test_the_noise_is_that_of_a_difference_of_two_runs() -> None:
    """Two single runs of one configuration differ by more than it in 5 % of cases."""
    generator = random.Random(1)
    beyond, rounds = 0, 1500
    for _ in range(rounds):
        groups = [[generator.gauss(0.5, 0.02) for _ in range(4)], [generator.gauss(0.6, 0.02) for _ in range(3)]]
        band = noise_of(groups)
        assert band is not None
        beyond += abs(generator.gauss(0, 0.02) - generator.gauss(0, 0.02)) > band
    assert beyond / rounds == pytest.approx(0.05, abs=0.02)


def test_without_repeats_there_is_no_noise_to_speak_of() -> None:
    assert noise_of([]) is None
    assert noise_of([[0.5], [0.6], [0.7, math.nan]]) is None
    assert noise_of([[0.5, 0.5]]) == 0.0
