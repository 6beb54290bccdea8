"""Replay: computing takes its recorded time, the all-reduce is real and right."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from perception.config import DistributedConfig
from perception.distributed import SoloCommunicator
from perception.errors import UserError
from perception.replay import ReplayModel, replay_steps
from tests.perception import replayed_ranks
from tests.perception.replayed_ranks import BUCKETS, LARGE, SLOW_FACTOR, TINY, schedule
from tests.ranks import launch_script, read_reports

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make setup with ENGINE unset"
)
VARIANTS = [
    pytest.param("torch", "gloo", 2, id="torch-gloo-2"),
    pytest.param("horovod", "mpi", 2, id="horovod-mpi-2", marks=needs_horovod),
    pytest.param("torch", "gloo", 4, id="torch-gloo-4"),
]


@cache
def reports(engine: str, transport: str, ranks: int) -> list[dict[str, Any]]:
    """Run all schedules once; starting ranks is what takes time."""
    folder = Path(mkdtemp(prefix="replay-"))
    arguments = [str(folder), engine, transport]
    launched = launch_script(Path(replayed_ranks.__file__), arguments, ranks, engine, transport, folder)
    assert launched.exit_code == 0, launched.errors
    return read_reports(folder, ranks)


def test_a_step_takes_its_recorded_time() -> None:
    profile = schedule(TINY, pace=0.3)
    steps = replay_steps(profile, SoloCommunicator(), BUCKETS, num_steps=6, num_warmup_steps=1)
    (seconds,) = steps.step_seconds
    assert len(seconds) == 6
    # Other work on the host only ever adds to a step.
    assert profile.step_seconds <= min(seconds) < 1.05 * profile.step_seconds
    assert 0 <= min(steps.lag_seconds[0]) < 0.1 * profile.step_seconds
    # Waiting takes no core.
    assert steps.rank_cores < 0.5


def test_gradients_come_in_the_recorded_order_at_the_recorded_times() -> None:
    profile = schedule([3, 5, 7, 9], pace=0.1)
    # Two that are ready together, as after one layer's backward.
    together = replace(profile.gradients[2], ready_seconds=profile.gradients[1].ready_seconds)
    profile = replace(profile, gradients=(*profile.gradients[:2], together, profile.gradients[3]))
    model = ReplayModel(profile)
    seen: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.numel()))
    model.begin_step()
    model().backward()
    assert seen == [3, 5, 7, 9]
    assert [parameter.numel() for parameter in model.parameters()] == [9, 7, 5, 3]
    for parameter, own in zip(reversed(list(model.parameters())), model.own_gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, own)
    assert len(model.lags) == 4 and min(model.lags) >= 0
    model.zero_grad(set_to_none=True)
    model.begin_step()
    (3.0 * model()).backward()
    for parameter, own in zip(reversed(list(model.parameters())), model.own_gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, 3 * own)


def test_dtypes_follow_the_element_size() -> None:
    profile = schedule([4, 4])
    gradients = tuple(replace(g, element_bytes=size) for g, size in zip(profile.gradients, (2, 8), strict=True))
    dtypes = [gradient.dtype for gradient in ReplayModel(replace(profile, gradients=gradients)).own_gradients]
    assert dtypes == [torch.bfloat16, torch.float64]
    odd = replace(profile, gradients=(replace(profile.gradients[0], element_bytes=3),))
    with pytest.raises(UserError, match=r"layer0.weight: element_bytes = 3 cannot be replayed; allowed: 2, 4, 8"):
        ReplayModel(odd)


def test_jitter_keeps_the_mean_and_comes_from_the_seed() -> None:
    def steps(seed: int) -> list[float]:
        profile = schedule([10], pace=0.02)
        replayed = replay_steps(profile, SoloCommunicator(), DistributedConfig(), 60, 0, jitter_fraction=0.5, seed=seed)
        return replayed.step_seconds[0]

    first, again, other = steps(1), steps(1), steps(2)
    recorded = schedule([10], pace=0.02).step_seconds
    assert min(first) < 0.8 * recorded and max(first) > 1.2 * recorded
    order = sorted(range(60), key=first.__getitem__)
    # The same draws give the same long and short steps, others do not.
    assert median(again[i] for i in order[:15]) < 0.8 * median(again[i] for i in order[-15:])
    assert set(order[:15]) != set(sorted(range(60), key=other.__getitem__)[:15])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport", "ranks"), VARIANTS)
def test_reduced_gradients_are_the_means(engine: str, transport: str, ranks: int) -> None:
    for report in reports(engine, transport, ranks):
        assert max(report["errors of means"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport", "ranks"), VARIANTS)
def test_ranks_together_take_the_recorded_time(engine: str, transport: str, ranks: int) -> None:
    recorded = schedule(TINY).step_seconds
    replayed = reports(engine, transport, ranks)[0]["tiny"]
    assert len(replayed["step_seconds"]) == ranks
    for seconds in replayed["step_seconds"]:
        assert recorded <= min(seconds) < 1.05 * recorded


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport", "ranks"), VARIANTS)
def test_a_large_gradient_is_hidden_if_ready_first_and_exposed_if_last(engine: str, transport: str, ranks: int) -> None:
    report = reports(engine, transport, ranks)[0]
    # Of the best step: other work on the host only ever adds.
    hidden, exposed = (
        min(map(max, zip(*report[name]["wait_seconds"], strict=True))) for name in ("large first", "large last")
    )
    assert exposed > 2 * hidden
    # What is exposed lengthens the step.
    recorded = schedule([LARGE, *TINY]).step_seconds
    for seconds, waits in zip(report["large last"]["step_seconds"], report["large last"]["wait_seconds"], strict=True):
        assert all(step > recorded + wait for step, wait in zip(seconds, waits, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport", "ranks"), VARIANTS)
def test_all_ranks_take_the_time_of_the_slowest(engine: str, transport: str, ranks: int) -> None:
    replayed = reports(engine, transport, ranks)[0]["one slow rank"]
    for seconds in replayed["step_seconds"]:
        assert min(seconds) > 0.95 * schedule(TINY, SLOW_FACTOR).step_seconds
    *waiting, slow = [median(wait) for wait in replayed["wait_seconds"]]
    # Forward and backward of the others are over that much earlier.
    assert min(waiting) > 0.9 * (SLOW_FACTOR - 1) * 0.25 > slow


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport", "ranks"), VARIANTS)
def test_a_slow_rank_is_the_others_straggler(engine: str, transport: str, ranks: int) -> None:
    replayed = reports(engine, transport, ranks)[0]["one slow rank"]
    *waiting, slow = [median(seconds) for seconds in replayed["straggler_seconds"]]
    assert min(waiting) > 0.9 * (SLOW_FACTOR - 1) * 0.25
    assert slow < 0.02
