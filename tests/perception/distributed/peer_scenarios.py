"""What the test suites of Horovod and torch.distributed ask of them, where it applies to this layer.

docs/allreduce_peers.md maps their tests to scenarios, these and others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perception import distributed
from perception.distributed import Communicator
from perception.errors import UserError
from tests.perception.distributed.hard_model_scenarios import inputs, layers, squares
from tests.perception.distributed.reducer_scenarios import Branches
from tests.perception.distributed.scenario_tools import (
    TINY_BUCKETS,
    assert_close,
    assert_gradients,
    assert_trains_like_one_process,
    data,
    gradients,
    loss_of,
    mean_gradients,
    network,
)

# Collectives.


def scenario_many_reductions_in_flight(c: Communicator) -> None:
    """Started in one order, waited for in the opposite one; dtypes and sizes mixed."""
    dtypes = (torch.float32, torch.int64, torch.float64, torch.int32)
    flats = [torch.full((1 + 997 * (n % 5),), c.rank + n, dtype=dtypes[n % 4]) for n in range(16)]
    started = [c.start_allreduce(flat, f"in_flight.{n}") for n, flat in enumerate(flats)]
    for pending in reversed(started):
        pending.wait()
    total = sum(range(c.size))
    assert all((flat == total + c.size * n).all() for n, flat in enumerate(flats))


def scenario_a_part_of_a_buffer_is_reduced_in_place(c: Communicator) -> None:
    buffer = torch.full((100,), float(c.rank))
    c.start_allreduce(buffer[25:75], "part").wait()
    assert (buffer[25:75] == sum(range(c.size))).all()
    assert (buffer[:25] == c.rank).all() and (buffer[75:] == c.rank).all()


def scenario_broadcast_from_every_rank(c: Communicator) -> None:
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    integers = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
    for root in range(c.size):
        for dtype in (*floats, *integers):
            for shape in ((), (1,), (5,), (2, 3), (2, 2, 3)):
                own = torch.full(shape, c.rank + 1, dtype=dtype)
                result = c.broadcast(own, root)
                assert result.dtype is dtype and result.shape == shape and (result == root + 1).all()
                assert (own == c.rank + 1).all(), "the input belongs to the caller"
        assert c.broadcast(torch.tensor([c.rank == root, c.rank != root]), root).tolist() == [True, False]
        values = torch.arange(48.0).reshape(2, 3, 2, 4)
        image = (values + 100 * c.rank).to(memory_format=torch.channels_last)
        assert torch.equal(c.broadcast(image, root), values + 100 * root)
        assert c.broadcast(image, root).stride() == image.stride()
        assert torch.equal(c.broadcast(image[:, 1, :, ::2], root), (values + 100 * root)[:, 1, :, ::2])


def scenario_allgather_of_every_dtype_and_dimension(c: Communicator) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64)
    for dtype in (*dtypes, torch.uint8):
        for shape in ((), (3,), (2, 3), (3, 1, 2)):
            parts = c.allgather(torch.full(shape, c.rank + 1, dtype=dtype))
            assert all(part.dtype is dtype and part.shape == shape for part in parts)
            assert all((part == rank + 1).all() for rank, part in enumerate(parts))
    # Each rank its own number of dimensions, and no memory in order.
    own = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2) + c.rank
    parts = c.allgather(own if c.rank == 0 else own[0])
    assert all(
        torch.equal(part, own - c.rank + rank if rank == 0 else (own - c.rank + rank)[0])
        for rank, part in enumerate(parts)
    )


# Optimizers.

OPTIMIZERS: tuple[Callable[[Any], Optimizer], ...] = (
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.Adamax(p),
    lambda p: torch.optim.AdamW(p, foreach=True),
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.ASGD(p),
    lambda p: torch.optim.Muon([x for x in p if x.dim() == 2]),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.RAdam(p),
    lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    lambda p: torch.optim.Rprop(p),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
)


def scenario_every_optimizer_goes_on_from_the_first_ranks_state(c: Communicator) -> None:
    """Rank 0 resumes after two steps, the others start; all go on as one process would."""

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, data(4, seed=number)).backward()
        optimizer.step()

    for build in OPTIMIZERS:
        reference, model = network(), network(c.rank)
        expected, optimizer = build(list(reference.parameters())), build(list(model.parameters()))
        for number in (1, 2):
            step(reference, expected, number)
            if c.rank == 0:
                step(model, optimizer, number)
        distributed.distribute(model, optimizer, c, TINY_BUCKETS)
        assert_same_state(optimizer.state_dict(), expected.state_dict(), type(optimizer).__name__, 0.0)
        for number in (3, 4):
            step(reference, expected, number)
            step(model, optimizer, number)
        # Both saw the same batches. Rounding differs, and some methods divide by almost nothing.
        assert_close([*model.parameters()], [*reference.parameters()], 1e-3)
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert all(torch.equal(part, flat) for part in c.allgather(flat)), type(optimizer).__name__


def assert_same_state(actual: Any, expected: Any, path: str, tolerance: float) -> None:
    """Equal trees of dicts, lists, tensors and plain values."""
    assert type(actual) is type(expected), path
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key, item in expected.items():
            assert_same_state(actual[key], item, f"{path}.{key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for number, item in enumerate(expected):
            assert_same_state(actual[number], item, f"{path}.{number}", tolerance)
    elif isinstance(expected, Tensor):
        assert actual.dtype is expected.dtype and torch.allclose(actual, expected, tolerance, tolerance), path
    else:
        assert actual == expected, path


def scenario_options_of_every_parameter_group(c: Communicator) -> None:
    """Plain numbers, tuples, None, a tensor as learning rate, entries of the user's own; one layer frozen."""
    model = network()
    first = model[0]
    assert isinstance(first, nn.Conv2d)
    first.requires_grad_(False)
    groups = [
        {"params": model[:4].parameters(), "lr": torch.tensor(0.5 / (1 + c.rank)), "name": f"backbone of {c.rank}"},
        {"params": model[4:].parameters(), "betas": (0.5 + 0.1 * c.rank, 0.9), "initial_lr": 0.25 * (1 + c.rank)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01 * (1 + c.rank), maximize=c.rank > 0, foreach=False)
    distributed.distribute(model, optimizer, c, TINY_BUCKETS)
    backbone, head = optimizer.param_groups
    assert isinstance(backbone["lr"], Tensor) and backbone["lr"].item() == 0.5
    assert backbone["name"] == "backbone of 0" and head["lr"] == 0.1
    assert head["betas"] == (0.5, 0.9) and head["initial_lr"] == 0.25
    assert all(group["weight_decay"] == 0.01 and not group["maximize"] for group in (backbone, head))
    before = first.weight.detach().clone()
    loss_of(model, data(4, seed=c.rank)).backward()
    optimizer.step()
    assert torch.equal(first.weight, before)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(part, flat) for part in c.allgather(flat))


# Graphs.


def scenario_layers_used_in_another_order_on_each_rank(c: Communicator) -> None:
    orders = ["first second third", "third first second", "second third first"]

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step), orders[(rank + step) % 3])  # type: ignore[no-any-return]

    assert_trains_like_one_process(c, Branches, loss, steps=4)


def scenario_several_forwards_before_one_backward(c: Communicator) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = inputs(rank, step)
        return (model(model(x)) + model(2 * x)).square().mean()  # type: ignore[no-any-return]

    assert_trains_like_one_process(c, layers, loss)


class TwoHeads(nn.Module):
    """Outputs in a dict, of which a loss may leave one out; one output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.trunk(x).tanh()
        return {"heads": (self.left(features), self.right(features)), "mask": x > 0}


def scenario_outputs_left_out_of_the_loss(c: Communicator) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        output = model(inputs(rank, step))
        left, right = output["heads"]
        return (left if (rank + step) % 2 == 0 or step == 2 else right)[output["mask"][:, :2]].square().sum()  # type: ignore[no-any-return]

    assert_trains_like_one_process(c, TwoHeads, loss, steps=4)


def scenario_autocast(c: Communicator) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs(rank, step)).float().square().mean()  # type: ignore[no-any-return]

    assert_trains_like_one_process(c, layers, loss)


def scenario_hooks_of_the_user(c: Communicator) -> None:
    """They run once a backward, on this rank's gradient, before it is averaged."""
    calls: list[str] = []

    def build(record: bool) -> nn.Sequential:
        model = layers(2)

        def change(gradient: Tensor) -> Tensor:
            if record:
                calls.append("parameter")
            return gradient.clamp(max=0.01)

        model[0][0].weight.register_hook(change)  # type: ignore[index]
        if record:
            model[1].register_forward_hook(lambda *_: calls.append("forward"))
            model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
        return model

    expected = [torch.zeros_like(parameter) for parameter in build(False).parameters()]
    for rank in range(c.size):
        reference = build(False)
        squares(reference, rank, 0).backward()
        for mean, parameter in zip(expected, reference.parameters(), strict=True):
            assert parameter.grad is not None
            mean += parameter.grad / c.size
    model = build(True)
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)
    for _ in range(2):
        calls.clear()
        reducer.zero_grad()
        squares(model, c.rank, 0).backward()
        assert sorted(calls) == ["backward", "forward", "parameter"]
        assert_gradients(model, expected)


def scenario_evaluation_between_forward_and_step(c: Communicator) -> None:
    """Also on one rank only: evaluation speaks to nobody."""
    model = distributed.synchronise_batch_norm(network(), c)
    reference = copy.deepcopy(model)
    for m in (model, reference):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        if m is model:
            distributed.distribute(m, optimizer, c, TINY_BUCKETS)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(m, data(4, seed=step))
            if m is model and c.rank == 0:
                with torch.inference_mode():
                    m.eval()(data(3)[0])
                m.train()
            loss.backward()
            if m is model and c.rank == c.size - 1:
                with torch.no_grad():
                    m.eval()(data(3)[0])
                m.train()
            optimizer.step()
    assert_close([*model.parameters()], [*reference.parameters()], 1e-4)


def scenario_functional_call(c: Communicator) -> None:
    """The model's own parameters, passed in by name."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        named: dict[str, Tensor] = dict(model.named_parameters())
        return torch.func.functional_call(model, named, (inputs(rank, step),)).square().mean()  # type: ignore[no-any-return]

    assert_trains_like_one_process(c, layers, loss)


# Ends, and inputs that end early.


def scenario_removed_and_distributed_again(c: Communicator) -> None:
    for unchanged in (True, False):
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reducer = distributed.distribute(model, optimizer, c, TINY_BUCKETS)
        if unchanged:
            squares(model, c.rank, 0).backward()
        else:
            reducer.backward(squares(model, c.rank, 0), 3)
            reducer.finish()
        optimizer.step()
        reducer.remove()
        optimizer.zero_grad()
        # Each rank for itself, the optimizer too.
        own = copy.deepcopy(model)
        squares(own, c.rank, 1).backward()
        squares(model, c.rank, 1).backward()
        optimizer.step()
        assert_close(gradients(model), gradients(own))
        expected = mean_gradients(layers(), lambda m, rank: squares(m, rank, 2), c.size)
        model.load_state_dict(layers().state_dict())
        distributed.distribute(model, optimizer, c, TINY_BUCKETS)
        optimizer.zero_grad()
        squares(model, c.rank, 2).backward()
        assert_gradients(model, expected)


def scenario_models_that_differ_in_dtype_or_buffers_are_refused(c: Communicator) -> None:
    if c.size == 1:
        return
    model = layers(2)
    if c.rank == c.size - 1:
        model[1].double()
    with pytest.raises(UserError, match=r"1\.0\.weight.*float32 on rank 0 but .*float64 on rank"):
        distributed.distribute(model, None, c, TINY_BUCKETS)
    model = layers(2)
    model.register_buffer("anchors", torch.zeros(3 if c.rank == c.size - 1 else 2))
    with pytest.raises(UserError, match=r"anchors \[2\].*on rank 0 but anchors \[3\]"):
        distributed.distribute(model, None, c, TINY_BUCKETS)
    # Refusals leave the ranks in step.
    distributed.distribute(layers(2), None, c, TINY_BUCKETS)


def scenario_uneven_inputs_train_like_one_process(c: Communicator) -> None:
    """Rank r has r + 1 batches; steps go on until the longest has ended, each over the samples really seen."""
    model, reference = layers(), layers()
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference))
    reducer = distributed.distribute(model, optimizer, c, TINY_BUCKETS)
    own = [inputs(c.rank, step, count=1 + c.rank) for step in range(c.rank + 1)]
    steps = 0
    for batch in distributed.agreed_batches(own, c, until="longest"):
        reducer.zero_grad()
        if batch is None:
            reducer.contribute_nothing()
        else:
            reducer.backward(model(batch).square().mean(), len(batch))
        everybody = torch.cat([inputs(rank, steps, count=1 + rank) for rank in range(c.size) if rank >= steps])
        assert reducer.finish().weight == len(everybody)
        optimizer.step()
        expected.zero_grad()
        reference(everybody).square().mean().backward()
        assert_gradients(model, [parameter.grad for parameter in reference.parameters()])
        expected.step()
        steps += 1
    assert steps == c.size
    assert_close([*model.parameters()], [*reference.parameters()], 1e-4)


# Synchronised batch norm.


def scenario_synchronised_batch_norm_of_one_sample_a_rank(c: Communicator) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm1d(3)
    own = distributed.synchronise_batch_norm(nn.Sequential(copy.deepcopy(plain)), c)
    x = torch.randn(max(2, c.size), 3)
    part = x if c.size == 1 else x[c.rank : c.rank + 1]
    assert torch.allclose(own(part), plain(x) if c.size == 1 else plain(x)[c.rank : c.rank + 1], atol=1e-5)
    assert plain.running_var is not None
    assert torch.allclose(own[0].running_var, plain.running_var, atol=1e-6)  # type: ignore[index]


def scenario_synchronised_batch_norm_of_other_layouts_and_dtypes(c: Communicator) -> None:
    for plain, shape in ((nn.BatchNorm2d(3), (3, 4, 4)), (nn.BatchNorm3d(3), (3, 2, 2, 2))):
        own = distributed.synchronise_batch_norm(nn.Sequential(copy.deepcopy(plain)), c)
        x = torch.randn(2 * c.size, *shape, generator=torch.Generator().manual_seed(0))
        part = x[2 * c.rank : 2 * c.rank + 2]
        expected = plain(x)[2 * c.rank : 2 * c.rank + 2]
        layout = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
        assert torch.allclose(own(part.to(memory_format=layout)), expected, atol=1e-5)
        narrow = own(part.bfloat16().requires_grad_())
        assert narrow.dtype is torch.bfloat16 and torch.allclose(narrow.float(), expected, atol=0.05)
        narrow.float().square().sum().backward()


def scenario_batch_norm_that_cannot_be_synchronised_is_refused(c: Communicator) -> None:
    for norm in (nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False)):
        with pytest.raises(ValueError, match="cannot be synchronised"):
            distributed.synchronise_batch_norm(nn.Sequential(norm), c)
