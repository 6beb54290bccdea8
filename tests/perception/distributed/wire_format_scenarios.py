"""What each wire format promises, as scenarios for real ranks whose gradients the engine reduces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import Communicator, Reducer
from perception.errors import UserError
from tests.perception.distributed.scenario_tools import SMALL_BUCKETS, assert_close

BUCKETS = replace(SMALL_BUCKETS, first_bucket_mib=0.004, bucket_mib=0.02)
"""A few buckets, most of them with a matrix that is worth compressing."""
POWERSGD = replace(BUCKETS, wire_format="powersgd", powersgd_rank=4)
CAST_FACTOR = 1.02
"""Final loss with fp16 and bf16 against fp32's: rounding of 2^-11 and 2^-8 is far below the noise of a batch."""
POWERSGD_FACTOR = 1.15
"""Vogels et al. report the quality of SGD at rank 2 to 4 after many epochs; these runs are short."""


def formats(c: Communicator) -> list[str]:
    return ["fp32", "fp16", "powersgd"] + ([] if c.engine == "horovod" else ["bf16"])


def regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8))


def regression_data(count: int) -> tuple[Tensor, Tensor]:
    """A linear map of full rank with noise, which is what remains of the loss."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 32, generator=generator)
    targets = inputs @ torch.randn(32, 8, generator=generator) / 32**0.5
    return inputs, targets + 0.3 * torch.randn(count, 8, generator=generator)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def classifier_data(count: int) -> tuple[Tensor, Tensor]:
    """A pattern for each of ten classes in noise; one label in ten is wrong, so that the loss ends above 0."""
    generator = torch.Generator().manual_seed(4)
    patterns = torch.randn(10, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = patterns[labels] + 1.5 * torch.randn(count, 3, 8, 8, generator=generator)
    wrong = torch.rand(count, generator=generator) < 0.1
    return images, torch.where(wrong, torch.randint(0, 10, (count,), generator=generator), labels)


def final_loss(
    c: Communicator,
    config: DistributedConfig,
    build: Callable[[], nn.Module],
    data: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: int,
) -> float:
    """Train on changing batches, ranks on parts of them; the loss over all data.

    The rate falls to 0: at a constant one, the last loss is that of a random moment, and tells nothing of the format.
    """
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    reducer = distributed.distribute(model, optimizer, c, config)
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        batch = torch.randint(0, len(data[0]), (16 * c.size,), generator=generator)[c.rank :: c.size]
        reducer.zero_grad()
        reducer.backward(loss(model(data[0][batch]), data[1][batch]), 16, global_samples=16 * c.size)
        assert reducer.finish().finite
        optimizer.step()
    reducer.remove()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(part, flat) for part in c.allgather(flat)), "ranks must agree to the bit"
    with torch.no_grad():
        return float(loss(model(data[0]), data[1]))


def assert_losses_agree(c: Communicator, what: str, losses: dict[str, float]) -> None:
    if c.is_first:
        print(f"{what} {c.engine}: {json.dumps(losses)}", flush=True)
    for name, value in losses.items():
        factor = POWERSGD_FACTOR if name == "powersgd" else CAST_FACTOR
        assert value <= factor * losses["fp32"], f"{name}: {losses}"


def scenario_regression_converges(c: Communicator) -> None:
    run = partial(final_loss, c, build=regression, data=regression_data(512), loss=nn.functional.mse_loss, steps=200)
    losses = {name: run(config=replace(BUCKETS, wire_format=name)) for name in formats(c)}
    assert losses["fp32"] < 0.2, "fp32 itself must have converged: targets have a variance of 1.09"
    assert_losses_agree(c, "regression", losses)


def scenario_classifier_converges(c: Communicator) -> None:
    data = classifier_data(2048)
    run = partial(final_loss, c, build=classifier, data=data, loss=nn.functional.cross_entropy, steps=200)
    losses = {name: run(config=replace(BUCKETS, wire_format=name)) for name in formats(c)}
    assert losses["fp32"] < 1.15, "fp32 itself must have learnt: chance is 2.3"
    assert_losses_agree(c, "classifier", losses)


def scenario_bf16_is_refused_where_the_engine_cannot(c: Communicator) -> None:
    if c.engine != "horovod":
        return
    with pytest.raises(UserError, match=r"^distributed\.wire_format = bf16: Horovod cannot reduce bf16; take fp16, or"):
        distributed.distribute(regression(), None, c, replace(BUCKETS, wire_format="bf16"))


def scenario_what_is_sent_needs_the_engine(c: Communicator) -> None:
    for name in set(formats(c)) - {"fp32"}:
        config = replace(POWERSGD, wire_format=name, local_reduction="shared_memory")
        with pytest.raises(UserError, match=rf"^distributed\.wire_format = {name}: .*\.local_reduction = engine"):
            distributed.distribute(regression(), None, c, config)


def weight_gradients(c: Communicator, reducer: Reducer, weights: list[nn.Parameter], own: list[Tensor]) -> list[Tensor]:
    """One step in which this rank's gradients are `own`; the mean over ranks as the reducer gives it."""
    reducer.zero_grad()
    loss = sum(((w.float() * g).sum() for w, g in zip(weights, own, strict=True)), torch.zeros(()))
    reducer.backward(loss, 1, global_samples=c.size)
    reducer.finish()
    return [weight.grad.clone() for weight in weights if weight.grad is not None]


def scenario_powersgd_of_the_gradients_rank_equals_fp32(c: Communicator) -> None:
    """Two samples on each rank: the sum over ranks has rank 4, so four columns hold all of it."""
    generator = torch.Generator().manual_seed(6)
    inputs, targets = torch.randn(2 * c.size, 48, generator=generator), torch.randn(2 * c.size, 40, generator=generator)
    own = slice(2 * c.rank, 2 * c.rank + 2)
    for powersgd_rank in (2 * c.size, 2 * c.size + 3):
        ends = []
        for config in (BUCKETS, replace(POWERSGD, powersgd_rank=powersgd_rank)):
            torch.manual_seed(0)
            model = nn.Linear(48, 40)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            reducer = distributed.distribute(model, optimizer, c, config)
            for _ in range(20):
                reducer.zero_grad()
                reducer.backward(nn.functional.mse_loss(model(inputs[own]), targets[own]), 2, global_samples=2 * c.size)
                reducer.finish()
                optimizer.step()
            ends.append([parameter.detach() for parameter in model.parameters()])
            assert bool(reducer.local_state()) == (config.wire_format == "powersgd")
            reducer.remove()
        assert_close(ends[1], ends[0], 1e-5)


def scenario_powersgd_loses_nothing_over_time(c: Communicator) -> None:
    """What has been handed out and what is still in the errors add up to all gradients so far."""
    shapes = [(40, 32), (32, 8, 3, 3), (24,)]
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    weights[1].data = weights[1].data.to(memory_format=torch.channels_last)
    reducer = distributed.distribute(nn.ParameterList(weights), None, c, POWERSGD)
    generator = torch.Generator().manual_seed(7)
    totals, given = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]
    for _ in range(6):
        of_ranks = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(c.size)]
        got = weight_gradients(c, reducer, weights, of_ranks[c.rank])
        for index in range(len(shapes)):
            totals[index] += torch.stack([rank[index] for rank in of_ranks]).mean(0)
            given[index] += got[index]
    errors = reducer.local_state()[::2]
    assert len(errors) == 2, "both matrices are compressed, and the vector is exact"
    assert all(c.allreduce(error).norm() > 0.1 for error in errors), "noise does not fit into four columns"
    in_channels_last = c.allreduce(errors[1]).view(32, 3, 3, 8).permute(0, 3, 1, 2)
    rest = [c.allreduce(errors[0]), in_channels_last, torch.zeros(24)]
    assert_close([a + b for a, b in zip(given, rest, strict=True)], totals, 1e-5)
    reducer.remove()


def scenario_powersgd_leaves_unfit_parameters_exact(c: Communicator) -> None:
    """Vectors, scalars, small and empty matrices, other dtypes: as fp32 does, to rounding."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((64, 48), torch.bfloat16),
        ((64, 48), torch.float64),
        ((64,), torch.float32),
        ((), torch.float32),
        ((3, 5), torch.float32),
        ((0, 7), torch.float32),
        ((1, 64, 1, 1), torch.float32),
        ((64, 48), torch.float32),
    ]
    for index in range(len(shapes) - 1):
        chosen = [shapes[index], shapes[-1]]
        weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in chosen]
        reducer = distributed.distribute(nn.ParameterList(weights), None, c, POWERSGD)
        assert len(reducer.local_state()) == 2, "only the fp32 matrix is compressed"
        # Small integers are exact in every dtype.
        generator = torch.Generator().manual_seed(index)
        of_ranks = [
            [torch.randint(-4, 5, shape, generator=generator).float() * c.size for shape, _ in chosen]
            for _ in range(c.size)
        ]
        got = weight_gradients(c, reducer, weights, of_ranks[c.rank])
        expected = torch.stack([rank[0] for rank in of_ranks]).mean(0)
        assert torch.equal(got[0].float(), expected), f"{chosen[0]}"
        reducer.remove()


def scenario_powersgd_with_unused_parameters(c: Communicator) -> None:
    """Unused on one rank: it counts as 0 there. Unused on all: no gradient, and its error waits."""
    generator = torch.Generator().manual_seed(8)
    weights = [nn.Parameter(torch.zeros(40, 32)), nn.Parameter(torch.zeros(32, 40))]
    reducer = distributed.distribute(nn.ParameterList(weights), None, c, POWERSGD)
    first, second = (torch.randn(shape, generator=generator) for shape in ((40, 32), (32, 40)))
    given, total = torch.zeros(32, 40), torch.zeros(32, 40)
    for users in ([0], [c.size - 1], [], list(range(c.size))):
        before = [tensor.clone() for tensor in reducer.local_state()]
        reducer.zero_grad()
        loss = (weights[0] * first).sum()
        if c.rank in users:
            loss = loss + (weights[1] * second).sum()
        reducer.backward(loss, 1, global_samples=c.size)
        reducer.finish()
        if users:
            assert weights[1].grad is not None
            given += weights[1].grad
            total += second * len(users) / c.size
        else:
            assert weights[1].grad is None
            assert all(torch.equal(*pair) for pair in zip(reducer.local_state()[2:], before[2:], strict=True))
    assert_close([given + c.allreduce(reducer.local_state()[2])], [total], 1e-5)
    reducer.remove()


def scenario_inf_on_one_rank_is_seen_by_all_and_forgotten(c: Communicator) -> None:
    for name in formats(c):
        for bad in (torch.inf, torch.nan):
            for guilty in (0, 1):
                # The bad number in a matrix or in a vector, which travel in different ways.
                weights = [nn.Parameter(torch.zeros(40, 32)), nn.Parameter(torch.zeros(40))]
                reducer = distributed.distribute(
                    nn.ParameterList(weights), None, c, replace(POWERSGD, wire_format=name)
                )
                own = [torch.linspace(-1, 1, 1280).reshape(40, 32).sin(), torch.ones(40)]
                weight_gradients(c, reducer, weights, own)
                before = [tensor.clone() for tensor in reducer.local_state()]
                spoilt = [part.clone() for part in own]
                if c.rank == c.size - 1:
                    spoilt[guilty].view(-1)[3] = bad
                reducer.zero_grad()
                reducer.backward(
                    sum(((w * g).sum() for w, g in zip(weights, spoilt, strict=True)), torch.zeros(())), 1, True, c.size
                )
                assert not reducer.finish().finite, f"{name}: {bad} in parameter {guilty}"
                assert all(torch.equal(*pair) for pair in zip(reducer.local_state(), before, strict=True))
                assert all(bool(part.isfinite().all()) for part in weight_gradients(c, reducer, weights, own))
                reducer.remove()


def scenario_fp16_overflow_on_one_rank_is_seen_by_all(c: Communicator) -> None:
    """A gradient of 1000 fits into fp16, but not into its scaled form; 200 does."""
    for name in formats(c):
        weights = [nn.Parameter(torch.zeros(40, 32))]
        reducer = distributed.distribute(nn.ParameterList(weights), None, c, replace(POWERSGD, wire_format=name))
        for size, fits in ((1000.0, name != "fp16"), (200.0, True)):
            value = size * c.size if c.rank == c.size - 1 else 0.0
            reducer.zero_grad()
            reducer.backward((weights[0] * value).sum(), 1, global_samples=c.size)
            assert reducer.finish().finite == fits, f"{name}: {size}"
        reducer.remove()


def scenario_fp16_keeps_small_gradients(c: Communicator) -> None:
    """1e-7 would lose most of its digits in unscaled fp16."""
    weights = [nn.Parameter(torch.zeros(40, 32))]
    reducer = distributed.distribute(nn.ParameterList(weights), None, c, replace(BUCKETS, wire_format="fp16"))
    own = torch.full((40, 32), 1e-7)
    assert_close(weight_gradients(c, reducer, weights, [own]), [own], 5e-3)
    reducer.remove()


@contextmanager
def counted_bytes(c: Communicator) -> Iterator[list[int]]:
    """Bytes of every buffer that this rank gives to the engine meanwhile."""
    sent: list[int] = []
    original = c.start_allreduce

    def counting(flat: Tensor, *arguments: object, **named: object) -> object:
        sent.append(flat.numel() * flat.element_size())
        return original(flat, *arguments, **named)  # type: ignore[arg-type]

    c.start_allreduce = counting  # type: ignore[method-assign,assignment]
    try:
        yield sent
    finally:
        c.start_allreduce = original  # type: ignore[method-assign]


def scenario_fewer_bytes_are_sent(c: Communicator) -> None:
    numbers: dict[str, int] = {}
    num_calls: dict[str, int] = {}
    for name in formats(c):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        reducer = distributed.distribute(model, None, c, replace(POWERSGD, wire_format=name, bucket_mib=1.0))
        with counted_bytes(c) as sent:
            reducer.backward(model(torch.ones(2, 256)).sum(), 2, global_samples=2 * c.size)
            reducer.finish()
        numbers[name], num_calls[name] = sum(sent), len(sent)
        num_buckets = len(reducer.plans)
        reducer.remove()
    if c.is_first:
        print(f"bytes {c.engine}: {json.dumps(numbers)}, calls {json.dumps(num_calls)}", flush=True)
    halves = [numbers[name] for name in ("fp16", "bf16") if name in numbers]
    assert all(0.49 * numbers["fp32"] < half < 0.51 * numbers["fp32"] for half in halves), numbers
    # (256 + 256) x 4 numbers stand for 256 x 256, a 32nd; vectors and extras come on top.
    assert numbers["fp32"] / 32 < numbers["powersgd"] < numbers["fp32"] / 25, numbers
    assert num_calls["powersgd"] <= 2 * num_buckets


def scenario_powersgd_resumes_bit_equal(c: Communicator) -> None:
    data = regression_data(64)

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Reducer]:
        model = regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, distributed.distribute(model, optimizer, c, POWERSGD)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, reducer: Reducer, steps: range) -> None:
        for step in steps:
            own = slice(8 * step + c.rank, 8 * step + 8, c.size)
            reducer.zero_grad()
            reducer.backward(nn.functional.mse_loss(model(data[0][own]), data[1][own]), 4, global_samples=4 * c.size)
            reducer.finish(clip_norm=1.0)
            optimizer.step()

    whole = begin()
    train(*whole, range(3))
    model, optimizer, reducer = whole
    stored = [tensor.clone() for tensor in [*model.state_dict().values(), *reducer.local_state()]]
    momenta = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    order = reducer.order
    train(*whole, range(3, 8))
    assert order is not None
    for takes_errors in (True, False):
        resumed = begin()
        num_weights = len(model.state_dict())
        resumed[0].load_state_dict(dict(zip(model.state_dict(), stored, strict=False)))
        for parameter, momentum in zip(resumed[0].parameters(), momenta, strict=True):
            resumed[1].state[parameter]["momentum_buffer"] = momentum.clone()
        resumed[2].follow(order)
        if takes_errors:
            resumed[2].load_local_state(stored[num_weights:])
        train(*resumed, range(3, 8))
        equal = all(torch.equal(*pair) for pair in zip(resumed[0].parameters(), model.parameters(), strict=True))
        assert equal == takes_errors, "equal to the bit with the errors, and not without"
        resumed[2].remove()
    with pytest.raises(ValueError, match=r"of another model or of another distributed\.powersgd_rank"):
        reducer.load_local_state(stored[:1])
    reducer.remove()
