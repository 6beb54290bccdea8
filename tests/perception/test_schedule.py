"""Learning rate and averaging as functions of samples seen, and the optimizer that takes them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from perception.config import OptimConfig, RunConfig, TrainConfig
from perception.errors import UserError
from perception.optimizer import build_optimizer, use_bf16
from perception.schedule import (
    describe_change_of_ranks,
    describe_rate,
    ema_decay,
    learning_rate,
    peak_learning_rate,
)

CONFIG = OptimConfig(lr=1e-3, reference_batch_size=40, warmup_samples=100, ema_decay_samples=1000)


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [("sqrt", 160, 2e-3), ("sqrt", 40, 1e-3), ("linear", 160, 4e-3), ("linear", 20, 5e-4), ("none", 160, 1e-3)],
)
def test_peak_follows_the_global_batch(rule: str, batch: int, expected: float) -> None:
    assert peak_learning_rate(replace(CONFIG, lr_scaling=rule), batch) == pytest.approx(expected)


def test_unknown_rule() -> None:
    with pytest.raises(UserError, match=r'optim\.lr_scaling = "cubic": must be one of sqrt, linear, none'):
        peak_learning_rate(replace(CONFIG, lr_scaling="cubic"), 8)


def test_the_rule_is_told_in_one_line() -> None:
    optim = replace(CONFIG, name="lamb", lr=0.005, reference_batch_size=8)
    config = RunConfig("lane", "x", optim=optim, train=TrainConfig(num_samples=12_000))
    assert describe_rate(config, 128) == (
        "lamb, global batch 128, learning rate 0.02 (0.005 at 8, sqrt rule), warm-up over 100 of 12000 samples, 94 "
        "steps in all"
    )


def test_what_another_number_of_ranks_changes_is_told_in_one_line() -> None:
    config = RunConfig("lane", "x", optim=CONFIG, train=TrainConfig(batch_size_per_rank=10))
    assert describe_change_of_ranks(config, config.train, ranks_before=4, ranks=1) == (
        "the checkpoint is of 4 ranks, this run has 1: the sample order goes on; global batch 10 instead of 40 "
        "(at most 10 a rank, accumulated over 1), peak learning rate 0.0005 instead of 0.001 (sqrt rule)"
    )
    given = replace(config.train, global_batch=40)
    fitted = replace(config, train=replace(given, accumulation=2))
    assert describe_change_of_ranks(fitted, given, ranks_before=4, ranks=3) == (
        "the checkpoint is of 4 ranks, this run has 3: the sample order goes on; global batch 40 and learning rate "
        "as before (at most 7 a rank, accumulated over 2)"
    )


def test_warm_up_rises_to_the_peak_then_falls_to_the_end() -> None:
    rates = [learning_rate(CONFIG, 1.0, samples, 2000) for samples in range(2001)]
    assert 0 < rates[0] < 0.02 and rates[100] == pytest.approx(1.0)
    assert all(a < b for a, b in itertools.pairwise(rates[:101]))
    assert all(a > b for a, b in itertools.pairwise(rates[100:]))
    assert rates[1050] == pytest.approx(0.5) and rates[2000] == pytest.approx(0.0)


def test_final_share_and_a_position_past_the_end() -> None:
    config = replace(CONFIG, final_lr_fraction=0.1)
    assert learning_rate(config, 2.0, 2000, 2000) == pytest.approx(0.2)
    assert learning_rate(config, 2.0, 2500, 2000) == pytest.approx(0.2)


def test_warm_up_is_at_most_a_tenth_of_the_run() -> None:
    assert learning_rate(CONFIG, 1.0, 20, 200) == pytest.approx(1.0)
    assert learning_rate(CONFIG, 1.0, 0, 1) == pytest.approx(1.0)


def test_decay_of_many_small_steps_is_that_of_a_large_one() -> None:
    """The average depends on samples, not on how many ranks or steps they took."""
    small = ema_decay(CONFIG, 50_000, 8, 100_000) ** 8
    assert small == pytest.approx(ema_decay(CONFIG, 50_000, 64, 100_000))
    assert ema_decay(CONFIG, 50_000, 1000, 100_000) == pytest.approx(math.exp(-1))


def test_time_constant_grows_with_the_run_up_to_its_limits() -> None:
    decays = [ema_decay(CONFIG, samples, 8, 100_000) for samples in range(0, 20_000, 100)]
    assert decays == sorted(decays) and decays[0] < 0.01 and decays[-1] == pytest.approx(math.exp(-8 / 1000))
    assert ema_decay(CONFIG, 1_000_000, 8, 500) == pytest.approx(math.exp(-8 / 50))
    assert ema_decay(CONFIG, 5, 1, 9) == 0.0


def test_weight_decay_spares_biases_norms_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(RunConfig("lane", "x", optim=CONFIG), model, torch.device("cpu"))
    decayed, spared = optimizer.param_groups
    assert [p.shape for p in decayed["params"]] == [model[0].weight.shape] and decayed["weight_decay"] == 0.01
    assert len(spared["params"]) == 4 and spared["weight_decay"] == 0
    assert all(group["lr"] == 1e-3 for group in optimizer.param_groups)


def test_precision_is_as_asked_or_the_processors() -> None:
    cpu = torch.device("cpu")
    assert use_bf16("bf16", cpu) and not use_bf16("fp32", cpu)
    capabilities = torch.cpu.get_capabilities()
    assert use_bf16("auto", cpu) == bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
