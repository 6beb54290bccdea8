"""Slowdowns planted in real trainings on two ranks are found in their first night and named; a quiet night is quiet.

Where the cores are shared, the throughput of equal runs differs by half: what is asked of the throughput series is then
only that they name no wrong cause, as no rule could find a change in them. Shares of a step hold even so.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from sweeps.ledger.change_points import Regression, Sensitivities, regressions
from sweeps.ledger.level_shifts import Sensitivity
from sweeps.record import JobRecord
from tests.sweeps.planted import QUIET_NIGHTS, run_nights

SHARED_CORES = Sensitivities(
    ratio=Sensitivity(least_change=math.log(1.5), least_noise=0.02),
    share=Sensitivity(least_change=0.1, least_noise=0.01),
)
CALM = 1.25
"""Fastest over slowest of the quiet nights, by which a machine is calm enough to compare throughput on."""
FOUND_WHERE_CALM = {
    "data": ("images_per_second", "scaling_factor", "share_data"),
    "straggler": ("images_per_second", "scaling_factor", "share_straggler"),
    "exposed_allreduce": ("share_exposed_allreduce",),
}
FOUND_ANYWHERE = {"data": ("share_data",), "straggler": (), "exposed_allreduce": ("share_exposed_allreduce",)}


def found(jobs: Iterable[JobRecord]) -> list[Regression]:
    return [regression for regression in regressions(list(jobs), SHARED_CORES) if regression.is_new]


def is_calm(nights: Mapping[str, Sequence[JobRecord]]) -> bool:
    speeds = [
        statistics.median(job.images_per_second or 0.0 for job in nights[str(number)]) for number in range(QUIET_NIGHTS)
    ]
    print(f"quiet nights: {', '.join(f'{speed:.1f}' for speed in speeds)} images/s")
    return max(speeds) <= CALM * min(speeds)


@pytest.mark.services
@pytest.mark.timeout(2400)
def test_planted_slowdowns_are_found_and_named(tmp_path: Path) -> None:
    nights = {ranks: run_nights(tmp_path / str(ranks), tmp_path / "cache", ranks) for ranks in (1, 2)}

    def night(number: int, name: str, ranks: Iterable[int] = (1, 2)) -> list[JobRecord]:
        return [
            dataclasses.replace(job, night=f"2026-11-{number + 1:02d}")
            for of_ranks in ranks
            for job in nights[of_ranks][name]
        ]

    tonight = QUIET_NIGHTS - 1
    before = [job for number in range(tonight) for job in night(number, str(number))]
    assert found([*before, *night(tonight, str(tonight))]) == []
    calm = all(is_calm(of_ranks) for of_ranks in nights.values())
    print("the machine is calm" if calm else "the machine is too busy to compare throughput on")
    for cause, expected in (FOUND_WHERE_CALM if calm else FOUND_ANYWHERE).items():
        new = found([*before, *night(tonight, str(tonight), [1]), *night(tonight, cause, [2])])
        for regression in new:
            print(regression.text())
            assert (regression.series.num_ranks, regression.cause) == (2, cause)
        by_quantity = {regression.series.quantity: regression for regression in new}
        assert by_quantity.keys() >= set(expected)
        if cause == "exposed_allreduce":
            differences = by_quantity["share_exposed_allreduce"].differences
            assert "distributed.bucket_mib default → 1e-06" in differences
