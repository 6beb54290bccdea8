"""Sign network: shapes, start-up state, precision, independence of the images of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perception.model_config import SignModelConfig
from perception.models.sign import Neck, SignModel, SignOutput
from perception.models.sign_boxes import decode_boxes, grid_points
from tests.perception.sign_cases import TINY

TINY_FULL = replace(TINY, stem="conv", bottom_up=True, head_convolutions=2, depthwise=False)


def images(batch: int = 2, height: int = 64, width: int = 96) -> torch.Tensor:
    return torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8, generator=torch.manual_seed(0))


@pytest.mark.parametrize("config", [TINY, TINY_FULL])
@pytest.mark.parametrize("size", [(64, 96), (32, 32), (96, 160)])
def test_any_multiple_of_32_goes_through_the_same_weights(config: SignModelConfig, size: tuple[int, int]) -> None:
    output = SignModel(config).eval()(images(2, *size))
    n = len(grid_points(*size))
    assert [tuple(part.shape) for part in output] == [(2, n), (2, n, 5), (2, n, 4)]
    assert all(part.isfinite().all() for part in output)


def test_fresh_network_is_unsure_and_predicts_boxes_of_4_strides_at_its_points() -> None:
    output = SignModel(TINY).eval()(images())
    assert abs(output.objectness.sigmoid().mean() - 0.01) < 0.002
    assert abs(output.classes.sigmoid().mean() - 0.01) < 0.002
    points = grid_points(64, 96)
    found = decode_boxes(output.offsets, points)
    half = torch.cat([points[:, 2:]] * 2, dim=1) * 2
    expected = torch.cat([points[:, :2] - half, points[:, :2] + half], dim=1)
    assert ((found - expected).abs() / points[:, 2:]).max() < 1


@pytest.mark.parametrize("config", [TINY, TINY_FULL])
def test_every_parameter_gets_a_gradient(config: SignModelConfig) -> None:
    model = SignModel(config)
    torch.stack([part.float().sum() for part in model(images())]).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_weights_are_shared_by_the_strides_and_batch_norm_is_not() -> None:
    model = SignModel(TINY_FULL)
    assert len(model.box_branch.convolutions) == 2 and len(model.box_branch.norms) == 6
    model(images())
    means = [norm.running_mean for norm in model.box_branch.norms]
    assert all(mean.abs().sum() > 0 for mean in means), "a stride's own batch norm was never used"


def test_the_order_of_points_is_that_of_the_grid() -> None:
    """A change in one corner of the image moves the outputs near it the most, at every stride."""
    torch.manual_seed(0)
    model = SignModel(TINY).eval()
    with torch.no_grad():
        torch.nn.init.normal_(model.regress.weight)
        before = images(1, 64, 160)
        after = before.clone()
        after[:, 40:64, 128:160] = 255
        change = (model(after).objectness - model(before).objectness).abs()[0]
    points = grid_points(64, 160)
    for stride in (4, 8, 16):
        level = points[:, 2] == stride
        x, y = points[level][change[level].argmax(), :2].tolist()
        assert x > 112 and y > 24


def test_the_neck_lets_fine_maps_see_coarse_ones_and_the_other_way_only_bottom_up() -> None:
    for bottom_up in (False, True):
        torch.manual_seed(0)
        neck = Neck((8, 8, 8, 8), 8, bottom_up, depthwise=False)
        maps = [torch.randn(1, 8, 64 // s, 64 // s, requires_grad=True) for s in (4, 8, 16, 32)]
        fine, _, coarse = neck(list(maps))
        assert torch.autograd.grad(fine.sum(), maps[3], retain_graph=True)[0].abs().sum() > 0
        back = torch.autograd.grad(coarse.sum(), maps[0], allow_unused=True)[0]
        assert (back is not None) == bottom_up


def test_a_rank_can_run_it_in_bfloat16() -> None:
    model = SignModel(TINY).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images())
    assert output.objectness.dtype == output.offsets.dtype == torch.float32
    assert all(part.isfinite().all() for part in output)


def test_images_of_a_batch_do_not_mix() -> None:
    model = SignModel(TINY).eval()
    batch = images(3)
    with torch.no_grad():
        together = model(batch)
        alone = model(batch[1:2])
    for whole, own in zip(together, alone, strict=True):
        torch.testing.assert_close(whole[1:2], own, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_outputs_are_plain_tensors_that_a_tracer_can_follow() -> None:
    model = SignModel(TINY).eval()
    program = torch.export.export(model, (images(1),))
    for traced, own in zip(program.module()(images(1)), model(images(1)), strict=True):
        torch.testing.assert_close(traced, own)
    assert isinstance(model(images(1)), SignOutput)
