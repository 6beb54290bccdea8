"""What pruning saves, over recorded learning curves of real small trainings (record_surrogates.py), eight workers."""

from __future__ import annotations

import statistics

import pytest
from scipy.stats import spearmanr

from sweeps.planning.plan import Pruning
from tests.sweeps.surrogates import Recorded, in_random_order, load, pruned_search, random_search

PROBLEMS = ["sign-faces", "sign-or-not"]
NUM_TRIALS = 200
"""Of the random search: a night's worth."""
NUM_WORKERS = 8
SEEDS = range(20)


def rules(recorded: list[Recorded]) -> Pruning:
    """About as in nightly.toml: rungs at a ninth and a third of a whole training, and one in three goes on."""
    return Pruning("asha", min_samples=sorted(recorded[0].curve)[2], reduction_factor=3)


def shares_of_random(problem: str) -> list[float]:
    """For each seed, rank-seconds until the best of the whole random trials is reached, against what those took.

    Both take the same configurations in the same order; where ASHA has ended the best one, it goes on with the others
    of the 300. Where none of those reaches it, it counts as if it had taken as long as the random search.
    """
    recorded = load(problem)
    shares = []
    for seed in SEEDS:
        order = in_random_order(recorded, seed)
        whole = random_search(order[:NUM_TRIALS])
        pruned = pruned_search(order, rules(recorded), NUM_WORKERS, whole.best)
        reached = pruned.best >= whole.best
        shares.append(pruned.rank_seconds / whole.rank_seconds if reached else 1.0)
    return shares


@pytest.mark.parametrize("problem", PROBLEMS)
def test_asha_reaches_the_best_of_random_search_with_a_third_of_its_time(problem: str) -> None:
    shares = shares_of_random(problem)
    print(f"{problem}: mean {statistics.fmean(shares):.3f}, {min(shares):.2f} to {max(shares):.2f}")
    assert statistics.fmean(shares) <= 1 / 3, shares


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_recorded_problems_are_no_easy_ones(problem: str) -> None:
    """The best is far above the middle, few come near it, and values at the first rung only hint at final ones."""
    recorded = load(problem)
    assert len(recorded) == 300 and all(len(row.curve) == 27 for row in recorded)
    final = sorted(row.final for row in recorded)
    assert final[-1] > final[150] + 0.1
    assert sum(value > final[-1] - 0.01 for value in final) <= 15
    rung = rules(recorded).min_samples
    order = spearmanr([row.curve[rung] for row in recorded], [row.final for row in recorded]).statistic
    assert 0.3 < order < 0.95


def test_without_pruning_the_simulated_workers_train_everything() -> None:
    order = in_random_order(load(PROBLEMS[0]), 0)[:20]
    whole = random_search(order)
    spent = pruned_search(order, Pruning(), NUM_WORKERS, target=2.0)
    assert spent.rank_seconds == pytest.approx(whole.rank_seconds)
    assert (spent.num_trials, spent.num_whole, spent.best) == (20, 20, whole.best)


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_record_is_what_its_script_makes(problem: str) -> None:
    """Its second configuration, trained again; other versions of torch may differ in the last bits."""
    import random

    import torch

    from tests.sweeps.record_surrogates import PROBLEMS as SCRIPTS
    from tests.sweeps.record_surrogates import train

    script, generator = SCRIPTS[problem], random.Random(problem)
    inputs, labels = script.data()
    script.space.draw(generator)
    torch.set_num_threads(1)
    curve, _ = train(script, script.space.draw(generator), inputs, labels, seed=1)
    assert curve == pytest.approx(list(load(problem)[1].curve.values()), abs=0.03)
