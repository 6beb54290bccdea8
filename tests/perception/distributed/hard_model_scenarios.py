"""Models that make averaging gradients hard: each must train as on one process that averages over ranks itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perception import distributed
from perception.distributed import Communicator
from perception.errors import UserError
from tests.perception.distributed.reducer_scenarios import Branches
from tests.perception.distributed.scenario_tools import (
    TINY_BUCKETS,
    assert_gradients,
    assert_trains_like_one_process,
    mean_gradients,
)


def inputs(rank: int, step: int, count: int = 3, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(100 * rank + step))


def squares(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step)).square().mean()  # type: ignore[no-any-return]


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)])


def scenario_unused_parameters_change_from_step_to_step(c: Communicator) -> None:
    uses = ["first", "first second third", "second", "third first", "first"]

    def on_one_rank(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step), uses[step] if rank == 0 else "second third")  # type: ignore[no-any-return]

    def on_all_ranks(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step), uses[step])  # type: ignore[no-any-return]

    def each_its_own(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step), uses[(step + rank) % len(uses)])  # type: ignore[no-any-return]

    for loss in (on_one_rank, on_all_ranks, each_its_own):
        assert_trains_like_one_process(c, Branches, loss, steps=len(uses))


def scenario_the_last_layer_gets_no_gradient(c: Communicator) -> None:
    """It fills the first bucket, which then can start only at the end."""

    def on_all_ranks(model: nn.Module, rank: int, step: int) -> Tensor:
        return squares(model[:-1], rank, step)  # type: ignore[index]

    def on_one_rank(model: nn.Module, rank: int, step: int) -> Tensor:
        return squares(model[: -1 if rank == 0 else None], rank, step)  # type: ignore[index]

    assert_trains_like_one_process(c, layers, on_all_ranks)
    assert_trains_like_one_process(c, layers, on_one_rank)


class Tied(nn.Module):
    """A language model in small: the same weight embeds and classifies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))  # type: ignore[no-any-return]


def scenario_tied_weights(c: Communicator) -> None:
    def next_token(model: nn.Module, rank: int, step: int) -> Tensor:
        tokens = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(7 * rank + step))
        return nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])

    assert_trains_like_one_process(c, Tied, next_token)
    model = Tied()
    distributed.distribute(model, None, c, TINY_BUCKETS)
    assert model.head.weight is model.embedding.weight


def scenario_frozen_and_unfrozen_mid_run(c: Communicator) -> None:
    def freeze_and_thaw(model: nn.Module, rank: int, step: int) -> Tensor:
        model[1].requires_grad_(step != 1)  # type: ignore[index]
        model[-1].requires_grad_(step not in (1, 2))  # type: ignore[index]
        return squares(model, rank, step)

    assert_trains_like_one_process(c, layers, freeze_and_thaw, steps=5)


def scenario_frozen_on_one_rank_only(c: Communicator) -> None:
    def frozen(model: nn.Module, rank: int, step: int) -> Tensor:
        model[1].requires_grad_(not (rank == 0 and step == 1))  # type: ignore[index]
        return squares(model, rank, step)

    assert_trains_like_one_process(c, layers, frozen)


def scenario_unfrozen_after_being_distributed(c: Communicator) -> None:
    """A parameter frozen at the start is averaged from when it trains, or its use is refused by its name."""

    def half_frozen() -> nn.Sequential:
        model = layers()
        model[1].requires_grad_(False)
        return model

    def thaw(model: nn.Module, rank: int, step: int) -> Tensor:
        model[1].requires_grad_(step > 0)  # type: ignore[index]
        return squares(model, rank, step)

    try:
        assert_trains_like_one_process(c, half_frozen, thaw)
    except (UserError, RuntimeError) as error:
        assert "1.0.weight" in str(error) or "1.0.bias" in str(error), error


def scenario_sparse_embeddings_train_as_dense_ones(c: Communicator) -> None:
    def build(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 4))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        # Indices repeat within a batch: their rows must add up.
        return model(torch.tensor([rank, step, 7, 7])).square().mean()  # type: ignore[no-any-return]

    # Decay would need dense gradients on one rank too, where nothing makes them so.
    assert_trains_like_one_process(c, lambda: build(True), loss, build_reference=lambda: build(False), weight_decay=0.0)
    model = build(True)
    distributed.distribute(model, None, c, TINY_BUCKETS)
    loss(model, c.rank, 0).backward()
    # One rank's unchanged code has nothing done to its gradients.
    assert all(p.grad is not None and (not p.grad.is_sparse or c.size == 1) for p in model.parameters())


def scenario_gradient_penalty(c: Communicator) -> None:
    def of_inputs(model: nn.Module, rank: int, step: int) -> Tensor:
        x = inputs(rank, step).requires_grad_()
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score.square() + (slope.norm(dim=1) - 1).square().mean()

    def of_parameters(model: nn.Module, rank: int, step: int) -> Tensor:
        loss = squares(model, rank, step)
        slopes = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
        return loss + torch.stack([slope.square().sum() for slope in slopes]).sum()

    assert_trains_like_one_process(c, layers, of_inputs)
    assert_trains_like_one_process(c, layers, of_parameters)


def scenario_grad_of_leaves_no_trace(c: Communicator) -> None:
    """`torch.autograd.grad` is a private look at derivatives: it reduces nothing and touches no `.grad`."""
    model = layers()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)
    if c.rank == 0:
        torch.autograd.grad(squares(model, 0, 0), list(model.parameters()))
    expected = mean_gradients(layers(), lambda m, rank: squares(m, rank, 1), c.size)
    squares(model, c.rank, 1).backward()
    assert_gradients(model, expected)
    reducer.zero_grad()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def scenario_backward_that_keeps_its_graph(c: Communicator) -> None:
    """Two losses by two backward passes, and `create_graph=True`: first derivatives are averaged."""
    model = layers()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)

    def both(m: nn.Module, rank: int) -> Tensor:
        return squares(m, rank, 0) + squares(m, rank, 0).sqrt()

    expected = mean_gradients(layers(), both, c.size)
    loss = squares(model, c.rank, 0)
    loss.backward(retain_graph=True)
    loss.sqrt().backward()
    assert_gradients(model, expected)

    for _ in range(2):
        reducer.zero_grad()
        both(model, c.rank).backward(create_graph=True)
        assert_gradients(model, expected)
    for parameter in model.parameters():
        parameter.grad = None
    both(model, c.rank).backward()
    assert_gradients(model, expected)


class Checkpointed(nn.Module):
    """Activations of the two middle layers are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = layers()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.layers[3](x)  # type: ignore[no-any-return]


def scenario_activation_checkpointing(c: Communicator) -> None:
    assert_trains_like_one_process(c, lambda: Checkpointed(reentrant=False), squares)


def scenario_reentrant_activation_checkpointing(c: Communicator) -> None:
    assert_trains_like_one_process(c, lambda: Checkpointed(reentrant=True), squares)


def scenario_two_models_in_one_backward(c: Communicator) -> None:
    """As a generator and its critic: one loss reaches both, and parts of either stay unused."""
    models = nn.ModuleList([Branches(), Branches()])
    reducers = [distributed.distribute(model, None, c, TINY_BUCKETS) for model in models]

    def loss(both: nn.Module, rank: int, step: int) -> Tensor:
        first, second = both  # type: ignore[misc]
        x = inputs(rank, step)
        return second(x, "second") * first(x, "third" if rank == step else "first")  # type: ignore[no-any-return]

    for step in range(3):
        reference = nn.ModuleList([Branches(), Branches()])
        expected = mean_gradients(reference, lambda m, rank, step=step: loss(m, rank, step), c.size)  # type: ignore[misc]
        for reducer in reducers:
            reducer.zero_grad()
        loss(models, c.rank, step).backward()
        assert_gradients(models, expected)


def scenario_two_models_in_turn(c: Communicator) -> None:
    """One model's step leaves the other's gradients alone, even those of a step that was never taken."""
    a, b = layers(2), layers(3)
    reducers = [distributed.distribute(model, None, c, TINY_BUCKETS) for model in (a, b)]
    expected = mean_gradients(layers(2), lambda m, rank: squares(m, rank, 0), c.size)
    squares(a, c.rank, 0).backward()
    squares(b, c.rank, 1).backward()
    reducers[1].zero_grad()
    assert_gradients(a, expected)
    assert all(not p.grad.any() for p in b.parameters() if p.grad is not None)
