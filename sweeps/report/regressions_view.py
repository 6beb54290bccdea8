"""Regressions as the report shows them: what one cause did to several series of a model is one regression.

A loader that sleeps shows in the throughput on each number of ranks, in the scaling factors and in the share of a step
that waits for data; a person is told once, by the series that says most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sweeps.ledger.change_points import FACTOR, THROUGHPUT, Regression, regressions
from sweeps.record import JobRecord


@dataclass(frozen=True)
class RegressionGroup:
    """Of one model on one hardware, image and setting of work, with one cause."""

    model: str
    cause: str
    """As change_points names it; empty for accuracy."""
    is_new: bool
    """Not found by the nights before this one: what the exit code is about."""
    first_night: str
    lead: Regression
    """The series that says most: the scaling factor on the most ranks, else throughput, else the largest change."""
    others: tuple[Regression, ...]

    @property
    def num_series(self) -> int:
        return 1 + len(self.others)


def regressions_of(
    night: str, jobs: Sequence[JobRecord], earlier: Sequence[JobRecord], models: Collection[str]
) -> tuple[RegressionGroup, ...]:
    """New ones first. Models that the night does not know are left out: nothing of it concerns them."""
    groups: dict[tuple[object, ...], list[Regression]] = {}
    for regression in regressions([*earlier, *jobs]):
        series = regression.series
        if series.model not in models:
            continue
        is_new = regression.is_new and series.nights[-1] == night
        accuracy = series.quantity if series.is_accuracy else ""
        key = (
            not is_new,
            series.model,
            series.hardware,
            series.image,
            series.configuration,
            regression.cause,
            accuracy,
        )
        groups.setdefault(key, []).append(regression)
    return tuple(_group(own, is_new=not key[0]) for key, own in sorted(groups.items(), key=lambda item: repr(item[0])))


def _group(own: Sequence[Regression], is_new: bool) -> RegressionGroup:
    ordered = sorted(own, key=_rank)
    lead = ordered[0]
    return RegressionGroup(
        model=lead.series.model,
        cause=lead.cause,
        is_new=is_new,
        # By the order of the nights: names of nights of one day do not sort as they followed.
        first_night=min((r.first_night for r in own), key=lambda name: _place(own, name)),
        lead=lead,
        others=tuple(ordered[1:]),
    )


def _rank(regression: Regression) -> tuple[int, int, int, float]:
    series = regression.series
    kinds = {FACTOR: 0, THROUGHPUT: 1}
    return kinds.get(series.quantity, 2), -series.num_ranks, -series.num_nodes, -abs(regression.change)


def _place(own: Sequence[Regression], night: str) -> int:
    longest = max((regression.series.nights for regression in own), key=len)
    return longest.index(night) if night in longest else len(longest)
