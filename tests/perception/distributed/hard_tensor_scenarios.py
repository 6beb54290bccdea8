"""Tensors that are hard to reduce or to lay out: dtypes, strides, sizes of nothing and of a great many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from perception import distributed
from perception.distributed import Communicator
from perception.errors import UserError
from tests.perception.distributed.scenario_tools import (
    SETTINGS,
    TINY_BUCKETS,
    assert_gradients,
    assert_trains_like_one_process,
    mean_gradients,
)


class Buffers(nn.Module):
    """One parameter, and buffers of the given tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"buffer{index}", tensor)


def scenario_buffers_of_every_kind_are_broadcast_exactly(c: Communicator) -> None:
    def tensors(rank: int) -> list[Tensor]:
        return [
            torch.tensor([2**53 + 1 + rank, -(2**63)]),
            torch.tensor([[rank == 0, True, False]]),
            *[torch.tensor([100 + rank, 0], dtype=t) for t in (torch.int8, torch.int16, torch.int32, torch.uint8)],
            *[torch.tensor([rank + 0.1], dtype=t) for t in (torch.float16, torch.bfloat16, torch.float64)],
            torch.zeros(0, 3) + rank,
            torch.zeros(0, dtype=torch.bool),
            torch.tensor(5 + rank),
            torch.full((2, 3, 4), float(rank)).permute(2, 0, 1),
        ]

    model = Buffers(*tensors(c.rank))
    distributed.distribute(model, None, c, SETTINGS)
    for buffer, expected in zip(model.buffers(), tensors(0), strict=True):
        assert buffer.dtype is expected.dtype and buffer.stride() == expected.stride()
        assert torch.equal(buffer, expected), expected.dtype


def scenario_complex_tensors_are_refused_or_exact(c: Communicator) -> None:
    buffer = torch.tensor([1 + 2j]) * (c.rank + 1)
    model = Buffers(buffer)
    try:
        distributed.distribute(model, None, c, SETTINGS)
    except (TypeError, UserError) as error:
        assert "complex64" in str(error)
    else:
        assert model.get_buffer("buffer0").tolist() == [1 + 2j]


def scenario_complex_parameters_are_refused_or_exact(c: Communicator) -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def loss(model: nn.Module, rank: int) -> Tensor:
        return (model.get_parameter("turn") * (rank + 1j)).abs().sum()

    model = Turn()
    try:
        reducer = distributed.distribute(model, None, c, SETTINGS)
    except (TypeError, UserError) as error:
        assert "turn" in str(error) and "complex64" in str(error)
        return
    expected = mean_gradients(Turn(), loss, c.size)
    reducer.backward(loss(model, c.rank), 1)
    reducer.finish()
    assert_gradients(model, expected)


def scenario_integers_and_bools_at_their_limits(c: Communicator) -> None:
    top = torch.iinfo(torch.int64).max // c.size
    assert c.allreduce(torch.tensor([top, -top])).tolist() == [top * c.size, -top * c.size]
    lowest = torch.tensor([torch.iinfo(torch.int64).min + c.rank])
    assert c.allreduce(lowest, "min").item() == torch.iinfo(torch.int64).min
    small = torch.tensor([127, -128], dtype=torch.int8)
    assert c.allreduce(small, "max").tolist() == [127, -128]
    # Wrapped around, as torch's own sum of int8 tensors would.
    wrapped = torch.stack([small] * c.size).sum(0, dtype=torch.int8)
    assert torch.equal(c.allreduce(small), wrapped)
    many = torch.arange(1000) % (c.rank + 2) == 0
    assert torch.equal(
        c.allreduce(many), torch.stack([torch.arange(1000) % (r + 2) == 0 for r in range(c.size)]).any(0)
    )


def scenario_nothing_in_every_call(c: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        nothing = torch.zeros(2, 0, dtype=dtype)
        for op in ("sum", "max", "min"):
            result = c.allreduce(nothing, op)  # type: ignore[arg-type]
            assert result.shape == (2, 0) and result.dtype is dtype
        assert c.broadcast(nothing).shape == (2, 0)
        assert [part.shape for part in c.allgather(nothing)] == [(2, 0)] * c.size
    assert c.average(torch.zeros(0)).shape == (0,)
    assert c.broadcast_object([]) == [] and c.allgather_object(None) == [None] * c.size


def scenario_zero_size_parameters(c: Communicator) -> None:
    class Hollow(nn.Module):
        """Empty parameters at the start, in the middle and at the end; a scalar among them."""

        def __init__(self) -> None:
            super().__init__()
            self.begin = nn.Parameter(torch.zeros(0))
            self.linear = nn.Linear(3, 2)
            self.middle = nn.Parameter(torch.zeros(3, 0, 2))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.end = nn.Parameter(torch.zeros(2, 0))

        def forward(self, x: Tensor) -> Tensor:
            empty = self.begin.sum() + self.middle.sum() + self.end.sum()
            return (self.linear(x) * self.scalar).square().mean() + empty  # type: ignore[no-any-return]

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(torch.full((2, 3), 0.1 * (rank + step + 1)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    state = Hollow().state_dict()

    def build() -> nn.Module:
        model = Hollow()
        model.load_state_dict(state)
        return model

    # The weights of all ranks are rank 0's, whatever each drew.
    assert_trains_like_one_process(c, build, loss)


def scenario_a_model_of_nothing_but_empty_parameters(c: Communicator) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 4))])
    reducer = distributed.distribute(model, None, c, SETTINGS)
    reducer.backward(model[0].sum() + model[1].sum(), 2)
    reduction = reducer.finish(1.0)
    assert reduction.weight == 2 * c.size and reduction.finite and reduction.grad_norm == 0


def scenario_parameters_that_are_not_contiguous(c: Communicator) -> None:
    class Strided(nn.Module):
        """Transposed, with gaps, channels-last in two and three dimensions, permuted."""

        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)

            def values(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=generator)

            self.transposed = nn.Parameter(values(4, 3).t())
            self.gaps = nn.Parameter(values(4, 8)[:, ::2])
            self.rows = nn.Parameter(values(6, 4)[::3])
            self.image = nn.Parameter(values(2, 3, 4, 5).to(memory_format=torch.channels_last))
            self.volume = nn.Parameter(values(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d))
            self.permuted = nn.Parameter(values(2, 3, 4).permute(1, 2, 0))
            self.one_channel = nn.Parameter(values(2, 1, 3, 3).to(memory_format=torch.channels_last))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * rank + step)
        terms = [(p * torch.randn(p.shape, generator=generator)).sum().square() for p in model.parameters()]
        return torch.stack(terms).sum() * 0.01

    strides = [p.stride() for p in Strided().parameters()]
    assert_trains_like_one_process(c, Strided, loss)
    model = Strided()
    if c.rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    distributed.distribute(model, None, c, TINY_BUCKETS)
    for parameter, original, stride in zip(model.parameters(), Strided().parameters(), strides, strict=True):
        assert torch.equal(parameter, original), "broadcast keeps each element in its place"
        assert parameter.stride() == stride


def scenario_layouts_that_differ_between_ranks(c: Communicator) -> None:
    """Equal shapes with other strides would add elements that do not belong together: right, or refused."""

    def build(rank: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        return model.to(memory_format=torch.channels_last) if rank else model

    def loss(model: nn.Module, rank: int) -> Tensor:
        images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
        return model(images).square().mean()  # type: ignore[no-any-return]

    model = build(c.rank)
    try:
        reducer = distributed.distribute(model, None, c, SETTINGS)
    except UserError as error:
        assert "weight" in str(error) and "stride" in str(error)
        return
    reducer.backward(loss(model, c.rank), 1)
    reducer.finish()
    assert_gradients(model, mean_gradients(build(0), loss, c.size))


def scenario_integer_parameters_are_left_alone(c: Communicator) -> None:
    """Quantised weights take no gradient; they are broadcast and stay."""
    model = nn.ParameterList(
        [nn.Parameter(torch.full((3,), c.rank + 5, dtype=torch.int8), requires_grad=False), nn.Parameter(torch.ones(2))]
    )
    reducer = distributed.distribute(model, None, c, SETTINGS)
    assert model[0].tolist() == [5, 5, 5]
    reducer.backward((model[1] * (c.rank + 1)).sum(), 1)
    reducer.finish()
    assert model[0].grad is None and model[1].grad is not None
    assert model[1].grad.tolist() == [(c.size + 1) / 2] * 2


def scenario_nothing_to_train_is_refused(c: Communicator) -> None:
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        distributed.distribute(nn.Linear(2, 2).requires_grad_(False), None, c, SETTINGS)
