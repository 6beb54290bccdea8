"""Which trials end early: pure functions of what every trial has reported so far. Resources are samples seen.

ASHA (Li et al. 2018) in the form that ends trials instead of suspending them, the median rule of Vizier (Golovin et
al. 2017), and Hyperband (Li et al. 2016) as several ASHA brackets. Nothing is remembered and no trial waits for
another, so the rules hold for any number of trials that run at once and after any restart.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweeps.planning.plan import Direction, Pruning

Curve = Mapping[int, float]
"""Samples seen → value of the objective, as reported."""


@dataclass(frozen=True)
class Decision:
    """What is to become of a trial after its newest report."""

    stop: bool
    cause: str = ""
    """For people, and for the trial's result."""


@dataclass(frozen=True)
class Bracket:
    """Trials that are compared with each other only."""

    rungs: tuple[int, ...]
    """Samples at which all but one in `reduction_factor` end; none: every trial runs to its end."""
    num_trials: int
    """Of one round of all brackets, how many trials belong to this one."""


GOES_ON = Decision(False)


def rungs(min_samples: int, num_samples: int, factor: int) -> tuple[int, ...]:
    """`min_samples` and its products with powers of `factor`, below the end of a whole trial."""
    found = []
    rung = min_samples
    while rung < num_samples:
        found.append(rung)
        rung *= factor
    return tuple(found)


def brackets(pruning: Pruning, num_samples: int) -> tuple[Bracket, ...]:
    """Hyperband's, from the one that ends trials soonest to the one that ends none; of ASHA the first alone."""
    all_rungs = rungs(pruning.min_samples, num_samples, pruning.reduction_factor)
    if pruning.name != "hyperband":
        return (Bracket(all_rungs, 1),)
    highest = len(all_rungs)
    return tuple(
        Bracket(all_rungs[skipped:], _num_trials(highest, highest - skipped, pruning.reduction_factor))
        for skipped in range(highest + 1)
    )


def bracket_of(number: int, of: Sequence[Bracket]) -> int:
    """Which bracket the trial of that number belongs to: always the same, in turn, in the brackets' proportions."""
    order = _round(tuple(bracket.num_trials for bracket in of))
    return order[number % len(order)]


def decide(
    pruning: Pruning, direction: Direction, num_samples: int, number: int, curves: Mapping[int, Curve]
) -> Decision:
    """What becomes of trial `number` after its newest report; `curves` hold its own and every other trial's.

    Looks only at what the newest report has just passed, so it is to be asked after each report, in their order.
    """
    own = curves.get(number, {})
    if pruning.name == "none" or not own:
        return GOES_ON
    newest = max(own)
    if not math.isfinite(own[newest]):
        return Decision(True, f"{pruning.name}: the value at {newest:,} samples is not finite")
    if newest >= num_samples:
        return GOES_ON
    if pruning.name == "median":
        if newest < pruning.min_samples:
            return GOES_ON
        others = [curve for other, curve in curves.items() if other != number]
        return median_decision(own, others, direction, pruning.min_trials)
    of = brackets(pruning, num_samples)
    mine = bracket_of(number, of)
    if not _just_passed(own, of[mine].rungs):
        # Most reports pass none, and a night has hundreds of trials.
        return GOES_ON
    peers = [curve for other, curve in curves.items() if other != number and bracket_of(other, of) == mine]
    return asha_decision(own, peers, of[mine].rungs, pruning.reduction_factor, direction, pruning.name)


def asha_decision(
    own: Curve, peers: Iterable[Curve], at_rungs: Sequence[int], factor: int, direction: Direction, name: str = "asha"
) -> Decision:
    """Go on if, at every rung just passed, the own value is among the best 1 in `factor` of those that passed it.

    At least one always goes on, and so does whatever is equal to it. A value counts at the first report at or after the
    rung. A value that is not finite has passed as the worst.
    """
    sign = 1 if direction == "minimize" else -1
    peers = list(peers)
    for rung in _just_passed(own, at_rungs):
        mine = sign * _at(own, rung)
        passed = [_loss(curve, rung, sign) for curve in peers if max(curve, default=-1) >= rung]
        going_on = max(1, (len(passed) + 1) // factor)
        better = sum(value < mine for value in passed)
        if better >= going_on:
            return Decision(
                True,
                f"{name}: {sign * mine:.4g} at {rung:,} samples is place {better + 1} of {len(passed) + 1}, "
                f"{going_on} go{'es' if going_on == 1 else ''} on",
            )
    return GOES_ON


def median_decision(own: Curve, others: Iterable[Curve], direction: Direction, min_trials: int) -> Decision:
    """End if the best so far is worse than the median of what others had as their best by the same samples."""
    sign = 1 if direction == "minimize" else -1
    newest = max(own)
    best_by_then = [
        min(
            (sign * value for samples, value in curve.items() if samples <= newest and math.isfinite(value)),
            default=math.inf,
        )
        for curve in others
        if max(curve, default=-1) >= newest
    ]
    if len(best_by_then) < min_trials:
        return GOES_ON
    mine = min(sign * value for value in own.values() if math.isfinite(value))
    median = statistics.median(best_by_then)
    if mine <= median:
        return GOES_ON
    return Decision(
        True,
        f"median: {sign * mine:.4g} by {newest:,} samples is worse than the median {sign * median:.4g} "
        f"of {len(best_by_then)} trials",
    )


def expected_share(pruning: Pruning, num_samples: int) -> float:
    """Of the samples of whole trials, what is expected to be trained: one in `reduction_factor` passes each rung.

    For planning; 1 for `median`, whose outcome depends on the trials.
    """
    if pruning.name not in ("asha", "hyperband"):
        return 1.0
    of = brackets(pruning, num_samples)
    total = 0.0
    for bracket in of:
        share, before = 1.0, 0
        for rung in bracket.rungs:
            total += bracket.num_trials * share * (rung - before)
            share, before = share / pruning.reduction_factor, rung
        total += bracket.num_trials * share * (num_samples - before)
    return total / (num_samples * sum(bracket.num_trials for bracket in of))


def _num_trials(highest: int, num_rungs: int, factor: int) -> int:
    """Hyperband's: so many that each bracket costs about the same."""
    spread: int = factor**num_rungs
    return math.ceil((highest + 1) * spread / (num_rungs + 1))


@functools.lru_cache(maxsize=8)
def _round(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Bracket of each trial of a round: spread evenly, so that any stretch of trials has about its proportions."""
    total = sum(counts)
    given = [0] * len(counts)
    order = []
    for turn in range(1, total + 1):
        due = [turn * count / total - has for count, has in zip(counts, given, strict=True)]
        chosen = due.index(max(due))
        given[chosen] += 1
        order.append(chosen)
    return tuple(order)


def _just_passed(own: Curve, at_rungs: Sequence[int]) -> list[int]:
    newest = max(own)
    before = max((samples for samples in own if samples < newest), default=-1)
    return [rung for rung in at_rungs if before < rung <= newest]


def _at(curve: Curve, rung: int) -> float:
    return curve[min(samples for samples in curve if samples >= rung)]


def _loss(curve: Curve, rung: int, sign: int) -> float:
    value = sign * _at(curve, rung)
    return value if not math.isnan(value) else math.inf
