"""Where the time of a step goes, by cause, and the throughput."""

from __future__ import annotations

import time

UNTIMED_STEPS = 5
"""Steps left out of the totals: allocation and code generation happen there."""


class StepClock:
    """Seconds of the steps by cause, and the throughput without the first steps."""

    def __init__(self) -> None:
        self.totals = {"data": 0.0, "compute": 0.0, "exposed_allreduce": 0.0, "step": 0.0}
        self._now = dict.fromkeys(self.totals, 0.0)
        self._steps = 0
        self._images = 0
        self._begun = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()
        self._now = dict.fromkeys(self.totals, 0.0)

    def add(self, cause: str, seconds: float) -> None:
        self._now[cause] += seconds

    def current(self, cause: str) -> float:
        return self._now[cause]

    def measuring(self, cause: str) -> _Measuring:
        return _Measuring(self, cause)

    def end(self, images: int) -> None:
        self._now["step"] = time.perf_counter() - self._begun
        self._steps += 1
        if self._steps <= UNTIMED_STEPS:
            return
        self._images += images
        for cause, seconds in self._now.items():
            self.totals[cause] += seconds

    @property
    def images_per_second(self) -> float:
        return self._images / self.totals["step"] if self.totals["step"] else 0.0

    def rates(self) -> dict[str, float]:
        step = self._now["step"]
        return {"seconds_step": step, "images_per_second": self.images_per_second}

    def shares(self) -> dict[str, float]:
        """Share of the step time by cause."""
        step = self.totals["step"]
        return {cause: seconds / step for cause, seconds in self.totals.items()} if step else {}


class _Measuring:
    def __init__(self, clock: StepClock, cause: str) -> None:
        self._clock, self._cause = clock, cause

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock.add(self._cause, time.perf_counter() - self._start)
