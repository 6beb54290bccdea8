"""The shared update: the same weights, averages and optimizer state to the bit as where each rank updates all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from perception import distributed
from perception.config import OptimConfig, RunConfig
from perception.distributed import Communicator, Update
from perception.ema import MovingAverage
from perception.errors import UserError
from perception.optimizer import build_optimizer
from tests.perception.distributed.scenario_tools import SETTINGS, SMALL_BUCKETS, data, loss_of, network, share

COUNT = 12


def adamw(model: nn.Module) -> Optimizer:
    """Two groups, as in training: weight decay on matrices only."""
    return built("adamw", 0.01, model)


def lamb(model: nn.Module) -> Optimizer:
    return built("lamb", 0.01, model)


def lars(model: nn.Module) -> Optimizer:
    return built("lars", 10.0, model)


def built(name: str, lr: float, model: nn.Module) -> Optimizer:
    optim = OptimConfig(name=name, lr=lr, weight_decay=0.1)
    return build_optimizer(RunConfig("lane", "x", optim=optim), model, torch.device("cpu"))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Run:
    """A model in training, with a moving average."""

    def __init__(self, c: Communicator, choice: str, build: Callable[[nn.Module], Optimizer], seed: int = 0) -> None:
        self.c = c
        # Another start on every rank: rank 0's counts.
        self.model = network(seed + c.rank).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = build(self.model)
        settings = replace(SMALL_BUCKETS, shared_update=choice)
        self.reducer = distributed.distribute(self.model, self.optimizer, c, settings)
        self.update: Update = distributed.share_update(
            self.model, self.optimizer, self.reducer, c, settings, with_averages=True
        )
        self.average = MovingAverage(self.model, self.update)

    def steps(self, count: int, first: int = 0, spoilt: int = -1) -> None:
        """Of the step `spoilt` the last rank's loss is infinite: nobody updates anything."""
        for number in range(first, first + count):
            images, labels = data(COUNT, seed=number)
            part = share(self.c, COUNT)
            self.reducer.zero_grad()
            batch = (images[part], labels[part])
            loss = loss_of(self.model, batch)
            if number == spoilt and self.c.rank == self.c.size - 1:
                loss = loss * float("inf")
            self.reducer.backward(loss, len(batch[0]), global_samples=COUNT)
            finite = self.reducer.finish(clip_norm=1.0).finite
            assert finite == (number != spoilt)
            if not finite:
                continue
            self.optimizer.step()
            self.average.update(self.model, 0.9)
            self.update.settle()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def state(self) -> dict[str, Any]:
        return self.update.optimizer_state()


def assert_equal(first: Run, second: Run) -> None:
    """Weights, averages of weights, and optimizer state, to the bit; buffers are each rank's own."""
    for a, b in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    names = dict(first.model.named_parameters())
    for name in names:
        assert torch.equal(first.average.tensors[name], second.average.tensors[name]), name
    here, there = first.state(), second.state()
    assert here["param_groups"] == there["param_groups"]
    assert here["state"].keys() == there["state"].keys()
    for number, entry in here["state"].items():
        for key, value in entry.items():
            other = there["state"][number][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (number, key)


def is_shared(run: Run) -> bool:
    return not all(run.update.is_own(parameter) for parameter in run.model.parameters())


def scenario_a_shared_update_is_the_same_to_the_bit(c: Communicator) -> None:
    for build in (adamw, sgd, lamb, lars):
        shared, whole = Run(c, "auto", build), Run(c, "off", build)
        assert is_shared(shared) == (c.size > 1 and SETTINGS.local_reduction != "engine") and not is_shared(whole)
        # The first step learns the order of gradients; from the second on sums are left in one place.
        shared.steps(6, spoilt=3)
        whole.steps(6, spoilt=3)
        assert_equal(shared, whole)
        if is_shared(shared):
            kept = sum(len(group["params"]) for group in shared.optimizer.param_groups)
            total = int(c.allreduce(torch.tensor(kept)))
            assert total == len(list(shared.model.parameters())), "each parameter has one owner"
            assert len(shared.optimizer.state) == kept


def scenario_a_shared_updates_state_is_that_of_one_rank(c: Communicator) -> None:
    """Saved by one and taken up by the other, in both directions, training goes on to the bit."""
    for choices, build in product((("auto", "off"), ("off", "auto")), (adamw, lamb, lars)):
        before, undisturbed = Run(c, choices[0], build), Run(c, choices[0], build)
        undisturbed.steps(5)
        before.steps(3)
        after = Run(c, choices[1], build, seed=7)
        after.model.load_state_dict({name: tensor.clone() for name, tensor in before.model.state_dict().items()})
        after.average.load({name: tensor.clone() for name, tensor in before.average.tensors.items()})
        after.update.load_optimizer_state(before.state())
        after.update.settle()
        after.reducer.follow(before.reducer.order or [])
        after.steps(2, first=3)
        assert_equal(after, undisturbed)


def scenario_a_shared_update_of_a_fresh_optimizer_has_no_state(c: Communicator) -> None:
    run = Run(c, "auto", adamw)
    assert run.state()["state"] == {}
    assert [len(group["params"]) for group in run.state()["param_groups"]] == [3, 4]


def scenario_a_shared_update_that_cannot_be_had_is_refused(c: Communicator) -> None:
    if c.size == 1:
        return
    model = network()
    settings = replace(SETTINGS, shared_update="on")
    with pytest.raises(UserError, match=r"distributed\.shared_update = on: .*LBFGS|engine was asked for"):
        reducer = distributed.distribute(model, None, c, settings)
        distributed.share_update(model, torch.optim.LBFGS(model.parameters()), reducer, c, settings)


def scenario_a_copy_of_a_model_with_shared_weights_is_a_ranks_own(c: Communicator) -> None:
    import copy

    run = Run(c, "auto", adamw)
    mine = copy.deepcopy(run.model)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.fill_(float(c.rank))
    c.barrier()
    for parameter in mine.parameters():
        assert bool((parameter == c.rank).all())
    assert not any(bool((parameter == 1.0).all()) for parameter in run.model.parameters() if parameter.dim() > 1)
