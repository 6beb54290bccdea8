"""What the scenarios share: a small network, data, unequal shares, comparisons."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import Communicator

LOCAL_REDUCTION_VARIABLE = "SCENARIO_LOCAL_REDUCTION"
"""Environment variable by which a test says how the ranks of its scenarios reduce on one host."""
SETTINGS = DistributedConfig(local_reduction=os.environ.get(LOCAL_REDUCTION_VARIABLE, "auto"))
SMALL_BUCKETS = replace(SETTINGS, first_bucket_mib=0.0005, bucket_mib=0.002)
"""Several buckets even for the small models here."""
TINY_BUCKETS = replace(SETTINGS, first_bucket_mib=0.0001, bucket_mib=0.0002)
"""About a bucket a parameter, so that every order of launching is met."""


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    # No bias before batch norm: its gradient would be rounding noise around 0.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
    )


def data(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.randint(0, 5, (count,), generator=generator)


def share(communicator: Communicator, count: int) -> slice:
    """Unequal contiguous shares: rank r takes r + 1 parts of 1 + 2 + ... + size."""
    size = communicator.size
    bounds = [round(count * r * (r + 1) / (size * (size + 1))) for r in range(size + 1)]
    return slice(bounds[communicator.rank], bounds[communicator.rank + 1])


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_close(actual: list[Tensor], expected: list[Tensor], relative: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        error = (a.float() - e.float()).norm() / e.float().norm().clamp(min=1e-12)
        assert error < relative, f"relative error {error:.2e}"


def single_gradients(model: nn.Module, count: int) -> list[Tensor]:
    loss_of(model, data(count)).backward()
    return gradients(model)


def mean_gradients(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], size: int) -> list[Tensor | None]:
    """For each parameter the mean over `size` ranks of the gradient of `loss(model, rank)`, by one process.

    A rank without a gradient counts as zeros; None where no rank has one.
    """
    means: list[Tensor | None] = [None] * len(list(model.parameters()))
    for rank in range(size):
        replica = copy.deepcopy(model)
        replica.zero_grad()
        loss(replica, rank).backward()
        for index, parameter in enumerate(replica.parameters()):
            if parameter.grad is not None:
                before = means[index]
                part = parameter.grad / size
                means[index] = part if before is None else before + part
    return means


def assert_gradients(model: nn.Module, expected: Sequence[Tensor | None], relative: float = 1e-5) -> None:
    """The model has these gradients, and none where None is expected."""
    for (name, parameter), mean in zip(model.named_parameters(), expected, strict=True):
        if mean is None:
            assert parameter.grad is None, f"{name} got a gradient that no rank has"
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.dtype is parameter.dtype
        error = (parameter.grad.to_dense() - mean).norm() / mean.norm().clamp(min=1e-6)
        assert error < relative, f"gradient of {name}: relative error {error:.2e}"


def assert_trains_like_one_process(
    c: Communicator,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int, int], Tensor],
    steps: int = 3,
    build_reference: Callable[[], nn.Module] | None = None,
    weight_decay: float = 0.01,
) -> None:
    """Train by `loss(model, rank, step)`, by unchanged code and in full control.

    Every step's gradients, and the weights of all ranks at the end, must be those of one process
    that computes each rank's gradients and averages them itself.
    """
    for unchanged in (True, False):
        model, reference = build(), (build_reference or build)()
        optimizer, reference_optimizer = (
            torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=weight_decay)
            for m in (model, reference)
        )
        reducer = distributed.distribute(model, optimizer, c, TINY_BUCKETS)
        for step in range(steps):
            expected = mean_gradients(reference, lambda m, rank, step=step: loss(m, rank, step), c.size)  # type: ignore[misc]
            if unchanged:
                optimizer.zero_grad()
                loss(model, c.rank, step).backward()
            else:
                reducer.zero_grad()
                reducer.backward(loss(model, c.rank, step), 2)
                reducer.finish()
            assert_gradients(model, expected)
            optimizer.step()
            for parameter, mean in zip(reference.parameters(), expected, strict=True):
                parameter.grad = mean
            reference_optimizer.step()
        assert_close([*model.parameters()], [*reference.parameters()], 1e-4)
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert all(torch.equal(part, flat) for part in c.allgather(flat)), "ranks must agree to the bit"
        reducer.remove()
