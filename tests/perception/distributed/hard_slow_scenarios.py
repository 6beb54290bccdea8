"""Hard cases that take seconds a rank: compiled models and ten thousand parameters."""

from __future__ import annotations

import shutil
import time

import torch
from torch import Tensor, nn

from perception import distributed
from perception.distributed import Communicator
from tests.perception.distributed.hard_model_scenarios import inputs, layers, squares
from tests.perception.distributed.scenario_tools import (
    SETTINGS,
    TINY_BUCKETS,
    assert_close,
    assert_gradients,
    mean_gradients,
)

# The inductor writes C++; where no compiler is, its graph and its backward can still be had.
BACKEND = "inductor" if shutil.which("g++") else "aot_eager"


def compiled_training(c: Communicator, wrapped_before: bool, unchanged: bool) -> None:
    """Train a compiled model; `wrapped_before` gives the compiled one to `distribute`, else the plain one."""
    torch._dynamo.reset()
    model, reference = layers(2), layers(2)
    compiled = torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reducer = distributed.distribute(compiled if wrapped_before else model, optimizer, c, TINY_BUCKETS)
    for step in range(3):
        expected = mean_gradients(reference, lambda m, rank, step=step: squares(m, rank, step), c.size)  # type: ignore[misc]
        if unchanged:
            optimizer.zero_grad(set_to_none=True)
            compiled(inputs(c.rank, step)).square().mean().backward()
        else:
            reducer.zero_grad()
            reducer.backward(compiled(inputs(c.rank, step)).square().mean(), 3)
            reducer.finish()
        assert_gradients(model, expected, 1e-4)
        optimizer.step()
        for parameter, mean in zip(reference.parameters(), expected, strict=True):
            parameter.grad = mean
        reference_optimizer.step()
    assert_close([*model.parameters()], [*reference.parameters()], 1e-4)


def scenario_a_model_compiled_before(c: Communicator) -> None:
    compiled_training(c, wrapped_before=True, unchanged=True)


def scenario_a_model_compiled_beside(c: Communicator) -> None:
    compiled_training(c, wrapped_before=False, unchanged=False)


def scenario_a_compiled_model_trains_with_some_layers_unused(c: Communicator) -> None:
    torch._dynamo.reset()
    model = layers(3)
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)

    def loss(m: nn.Module, rank: int) -> Tensor:
        return squares(m[: 2 if rank == 0 else 3], rank, 0)  # type: ignore[index]

    compiled = torch.compile(lambda: loss(model, c.rank), backend=BACKEND)
    expected = mean_gradients(layers(3), loss, c.size)
    reducer.backward(compiled(), 1)
    reducer.finish()
    assert_gradients(model, expected, 1e-4)


def scenario_ten_thousand_parameters(c: Communicator) -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((8,), float(index % 7))) for index in range(10_000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reducer = distributed.distribute(model, optimizer, c, SETTINGS)
    for step in range(2):
        reducer.zero_grad()
        # Every tenth is unused on rank 0, another tenth on all.
        used = [p for i, p in enumerate(model) if i % 10 != 1 and not (i % 10 == 0 and c.rank == 0)]
        loss = torch.stack(used).sum() * (c.rank + 1 + step)
        began = time.perf_counter()
        reducer.backward(loss, 1)
        reduction = reducer.finish()
        seconds = time.perf_counter() - began
        assert reduction.finite and seconds < 30, f"a step of 10,000 parameters took {seconds:.1f} s"
        mean = (c.size + 1) / 2 + step
        without_rank_0 = mean - (1 + step) / c.size
        for index, parameter in enumerate(model):
            if index % 10 == 1 or (index % 10 == 0 and c.size == 1):
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                expected = without_rank_0 if index % 10 == 0 else mean
                assert torch.allclose(parameter.grad, torch.full((8,), expected))
