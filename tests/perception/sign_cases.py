"""A sign detector small enough for tests of its parts."""

from __future__ import annotations

from perception.model_config import SignModelConfig

TINY = SignModelConfig(
    num_classes=5,
    backbone_widths=(8, 8, 16, 16),
    backbone_blocks=(1, 1, 1, 1),
    stem="patch",
    neck_channels=16,
    bottom_up=False,
    head_convolutions=1,
    depthwise=True,
)
