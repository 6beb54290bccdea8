"""The reducer in full control, against one process that sees all data."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from perception import distributed
from perception.config import RunConfig
from perception.data.generated import render_scene
from perception.data.lane_targets import SampleKey
from perception.distributed import Communicator, SoloCommunicator
from perception.model_config import LaneModelConfig
from perception.tasks import LaneTask
from tests.perception.distributed.scenario_tools import (
    SMALL_BUCKETS,
    assert_close,
    data,
    gradients,
    loss_of,
    network,
    share,
    single_gradients,
)


def whole_batch_reference(count: int, steps: int, clip: float = 0.0) -> tuple[list[float], list[Tensor]]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch, losses = data(count), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients(model)


def scenario_unequal_batches_equal_one_process(c: Communicator) -> None:
    for clip in (0.0, 0.1):
        expected_losses, expected = whole_batch_reference(12, 20, clip)
        model = distributed.synchronise_batch_norm(network(c.rank), c)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # Ranks begin with other weights: `distribute` gives all of them those of rank 0.
        reducer = distributed.distribute(model, optimizer, c, SMALL_BUCKETS, num_extras=1)
        own, losses = share(c, 12), []
        batch = tuple(part[own] for part in data(12))
        for _ in range(20):
            reducer.zero_grad()
            loss = loss_of(model, batch)  # type: ignore[arg-type]
            reducer.backward(loss, len(batch[0]))
            reduction = reducer.finish(clip, torch.tensor([loss.item() * len(batch[0])]))
            assert reduction.weight == 12 and reduction.finite
            optimizer.step()
            losses.append(reduction.extras.item() / reduction.weight)
        assert all(abs(a - e) <= 1e-4 * abs(e) + 1e-6 for a, e in zip(losses, expected_losses, strict=True)), losses
        assert_close(gradients(model), expected, 2e-2 if clip == 0.0 else 1e-3)


def scenario_first_gradient_equals_one_process(c: Communicator) -> None:
    _, expected = whole_batch_reference(12, 1)
    model = distributed.synchronise_batch_norm(network(), c)
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    own = share(c, 12)
    batch = tuple(part[own] for part in data(12))
    reducer.backward(loss_of(model, batch), len(batch[0]))  # type: ignore[arg-type]
    reducer.finish()
    assert_close(gradients(model), expected)


def scenario_first_lane_gradient_equals_one_process(c: Communicator) -> None:
    """The detector on generated scenes, fp32: all gradients, taken together, to 1e-5 of one rank's on the whole batch.

    torch's own batch norm rounds otherwise than the synchronised one, which this network amplifies
    to 1.5e-5 of the gradient on a single rank already.
    """
    model_config = LaneModelConfig(
        backbone_widths=(8, 16, 24, 32), backbone_blocks=(1, 1, 1, 1), input_height=64, input_width=160
    )
    task = LaneTask(RunConfig("lane", "tiny", model=model_config))
    samples = [render_scene(0, index, 128, 320) for index in range(8)]
    examples = [task.prepare(sample, SampleKey(0, index), train=True) for index, sample in enumerate(samples)]
    torch.manual_seed(0)
    plain = task.build_model().train()
    one_rank = distributed.synchronise_batch_norm(copy.deepcopy(plain), SoloCommunicator())
    model = distributed.synchronise_batch_norm(copy.deepcopy(plain), c)
    for reference in (plain, one_rank):
        task.loss(reference, task.collate(examples)).total.backward()
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    own = examples[share(c, len(examples))]
    reducer.backward(task.loss(model, task.collate(own)).total, len(own))
    reducer.finish()
    plainly, whole, mean = (torch.cat([g.flatten() for g in gradients(m)]) for m in (plain, one_rank, model))
    assert_close([mean], [whole], 1e-5)
    assert_close([mean], [plainly], 1e-4)


def scenario_channels_last_gradients_are_views(c: Communicator) -> None:
    model = network().to(memory_format=torch.channels_last)
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    held: list[int] = []
    for step in range(4):
        reducer.zero_grad()
        reducer.backward(loss_of(model, data(4)), 4)
        reducer.finish()
        addresses = []
        for parameter in model.parameters():
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            addresses.append(parameter.grad.data_ptr())
        # The first step lays the buckets out; then each gradient is always the same place of its bucket.
        assert step < 2 or c.size == 1 or addresses == held
        held = addresses
    assert_close(gradients(model), single_gradients(network(), 4))


def scenario_bf16_fp16_and_mixed_parameters(c: Communicator) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 3))
    for first in (model, nn.Sequential(nn.Linear(6, 3).bfloat16()), nn.Sequential(nn.Linear(6, 3).half())):
        reducer = distributed.distribute(first, None, c, SMALL_BUCKETS)
        x = torch.full((2, 6), 1.0 + c.rank)
        for layer in first:
            x = layer(x.to(layer.weight.dtype))
        reducer.backward(x.float().mean(), 2)
        reducer.finish()
        bias = first[-1].bias.grad
        assert bias is not None and bias.dtype is first[-1].bias.dtype
        assert torch.allclose(bias.float(), torch.full((3,), 1 / 3), rtol=1e-2)


def scenario_accumulation_with_a_short_last_micro_batch(c: Communicator) -> None:
    model = network()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    reference = copy.deepcopy(model)
    inputs, labels = data(5 * c.size)
    loss_of(reference, (inputs, labels)).backward()
    expected = gradients(reference)
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    start = 5 * c.rank
    for number, (a, b) in enumerate([(0, 2), (2, 4), (4, 5)]):
        part = (inputs[start + a : start + b], labels[start + a : start + b])
        reducer.backward(loss_of(model, part), b - a, last=number == 2)
    assert reducer.finish().weight == 5 * c.size
    assert_close(gradients(model), expected)


def scenario_nonfinite_on_one_rank_is_decided_by_all(c: Communicator) -> None:
    for bad in (math.nan, math.inf):
        model = network()
        reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
        inputs, labels = data(4)
        if c.rank == c.size - 1:
            inputs[0, 0, 0, 0] = bad
        reducer.backward(loss_of(model, (inputs, labels)), 4)
        assert not reducer.finish(1.0).finite
        reducer.zero_grad()
        reducer.backward(loss_of(model, data(4)), 4)
        if not any(b.isnan().any() for b in model.buffers() if b.is_floating_point()):
            assert reducer.finish(1.0).finite
        else:
            reducer.finish(1.0)


class Branches(nn.Module):
    """Layers of which any may stay unused; `first` twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name in use.split():
            x = getattr(self, name)(x)
        return x.square().mean()


def scenario_unused_parameters(c: Communicator) -> None:
    model = Branches()
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    for use_of_0, use_of_others in [("first", "first second"), ("second", "second"), ("first again", "third")]:
        reducer.zero_grad()
        use = use_of_0 if c.rank == 0 else use_of_others
        reducer.backward(model(torch.ones(2, 4), use), 2)
        reducer.finish()
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(c.size):
            reference = Branches()
            reference(torch.ones(2, 4), use_of_0 if rank == 0 else use_of_others).backward()
            for total, parameter in zip(expected, reference.parameters(), strict=True):
                total += (parameter.grad if parameter.grad is not None else 0) / c.size
        used = set(use_of_0.split()) | (set(use_of_others.split()) if c.size > 1 else set())
        for (name, parameter), mean in zip(model.named_parameters(), expected, strict=True):
            if name.split(".")[0] in used or (name.startswith("first") and "again" in used):
                assert parameter.grad is not None and torch.allclose(parameter.grad, mean, atol=1e-6), name
            else:
                assert parameter.grad is None, f"{name} was used by no rank"


def scenario_a_rank_without_samples(c: Communicator) -> None:
    model = network().eval()
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    if c.rank == 0:
        reducer.backward(loss_of(model, data(4)), 4)
    else:
        reducer.contribute_nothing()
    assert reducer.finish().weight == 4
    assert_close(gradients(model), single_gradients(network().eval(), 4))


def scenario_frozen_parameters(c: Communicator) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    before = model[0].weight.clone()
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    loss_of(model, data(4)).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None


def scenario_sparse_gradients_become_dense(c: Communicator) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    reducer = distributed.distribute(model, None, c)
    reducer.backward(model(torch.tensor([c.rank, 5])).sum(), 1)
    reducer.finish()
    grad = model.weight.grad
    assert grad is not None and not grad.is_sparse
    assert torch.allclose(grad[5], torch.ones(3)) and torch.allclose(grad[0], torch.full((3,), 1 / c.size))


def scenario_many_small_and_empty_parameters(c: Communicator) -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((length,), 1.0)) for length in [0, 1, 3, 7] * 50])
    reducer = distributed.distribute(model, None, c)
    reducer.backward(sum((p.sum() * (c.rank + 1) for p in model), torch.zeros(())), 1)
    reducer.finish()
    mean = sum(range(1, c.size + 1)) / c.size
    assert all(p.grad is None or torch.allclose(p.grad, torch.full_like(p, mean)) for p in model)


def scenario_two_models(c: Communicator) -> None:
    a, b = network(0), network(1)
    ra = distributed.distribute(a, None, c, SMALL_BUCKETS)
    rb = distributed.distribute(b, None, c, SMALL_BUCKETS)
    ra.backward(loss_of(a, data(4)), 4)
    rb.backward(loss_of(b, data(4)), 4)
    ra.finish()
    rb.finish()
    assert_close(gradients(a), single_gradients(network(0), 4))
    assert_close(gradients(b), single_gradients(network(1), 4))
