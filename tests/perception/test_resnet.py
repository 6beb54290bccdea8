"""Backbone: strides, start-up state, independence of the input size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perception.models.resnet import BasicBlock, ResNet, normalise


@pytest.mark.parametrize("stem", ["conv", "conv3", "patch"])
@pytest.mark.parametrize("size", [(64, 96), (32, 160)])
def test_stages_have_strides_4_to_32(stem: str, size: tuple[int, int]) -> None:
    model = ResNet((8, 16, 24, 32), (1, 2, 1, 1), stem)
    maps = model(torch.zeros(2, 3, *size))
    expected = [(2, c, size[0] // s, size[1] // s) for c, s in zip((8, 16, 24, 32), (4, 8, 16, 32), strict=True)]
    assert [tuple(level.shape) for level in maps] == expected


def test_resnet18_has_the_known_number_of_parameters() -> None:
    model = ResNet((64, 128, 256, 512), (2, 2, 2, 2))
    # 11,689,512 of the published network less its 513,000 of the classifier.
    assert sum(p.numel() for p in model.parameters()) == 11_176_512


def test_block_starts_as_its_shortcut() -> None:
    model = ResNet((8, 8, 8, 8), (2, 1, 1, 1))
    block = model.stages[0][1]
    assert isinstance(block, BasicBlock)
    x = torch.rand(2, 8, 4, 4)
    torch.testing.assert_close(block(x), x)


def test_every_parameter_but_those_behind_zero_scales_gets_gradient() -> None:
    model = ResNet((8, 8, 8, 8), (1, 1, 1, 1))
    sum(level.square().sum() for level in model(torch.randn(2, 3, 64, 64))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert model.stem[0].weight.grad.abs().sum() > 0


def test_wrong_descriptions_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages"):
        ResNet((8, 8, 8), (1, 1, 1))
    with pytest.raises(ValueError, match='"conv3" or "patch"'):
        ResNet((8, 8, 8, 8), (1, 1, 1, 1), "tiles")


def test_normalise_keeps_pixels_apart_and_channels_last() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8))
    out = normalise(images)
    assert out.shape == (2, 3, 4, 6) and out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out[1, 2, 3, 5], images[1, 3, 5, 2].float() / 57.6 - 2)
