"""What the all-reduce layer promises, as functions that every rank of an engine runs.

`python scenarios.py FOLDER ENGINE` runs them all and writes what failed to
FOLDER/rank<N>.json. A scenario raises AssertionError where a promise is broken.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import Communicator
from perception.errors import UserError

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


# ---- the communicator ----


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


def scenario_agree(c: Communicator) -> None:
    assert c.agree(c.rank == c.size - 1)
    assert not c.agree(False)


def scenario_agreed_batches(c: Communicator) -> None:
    batches = list(range(3 + c.rank))
    assert list(distributed.agreed_batches(batches, c)) == [0, 1, 2]
    longest = list(distributed.agreed_batches(batches, c, until="longest"))
    assert longest == [*batches, *[None] * (3 + c.size - 1 - len(batches))]


# ---- the reducer against one process that sees all data ----


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


def scenario_channels_last_gradients_are_views(c: Communicator) -> None:
    model = network().to(memory_format=torch.channels_last)
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    for _ in range(2):
        reducer.zero_grad()
        held = [parameter.grad for parameter in model.parameters()]
        reducer.backward(loss_of(model, data(4)), 4)
        reducer.finish()
        for parameter, view in zip(model.parameters(), held, strict=True):
            assert parameter.grad is view and view is not None
            assert view.stride() == parameter.stride()
    assert_close(gradients(model), _single_gradients(network(), 4))


def _single_gradients(model: nn.Module, count: int) -> list[Tensor]:
    loss_of(model, data(count)).backward()
    return gradients(model)


def scenario_bf16_parameters_and_mixed_dtypes(c: Communicator) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 3))
    for first in (model, nn.Sequential(nn.Linear(6, 3).bfloat16())):
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
    assert_close(gradients(model), _single_gradients(network().eval(), 4))


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
    assert_close(gradients(a), _single_gradients(network(0), 4))
    assert_close(gradients(b), _single_gradients(network(1), 4))


# ---- unchanged code, and what breaks in Horovod's own optimizer ----


def scenario_unchanged_code(c: Communicator) -> None:
    model = network(c.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    reference = network(0)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for m, o in ((model, optimizer), (reference, expected)):
            o.zero_grad(set_to_none=step % 2 == 0)
            loss_of(m, data(4, seed=step)).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            o.step()
    assert_close([*model.parameters()], [*reference.parameters()], 1e-4)


def scenario_unchanged_accumulation(c: Communicator) -> None:
    model = network().eval()
    reducer = distributed.distribute(model, None, c, SMALL_BUCKETS)
    with reducer.accumulating():
        (loss_of(model, data(4, 1)) / 2).backward()
    (loss_of(model, data(4, 2)) / 2).backward()
    reference = network().eval()
    for seed in (1, 2):
        (loss_of(reference, data(4, seed)) / 2).backward()
    assert_close(gradients(model), gradients(reference))
    reducer.zero_grad()
    for seed in (1, 2):
        (loss_of(model, data(4, seed)) / 2).backward()
    assert_close(gradients(model), gradients(reference))


def scenario_set_to_none_is_allowed(c: Communicator) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, data(4)).backward()
        optimizer.step()
    assert_close(gradients(model), _single_gradients(network(), 4), 1e-3)


def scenario_momentum_survives_being_distributed_late(c: Communicator) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, data(4, seed=c.rank)).backward()
    optimizer.step()
    own = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    for parameter, buffer in zip(model.parameters(), own, strict=True):
        held = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(held, c.broadcast(buffer))


def scenario_optimizer_state_of_the_first_rank_only(c: Communicator) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + c.rank), betas=(0.8, 0.9))
    if c.rank == 0:
        loss_of(model, data(4)).backward()
        optimizer.step()
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and tuple(optimizer.param_groups[0]["betas"]) == (0.8, 0.9)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["step"].item() == 1
        assert torch.equal(c.broadcast(state["exp_avg"]), state["exp_avg"])


def scenario_a_fresh_optimizer_stays_fresh(c: Communicator) -> None:
    for build in (
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5, momentum=0.9),
    ):
        model = network()
        before = [parameter.clone() for parameter in model.parameters()]
        optimizer = build(model.parameters())
        distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
        assert not optimizer.state, "no dummy step may have been taken"
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def scenario_scheduler_built_before_does_not_warn(c: Communicator) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, data(4)).backward()
        optimizer.step()
        scheduler.step()


def scenario_step_hooks_fire_once(c: Communicator) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
    loss_of(model, data(4)).backward()
    optimizer.step()
    assert fired == ["pre", "post"]


def scenario_gradient_scaler(c: Communicator) -> None:
    model, reference = network(), network()
    for m in (model, reference):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        if m is model:
            distributed.distribute(m, optimizer, c, SMALL_BUCKETS)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(m, data(4, seed=step))
            if step == 1 and (m is reference or c.rank == c.size - 1):
                loss = loss * math.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if m is model:
            assert c.allgather_object(scaler.get_scale()) == [512.0] * c.size
    assert_close([*model.parameters()], [*reference.parameters()])


def scenario_different_models_are_refused(c: Communicator) -> None:
    if c.size == 1:
        return
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if c.rank == c.size - 1 else 3))
    with pytest.raises(UserError, match=r"1\.weight \[3, 4\].*rank 0 but 1\.weight \[5, 4\].*rank"):
        distributed.distribute(model, None, c)
    model = nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if c.rank == 0 else []))
    with pytest.raises(UserError, match="missing on rank 1"):
        distributed.distribute(model, None, c)
    config = DistributedConfig(bucket_mib=1.0 + c.rank)
    with pytest.raises(UserError, match="bucket sizes"):
        distributed.distribute(nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)]), None, c, config)


def scenario_two_runs_are_bit_equal(c: Communicator) -> None:
    ends = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        reducer = distributed.distribute(model, optimizer, c, SMALL_BUCKETS)
        for step in range(5):
            reducer.zero_grad()
            reducer.backward(loss_of(model, data(6, seed=100 * c.rank + step)), 6)
            reducer.finish(1.0)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert all(torch.equal(part, ends[0]) for part in c.allgather(ends[0])), "ranks must agree to the bit"


SCENARIOS: dict[str, Callable[[Communicator], None]] = {
    name.removeprefix("scenario_"): function
    for name, function in list(globals().items())
    if name.startswith("scenario_")
}


def main(folder: Path, engine: str, transport: str) -> None:
    communicator = distributed.connect(DistributedConfig(engine=engine, transport=transport, timeout_seconds=60))
    torch.set_num_threads(1)
    failures: dict[str, str] = {}
    for name, function in SCENARIOS.items():
        try:
            function(communicator)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
        # Also notices when ranks got out of step.
        communicator.barrier()
    report = {"ran": list(SCENARIOS), "failures": failures, "engine": communicator.engine, "size": communicator.size}
    (folder / f"rank{communicator.rank}.json").write_text(json.dumps(report))
    communicator.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
