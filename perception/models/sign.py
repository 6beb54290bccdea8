"""Sign detector without anchors: every point of three maps may predict one box (after YOLOX, Ge et al. 2021).

Shape letters: B images, N points of all maps (`sign_boxes.grid_points`), C classes.
No layer depends on the input size and no operator is custom, so the model exports as it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from perception.model_config import SignModelConfig
from perception.models import efficientnet
from perception.models.efficientnet import EfficientNetLite0
from perception.models.resnet import ResNet, normalise
from perception.models.sign_boxes import STRIDES

PRIOR_PROBABILITY = 0.01
"""What a fresh network gives every point and class: the many empty points then do not swamp the first steps."""
PRIOR_SIZE_STRIDES = 4.0
"""Side of the boxes that a fresh network predicts."""


class SignOutput(NamedTuple):
    """What the network says of B images at each of N points. A score is made of two sigmoids, see `sign_decode`."""

    objectness: Tensor
    """(B, N) float32: a sign of any class, before the sigmoid."""
    classes: Tensor
    """(B, N, C): which one, before the sigmoid; in the precision of the computation, as most are never read."""
    offsets: Tensor
    """(B, N, 4) float32: the box relative to its point, see `sign_boxes.decode_boxes`."""


class SignModel(nn.Module):
    """uint8 RGB images (B, H, W, 3), H and W multiples of 32 → SignOutput."""

    def __init__(self, config: SignModelConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.neck_channels
        if config.backbone == "efficientnet-lite0":
            self.backbone: nn.Module = EfficientNetLite0()
            widths: tuple[int, ...] = efficientnet.WIDTHS
        else:
            self.backbone = ResNet(config.backbone_widths, config.backbone_blocks, config.stem)
            widths = config.backbone_widths
        self.neck = Neck(widths, channels, config.bottom_up, config.depthwise)
        self.class_branch = Branch(channels, config.head_convolutions, config.depthwise)
        self.box_branch = Branch(channels, config.head_convolutions, config.depthwise)
        self.classify = nn.Conv2d(channels, config.num_classes, 1)
        self.regress = nn.Conv2d(channels, 1 + 4, 1)
        prior_logit = -math.log(1 / PRIOR_PROBABILITY - 1)
        size = math.log(PRIOR_SIZE_STRIDES)
        for layer in (self.classify, self.regress):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.constant_(layer.bias, prior_logit)  # type: ignore[arg-type]
        with torch.no_grad():
            self.regress.bias[1:] = torch.tensor([0.0, 0.0, size, size])  # type: ignore[index]

    def forward(self, images: Tensor) -> SignOutput:
        maps = self.neck(self.backbone(normalise(images)))
        classes, regressions = [], []
        for level, x in enumerate(maps):
            classes.append(per_point(self.classify(self.class_branch(x, level))))
            regressions.append(per_point(self.regress(self.box_branch(x, level))))
        regression = torch.cat(regressions, dim=1).float()
        return SignOutput(regression[..., 0], torch.cat(classes, dim=1), regression[..., 1:])


class Neck(nn.Module):
    """Maps of a backbone at strides 4 to 32 → maps of C channels at strides 4, 8, 16, each seeing the coarser ones.

    With `bottom_up` they see the finer ones too (PAFPN, Liu et al. 2018).
    """

    def __init__(self, widths: tuple[int, ...], channels: int, bottom_up: bool, depthwise: bool) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.fuse = nn.ModuleList(convolution(channels, depthwise) for _ in STRIDES)
        self.shrink = nn.ModuleList(convolution(channels, depthwise, stride=2) for _ in STRIDES[1:] if bottom_up)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        for level in reversed(range(len(STRIDES))):
            maps[level] = maps[level] + functional.interpolate(maps[level + 1], scale_factor=2.0, mode="nearest")
        maps = [fuse(x) for fuse, x in zip(self.fuse, maps[:-1], strict=True)]
        for level, shrink in enumerate(self.shrink, start=1):
            maps[level] = maps[level] + shrink(maps[level - 1])
        return maps


class Branch(nn.Module):
    """3x3 convolutions whose weights all strides share; batch norm is each stride's own, as its statistics differ."""

    def __init__(self, channels: int, num_convolutions: int, depthwise: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolution(channels, depthwise) for _ in range(num_convolutions))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(num_convolutions * len(STRIDES)))

    def forward(self, x: Tensor, level: int) -> Tensor:
        for number, layer in enumerate(self.convolutions):
            norm = self.norms[level * len(self.convolutions) + number]
            x = functional.relu(norm(layer(x)), inplace=True)
        return x


def convolution(channels: int, depthwise: bool, stride: int = 1) -> nn.Module:
    """A 3x3 convolution, or a depthwise one and a 1x1 to mix its channels."""
    if not depthwise:
        return nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
    )


def per_point(x: Tensor) -> Tensor:
    """(B, C, h, w) → (B, h * w, C); a view where x is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
