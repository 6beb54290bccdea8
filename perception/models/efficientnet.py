"""EfficientNet-Lite0 backbone (Tan and Le 2019, in the form without squeeze-and-excitation), strides 4 to 32.

Submodules are named as in the published weights, so that these load as they are.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (24, 40, 112, 320)
"""Channels of the maps at stride 4, 8, 16 and 32."""
_STEM = 32
# Expansion, kernel, stride, channels, repeats.
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
_MAPS_AFTER = (2, 4, 10, 15)
_BATCH_NORM_EPSILON = 1e-3
_BATCH_NORM_MOMENTUM = 0.01
# `normalise` gives v / 57.6 - 2, these weights were trained on (v - 127) / 128.
_SCALE = 57.6 / 128
_OFFSET = (2 * 57.6 - 127) / 128


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=_BATCH_NORM_EPSILON, momentum=_BATCH_NORM_MOMENTUM)


class PaddedConv2d(nn.Conv2d):
    """Stride 2 with the odd pixel of padding on the right and below, as the weights were trained."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels_in, channels_out, kernel, stride, groups=groups, bias=False)
        before = (kernel - stride) // 2
        after = kernel - stride - before
        self._pads = (before, after, before, after)

    def forward(self, x: Tensor) -> Tensor:
        if self._pads[0] == self._pads[1]:
            return functional.conv2d(x, self.weight, None, self.stride, self._pads[0], 1, self.groups)
        return functional.conv2d(functional.pad(x, self._pads), self.weight, None, self.stride, 0, 1, self.groups)


class InvertedBottleneck(nn.Module):
    """1x1 to more channels, depthwise, 1x1 to fewer, with a shortcut where the shape stays (Sandler et al. 2018)."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels_in * expansion
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = nn.Conv2d(channels_in, inner, 1, bias=False)
            self._bn0 = norm(inner)
        self._depthwise_conv = PaddedConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = norm(inner)
        self._project_conv = nn.Conv2d(inner, channels_out, 1, bias=False)
        self._bn2 = norm(channels_out)
        self.has_shortcut = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        if self.has_shortcut:
            y = y + x
        return y


class EfficientNetLite0(nn.Module):
    """Images (B, 3, H, W) from `resnet.normalise`, H and W multiples of 32 → maps at strides 4, 8, 16 and 32.

    2.96 million parameters; of the published network all but its classifier.
    """

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = PaddedConv2d(3, _STEM, 3, stride=2)
        self._bn0 = norm(_STEM)
        blocks: list[nn.Module] = []
        channels = _STEM
        for expansion, kernel, stride, width, repeats in _STAGES:
            for number in range(repeats):
                blocks.append(InvertedBottleneck(channels, width, kernel, stride if number == 0 else 1, expansion))
                channels = width
        self._blocks = nn.ModuleList(blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: Tensor) -> list[Tensor]:
        x = functional.relu6(self._bn0(self._conv_stem(images * _SCALE + _OFFSET)))
        maps = []
        for number, block in enumerate(self._blocks):
            x = block(x)
            if number in _MAPS_AFTER:
                maps.append(x)
        return maps
