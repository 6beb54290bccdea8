"""When a configuration is better than the default beyond the noise: the rule, how often it errs, and its edges."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sweeps.planning.plan import Constraint
from sweeps.record import JobRecord
from sweeps.report.leaderboard import Board, board_of
from sweeps.report.noise import LEVEL, compare, needed_difference, noise_of, repeats_needed
from sweeps.report.plan_facts import ModelFacts
from tests.sweeps.made_up_nights import empty_night, job_of

NIGHT = empty_night()
FACTS = ModelFacts("culane_f1_50", "maximize")


def runs(kind: str, config: str, values: Sequence[float], night: str = NIGHT.night) -> list[JobRecord]:
    of_night = replace(NIGHT, night=night)
    return [
        job_of(of_night, f"{kind}-{config}-{seed}", kind=kind, config_hash=config, objective=value, seed=seed)
        for seed, value in enumerate(values)
    ]


def board(jobs: Sequence[JobRecord], earlier: Sequence[JobRecord] = (), facts: ModelFacts = FACTS) -> Board:
    return board_of("lane-small", jobs, earlier, facts, {})


def test_spread_is_pooled_over_groups_of_equal_configurations() -> None:
    jobs = [*runs("default", "d", [0.5, 0.52, 0.51]), *runs("champion", "c", [0.7, 0.74]), *runs("trial", "c", [0.9])]
    noise = noise_of(jobs)
    assert noise is not None
    assert noise.degrees_of_freedom == 3 and noise.num_runs == 5 and noise.num_groups == 2
    pooled = (2 * statistics.variance([0.5, 0.52, 0.51]) + statistics.variance([0.7, 0.74])) / 3
    assert noise.standard_deviation == pytest.approx(math.sqrt(pooled))


def test_a_change_between_nights_is_no_spread_under_seeds() -> None:
    """The same configuration, 0.5 one night and 0.6 the next, within a hundredth each night."""
    jobs = [*runs("default", "d", [0.5, 0.51], "2026-11-29"), *runs("default", "d", [0.6, 0.61], "2026-11-30")]
    noise = noise_of(jobs)
    assert noise is not None and noise.standard_deviation == pytest.approx(0.01 / math.sqrt(2))


def test_one_run_twice_under_one_seed_tells_nothing() -> None:
    jobs = [job_of(NIGHT, name, kind="default", config_hash="d", seed=1, objective=0.5) for name in ("a", "b")]
    assert noise_of(jobs) is None


def test_the_needed_difference_is_students() -> None:
    noise = noise_of(runs("default", "d", [0.50, 0.52, 0.51, 0.53]))
    assert noise is not None
    quantile = stats.t.ppf(1 - LEVEL / 12, 3)
    expected = quantile * noise.standard_deviation * math.sqrt(1 + 1 / 4)
    assert needed_difference(noise, 1, 4, 12) == pytest.approx(expected)


def test_too_early_a_claim_is_rare_and_a_real_gain_is_found() -> None:
    """400 nights of 24 configurations that are all like the default, and of one among them that is better."""
    generator = random.Random(5)
    quiet = repeated = better = 0
    for _ in range(400):
        default = runs("default", "d", [generator.gauss(0.6, 0.01) for _ in range(4)])
        champion = runs("champion", "c", [generator.gauss(0.6, 0.01) for _ in range(4)])
        trials = [run for index in range(24) for run in runs("trial", f"t{index}", [generator.gauss(0.6, 0.01)])]
        quiet += board([*default, *champion, *trials]).is_better
        # The best of the crowd is run again, as a night does.
        best = max(trials, key=lambda job: job.objective or 0.0).config_hash
        again = runs("champion", best, [generator.gauss(0.6, 0.01) for _ in range(2)])
        repeated += board([*default, *champion, *trials, *again]).is_better
        gain = runs("trial", "real", [generator.gauss(0.6 + 8 * 0.01, 0.01)])
        better += board([*default, *champion, *trials, *gain]).is_better
    # The stated rate and three of its standard errors.
    allowed = LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / 400)
    assert quiet / 400 <= allowed and repeated / 400 <= allowed
    assert better / 400 > 0.9


def test_verdicts_say_why() -> None:
    default = runs("default", "d", [0.50, 0.51, 0.52])
    assert board([*default, *runs("trial", "t", [0.7])]).verdict == "better"
    assert board([*default, *runs("trial", "t", [0.515])]).verdict == "not beyond noise"
    assert board([*default, *runs("trial", "t", [0.4])]).verdict == "worse"
    lonely = board([*runs("default", "d", [0.5]), *runs("trial", "t", [0.9])])
    assert lonely.verdict == "unknown" and "no configuration was run under two seeds" in lonely.verdict_reason
    no_default = board(runs("trial", "t", [0.9]))
    assert no_default.verdict == "unknown" and "default was not run" in no_default.verdict_reason
    assert board([]).verdict == "none"
    untrained = board([*runs("default", "d", [0.0, 0.0, 0.0]), *runs("trial", "t", [0.001])])
    assert untrained.verdict == "unknown" and "same figure" in untrained.verdict_reason


def test_where_smaller_is_better_the_smallest_leads() -> None:
    facts = ModelFacts("culane_f1_50", "minimize")
    found = board([*runs("default", "d", [0.50, 0.51, 0.52]), *runs("trial", "t", [0.2])], facts=facts)
    assert found.best is not None and found.best.mean == 0.2 and found.verdict == "better"
    assert found.best.against_default is not None
    assert found.best.against_default.difference == pytest.approx(0.31)
    assert found.verdict_reason.startswith("−0.3100 against ")


def test_repeats_made_after_picking_need_no_correction_for_luck() -> None:
    default = runs("default", "d", [0.600, 0.601, 0.599, 0.600])
    crowd = [run for index in range(200) for run in runs("trial", f"t{index}", [0.55])]
    trial_alone = board([*default, *crowd, *runs("trial", "x", [0.6042])])
    confirmed = board(
        [*default, *crowd, *runs("trial", "x", [0.6042]), *runs("champion", "x", [0.604, 0.6045, 0.6041])]
    )
    assert trial_alone.verdict == "not beyond noise" and confirmed.verdict == "better"
    entry = confirmed.entries[0]
    assert entry.against_default is not None and entry.against_default.num_compared == 2, "half of the level"


def test_pruned_failed_and_answered_runs_are_not_ranked() -> None:
    jobs = runs("default", "d", [0.5, 0.51])
    jobs += [
        job_of(NIGHT, status, status=status, objective=0.99) for status in ("pruned", "failed", "answered", "diverged")
    ]
    found = board(jobs)
    assert [entry.config_hash for entry in found.entries] == ["d"]
    assert found.outcomes == {"finished": 2, "failed": 2, "pruned": 1, "answered": 1}


def test_change_since_last_night_and_nights_without_gain() -> None:
    earlier = [
        *runs("default", "d", [0.50, 0.502], "2026-11-27"),
        *runs("trial", "a", [0.60], "2026-11-27"),
        *runs("trial", "b", [0.61], "2026-11-28"),
        *runs("trial", "c", [0.601], "2026-11-29"),
    ]
    found = board(runs("trial", "e", [0.6105]), earlier)
    assert found.last_night == "2026-11-29" and found.change_since_last_night == pytest.approx(0.0095)
    assert [night.best for night in found.history] == [0.60, 0.61, 0.601, 0.6105]
    assert found.num_nights_without_gain == 2, "0.6105 is above 0.61 by less than the spread of 0.0014"


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=6),
    st.lists(st.floats(-10, 10), min_size=1, max_size=6),
    st.integers(1, 1000),
    st.sampled_from([-1, 1]),
)
def test_comparisons_are_consistent(a: list[float], b: list[float], compared: int, sign: int) -> None:
    noise = noise_of(runs("default", "d", [0.5, 0.51, 0.53]))
    there, back = compare(a, b, noise, compared, sign), compare(b, a, noise, compared, sign)
    assert there is not None and back is not None and there.needed is not None and back.needed is not None
    assert there.difference == pytest.approx(-back.difference, abs=1e-9) and there.needed == pytest.approx(back.needed)
    assert not (there.is_better and back.is_better)
    more = compare(a, b, noise, compared + 1, sign)
    assert more is not None and more.needed is not None and more.needed >= there.needed


def test_repeats_needed_would_decide_it() -> None:
    noise = noise_of(runs("default", "d", [0.50, 0.52, 0.51, 0.53]))
    repeats = repeats_needed(noise, 0.02, 1)
    assert repeats is not None and repeats > 1
    needed, before = (
        needed_difference(noise, repeats, repeats, 1),
        needed_difference(noise, repeats - 1, repeats - 1, 1),
    )
    assert needed is not None and before is not None and needed < 0.02 <= before
    assert repeats_needed(noise, 1e-9, 1) is None and repeats_needed(None, 0.02, 1) is None


def test_what_breaks_a_constraint_is_no_answer() -> None:
    facts = replace(FACTS, constraints=(Constraint("images_per_second", at_least=50.0),))
    fast = [replace(run, images_per_second=60.0) for run in runs("default", "d", [0.50, 0.51])]
    slow = [replace(run, images_per_second=40.0) for run in runs("trial", "slow", [0.9])]
    found = board([*fast, *slow], facts=facts)
    assert [entry.config_hash for entry in found.entries] == ["d"] and found.num_breaking == 1


@pytest.mark.parametrize("second", ["seconds", "num_parameters", "latency_seconds"])
def test_with_two_objectives_the_front_is_what_nothing_dominates(second: str) -> None:
    facts = replace(FACTS, others=((second, "minimize"),))
    figures = {"a": (0.9, 30.0), "b": (0.8, 20.0), "c": (0.7, 25.0), "d": (0.6, 10.0), "e": (0.8, 20.0)}
    jobs = [
        replace(run, **{second: other})
        for name, (value, other) in figures.items()
        for run in runs("trial", name, [value])
    ]
    found = board(jobs, facts=facts)
    assert {entry.config_hash for entry in found.entries if entry.is_on_front} == {"a", "b", "d", "e"}
    assert [entry.others[second] for entry in found.entries] == [30.0, 20.0, 20.0, 25.0, 10.0]
    assert board(jobs).front == ()


def test_nights_of_another_plan_data_or_length_are_not_compared() -> None:
    tonight = [replace(run, samples=4000, data_manifest="aa") for run in runs("default", "d", [0.5, 0.51])]
    earlier: list[JobRecord] = []
    others: list[dict[str, Any]] = [{"plan": "other"}, {"data_manifest": "bb"}, {"samples": 8000}, {}]
    for index, changes in enumerate(others):
        own = runs("trial", f"t{index}", [0.6 + index / 100], f"2026-11-2{index}")
        earlier += [replace(replace(run, samples=4000, data_manifest="aa"), **changes) for run in own]
    found = board(tonight, earlier)
    assert found.num_nights_apart == 3 and found.last_night == "2026-11-23"
    assert [night.best for night in found.history] == [pytest.approx(0.63), pytest.approx(0.505)]


def test_what_is_confirmed_is_found_below_a_crowd_of_lucky_ones() -> None:
    default = runs("default", "d", [0.600, 0.604, 0.596, 0.600])
    lucky = [run for index in range(300) for run in runs("trial", f"t{index}", [0.609])]
    found = board([*default, *lucky, *runs("champion", "x", [0.6080, 0.6084, 0.6081, 0.6082])])
    assert found.verdict == "better"
    assert [(entry.rank, entry.config_hash) for entry in found.entries[10:]] == [(301, "x"), (302, "d")]


def test_what_this_night_confirmed_is_not_called_the_champion_it_began_with() -> None:
    jobs = [*runs("default", "d", [0.5, 0.51]), *runs("champion", "x", [0.7, 0.71])]
    assert board(jobs).champion is None
    began = [replace(run, parameters={"optim.lr": 0.1}) for run in runs("champion", "old", [0.65, 0.66])]
    found = board_of("lane-small", [*jobs, *began], [], FACTS, {"optim.lr": 0.1})
    assert found.champion is not None and found.champion.config_hash == "old"
    against = found.entries[0].against_champion
    assert against is not None and against.difference == pytest.approx(0.05) and against.is_better


def test_pruned_trials_count_among_those_that_could_have_been_picked() -> None:
    default = runs("default", "d", [0.5, 0.51, 0.52])
    pruned = [replace(run, status="pruned") for index in range(9) for run in runs("trial", f"p{index}", [0.1])]
    entry = board([*default, *pruned, *runs("trial", "t", [0.6])]).entries[0]
    assert entry.against_default is not None and entry.against_default.num_compared == 10
