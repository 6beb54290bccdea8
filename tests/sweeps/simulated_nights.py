"""Made-up nights of scaling runs and champion repeats with known noise and known slowdowns; for tests alone.

A step is computing, waiting for data, exposed all-reduce and waiting for the slowest rank; a slowdown makes one of
them longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.record import JobRecord

IMAGES_A_STEP = 8
STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Noise:
    """Standard deviations, as shares: between the runs of a night, and of a whole night."""

    run: float
    night: float


@dataclass(frozen=True)
class Slowdown:
    """From night number `first` on, throughput on several ranks (data, compute: on one too) is less by `share`."""

    cause: str
    share: float
    first: int
    last: int = 10**6


def scaling_job(night: str, ranks: int, images_per_second: float, **fields: Any) -> JobRecord:
    lost = {"data": 0.02, "exposed_allreduce": 0.0, "straggler": 0.0}
    return JobRecord(
        **{
            "night": night,
            "job": f"lane-small-{ranks:02d}",
            "plan": "nightly",
            "model": "lane-small",
            "kind": "scaling",
            "status": "finished",
            "num_ranks": ranks,
            "hardware": "8 x NVIDIA H100",
            "images_per_second": images_per_second,
            "lost_scaling": lost,
            **fields,
        }
    )


def night_name(number: int) -> str:
    return f"2026-11-{number + 1:02d}" if number < 30 else f"2026-12-{number - 29:02d}"


def simulated_nights(
    count: int,
    seed: int,
    noise: Noise,
    slowdowns: Sequence[Slowdown] = (),
    ranks: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 3,
    spread: Callable[[random.Random], float] = lambda draw: draw.gauss(0, 1),
) -> list[list[JobRecord]]:
    """Night by night."""
    draw = random.Random(seed)
    nights = []
    for number in range(count):
        # Half of what tells one night from another is common to all numbers of ranks.
        of_night = 1 + noise.night * spread(draw) / 2**0.5
        jobs = []
        for num_ranks in ranks:
            own = 1 + noise.night * spread(draw) / 2**0.5
            for repeat in range(repeats):
                of_run = 1 + noise.run * spread(draw)
                times = {
                    "compute": 1.0,
                    "data": 0.02,
                    "exposed_allreduce": 0.015 * (num_ranks.bit_length() - 1),
                    "straggler": 0.01 * (num_ranks.bit_length() - 1),
                }
                for name in ("data", "exposed_allreduce", "straggler"):
                    times[name] *= max(0.0, 1 + 5 * noise.run * spread(draw))
                for slowdown in slowdowns:
                    on_one_rank_too = slowdown.cause in ("data", "compute")
                    if slowdown.first <= number <= slowdown.last and (num_ranks > 1 or on_one_rank_too):
                        times[slowdown.cause] += sum(times.values()) * (1 / (1 - slowdown.share) - 1)
                step = sum(times.values())
                seconds = STEP_SECONDS * step * of_night * own * of_run
                jobs.append(
                    scaling_job(
                        night_name(number),
                        num_ranks,
                        num_ranks * IMAGES_A_STEP / seconds,
                        job=f"lane-small-{num_ranks:02d}-{repeat}",
                        lost_scaling={name: time / step for name, time in times.items() if name != "compute"},
                        git_revision=f"{number:040x}",
                    )
                )
        for repeat in range(repeats):
            accuracy = 0.85 + 0.004 * draw.gauss(0, 1)
            jobs.append(
                JobRecord(
                    night_name(number),
                    f"lane-small-champion-{repeat}",
                    "nightly",
                    "lane-small",
                    "champion",
                    status="finished",
                    num_ranks=8,
                    objective_name="culane_f1_50",
                    objective=accuracy,
                )
            )
        nights.append(jobs)
    return nights
