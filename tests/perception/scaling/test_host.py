"""Recording a step, what the layer adds on a host's cores, and the prediction that follows."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from perception.distributed import SoloCommunicator
from perception.errors import UserError
from perception.scaling.calibrate import calibrate
from perception.scaling.host import HostConstants, mean_of_slowest, predict_measured
from perception.scaling.profile import GradientReady, StepProfile
from perception.scaling.record import record_profile


class _Slow(torch.autograd.Function):
    """Forward at once, backward after a wait."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradients[0], None


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.early = nn.Parameter(torch.ones(4))
        self.late = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self) -> Tensor:
        x = _Slow.apply(self.early * 1.0, 0.02)
        return _Slow.apply(x * self.late, 0.05).sum()


def test_a_recorded_profile_tells_when_each_gradient_was_ready() -> None:
    model = _Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of_batch() -> Tensor:
        time.sleep(0.03)
        return model()

    profile = record_profile(
        model, loss_of_batch, optimizer, name="chain", precision="fp32", batch_size_per_rank=2,
        num_steps=3, num_warmup_steps=1,
    )  # fmt: skip
    ready = {gradient.name: gradient.ready_seconds for gradient in profile.gradients}
    assert [gradient.name for gradient in profile.gradients] == ["late", "early", "unused"]
    assert ready["late"] >= 0.05
    assert ready["early"] >= ready["late"] + 0.02
    # What no backward reaches is known to be unused when backward has ended.
    assert ready["unused"] == profile.backward_seconds >= ready["early"]
    assert profile.forward_seconds >= 0.03
    assert [(gradient.numel, gradient.element_bytes) for gradient in profile.gradients] == [(4, 4), (4, 4), (3, 4)]
    assert not torch.equal(model.late, torch.ones(4))
    # No hook stays behind.
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_nothing_trained_is_nothing_to_record() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(UserError, match="frozen: no parameter"):
        record_profile(
            model, lambda: torch.zeros(()), optimizer, name="frozen", precision="fp32", batch_size_per_rank=1
        )


PROFILE = StepProfile(
    "m", "CPU", "fp32", 4, 0.01, 0.02, 0.001,
    tuple(GradientReady(f"p{index}", 262_144, 4, 0.02 * (index + 1) / 4) for index in range(4)),
)  # fmt: skip


def _constants(bytes_per_second: float, core_share: float, bucket_seconds: float = 0.0) -> HostConstants:
    return HostConstants("torch", "gloo", "engine", 2, 0.0, 0.0, bucket_seconds, bytes_per_second, core_share)


def _layer_seconds(constants: HostConstants) -> float:
    return predict_measured(PROFILE, constants, 2, first_bucket_mib=1, bucket_mib=1).layer_seconds


def test_what_takes_a_core_is_paid_for_and_what_waits_is_hidden() -> None:
    mib, four_mib = 1 << 20, 4 << 20
    # 1 ms a bucket: three are hidden in backward, the last is not.
    assert _layer_seconds(_constants(mib / 1e-3, core_share=0.0)) == pytest.approx(1e-3)
    # All of it is work: hidden or not, it delays the step.
    assert _layer_seconds(_constants(mib / 1e-3, core_share=1.0)) == pytest.approx(4e-3)
    assert _layer_seconds(_constants(mib / 1e-3, core_share=0.5)) == pytest.approx(3 * 0.5e-3 + 1e-3)
    # Slower than backward: buckets queue behind the first.
    assert _layer_seconds(_constants(four_mib / 0.4, core_share=0.0)) == pytest.approx(0.4 + 0.005 - 0.02)
    assert _layer_seconds(_constants(float("inf"), 1.0, bucket_seconds=2e-4)) == pytest.approx(4 * 2e-4)


def test_ranks_that_differ_wait_for_the_slower() -> None:
    steps = np.random.default_rng(0).lognormal(0, 0.3, 400).tolist()
    drawn = np.random.default_rng(1).choice(steps, (200_000, 2)).max(axis=1).mean()
    assert mean_of_slowest(steps, 2) == pytest.approx(drawn, rel=0.01)
    assert mean_of_slowest([3.0], 5) == 3.0
    even = predict_measured(PROFILE, _constants(1e9, 1.0), 2, first_bucket_mib=1, bucket_mib=1)
    uneven = predict_measured(
        PROFILE, _constants(1e9, 1.0), 2, first_bucket_mib=1, bucket_mib=1, limit_step_seconds=[0.02, 0.04]
    )
    assert uneven.step_seconds - even.step_seconds == pytest.approx(0.005)
    assert uneven.ratio_to_limit < even.ratio_to_limit < 1


def test_constants_hold_for_the_ranks_they_were_measured_with() -> None:
    with pytest.raises(ValueError, match="calibrate with 4"):
        predict_measured(PROFILE, _constants(1e9, 1.0), 4, first_bucket_mib=1, bucket_mib=1)


def test_a_single_rank_s_layer_is_calibrated_as_almost_free() -> None:
    constants = calibrate(SoloCommunicator())
    assert constants.ranks == 1
    added = constants.step_seconds + constants.seconds(num_tensors=100, num_buckets=2, num_bytes=4 << 20)
    # What is left is the norm of the gradients, a pass over memory.
    assert 0 <= added < 0.05
