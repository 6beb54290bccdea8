"""The moving average follows weights and buffers, in fp32, and is never taken for another model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from perception.ema import MovingAverage
from perception.errors import UserError


def network(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def shift(model: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor += amount if tensor.is_floating_point() else 1


def test_average_is_the_weighted_mean_of_all_weights_seen() -> None:
    model = network()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = MovingAverage(model)
    shift(model, 1.0)
    average.update(model, 0.9)
    shift(model, 1.0)
    average.update(model, 0.5)
    for name, tensor in average.tensors.items():
        torch.testing.assert_close(tensor, start[name] + 0.5 * 0.1 + 0.5 * 2)
    assert set(average.tensors) == set(start) - {"1.num_batches_tracked"}


def test_copies_are_its_own_and_integers_stay() -> None:
    model = network()
    average = MovingAverage(model)
    shift(model, 5.0)
    other = network()
    average.copy_to(other)
    torch.testing.assert_close(other.state_dict(), network().state_dict())
    shift(model, 1.0)
    average.copy_to(model)
    torch.testing.assert_close(model[0].weight, network()[0].weight)
    assert model[1].num_batches_tracked == 2


def test_half_precision_weights_are_averaged_in_single() -> None:
    model = network().to(torch.bfloat16)
    average = MovingAverage(model)
    shift(model, 1.0)
    average.update(model, 0.999)
    assert all(tensor.dtype == torch.float32 for tensor in average.tensors.values())
    moved = average.tensors["1.running_mean"]
    torch.testing.assert_close(moved, torch.full_like(moved, 0.001), atol=1e-6, rtol=1e-3)


def test_load_takes_over_what_was_stored() -> None:
    first, second = MovingAverage(network()), MovingAverage(network())
    for tensor in first.tensors.values():
        tensor += 3
    second.load({name: tensor.clone() for name, tensor in first.tensors.items()})
    torch.testing.assert_close(second.tensors, first.tensors)


def test_load_refuses_averages_that_are_missing_or_of_another_model() -> None:
    average = MovingAverage(network())
    before = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with pytest.raises(UserError, match=r"6 tensors, first 0\.bias\): .*optim\.ema_decay_samples"):
        average.load({})
    with pytest.raises(UserError, match="does not fit this model"):
        average.load(MovingAverage(network(5)).tensors)
    torch.testing.assert_close(average.tensors, before)
