"""Where the time of a step goes, by cause, and the throughput.

Each rank measures its own steps (`StepClock`); the times of a step travel with the next one's
gradients, and every rank gets their means over ranks (`RankMeans`) without a call of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

UNTIMED_STEPS = 5
"""Steps left out of the totals: allocation and code generation happen there."""


class StepTimes(NamedTuple):
    """Seconds of one step by cause, of one rank or a mean over ranks; together they are the whole step."""

    data: float = 0.0
    """Waiting for the next batch and bringing it to the device."""
    compute: float = 0.0
    """Forward and backward."""
    exposed_allreduce: float = 0.0
    """Waiting for the reduction after all ranks had their gradients ready, and work on it within backward."""
    straggler: float = 0.0
    """Waiting until the last rank had its gradients ready."""
    optimizer: float = 0.0
    """Zeroing, averaging and clipping gradients, the update and its moving average."""
    other: float = 0.0

    @property
    def step(self) -> float:
        return sum(self)


CAUSES = StepTimes._fields


class Timer(Protocol):
    """Takes marks, and tells the seconds between two of them."""

    lag_steps: int
    """Steps after which a mark can be read."""

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def at(self, mark: Any) -> float:
        """A mark as seconds of `time.perf_counter`."""


class HostTimer:
    """The host's clock, for ranks that compute on CPUs."""

    lag_steps = 0

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def at(self, mark: float) -> float:
        return mark


class CudaTimer:
    """Events on the current stream, since a host's clock sees no more than launches there.

    An event is read one step later, when it has long passed, so that nothing is synchronised.
    Not yet run on a GPU: only the lag is covered by tests.
    """

    lag_steps = 1

    def __init__(self) -> None:
        self._base: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1000

    def at(self, mark: torch.cuda.Event) -> float:
        if self._base is None:
            # Once, for a trace: an event whose moment on the host's clock is known.
            event = self.mark()
            event.synchronize()
            self._base = event, time.perf_counter()
        event, seconds = self._base
        return seconds - self.seconds(mark, event)


def timer_for(device: torch.device) -> Timer:
    return CudaTimer() if device.type == "cuda" else HostTimer()


@dataclass
class _Step:
    """What was marked in one step."""

    begin: Any
    sections: list[tuple[str, Any, Any]] = field(default_factory=list)
    end: Any = None
    wait_seconds: float = 0.0
    straggler_seconds: float = 0.0
    busy_seconds: float = 0.0


class StepClock:
    """Times of this rank's steps by cause, and the throughput without the first steps.

    A step is `begin`, then sections, each inside `measuring`, then `end`. Sections are zero, data,
    forward, backward, finish (the reducer's) and update; what lies between them is `other`.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        self.latest: StepTimes | None = None
        """Of the newest step that can be read: the last one, on GPUs the one before it."""
        self.spans: list[tuple[str, float, float]] | None = None
        """Set to a list, it gets (name, begin, end) in seconds of `time.perf_counter`: the step, its sections, with
        what was waiting in `finish` taken to be its first part."""
        self._timer = timer or HostTimer()
        self._step = _Step(begin=None)
        self._unread: list[_Step] = []
        self._begun = 0.0
        self._num_steps = 0
        self._images = 0
        self._seconds = 0.0

    @property
    def lag_steps(self) -> int:
        return self._timer.lag_steps

    @property
    def images_per_second(self) -> float:
        return self._images / self._seconds if self._seconds else 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter()
        self._step = _Step(self._timer.mark())

    def measuring(self, section: str) -> _Measuring:
        return _Measuring(self._timer, section, self._step.sections)

    def end(self, images: int, wait_seconds: float, straggler_seconds: float, busy_seconds: float = 0.0) -> None:
        """End the step on `images` of all ranks.

        The reduction tells what of `finish` was waiting, and for whom, and what of backward was work on itself.
        """
        step = self._step
        step.busy_seconds = busy_seconds
        step.end, step.wait_seconds, step.straggler_seconds = self._timer.mark(), wait_seconds, straggler_seconds
        self._num_steps += 1
        if self._num_steps > UNTIMED_STEPS:
            self._images += images
            self._seconds += time.perf_counter() - self._begun
        self._unread.append(step)
        if len(self._unread) > self._timer.lag_steps:
            self._read(self._unread.pop(0))

    def _read(self, step: _Step) -> None:
        timer = self._timer
        seconds = dict.fromkeys(("zero", "data", "forward", "backward", "finish", "update"), 0.0)
        for section, begin, end in step.sections:
            seconds[section] += timer.seconds(begin, end)
        wait = min(step.wait_seconds, seconds["finish"])
        if timer.lag_steps and wait:
            # On a GPU the host waits in `finish` for backward too; there the stream's own time is the wait.
            wait = seconds["finish"]
        straggler = min(max(0.0, step.straggler_seconds), wait)
        busy = min(step.busy_seconds, seconds["backward"])
        self.latest = StepTimes(
            data=seconds["data"],
            compute=seconds["forward"] + seconds["backward"] - busy,
            exposed_allreduce=wait - straggler + busy,
            straggler=straggler,
            optimizer=seconds["zero"] + seconds["finish"] - wait + seconds["update"],
            # Not below 0 by rounding.
            other=max(0.0, timer.seconds(step.begin, step.end) - sum(seconds.values())),
        )
        if self.spans is not None:
            self.spans.append(("step", timer.at(step.begin), timer.at(step.end)))
            for section, begin, end in step.sections:
                self.spans += _parts(section, timer.at(begin), timer.at(end), wait, straggler)


def _parts(section: str, begin: float, end: float, wait: float, straggler: float) -> list[tuple[str, float, float]]:
    if section != "finish":
        return [(section, begin, end)]
    together, done = begin + straggler, begin + wait
    parts = [("straggler", begin, together), ("exposed_allreduce", together, done), ("clip", done, end)]
    return [part for part in parts if part[2] > part[1]]


class _Measuring:
    def __init__(self, timer: Timer, section: str, sections: list[tuple[str, Any, Any]]) -> None:
        self._timer, self._section, self._sections = timer, section, sections

    def __enter__(self) -> None:
        self._begin = self._timer.mark()

    def __exit__(self, *_: object) -> None:
        self._sections.append((self._section, self._begin, self._timer.mark()))


class RankMeans:
    """Means over ranks of the steps' times, from numbers that travel with the gradients.

    Beside its times by cause each rank sends how long it waited in the reduction, in a place of its
    own: all are released together, so the rank that waited least came last.
    """

    def __init__(self, rank: int, size: int, waits_tell_stragglers: bool = False) -> None:
        """`waits_tell_stragglers`: take what ranks waited beyond the last one for their straggler wait.

        For GPUs, where ranks cannot say by a clock when they were ready.
        """
        self._rank, self._size, self._waits_tell_stragglers = rank, size, waits_tell_stragglers
        self.num_values = len(CAUSES) + size
        self.slowest_rank: int | None = None
        """The rank that came last in the newest step received; None for a single rank."""
        self._num_received = 0
        self._totals = [0.0] * len(CAUSES)
        self._times_last = [0] * size

    def to_send(self, times: StepTimes | None) -> list[float]:
        """`num_values` numbers to be summed over ranks; None where no step was measured yet."""
        if times is None:
            return [0.0] * self.num_values
        waits = [0.0] * self._size
        waits[self._rank] = times.exposed_allreduce + times.straggler
        return [*times, *waits]

    def receive(self, sums: Sequence[float]) -> StepTimes | None:
        """The mean over ranks of what they sent, of which `sums` are the sums; None if that was nothing."""
        means = [value / self._size for value in sums[: len(CAUSES)]]
        if not any(means):
            return None
        times, waits = StepTimes(*means), list(sums[len(CAUSES) :])
        shortest = min(waits)
        if self._waits_tell_stragglers:
            straggler = sum(waits) / self._size - shortest
            times = times._replace(exposed_allreduce=shortest, straggler=straggler)
        slowest = waits.index(shortest)
        self.slowest_rank = slowest if self._size > 1 else None
        self._num_received += 1
        if self._num_received > UNTIMED_STEPS:
            for index, seconds in enumerate(times):
                self._totals[index] += seconds
            self._times_last[slowest] += 1
        return times

    def mean(self) -> StepTimes | None:
        """Over ranks and over the steps received, without the first; None if there are no others."""
        num_steps = sum(self._times_last)
        return StepTimes(*(total / num_steps for total in self._totals)) if num_steps else None

    def summary(self) -> list[str]:
        """One or two plain lines: what scaling was lost to, and which rank came last most often."""
        mean = self.mean()
        if mean is None or mean.step == 0:
            return [f"lost scaling by cause: not measured, as the first {UNTIMED_STEPS} steps are left out"]
        share = {cause: f"{100 * getattr(mean, cause) / mean.step:.1f} %" for cause in CAUSES}
        lines = [
            f"lost scaling by cause: data {share['data']}, exposed all-reduce {share['exposed_allreduce']}, "
            f"stragglers {share['straggler']} of a step of {1000 * mean.step:.1f} ms "
            f"(compute {share['compute']}, optimizer {share['optimizer']}, other {share['other']})"
        ]
        if self._size > 1:
            most = max(self._times_last)
            lines.append(
                f"the last rank to be ready was most often rank {self._times_last.index(most)}: "
                f"in {100 * most / sum(self._times_last):.0f} % of the steps, 1 in {self._size} would be its share"
            )
        return lines
