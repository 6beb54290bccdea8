"""Unchanged training code, and what breaks in Horovod's own optimizer."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import Communicator
from perception.errors import UserError
from tests.perception.distributed.scenario_tools import (
    SMALL_BUCKETS,
    assert_close,
    data,
    gradients,
    loss_of,
    network,
    single_gradients,
)


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
    assert_close(gradients(model), single_gradients(network(), 4), 1e-3)


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
