"""Levels of a series of nights: where it changed, held against its own noise. Knows nothing of what the figures are.

Few nights: the median of the nights before against K times their spread. Ten nights and more: PELT (Killick 2012, by
ruptures) proposes where levels begin, and each change must pass the same test. Rates of false and missed alarms were
simulated; docs/results.md has them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_NIGHTS = 3
"""No night is judged by fewer before it, and a level that lasts shorter is a passing disturbance."""
PELT_NIGHTS = 10
PELT_PENALTY = 13.0
"""In units of the noise's variance: what one more change must explain; a single night's, √(13 · (n + 1) / n) sigma."""
K = {3: 8.0, 4: 6.5, 5: 6.0, 6: 5.5, 7: 5.0}
K_OF_MORE = 4.5
"""Standard deviations that make a change, by number of nights it is held against: few say little of their spread."""
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Sensitivity:
    """What is taken for noise in one kind of figure, in its own unit."""

    least_change: float
    """A smaller change is none, however sure it is."""
    least_noise: float
    """Standard deviation between nights that is taken for granted."""


@dataclass(frozen=True)
class Shift:
    """From one level to another that has lasted to the newest night."""

    before: float
    after: float
    begin: int
    """Index of the first night of the change."""
    nights_before: tuple[int, ...]
    nights_after: tuple[int, ...]
    """Of the two levels; passing disturbances are in neither."""
    noise: float
    threshold: float
    """A single night would have had to differ by so much."""
    rule: str


def worse_level(
    values: Sequence[float], sensitivity: Sensitivity, higher_is_better: bool, least_noise: float = 0.0
) -> Shift | None:
    """The change for the worse that the newest level stands in; None where there is none.

    `least_noise`: what the spread within nights and that of similar series say of the noise; see `difference_noise`.
    """
    if not values or max(values) - min(values) <= sensitivity.least_change:
        return None
    sign = 1.0 if higher_is_better else -1.0
    signed = [sign * value for value in values]
    floor = max(sensitivity.least_noise, least_noise)
    if len(values) < PELT_NIGHTS:
        levels, rule = _few_nights(signed, sensitivity.least_change, floor), "median and k sigma"
    else:
        levels, rule = _many_nights(signed, sensitivity.least_change, floor), f"PELT, penalty {PELT_PENALTY:g}"
    last = levels[-1]
    for place in range(len(levels) - 2, -1, -1):
        before = levels[place]
        test = _test(signed, before, last, sensitivity.least_change, floor)
        if test.drop > test.threshold:
            return Shift(
                before=sign * statistics.median(signed[index] for index in before),
                after=sign * statistics.median(signed[index] for index in last),
                begin=levels[place + 1][0],
                nights_before=tuple(before),
                nights_after=tuple(last),
                noise=test.noise,
                threshold=test.threshold_of_one,
                rule=f"{rule}, k = {test.k:g}",
            )
    return None


def difference_noise(series: Sequence[Sequence[float]]) -> float:
    """Standard deviation between nights from the differences of successive ones, over several similar series.

    Their median, so that changes of level, few as they are, do not count.
    """
    differences = [abs(b - a) for values in series for a, b in itertools.pairwise(values)]
    return MAD_TO_SIGMA * statistics.median(differences) / math.sqrt(2) if differences else 0.0


@dataclass(frozen=True)
class _Test:
    drop: float
    threshold: float
    threshold_of_one: float
    noise: float
    k: float


def _test(
    values: Sequence[float], before: Sequence[int], after: Sequence[int], least_change: float, floor: float
) -> _Test:
    """How far `after` lies below `before`, and how far it must to be lower.

    The spread is the largest of what can be said of it: by itself the median deviation of three to nine nights is
    far too small too often.
    """
    reference = [values[index] for index in before]
    middle = statistics.median(reference)
    deviation = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in reference)
    noise = max(floor, deviation, statistics.stdev(reference) if len(reference) > 1 else 0.0)
    k = K.get(len(reference), K_OF_MORE if len(reference) > MIN_NIGHTS else math.inf)
    # Variance of a median is pi / 2 times that of a mean.
    spread_of_median = math.pi / 2 / len(reference)
    drop = middle - statistics.median(values[index] for index in after)
    return _Test(
        drop,
        max(least_change, k * noise * math.sqrt(1 / len(after) + spread_of_median)),
        max(least_change, k * noise * math.sqrt(1 + spread_of_median)),
        noise,
        k,
    )


def _few_nights(values: Sequence[float], least_change: float, floor: float) -> list[list[int]]:
    """Levels as lists of nights, one night after the other; nights of passing disturbances are in none."""
    levels: list[list[int]] = [[]]
    leaving: list[int] = []
    left_below = False
    for night in range(len(values)):
        level = levels[-1]
        test = _test(values, level, [night], least_change, floor) if len(level) >= MIN_NIGHTS else None
        if test is None or abs(test.drop) <= test.threshold:
            level.append(night)
            leaving = []
            continue
        below = test.drop > 0
        leaving = [*leaving, night] if leaving and below == left_below else [night]
        left_below = below
        if len(leaving) == MIN_NIGHTS:
            levels.append(leaving)
            leaving = []
    return [*levels, leaving] if leaving else levels


def _many_nights(values: Sequence[float], least_change: float, floor: float) -> list[list[int]]:
    import numpy as np
    import ruptures

    noise = max(floor, difference_noise([values]))
    signal = np.asarray(values).reshape(-1, 1) / noise
    ends = ruptures.Pelt(model="l2", min_size=1, jump=1).fit(signal).predict(pen=PELT_PENALTY)
    segments = [list(range(begin, end)) for begin, end in itertools.pairwise([0, *ends])]
    levels: list[list[int]] = []
    disturbed = False
    for place, segment in enumerate(segments):
        if len(segment) < MIN_NIGHTS and place < len(segments) - 1:
            disturbed = True
            continue
        if disturbed and levels:
            # One level, if it went on as it was. Neighbours that PELT told apart stay two: in a slow drift, where no
            # step is large, the newest is held against one further back.
            test = _test(values, levels[-1], segment, least_change, floor)
            if abs(test.drop) <= test.threshold:
                segment = [*levels.pop(), *segment]
        levels.append(segment)
        disturbed = False
    return levels
