"""Settings of the networks, one frozen dataclass a model; the rest of a run's settings is in `config.py`. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaneModelConfig:
    """Sketch-and-refine lane detector."""

    backbone_widths: tuple[int, ...] = (64, 128, 256, 512)
    """Channels of the stages at stride 4, 8, 16, 32."""
    backbone_blocks: tuple[int, ...] = (2, 2, 2, 2)
    stem: str = "conv"
    """conv: 7x7 and max-pooling; conv3: two of 3x3; patch: non-overlapping 4x4 patches, far cheaper on CPUs."""
    neck_channels: int = 64
    use_fpn: bool = True
    input_height: int = 320
    input_width: int = 800
    crop_top_fraction: float = 0.0
    """Share of the image height that is cut from the top before resizing."""
    num_rows: int = 72
    """Rows at which a lane's x is regressed, row 0 at the bottom."""
    num_sample_rows: int = 36
    """Rows at which features are sampled along a proposal."""
    proposal_grid: tuple[int, int] = (4, 10)
    """Rows and columns of the grid of line proposals."""
    num_segments: int = 6
    max_lanes: int = 8
    """Most lanes that decoding returns."""
    score_threshold: float = 0.4
    nms_distance_pixels: float = 50.0
    """Mean |dx| below which two lanes are one, at an input width of 800."""
    assignment_lambda: float = 3.0
    assignment_candidates: int = 4
    """Most proposals that answer for one lane in training: the sum of the best so many IoUs says how many do."""
    iou_half_width_fraction: float = 7.5 / 800
    """Half the width of a lane in the IoU loss, as a share of the input width."""
    class_weight: float = 2.0
    iou_weight: float = 2.0
    extent_weight: float = 0.2
    angle_weight: float = 5.0
    extend_to_bottom: bool = True
    """Decoded lanes run on below their predicted start until they leave the image."""


@dataclass(frozen=True)
class SignModelConfig:
    """Anchor-free sign detector with heads on strides 4, 8 and 16. The defaults are the full one, for GPUs."""

    num_classes: int = 43
    """0: as many as the data set has, which a run finds out at its start."""
    class_names: tuple[str, ...] = ()
    """Recorded by each run from its data: a class's number is its place here. Empty: not known yet."""
    backbone: str = "resnet"
    """resnet, as the next three fields say, or efficientnet-lite0: see `train.pretrained_backbone`."""
    backbone_widths: tuple[int, ...] = (64, 128, 256, 512)
    """Channels of the stages at stride 4, 8, 16, 32; the last one gives context only."""
    backbone_blocks: tuple[int, ...] = (2, 2, 2, 2)
    stem: str = "conv"
    """conv: 7x7 and max-pooling; conv3: two of 3x3; patch: non-overlapping 4x4 patches, far cheaper on CPUs."""
    neck_channels: int = 64
    """Channels of neck and heads."""
    bottom_up: bool = True
    """The neck has a second pass, from fine to coarse."""
    head_convolutions: int = 2
    """3x3 convolutions in each of the two branches, classes and boxes; their weights are shared by all strides."""
    depthwise: bool = False
    """3x3 convolutions of neck and heads are depthwise separable, cheaper on CPUs."""
    input_height: int = 640
    input_width: int = 640
    iou_cost_weight: float = 3.0
    """Weight of -ln(IoU) against the classification cost when points are assigned to boxes."""
    box_weight: float = 5.0
    offset_weight: float = 1.0
    objectness_weight: float = 1.0
    class_weight: float = 1.0
    num_background_points: int = 0
    """Of each image, points without a sign, those of highest objectness, that are taught to be of no class."""
    class_score_power: float = 0.25
    """A detection's score is objectness * class ** power. Below 1, as long as classes are less well learnt than
    objectness."""
    score_threshold: float = 0.001
    """Detections below it are dropped: low for average precision; drawings want 0.3 or so."""
    max_candidates_per_stride: int = 1000
    """Best points of a stride that reach non-maximum suppression."""
    nms_iou_threshold: float = 0.65
    nms_class_agnostic: bool = True
    """A detection suppresses those of any class: two signs hardly overlap, two guesses at one do."""
    max_detections: int = 100
    tile_size: int = 0
    """Side in pixels of the tiles in which large images are searched, a multiple of 32; 0: each image as a whole."""
    tile_overlap: int = 160
    """Pixels that neighbouring tiles share: at least as much as the largest sign, so that some tile holds it whole."""
