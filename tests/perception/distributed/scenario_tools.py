"""What the scenarios share: a small network, data, unequal shares, comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perception.config import DistributedConfig
from perception.distributed import Communicator

SMALL_BUCKETS = DistributedConfig(first_bucket_mib=0.0005, bucket_mib=0.002)
"""Several buckets even for the small models here."""


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
