"""Ranks whose graphs differ so much that they would wait for each other: each scenario has processes of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perception import distributed
from perception.distributed import Communicator
from tests.perception.distributed.hard_model_scenarios import inputs, layers, squares
from tests.perception.distributed.scenario_tools import TINY_BUCKETS, assert_gradients, mean_gradients


def scenario_two_models_reached_in_different_orders(c: Communicator) -> None:
    """One backward reaches two models, on some ranks the first one first, on the others the second."""
    models = nn.ModuleList([layers(2), layers(2)])
    reducers = [distributed.distribute(model, None, c, TINY_BUCKETS) for model in models]

    def loss(both: nn.Module, rank: int, step: int) -> Tensor:
        first, second = both if (rank + step) % 2 == 0 else reversed(list(both))  # type: ignore[call-overload]
        return second(first(inputs(rank, step))).square().mean()  # type: ignore[no-any-return]

    for step in range(3):
        reference = nn.ModuleList([layers(2), layers(2)])
        expected = mean_gradients(reference, lambda m, rank, step=step: loss(m, rank, step), c.size)  # type: ignore[misc]
        for reducer in reducers:
            reducer.zero_grad()
        loss(models, c.rank, step).backward()
        assert_gradients(models, expected)


def scenario_a_rank_whose_loss_reaches_no_parameter(c: Communicator) -> None:
    """Unchanged code: its backward meets no hook, and the others wait for it until its optimizer steps."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distributed.distribute(model, optimizer, c, TINY_BUCKETS)
    reference = layers()
    for step in range(3):
        optimizer.zero_grad()
        idle = c.size > 1 and c.rank == step % c.size
        loss = squares(model, c.rank, step) if not idle else torch.ones((), requires_grad=True) * 2
        loss.backward()
        optimizer.step()

        def loss_of_rank(m: nn.Module, rank: int, step: int = step) -> Tensor:
            factor = 0.0 if c.size > 1 and rank == step % c.size else 1.0
            return squares(m, rank, step) * factor

        means = mean_gradients(reference, loss_of_rank, c.size)
        with torch.no_grad():
            for parameter, mean in zip(reference.parameters(), means, strict=True):
                assert mean is not None
                parameter -= 0.1 * mean
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter, expected, atol=1e-6)
