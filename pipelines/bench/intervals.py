"""A ratio of two quantities that were measured in the same rounds, and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A median over rounds and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float]) -> Interval:
    """Median and the 95 % percentile bootstrap of it (Efron 1979); one value has no width.

    Values are one per round, e.g. ratios within the round, so that what slows a whole round down cancels.
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return Interval(statistics.median(values), low, high)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The ratio of two rows of figures, round by round."""
    return median_interval([a / b for a, b in zip(numerators, denominators, strict=True)])
