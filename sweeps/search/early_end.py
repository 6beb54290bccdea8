"""When a search may end before its budget: what is left is unlikely to improve the best by more than the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.planning.plan import Direction

LEAST_TRIALS = 20
TAIL_SHARE = 0.25
"""The best quarter of the trials tells how far better ones may lie."""
_DROP = 3.94
"""Of the log-likelihood: half the 99.5 % quantile of chi squared with one degree of freedom, so 99.75 % on one side. So
much, since the question is put again and again."""


@dataclass(frozen=True)
class Outlook:
    """What the rest of a budget can be expected to bring."""

    end: bool
    probability: float
    """Upper bound of the probability that any trial still to come beats the best by more than the noise."""
    reason: str


def outlook(
    values: Sequence[float | None], direction: Direction, noise: float, num_left: int, risk: float = 0.05
) -> Outlook:
    """Judge from the trials so far, in the order in which they ended; None: pruned, failed or diverged.

    The rule is that of peaks over a threshold (Pickands 1975): beyond a high threshold the excesses of a sample follow
    a generalised Pareto law. Its shape is taken from the bounded ones, as that of an F1 or a precision, up to the
    exponential one, the heaviest. With u the value below the k best of n trials, one more trial beats best + noise with
    a probability of p = k / n * (1 + shape * (best + noise - u) / scale) ** (-1 / shape). Its upper bound of 99.75 % by
    the profile likelihood of shape and scale is used (Coles 2001, section 4.3.3), so few or widely spread values keep
    the search going. Any of the `num_left` does so with 1 - (1 - p) ** num_left; below `risk` the search ends.

    The trials are taken as exchangeable. A search that learns gets better with time, so only the later half of them is
    read where that is enough, and nothing is judged by fewer than 20. `noise` is the least difference of two runs that
    counts (see `noise_of`); a trial without a value has failed to reach the threshold.
    """
    if num_left <= 0:
        return Outlook(True, 0.0, "no trials are left")
    recent = list(values)[-max(LEAST_TRIALS, math.ceil(len(values) / 2)) :]
    sign = 1 if direction == "maximize" else -1
    scores = sorted((sign * v for v in recent if v is not None and math.isfinite(v)), reverse=True)
    everything = [sign * value for value in values if value is not None and math.isfinite(value)]
    num_tail = math.ceil(TAIL_SHARE * len(recent))
    if len(recent) < LEAST_TRIALS or len(scores) <= num_tail:
        return Outlook(False, 1.0, f"{len(scores)} of {len(values)} trials have a value: too few to judge")
    threshold = scores[num_tail]
    needed = max(everything) + noise - threshold
    excesses = [score - threshold for score in scores[:num_tail]]
    if max(excesses) > 0:
        once = num_tail / len(recent) * _upper_survival(excesses, needed)
    else:
        # All of the best are equal: they say nothing of how far others may lie.
        once = 0.0 if noise > 0 else 1.0
    probability = -math.expm1(num_left * math.log1p(-min(once, 1 - 1e-12)))
    reason = (
        f"{num_left} more trials would beat the best, {sign * max(everything):.4g}, by more than the noise of "
        f"{noise:.2g} with a probability of at most {probability:.1%}"
    )
    return Outlook(probability < risk, probability, reason)


def noise_of(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> float | None:
    """Least difference between two single runs that is more than chance, from repeats under other seeds.

    `groups`: one of each configuration that was repeated, e.g. the default's and the champion's. Their spreads are
    pooled: t * s * sqrt(2), with Student's t at that confidence, two-sided. None where nothing was repeated.
    """
    kept = [[value for value in group if math.isfinite(value)] for group in groups]
    kept = [group for group in kept if len(group) > 1]
    freedom = sum(len(group) - 1 for group in kept)
    if not freedom:
        return None
    variance = sum(statistics.variance(group) * (len(group) - 1) for group in kept) / freedom
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(2 * variance)


def _upper_survival(excesses: Sequence[float], needed: float) -> float:
    """Largest probability that an excess is above `needed`, over the laws that the excesses do not speak against."""
    import numpy as np

    # In units of the largest: nothing depends on the scale, and what is tiny does not overflow.
    unit = max(excesses)
    needed = min(needed / unit, 1e100)
    y = np.asarray(excesses, np.float64) / unit
    count, most, mean = len(y), float(y.max()), float(y.mean())
    # Shapes below 0, bounded: beyond scale / -shape there is nothing, so the largest excess bounds the scale.
    shapes = np.linspace(-1.0, -0.05, 20)[:, None]
    least = np.maximum(mean / 8, -shapes * most * (1 + 1e-9))
    scales = least * np.geomspace(1.0, 64.0, 80)
    inner = np.log1p(shapes[..., None] * y / scales[..., None]).sum(-1)
    likelihoods = -count * np.log(scales) - (1 + 1 / shapes) * inner
    survivals = np.maximum(0.0, 1 + shapes * needed / scales) ** (-1 / shapes)
    # Shape 0: exponential.
    plain = np.geomspace(mean / 8, 8 * mean, 80)
    likelihoods = np.append(likelihoods, -count * np.log(plain) - count * mean / plain)
    survivals = np.append(survivals, np.exp(-needed / plain))
    return float(survivals[likelihoods >= likelihoods.max() - _DROP].max())
