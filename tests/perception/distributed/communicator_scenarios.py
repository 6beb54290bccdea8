"""What ranks say to each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perception import distributed
from perception.distributed import Communicator
from tests.perception.distributed.scenario_tools import SETTINGS


def scenario_allreduce_of_every_dtype(c: Communicator) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        result = c.allreduce(torch.full((3, 2), c.rank + 0.5, dtype=dtype))
        assert result.dtype is dtype
        assert (result == sum(r + 0.5 for r in range(c.size))).all()
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        values = torch.tensor([c.rank, 1], dtype=dtype)
        assert c.allreduce(values).tolist() == [sum(range(c.size)), c.size]
        assert c.allreduce(values, "max").tolist() == [c.size - 1, 1]
        assert c.allreduce(values, "min").tolist() == [0, 1]
    big = torch.tensor([2**53 + 1 + c.rank], dtype=torch.int64)
    assert c.allreduce(big, "max").item() == 2**53 + c.size, "int64 must not travel as a float"
    flags = torch.tensor([c.rank == 0, True, False])
    assert c.allreduce(flags, "max").tolist() == [True, True, False]
    assert c.allreduce(flags, "min").tolist() == [c.size == 1, True, False]
    assert c.allreduce(flags).dtype is torch.bool


def scenario_allreduce_keeps_strides_and_leaves_its_input(c: Communicator) -> None:
    tensor = torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
    before = tensor.clone()
    result = c.allreduce(tensor)
    assert result.stride() == tensor.stride() and torch.equal(result, before * c.size)
    assert torch.equal(tensor, before)
    sliced = torch.arange(20.0).reshape(4, 5)[:, 1::2]
    assert torch.equal(c.allreduce(sliced), sliced * c.size)
    assert c.allreduce(torch.zeros(0, 3)).shape == (0, 3)
    assert c.allreduce(torch.tensor(2.0)).item() == 2.0 * c.size


def scenario_what_cannot_be_reduced_is_refused(c: Communicator) -> None:
    with pytest.raises(TypeError, match="view_as_real"):
        c.allreduce(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="float"):
        c.average(torch.tensor([1, 2]))


def scenario_average(c: Communicator) -> None:
    assert c.average(torch.tensor([1.0 * c.rank, 4.0])).tolist() == [(c.size - 1) / 2, 4.0]
    assert c.average(torch.tensor([1.5], dtype=torch.bfloat16)).item() == 1.5


def scenario_allgather_of_unequal_shapes(c: Communicator) -> None:
    own = torch.full((c.rank + 1, 2), float(c.rank), dtype=torch.bfloat16)
    parts = c.allgather(own)
    assert [tuple(part.shape) for part in parts] == [(r + 1, 2) for r in range(c.size)]
    assert all((part == r).all() and part.dtype is torch.bfloat16 for r, part in enumerate(parts))
    odd = c.allgather(torch.tensor([-0.0, math.nan, math.inf]))
    assert all(torch.signbit(part[0]) and part[1].isnan() and part[2].isinf() for part in odd)
    empty = c.allgather(torch.zeros(0 if c.rank == 0 else 2))
    assert [len(part) for part in empty] == [0 if r == 0 else 2 for r in range(c.size)]
    assert c.allgather(torch.tensor([c.rank > 0, True]))[0].tolist() == [False, True]


def scenario_broadcast_and_objects(c: Communicator) -> None:
    root = c.size - 1
    assert c.broadcast(torch.tensor([float(c.rank)]), root).item() == root
    assert c.broadcast(torch.tensor([c.rank], dtype=torch.bfloat16)).item() == 0
    assert c.broadcast_object({"a": [c.rank, "ä"]}, root) == {"a": [root, "ä"]}
    assert c.allgather_object(["x" * c.rank, None]) == [["x" * r, None] for r in range(c.size)]
    c.barrier()


def scenario_a_root_that_is_no_rank(c: Communicator) -> None:
    there_are = "there is 1 rank" if c.size == 1 else f"there are {c.size} ranks"
    for root in (c.size, -1):
        with pytest.raises(ValueError, match=f"^root = {root}, but {there_are}$"):
            c.broadcast(torch.zeros(2), root)
        with pytest.raises(ValueError, match=f"root = {root}"):
            c.broadcast_object("word", root)


def scenario_calls_that_differ_are_refused_on_every_rank(c: Communicator) -> None:
    """Where calls go through shared memory; an engine of its own accord may abort the process."""
    if c.size == 1 or SETTINGS.local_reduction != "shared_memory":
        return
    odd = c.rank == c.size - 1
    calls: dict[str, Callable[[], Tensor]] = {
        "values of": lambda: c.allreduce(torch.ones(4 if odd else 3)),
        "torch.float64": lambda: c.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)),
        "to max": lambda: c.allreduce(torch.ones(3), "max" if odd else "sum"),
        "from rank 1": lambda: c.broadcast(torch.ones(3), int(odd)),
        "to broadcast": lambda: c.broadcast(torch.ones(3)) if odd else c.allreduce(torch.ones(3)),
    }
    for words, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{words}.*every rank must make the same call"):
            call()
        # Nobody is out of step by it.
        assert c.allreduce(torch.ones(3)).tolist() == [c.size] * 3


def scenario_agree(c: Communicator) -> None:
    assert c.agree(c.rank == c.size - 1)
    assert not c.agree(False)


def scenario_agreed_batches(c: Communicator) -> None:
    batches = list(range(3 + c.rank))
    assert list(distributed.agreed_batches(batches, c)) == [0, 1, 2]
    longest = list(distributed.agreed_batches(batches, c, until="longest"))
    assert longest == [*batches, *[None] * (3 + c.size - 1 - len(batches))]
