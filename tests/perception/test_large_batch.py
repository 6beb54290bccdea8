"""LARS and LAMB: against their formulas in NumPy, how far a step goes, and that tensors do not depend on each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from perception.config import OptimConfig, RunConfig, validate
from perception.errors import UserError
from perception.large_batch import Lamb, Lars
from perception.optimizer import build_optimizer

SETTINGS = settings(deadline=None, max_examples=15)
Array = NDArray[np.float64]
Build = Callable[..., Optimizer]
both = pytest.mark.parametrize("build", [Lars, Lamb])


def length(weight: Array) -> float:
    return float(max(np.linalg.norm(weight), 0.5 * np.sqrt(len(weight))))


def numpy_lars(weight: Array, gradients: list[Array], lr: float, decay: float, adapted: bool) -> Array:
    velocity = np.zeros_like(weight)
    for gradient in gradients:
        ratio = 1.0
        if adapted:
            ratio = 0.001 * length(weight) / (np.linalg.norm(gradient) + decay * np.linalg.norm(weight))
        velocity = 0.9 * velocity + lr * ratio * (gradient + decay * weight)
        weight = weight - velocity
    return weight


def numpy_lamb(weight: Array, gradients: list[Array], lr: float, decay: float, adapted: bool) -> Array:
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for step, gradient in enumerate(gradients, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        direction = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-6) + decay * weight
        ratio = 1.0
        if adapted:
            ratio = length(weight) / np.linalg.norm(direction)
        weight = weight - lr * ratio * direction
    return weight


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 50.0]),
    lr=st.sampled_from([0.001, 0.1, 3.0]),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    adapted=st.booleans(),
)
@pytest.mark.parametrize(("build", "reference"), [(Lars, numpy_lars), (Lamb, numpy_lamb)])
def test_steps_are_those_of_the_formulas(
    build: Build, reference: Callable[..., Array], seed: int, scale: float, lr: float, decay: float, adapted: bool
) -> None:
    """Two tensors of other shapes and scales in one group, five steps, in double precision."""
    draw = np.random.default_rng(seed)
    starts = [scale * draw.normal(size=(4, 3)), draw.normal(size=(2, 3, 2, 2))]
    gradients = [[draw.normal(size=start.shape) * 10.0 ** draw.integers(-3, 3) for start in starts] for _ in range(5)]
    weights = [nn.Parameter(torch.from_numpy(start.copy())) for start in starts]
    optimizer = build([{"params": weights, "weight_decay": decay, "adapted": adapted}], lr=lr)
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    for number, (weight, start) in enumerate(zip(weights, starts, strict=True)):
        expected = reference(start, [step[number] for step in gradients], lr, decay, adapted)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-9, atol=1e-12)


@SETTINGS
@given(seed=st.integers(0, 1000), exponent=st.integers(-6, 6))
@pytest.mark.parametrize(("build", "share"), [(Lars, 0.5 * 0.001), (Lamb, 0.5)])
def test_a_step_is_as_long_as_lr_says_whatever_the_gradients_scale(
    build: Build, share: float, seed: int, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(7, 50, generator=generator))
    before = weight.detach().clone()
    weight.grad = torch.randn(7, 50, generator=generator) * 10.0**exponent
    build([weight], lr=0.5).step()
    moved = (weight.detach() - before).norm() / before.norm()
    # LAMB's eps counts for gradients as small as it.
    assert float(moved) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize(("build", "lr"), [(Lars, 20.0), (Lamb, 0.02)])
def test_a_last_layer_that_begins_near_zero_is_not_held_there(build: Build, lr: float) -> None:
    """Its first step is nearly as long as that of a layer that begins at a usual length."""
    weight = nn.Parameter(torch.full((4, 64), 1e-4))
    weight.grad = torch.ones(4, 64)
    build([weight], lr=lr).step()
    # Four outputs count as of length 1/2 each, and so the tensor as of length 1.
    assert float((weight.detach() - 1e-4).norm()) == pytest.approx(0.02, rel=1e-4)


@both
def test_nothing_becomes_nan_and_a_zero_tensor_gets_away(build: Build) -> None:
    zero, still = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = build([zero, still], lr=0.1)
    zero.grad, still.grad = torch.ones(3, 3), torch.zeros(3, 3)
    for _ in range(3):
        optimizer.step()
    assert bool(torch.isfinite(zero).all()) and bool((zero < 0).all())
    assert torch.equal(still.detach(), torch.ones(3, 3))


@both
def test_a_parameter_without_a_gradient_stays_and_counts_no_step(build: Build) -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = build([first, second], lr=0.1, weight_decay=0.1)
    first.grad = torch.ones(2, 2)
    optimizer.step()
    assert not torch.equal(first, torch.ones(2, 2)) and torch.equal(second, torch.ones(2, 2))
    assert second not in optimizer.state
    assert optimizer.step(lambda: 3.0) == 3.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def config_of(name: str, lr: float) -> RunConfig:
    return RunConfig("lane", "x", optim=OptimConfig(name=name, lr=lr))


def steps(model: nn.Module, optimizer: Optimizer, count: int, first: int = 0) -> list[float]:
    """On images whose class is the quarter in which they are bright; returns the losses."""
    losses = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(0, 4, (64,), generator=generator)
        quarters = torch.eye(4).view(4, 1, 2, 2).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        images = 0.5 * torch.randn(64, 3, 8, 8, generator=generator) + quarters[labels]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("name", "lr"), [("lars", 2.0), ("lamb", 0.02)])
def test_a_small_network_learns(name: str, lr: float) -> None:
    model = network()
    losses = steps(model, build_optimizer(config_of(name, lr), model, torch.device("cpu")), 40)
    assert losses[0] > 1.2 and max(losses[-5:]) < 0.2, losses


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_training_goes_on_from_a_saved_state_to_the_bit(name: str) -> None:
    model = network()
    optimizer = build_optimizer(config_of(name, 0.01), model, torch.device("cpu"))
    steps(model, optimizer, 3)
    other = copy.deepcopy(model)
    taken_up = build_optimizer(config_of(name, 0.5), other, torch.device("cpu"))
    taken_up.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 3, first=3)
    steps(other, taken_up, 3, first=3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@both
def test_tensors_do_not_depend_on_each_other_to_the_bit(build: Build) -> None:
    """Why ranks may share the work: each alone moves as all together."""

    def moved(numbers: list[int]) -> dict[int, Tensor]:
        weights = {}
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            shape = (16 + number, 8, 3, 3)
            start = torch.randn(shape, generator=generator).to(memory_format=torch.channels_last)
            weights[number] = nn.Parameter(start)
            weights[number].grad = torch.randn(shape, generator=generator).to(memory_format=torch.channels_last)
        optimizer = build(list(weights.values()), lr=0.1, weight_decay=0.01)
        for _ in range(3):
            optimizer.step()
        return {number: weight.detach() for number, weight in weights.items()}

    together = moved(list(range(6)))
    for number in range(6):
        assert torch.equal(moved([number])[number], together[number])


@pytest.mark.parametrize(("name", "kind"), [("lars", Lars), ("lamb", Lamb)])
def test_biases_and_norms_are_neither_adapted_nor_decayed(name: str, kind: type[Optimizer]) -> None:
    model = network()
    optimizer = build_optimizer(config_of(name, 0.01), model, torch.device("cpu"))
    assert type(optimizer) is kind
    adapted, plain = optimizer.param_groups
    assert [parameter.dim() for parameter in adapted["params"]] == [4, 2]
    assert adapted["adapted"] and adapted["weight_decay"] == 0.01
    assert len(plain["params"]) == 4 and not plain["adapted"] and plain["weight_decay"] == 0.0


def test_the_trust_coefficient_is_a_setting_of_lars() -> None:
    config = config_of("lars", 1.0)
    config = replace(config, optim=replace(config.optim, trust_coefficient=0.02))
    groups = build_optimizer(config, network(), torch.device("cpu")).param_groups
    assert all(group["trust_coefficient"] == 0.02 for group in groups)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r'optim\.name = "lam" is unknown; did you mean "lamb"'):
        validate(config_of("lam", 0.01))
    with pytest.raises(UserError, match=r"optim\.trust_coefficient = 0\.0: must be above 0"):
        validate(RunConfig("lane", "x", optim=OptimConfig(trust_coefficient=0.0)))
