"""Steps out of the ordinary: gradients taken away, uneven accumulation, overflow on one rank, batch norm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from perception import distributed
from perception.distributed import Communicator
from tests.perception.distributed.hard_model_scenarios import layers, squares
from tests.perception.distributed.scenario_tools import (
    TINY_BUCKETS,
    assert_close,
    assert_gradients,
    data,
    loss_of,
    mean_gradients,
    network,
)


def scenario_gradients_set_to_none_by_hand(c: Communicator) -> None:
    model = layers()
    distributed.distribute(model, None, c, TINY_BUCKETS)
    expected = mean_gradients(layers(), lambda m, rank: squares(m, rank, 0), c.size)
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            if step == 2 and index % 2:
                # Some views and some newly made gradients in one step.
                assert parameter.grad is not None
                parameter.grad.zero_()
            elif (index + c.rank) % 2:
                parameter.grad = None
            else:
                del parameter.grad
        squares(model, c.rank, 0).backward()
        assert_gradients(model, expected)


def scenario_set_to_none_between_micro_batches(c: Communicator) -> None:
    """What was taken away does not count, on the rank that did so only."""
    model = layers()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)

    def gradients_of(rank: int) -> list[Tensor]:
        replica = layers()
        squares(replica, rank, 0).backward()
        if rank == 0:
            replica[1].zero_grad()
        squares(replica, rank, 1).backward()
        return [p.grad / 2 for p in replica.parameters() if p.grad is not None]

    rows = zip(*[gradients_of(rank) for rank in range(c.size)], strict=True)
    expected: list[Tensor | None] = [torch.stack(row).mean(0) for row in rows]
    for _ in range(2):
        reducer.zero_grad()
        reducer.backward(squares(model, c.rank, 0), 1, last=False)
        if c.rank == 0:
            model[1].zero_grad(set_to_none=True)
        reducer.backward(squares(model, c.rank, 1), 1)
        reducer.finish()
        assert_gradients(model, expected)


def scenario_gradients_removed_before_finish(c: Communicator) -> None:
    """A gradient that every rank took away after backward stays away, and disturbs no other."""
    model = layers()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)
    expected = mean_gradients(layers(), lambda m, rank: squares(m, rank, 0), c.size)
    expected[0] = None
    reducer.backward(squares(model, c.rank, 0), 1)
    model[0][0].weight.grad = None
    reducer.finish()
    assert_gradients(model, expected)


def scenario_uneven_accumulation(c: Communicator) -> None:
    """Ranks differ in the number of micro-batches and in their sizes; the mean is over samples."""
    model = network().eval()
    counts = [[2, 2, 1], [4], [1, 3], [1, 1, 1, 1]]
    total = sum(sum(counts[rank % 4]) for rank in range(c.size))
    reference = copy.deepcopy(model)
    images, labels = data(total)
    loss_of(reference, (images, labels)).backward()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)
    own = counts[c.rank % 4]
    for _ in range(2):
        reducer.zero_grad()
        start = sum(sum(counts[rank % 4]) for rank in range(c.rank))
        for number, count in enumerate(own):
            part = slice(start, start + count)
            reducer.backward(loss_of(model, (images[part], labels[part])), count, last=number == len(own) - 1)
            start += count
        assert reducer.finish().weight == total
        assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])  # type: ignore[misc]


def scenario_scaler_with_accumulation_and_inf_on_one_rank(c: Communicator) -> None:
    """An overflow in one micro-batch of one rank skips the step on all; the scale stays equal everywhere."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = distributed.distribute(model, optimizer, c, TINY_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        reducer.zero_grad()
        for micro in range(2):
            bad = step != 1 and micro == 0 and c.rank == (0 if step == 0 else c.size - 1)
            loss = squares(model, c.rank, micro) * (math.inf if bad else 1.0)
            reducer.backward(scaler.scale(loss), 1, last=micro == 1)
        assert reducer.finish().finite == (step == 1)
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert_close([*model.parameters()], before, 1e-12)
    assert c.allgather_object(scaler.get_scale()) == [64.0] * c.size
    reference = layers()
    for micro in range(2):
        rows = mean_gradients(reference, lambda m, rank, micro=micro: squares(m, rank, micro), c.size)  # type: ignore[misc]
        for parameter, row in zip(reference.parameters(), rows, strict=True):
            assert row is not None
            parameter.grad = row / 2 if parameter.grad is None else parameter.grad + row / 2
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_close([*model.parameters()], [*reference.parameters()])


def scenario_synchronised_batch_norm_keeps_the_statistics_of_one_process(c: Communicator) -> None:
    """Unequal shares, a rank without samples, both kinds of momentum, 1-d and 2-d."""
    torch.manual_seed(0)
    for plain, shape in (
        (nn.BatchNorm2d(3), (3, 2, 2)),
        (nn.BatchNorm2d(3, momentum=None), (3, 2, 2)),
        (nn.BatchNorm1d(3), (3,)),
        (nn.BatchNorm1d(3), (3, 5)),
    ):
        own = distributed.synchronise_batch_norm(nn.Sequential(copy.deepcopy(plain)), c)
        # Every rank's share but the last's grows from none.
        bounds = [0, *(share_of_rank.stop for share_of_rank in _shares(12, c.size))]
        for step in range(3):
            x = torch.randn(12, *shape, generator=torch.Generator().manual_seed(step)) * 3 + 50
            whole, part = x.clone().requires_grad_(), x[bounds[c.rank] : bounds[c.rank + 1]].clone().requires_grad_()
            plain(whole).sin().sum().backward()
            own(part).sin().sum().backward()
            assert whole.grad is not None and part.grad is not None
            assert torch.allclose(part.grad, whole.grad[bounds[c.rank] : bounds[c.rank + 1]], atol=1e-4)
        for name, buffer in plain.named_buffers():
            actual = dict(own[0].named_buffers())[name]  # type: ignore[index]
            assert torch.allclose(actual.double(), buffer.double(), rtol=1e-4), name
        assert torch.allclose(own.eval()(x), plain.eval()(x), atol=1e-4)
        plain.zero_grad()


def _shares(count: int, size: int) -> list[slice]:
    """Rank 0 has nothing where there is more than one."""
    if size == 1:
        return [slice(0, count)]
    step = count // (size - 1)
    return [slice(0, 0), *(slice(r * step, count if r == size - 2 else (r + 1) * step) for r in range(size - 1))]


def scenario_averaged_buffers(c: Communicator) -> None:
    """Batch norm left to each rank: the mean of the ranks' statistics is that of equal shares."""
    model = network(c.rank)
    distributed.distribute(model, None, c, TINY_BUCKETS)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    images, _ = data(4 * c.size)
    model.train()(images[4 * c.rank : 4 * c.rank + 4])
    whole = network(0).train()
    whole(images)
    whole_norm = whole[1]
    assert isinstance(whole_norm, nn.BatchNorm2d) and whole_norm.running_mean is not None
    assert torch.allclose(c.average(norm.running_mean), whole_norm.running_mean, atol=1e-6)
    assert norm.num_batches_tracked is not None and norm.num_batches_tracked.item() == 1
    if c.size > 1:
        assert not torch.allclose(norm.running_mean, whole_norm.running_mean), "each rank saw its own images"


def scenario_a_second_backward_is_refused_while_the_first_is_reduced(c: Communicator) -> None:
    model = layers()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)
    if c.size == 1:
        return  # Nothing is ever in flight.
    reducer.backward(squares(model, c.rank, 0), 1)
    with pytest.raises(RuntimeError, match=r"second backward reached .*last=False"):
        reducer.backward(squares(model, c.rank, 1), 1)
    reducer.zero_grad()
    expected = mean_gradients(layers(), lambda m, rank: squares(m, rank, 0), c.size)
    reducer.backward(squares(model, c.rank, 0), 1)
    reducer.finish()
    assert_gradients(model, expected)


def scenario_an_abandoned_step(c: Communicator) -> None:
    """After an exception in the loop on all ranks, `zero_grad` begins anew, even amid accumulation."""
    model = layers()
    reducer = distributed.distribute(model, None, c, TINY_BUCKETS)
    reducer.backward(squares(model, c.rank, 0), 5, last=False)
    reducer.zero_grad()
    reducer.backward(squares(model, c.rank, 1), 3)
    reducer.zero_grad()
    reducer.backward(squares(model, c.rank, 2), 1)
    assert reducer.finish().weight == c.size
    assert_gradients(model, mean_gradients(layers(), lambda m, rank: squares(m, rank, 2), c.size))
