"""Reduction in two levels, against the engine alone: ranks on several hosts with equally many ranks, more than one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import Communicator
from perception.distributed.buckets import plan_buckets
from perception.distributed.exchange import Bucket
from perception.distributed.exchanges import open_exchange
from perception.distributed.hierarchical_exchange import HierarchicalExchange
from perception.distributed.layout import arena_sizes, parameter_spec, with_tail
from perception.distributed.tail import Tail
from tests.perception.distributed.scenario_tools import (
    SMALL_BUCKETS,
    TINY_BUCKETS,
    assert_gradients,
    data,
    loss_of,
    mean_gradients,
    network,
)

NUM_BUCKETS = 4
BUCKET_NUMEL = 50_000
NUM_EXTRAS = 3


class Branches(nn.Module):
    """One layer that all ranks use, one that only rank 1 uses, one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common, self.one, self.none = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, use_one: bool) -> Tensor:
        x = self.common(x)
        return (self.one(x) if use_one else x).square().mean()


def by_engine(settings: DistributedConfig) -> DistributedConfig:
    return replace(settings, local_reduction="engine", wire_format="fp32")


def assert_bits_equal(c: Communicator, values: Tensor) -> None:
    assert all(torch.equal(part, values) for part in c.allgather(values)), "ranks must agree to the bit"


def assert_like_engine(
    c: Communicator,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor],
    settings: DistributedConfig,
    relative: float,
    steps: int = 20,
) -> None:
    """At every one of `steps` steps, from the same weights, gradients, norm and extras are those of the engine."""
    model, reference = build(), build()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    reducer = distributed.distribute(model, None, c, settings, NUM_EXTRAS)
    expected = distributed.distribute(reference, optimizer, c, by_engine(settings), NUM_EXTRAS)
    extras = torch.tensor([1.0, 1e6 + c.rank, 1e-3])
    for step in range(steps):
        model.load_state_dict(reference.state_dict())
        found = []
        for each, of in ((model, reducer), (reference, expected)):
            of.zero_grad()
            of.backward(loss(each, step), 1 + c.rank)
            found.append(of.finish(0.5, extras))
        assert math.isclose(found[0].grad_norm, found[1].grad_norm, rel_tol=max(1e-5, relative))
        assert torch.allclose(found[0].extras, found[1].extras, rtol=1e-6)
        assert found[0].weight == found[1].weight == c.size * (c.size + 1) / 2
        for (name, own), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (own.grad is None) == (theirs.grad is None), name
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
        a, b = (torch.cat([pair[i].double().flatten() for pair in pairs if pair[i] is not None]) for i in (0, 1))  # type: ignore[union-attr]
        error = float((a - b).norm() / b.norm())
        assert error < relative, f"step {step}: relative error {error:.2e}"
        assert_bits_equal(c, torch.cat([a, torch.tensor([found[0].grad_norm], dtype=torch.float64)]))
        optimizer.step()
    reducer.remove()
    expected.remove()


def scenario_gradients_of_twenty_steps(c: Communicator) -> None:
    for settings in (SMALL_BUCKETS, TINY_BUCKETS):
        assert_like_engine(c, network, lambda m, step: loss_of(m, data(4, 10 * step + c.rank)), settings, 1e-6)


def scenario_unused_parameters_by_hosts(c: Communicator) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        torch.manual_seed(10 * step + c.rank)
        return model(torch.randn(4, 6), c.rank == 1)  # type: ignore[no-any-return]

    assert_like_engine(c, Branches, loss, TINY_BUCKETS, 1e-6, 5)


def scenario_narrow_and_wide_parameters_by_hosts(c: Communicator) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        torch.manual_seed(10 * step + c.rank)
        x = torch.randn(4, 6)
        for layer in model:  # type: ignore[attr-defined]
            x = layer(x.to(layer.weight.dtype))
        return x.float().square().mean()

    def layer(dtype: torch.dtype) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(6, 6).to(dtype)

    for dtype, relative in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        assert_like_engine(
            c,
            lambda dtype=dtype: nn.Sequential(layer(torch.float32), layer(dtype), layer(torch.float32)),  # type: ignore[misc]
            loss,
            SMALL_BUCKETS,
            relative,
            5,
        )


def scenario_double_precision_by_hosts(c: Communicator) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return (model(torch.full((2, 6), 1.0 + rank, dtype=torch.float64)) ** 2).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    expected = mean_gradients(model, loss, c.size)
    distributed.distribute(model, None, c, SMALL_BUCKETS)
    loss(model, c.rank).backward()
    assert_gradients(model, expected, 1e-12)


def scenario_wire_formats_of_what_crosses(c: Communicator) -> None:
    formats = [("fp16", 2e-3)] if c.engine == "horovod" else [("fp16", 2e-3), ("bf16", 1e-2)]
    for wire_format, relative in formats:
        settings = replace(SMALL_BUCKETS, wire_format=wire_format)
        assert_like_engine(c, network, lambda m, step: loss_of(m, data(4, 10 * step + c.rank)), settings, relative, 5)


def scenario_twenty_steps_of_unchanged_code(c: Communicator) -> None:
    models = [network(), network()]
    for model, settings in zip(models, (SMALL_BUCKETS, by_engine(SMALL_BUCKETS)), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        reducer = distributed.distribute(model, optimizer, c, settings)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, data(4, 10 * step + c.rank)).backward()
            optimizer.step()
        reducer.remove()
    a, b = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
    assert_bits_equal(c, a)
    assert (a - b).norm() < 1e-5 * b.norm()


def scenario_models_whose_buckets_cross_together(c: Communicator) -> None:
    models, references = ([network(seed) for seed in (1, 2, 3)] for _ in range(2))
    for step in range(5):
        for group, settings in ((models, TINY_BUCKETS), (references, by_engine(TINY_BUCKETS))):
            if step == 0:
                for model in group:
                    distributed.distribute(model, None, c, settings)
            for model in group:
                model.zero_grad()
            # One backward reaches all of them, in another order on every rank.
            order = [(number + c.rank) % len(group) for number in range(len(group))]
            losses = [loss_of(group[number], data(4, 10 * step + number + c.rank)) for number in order]
            torch.stack(losses).sum().backward()
        for model, reference in zip(models, references, strict=True):
            gradients = [torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, reference)]  # type: ignore[union-attr]
            assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[1].norm()
            assert_bits_equal(c, gradients[0])


def scenario_nonfinite_on_one_host_is_decided_by_all(c: Communicator) -> None:
    for wire_format in ("fp32", "fp16"):
        model = network()
        reducer = distributed.distribute(model, None, c, replace(SMALL_BUCKETS, wire_format=wire_format))
        # In the second step a gradient that fp16 cannot hold, though fp32 can.
        for step, (factor, fp32, fp16) in enumerate([(math.inf, False, False), (1e12, True, False), (1.0, True, True)]):
            reducer.zero_grad()
            loss = loss_of(model, data(4, step)) * (factor if c.rank == c.size - 1 else 1.0)
            reducer.backward(loss, 1)
            reduction = reducer.finish()
            assert reduction.finite == (fp32 if wire_format == "fp32" else fp16)
            assert_bits_equal(c, torch.tensor([float(reduction.finite)]))
        reducer.remove()


def open_buckets(c: Communicator, wire_format: str = "fp32") -> tuple[HierarchicalExchange, list[Bucket]]:
    """An exchange of NUM_BUCKETS fp32 buckets of BUCKET_NUMEL gradients each, the last one with its tail."""
    specs = [parameter_spec(f"p{n}", nn.Parameter(torch.zeros(BUCKET_NUMEL))) for n in range(NUM_BUCKETS)]
    plans = with_tail(plan_buckets(specs, 4 * BUCKET_NUMEL, 4 * BUCKET_NUMEL))
    assert len(plans) == NUM_BUCKETS
    exchange = open_exchange(c, replace(SMALL_BUCKETS, wire_format=wire_format), plans, len(specs), 0)
    assert isinstance(exchange, HierarchicalExchange)
    num_extras = Tail(c, len(specs), 0).numel
    arena = exchange.allocate(arena_sizes(plans, num_extras))[torch.float32]
    buckets, start = [], 0
    for number, plan in enumerate(plans):
        extras = num_extras if number == len(plans) - 1 else 0
        buckets.append(Bucket(arena[start : start + plan.numel + extras], extras, (), f"bucket {number}"))
        start += plan.numel + extras
    exchange.set_buckets(buckets)
    return exchange, buckets


def scenario_progress_does_not_wait_for_other_hosts(c: Communicator) -> None:
    """Were it to block, the barrier would not be reached and the ranks end at their timeout."""
    exchange, buckets = open_buckets(c)
    first_host = c.rank in c.neighbours().hosts[0]
    for _ in range(3):
        for bucket in buckets:
            bucket.buffer.fill_(c.rank + 1.0)
        if first_host:
            for index in range(NUM_BUCKETS):
                exchange.start(index)
                exchange.progress()
        c.barrier()
        if not first_host:
            for index in range(NUM_BUCKETS):
                exchange.start(index)
                exchange.progress()
        exchange.wait()
        total = c.size * (c.size + 1) / 2
        for bucket in buckets:
            assert torch.allclose(bucket.gradients, torch.full_like(bucket.gradients, total / c.size))
            assert torch.equal(bucket.extras, torch.full_like(bucket.extras, total))
        square = exchange.square_norm()
        assert square is not None and math.isclose(
            square, NUM_BUCKETS * BUCKET_NUMEL * (total / c.size) ** 2, rel_tol=1e-5
        )


def scenario_one_share_of_the_data_crosses(c: Communicator) -> None:
    """Bytes handed to the engine: 1 / ranks of a host of all gradients, half of that as fp16."""
    for wire_format, element_bytes in (("fp32", 4), ("fp16", 2)):
        exchange, buckets = open_buckets(c, wire_format)
        crossing = int(c.allreduce(torch.tensor([exchange.crossing_bytes]))) / len(c.neighbours().hosts)
        gradients, extras = (
            sum(part.numel() for part in parts)
            for parts in zip(*((b.gradients, b.extras) for b in buckets), strict=True)
        )
        assert crossing == gradients * element_bytes + extras * 4
        largest = int(c.allreduce(torch.tensor([exchange.crossing_bytes]), "max"))
        assert largest < 1.02 * crossing / len(c.neighbours().ranks)
