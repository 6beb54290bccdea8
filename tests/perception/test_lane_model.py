"""Sketch-and-refine model: proposals, sampling against grid_sample, size independence."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from perception.model_config import LaneModelConfig
from perception.models.lane import LaneModel, RefineHead, line_xs, propose, row_heights

TINY = LaneModelConfig(
    backbone_widths=(8, 8, 16, 16), backbone_blocks=(1, 1, 1, 1), neck_channels=16, input_height=64, input_width=128
)


def images(batch: int = 2, height: int = 64, width: int = 128) -> torch.Tensor:
    return torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8, generator=torch.manual_seed(0))


@pytest.mark.parametrize("size", [(64, 128), (96, 160), (32, 32)])
def test_any_multiple_of_32_goes_through_the_same_weights(size: tuple[int, int]) -> None:
    model = LaneModel(TINY).eval()
    output = model(images(2, *size))
    assert output.logits.shape == (2, 40) and output.xs.shape == (2, 40, 72)
    assert output.start.shape == output.length.shape == (2, 40)
    assert [tuple(m.shape) for m in output.angles] == [(2, size[0] // s, size[1] // s) for s in (8, 16, 32)]
    for tensor in (output.logits, output.xs, output.start, output.length, *output.angles):
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()


def test_fresh_model_returns_its_proposals() -> None:
    model = LaneModel(TINY).eval()
    output = model(images())
    origins, slopes = propose(output.angles[2], TINY.proposal_grid, 64, 128)
    expected = line_xs(origins, slopes, row_heights(72, 64))
    assert (output.xs - expected).abs().max() < 0.05 * 128


def test_proposal_runs_through_its_cell_in_the_given_direction() -> None:
    theta = 0.25  # Up and to the right, one pixel each.
    origins, slopes = propose(torch.full((1, 2, 4), theta), (4, 10), 64, 128)
    assert origins.shape == (40, 2)
    torch.testing.assert_close(origins[0], torch.tensor([128 / 20 - 0.5, 64 / 8 - 0.5]))
    torch.testing.assert_close(slopes, torch.ones(1, 40))
    xs = line_xs(origins, slopes, torch.stack([origins[0, 1], origins[0, 1] - 10]))
    torch.testing.assert_close(xs[0, 0], torch.stack([origins[0, 0], origins[0, 0] + 10]))


def test_proposal_angles_are_clamped_and_send_no_gradient_back() -> None:
    angles = torch.tensor([[[0.0, 1.0]]], requires_grad=True)
    _, slopes = propose(angles, (1, 2), 64, 128)
    assert not slopes.requires_grad
    torch.testing.assert_close(slopes[0, 0], torch.tensor(1 / math.tan(0.05 * math.pi)))
    torch.testing.assert_close(slopes[0, 1], torch.tensor(-1 / math.tan(0.05 * math.pi)))


def test_rows_run_from_the_bottom_edge_to_the_top() -> None:
    heights = row_heights(72, 320)
    assert heights[0] == 320 and heights[-1] == 0
    torch.testing.assert_close(heights[:-1] - heights[1:], torch.full((71,), 320 / 71), atol=1e-4, rtol=0)


def test_sampling_equals_grid_sample() -> None:
    """Away from the top and bottom border, where grid_sample fades to 0 and ours holds the last row."""
    torch.manual_seed(0)
    height, width = 64, 128
    head = RefineHead(TINY)
    maps = [torch.randn(2, 16, height // s, width // s) for s in (8, 16, 32)]
    origins, _ = propose(torch.full((2, 2, 4), 0.5), (4, 10), height, width)
    slopes = torch.randn(2, 40) * 2
    xs = line_xs(origins, slopes, row_heights(72, height))
    ours = head.sample(maps, xs, height, width)

    rows = torch.linspace(0, 71, 36).round().long()
    y, x = row_heights(72, height)[rows], xs[..., rows]
    grid = torch.stack([(x + 0.5) / width * 2 - 1, ((y + 0.5) / height * 2 - 1).expand_as(x)], dim=-1)
    distance = head.level_position[:, None] - torch.arange(3)
    weights = (-distance.square() / 2).softmax(1)
    reference = sum(
        functional.grid_sample(level, grid, align_corners=False).permute(0, 2, 3, 1) * weights[:, i, None]
        for i, level in enumerate(reversed(maps))
    )
    inner = (y > 16) & (y < height - 17)
    torch.testing.assert_close(ours[:, :, inner], reference[:, :, inner], atol=1e-5, rtol=1e-4)


def test_every_parameter_gets_gradient() -> None:
    model = LaneModel(TINY)
    output = model(images())
    tensors = (output.logits, output.xs, output.start, output.length, *output.angles)
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


def test_a_rank_can_run_it_in_bfloat16() -> None:
    model = LaneModel(TINY).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images())
    assert output.xs.dtype == torch.float32 and output.xs.isfinite().all()


def test_images_of_a_batch_do_not_mix() -> None:
    model = LaneModel(TINY).eval()
    batch = images(3)
    torch.testing.assert_close(model(batch).xs[1:2], model(batch[1:2]).xs, atol=1e-3, rtol=1e-4)


def test_uneven_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="do not split"):
        LaneModel(LaneModelConfig(num_sample_rows=35))
