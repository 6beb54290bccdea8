"""How much a model's objective varies under other seeds, and when a difference is more than that.

The rule. Repeats of one configuration in one night differ by their seeds alone; s is their standard deviation, pooled
over all configurations and nights that have repeats, with as many degrees of freedom as runs less groups. A
configuration of a runs is better than one of b runs beyond the noise if its mean is better by more than

    t(1 − 0.05 / m, degrees of freedom) × s × sqrt(1/a + 1/b)

where t is Student's quantile and m corrects for the number of comparisons (Bonferroni: the best of many is lucky as a
rule). Configurations with two champion runs or more, made under other seeds after the configuration had been picked,
are compared by these alone; all others by all their runs. Without any of the first sort m is the number of
configurations of the night that could have been picked, pruned ones included; otherwise each sort is given half of the
level: m is twice its number. So a night without any better configuration names one as better in at most one case of
twenty. That the spread of all configurations is the same is taken for granted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweeps.record import JobRecord
from sweeps.report.accounts import DONE
from sweeps.report.wording import finite

LEVEL = 0.05


@dataclass(frozen=True)
class Noise:
    """Of one model's objective."""

    standard_deviation: float
    degrees_of_freedom: int
    num_runs: int
    """That it was estimated from."""
    num_groups: int
    """Configurations with repeats, each night's on its own."""


@dataclass(frozen=True)
class Repeats:
    """Runs of one configuration in one night under several seeds."""

    config_hash: str
    values: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def standard_deviation(self) -> float | None:
        """Of this group alone; None of a single run."""
        if len(self.values) < 2:
            return None
        mean = self.mean
        return math.sqrt(sum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))


@dataclass(frozen=True)
class Comparison:
    """Of one configuration against another of the same model."""

    difference: float
    """Of the means, in the objective's own direction: above 0 is better."""
    needed: float | None
    """A difference above this is beyond the noise; None where the noise is not known."""
    is_better: bool | None
    num_compared: int
    """m of the rule."""


def scored(jobs: Iterable[JobRecord]) -> list[JobRecord]:
    """Those whose objective counts: trained to the end, with a number. An answered job repeats another's figure and is
    no run of its own."""
    return [job for job in jobs if job.status in DONE and finite(job.objective) is not None]


def groups_of(jobs: Iterable[JobRecord]) -> dict[str, Repeats]:
    """Configuration → its scored runs of one night, in the order given; a seed counts once."""
    runs: dict[str, dict[int, float]] = defaultdict(dict)
    for job in scored(jobs):
        runs[job.config_hash or job.job].setdefault(job.seed, float(job.objective or 0.0))
    return {name: Repeats(name, tuple(seeds.values()), tuple(seeds)) for name, seeds in runs.items()}


def noise_of(jobs: Iterable[JobRecord]) -> Noise | None:
    """Of one model's default and champion runs of any nights; None without two of one configuration in one night."""
    nights: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)
    for job in jobs:
        # A trial was picked for its figure: among its repeats it is no draw like the others.
        if job.kind not in ("default", "champion"):
            continue
        # Another objective, other data or another length is another spread.
        nights[job.night, job.objective_name].append(job)
    groups = [group for night in nights.values() for group in groups_of(night).values() if len(group.values) > 1]
    freedom = sum(len(group.values) - 1 for group in groups)
    if not freedom:
        return None
    squares = sum((group.standard_deviation or 0.0) ** 2 * (len(group.values) - 1) for group in groups)
    return Noise(math.sqrt(squares / freedom), freedom, sum(len(group.values) for group in groups), len(groups))


def needed_difference(noise: Noise | None, num_a: int, num_b: int, num_compared: int) -> float | None:
    """By the rule above; None also where repeats do not differ at all, as of models that have learnt nothing yet: any
    difference would be beyond such a noise."""
    if noise is None or noise.standard_deviation <= 0 or num_a < 1 or num_b < 1:
        return None
    from scipy.special import stdtrit

    quantile = float(stdtrit(noise.degrees_of_freedom, 1 - LEVEL / max(1, num_compared)))
    return quantile * noise.standard_deviation * math.sqrt(1 / num_a + 1 / num_b)


def compare(
    candidate: Sequence[float], reference: Sequence[float], noise: Noise | None, num_compared: int, sign: int
) -> Comparison | None:
    """sign: 1 where larger is better, −1 where smaller is. None without a run on either side."""
    if not candidate or not reference:
        return None
    difference = sign * (sum(candidate) / len(candidate) - sum(reference) / len(reference))
    needed = needed_difference(noise, len(candidate), len(reference), num_compared)
    is_better = None if needed is None else difference > needed
    return Comparison(difference, needed, is_better, max(1, num_compared))


def repeats_needed(noise: Noise | None, difference: float, num_compared: int, most: int = 20) -> int | None:
    """Runs of each of the two that would put this difference beyond the noise; None: more than `most`, or unknown."""
    if difference <= 0:
        return None
    for repeats in range(1, most + 1):
        needed = needed_difference(noise, repeats, repeats, num_compared)
        if needed is not None and difference > needed:
            return repeats
    return None
