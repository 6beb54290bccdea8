"""Where a step's time goes: the causes make up the step, means over ranks are means, and measuring is cheap."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from perception.step_clock import (
    CAUSES,
    UNTIMED_STEPS,
    CudaTimer,
    HostTimer,
    RankMeans,
    StepClock,
    StepTimes,
    timer_for,
)


class Hand:
    """A clock that is moved by hand, read `lag_steps` late like a GPU's."""

    def __init__(self, lag_steps: int = 0) -> None:
        self.now = 100.0
        self.lag_steps = lag_steps

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def at(self, mark: float) -> float:
        return mark + 1000


def one_step(
    clock: StepClock, hand: Hand, compute: float = 2.0, wait: float = 3.0, straggler: float = 1.0, images: int = 8
) -> None:
    """Two micro-batches; 0.25 s between sections, wait seconds within a `finish` of 4."""
    clock.begin()
    for section, seconds in [
        ("zero", 0.5),
        ("data", 1.0),
        ("forward", compute / 4),
        ("backward", compute / 4),
        ("data", 0.5),
        ("forward", compute / 4),
        ("backward", compute / 4),
        ("finish", 4.0),
        ("update", 0.75),
    ]:
        with clock.measuring(section):
            hand.now += seconds
    hand.now += 0.25
    clock.end(images, wait, straggler)


def test_the_causes_make_up_the_step() -> None:
    hand = Hand()
    clock = StepClock(hand)
    assert clock.latest is None
    one_step(clock, hand)
    expected = {"data": 1.5, "compute": 2, "exposed_allreduce": 2, "straggler": 1, "optimizer": 2.25, "other": 0.25}
    assert clock.latest is not None
    assert clock.latest._asdict() == pytest.approx(expected)
    assert clock.latest.step == pytest.approx(9.0) and list(expected) == list(CAUSES)


@pytest.mark.parametrize(("wait", "straggler"), [(9.0, 0.0), (1.0, 5.0), (0.0, 0.0), (1.0, -0.1)])
def test_no_cause_is_negative_whatever_the_reduction_reports(wait: float, straggler: float) -> None:
    hand = Hand()
    clock = StepClock(hand)
    one_step(clock, hand, wait=wait, straggler=straggler)
    assert clock.latest is not None
    assert min(clock.latest) >= 0 and clock.latest.step == pytest.approx(9.0)


def test_marks_that_are_read_late_are_of_the_step_before() -> None:
    hand = Hand(lag_steps=1)
    clock = StepClock(hand)
    one_step(clock, hand, compute=2.0, straggler=1.0)
    assert clock.latest is None
    one_step(clock, hand, compute=6.0, straggler=1.0)
    assert clock.latest is not None and clock.latest.compute == pytest.approx(2.0)
    # The host waits in `finish` for backward too, so only the stream's time counts there.
    assert clock.latest.exposed_allreduce + clock.latest.straggler == pytest.approx(4.0)
    one_step(clock, hand, wait=0.0)
    assert clock.latest.compute == pytest.approx(6.0)
    one_step(clock, hand)
    assert clock.latest.exposed_allreduce == 0, "a single rank waits for nobody"


def test_throughput_leaves_out_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    monkeypatch.setattr("time.perf_counter", lambda: hand.now)
    clock = StepClock(hand)
    for number in range(UNTIMED_STEPS + 4):
        one_step(clock, hand, compute=100.0 if number < UNTIMED_STEPS else 2.0)
        assert (clock.images_per_second > 0) == (number >= UNTIMED_STEPS)
    assert clock.images_per_second == pytest.approx(8 / 9.0)


def test_spans_are_those_of_the_clock_and_do_not_overlap() -> None:
    hand = Hand()
    clock = StepClock(hand)
    one_step(clock, hand)
    clock.spans = []
    one_step(clock, hand)
    (step, begin, end), *sections = clock.spans
    assert (step, begin, end) == ("step", 1109.0, 1118.0)
    assert [name for name, _, _ in sections] == [
        *("zero", "data", "forward", "backward", "data", "forward", "backward"),
        *("straggler", "exposed_allreduce", "clip", "update"),
    ]
    for earlier, later in itertools.pairwise(sections):
        assert earlier[1] < earlier[2] <= later[1]
    assert {name: last - first for name, first, last in sections}["exposed_allreduce"] == pytest.approx(2.0)


def test_the_timer_follows_the_device() -> None:
    assert isinstance(timer_for(torch.device("cpu")), HostTimer)
    assert isinstance(timer_for(torch.device("cuda", 0)), CudaTimer)


def summed(ranks: list[RankMeans], times: list[StepTimes | None]) -> list[float]:
    rows = [means.to_send(own) for means, own in zip(ranks, times, strict=True)]
    assert {len(row) for row in rows} == {ranks[0].num_values}
    return [sum(column) for column in zip(*rows, strict=True)]


def test_means_over_ranks_and_who_came_last() -> None:
    ranks = [RankMeans(rank, 3) for rank in range(3)]
    assert ranks[1].receive(summed(ranks, [None, None, None])) is None and ranks[1].slowest_rank is None
    times = [
        StepTimes(data=0.3, compute=1.0, exposed_allreduce=0.1, straggler=0.6, other=0.01),
        StepTimes(data=0.9, compute=1.0, exposed_allreduce=0.1, straggler=0.0, other=0.04),
        StepTimes(data=0.0, compute=1.6, exposed_allreduce=0.1, straggler=0.3, optimizer=0.3, other=0.01),
    ]
    for means in ranks:
        mean = means.receive(summed(ranks, list(times)))
        assert mean is not None
        for cause in CAUSES:
            assert getattr(mean, cause) == pytest.approx(sum(getattr(own, cause) for own in times) / 3)
        assert means.slowest_rank == 1
    assert RankMeans(0, 1).receive(RankMeans(0, 1).to_send(times[0])) == times[0]


def test_where_clocks_cannot_tell_stragglers_the_waits_do() -> None:
    ranks = [RankMeans(rank, 2, waits_tell_stragglers=True) for rank in range(2)]
    times = [StepTimes(compute=1.0, exposed_allreduce=0.75), StepTimes(compute=1.5, exposed_allreduce=0.25)]
    mean = ranks[0].receive(summed(ranks, list(times)))
    assert mean == StepTimes(compute=1.25, exposed_allreduce=0.25, straggler=0.25)
    assert ranks[0].slowest_rank == 1


def test_the_summary_is_of_the_steps_after_the_first() -> None:
    ranks = [RankMeans(rank, 2) for rank in range(2)]
    slow = [StepTimes(data=50.0), StepTimes(data=50.0)]
    for _ in range(UNTIMED_STEPS):
        ranks[0].receive(summed(ranks, list(slow)))
    assert ranks[0].mean() is None
    assert ranks[0].summary() == ["lost scaling by cause: not measured, as the first 5 steps are left out"]
    first_late = [
        StepTimes(data=0.04, compute=0.15, exposed_allreduce=0.01),
        StepTimes(compute=0.15, exposed_allreduce=0.01, straggler=0.04),
    ]
    for number in range(4):
        ranks[0].receive(summed(ranks, list(first_late if number else first_late[::-1])))
    mean = ranks[0].mean()
    assert mean is not None and mean.step == pytest.approx(0.2) and mean.data == pytest.approx(0.02)
    assert ranks[0].summary() == [
        "lost scaling by cause: data 10.0 %, exposed all-reduce 5.0 %, stragglers 10.0 % of a step of 200.0 ms "
        "(compute 75.0 %, optimizer 0.0 %, other 0.0 %)",
        "the last rank to be ready was most often rank 0: in 75 % of the steps, 1 in 2 would be its share",
    ]
    alone = RankMeans(0, 1)
    for _ in range(UNTIMED_STEPS + 1):
        alone.receive(alone.to_send(StepTimes(compute=1.0)))
    assert len(alone.summary()) == 1


def seconds_a_call(work: Callable[[], None], calls: int = 200) -> float:
    """Of processor time, in the best of several rounds: what the machine does besides does not count."""
    rounds = []
    for _ in range(9):
        began = time.thread_time()
        for _ in range(calls):
            work()
        rounds.append((time.thread_time() - began) / calls)
    return min(rounds)


@pytest.mark.parametrize("size", [2, 64])
def test_measuring_costs_less_than_a_hundredth_of_a_short_step(size: int) -> None:
    """All that the time split adds to a step of 5 ms, but for the reduction of `num_values` more numbers."""
    clock, means = StepClock(), RankMeans(0, size)

    def step() -> None:
        clock.begin()
        for section in ("zero", "data", "forward", "backward", "finish", "update"):
            with clock.measuring(section):
                pass
        clock.end(8, 0.0, 0.0)
        means.receive(torch.tensor(means.to_send(clock.latest)).tolist())

    assert seconds_a_call(step) < 0.01 * 5e-3
