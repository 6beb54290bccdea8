"""Lane detector: sketch a line direction per cell, refine 40 line proposals (after SRLane, Xiao et al. 2024).

Shape letters: B images, P proposals, N rows of a lane, S sampled rows, C neck channels, G segments.
Rows are counted from the bottom: row k lies at y = H * (1 - k / (N - 1)) input pixels.
No layer depends on the input size and no operator is custom, so the model exports as it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from perception.model_config import LaneModelConfig
from perception.models.resnet import ResNet, normalise

ANGLE_STRIDES = (8, 16, 32)
"""Strides of the maps that carry a line direction, in the order of `LaneOutput.angles`."""
SEGMENT_CHANNELS = 32
OFFSET_UNIT = 1 / 4
"""Unit of the regressed offsets, as a share of the image's width. With the whole width, one step of Adam at the
rates of a short run throws lanes across the image; with a sixteenth they are slow to reach their places."""
EXTENT_UNIT_ROWS = 16
"""Unit of the regressed start and length."""


class LaneOutput(NamedTuple):
    """What the network says of B images; x in input pixels, extents in rows, angles as theta / pi in (0, 1)."""

    logits: Tensor
    """(B, P): a lane, before the sigmoid."""
    xs: Tensor
    """(B, P, N): x of each row."""
    start: Tensor
    """(B, P): first row of the lane."""
    length: Tensor
    """(B, P): number of its rows."""
    angles: tuple[Tensor, Tensor, Tensor]
    """Per level of ANGLE_STRIDES (B, H/stride, W/stride)."""


class LaneModel(nn.Module):
    """uint8 RGB images (B, H, W, 3), H and W multiples of 32 → LaneOutput."""

    def __init__(self, config: LaneModelConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.neck_channels
        self.backbone = ResNet(config.backbone_widths, config.backbone_blocks, config.stem)
        self.neck = nn.ModuleList(conv(width, channels, 1) for width in config.backbone_widths[1:])
        self.fuse = nn.ModuleList(conv(channels, channels, 3) for _ in ANGLE_STRIDES if config.use_fpn)
        self.sketch = nn.ModuleList(conv(channels, 1, 1) for _ in ANGLE_STRIDES)
        self.refine = RefineHead(config)

    def forward(self, images: Tensor) -> LaneOutput:
        height, width = images.shape[1:3]
        maps = self.features(normalise(images))
        angles = [head(level).squeeze(1).float().sigmoid() for head, level in zip(self.sketch, maps, strict=True)]
        origins, slopes = propose(angles[2], self.config.proposal_grid, height, width)
        proposals = line_xs(origins, slopes, row_heights(self.config.num_rows, height, slopes.device))
        logits, xs, start, length = self.refine(maps, proposals, height, width)
        return LaneOutput(logits, xs, start, length, (angles[0], angles[1], angles[2]))

    def features(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) → maps of C channels at strides 8, 16, 32, each seeing the coarser ones if `use_fpn`."""
        maps = [lateral(x) for lateral, x in zip(self.neck, self.backbone(images)[1:], strict=True)]
        if self.config.use_fpn:
            for level in (1, 0):
                # Nearest: each coarse cell covers 2x2 finer ones exactly, since H and W are multiples of 32.
                maps[level] = maps[level] + functional.interpolate(maps[level + 1], scale_factor=2.0, mode="nearest")
            maps = [fuse(x) for fuse, x in zip(self.fuse, maps, strict=True)]
        return maps


def conv(channels_in: int, channels_out: int, size: int) -> nn.Conv2d:
    """A convolution of the neck: biased, padded, its output as wide in variance as its input."""
    convolution = nn.Conv2d(channels_in, channels_out, size, padding=size // 2)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_in", nonlinearity="linear")
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    return convolution


def small_linear(channels_in: int, channels_out: int) -> nn.Linear:
    """The last layer of a head: its first outputs are nearly 0, so training starts from the bare proposals."""
    linear = nn.Linear(channels_in, channels_out)
    nn.init.normal_(linear.weight, std=1e-3)
    nn.init.zeros_(linear.bias)
    return linear


def propose(angle_map: Tensor, grid: tuple[int, int], height: int, width: int) -> tuple[Tensor, Tensor]:
    """Lay a line through each cell of a grid, in the direction the coarsest angle map gives there.

    Returns origins (P, 2), the cell centres (x, y), and slopes (B, P): pixels that x moves
    right as y goes up by one, x(y) = origin_x + slope * (origin_y - y). No gradient flows back:
    the angle is taught by its own loss only.
    """
    rows, columns = grid
    resized = functional.interpolate(angle_map.detach()[:, None], size=(rows, columns), mode="bilinear")
    theta = resized.flatten(1).clamp(0.05, 0.95) * math.pi
    slopes = theta.cos() / theta.sin()
    x = (torch.arange(columns, device=angle_map.device) + 0.5) * (width / columns) - 0.5
    y = (torch.arange(rows, device=angle_map.device) + 0.5) * (height / rows) - 0.5
    origins = torch.stack([x.expand(rows, columns).flatten(), y[:, None].expand(rows, columns).flatten()], dim=1)
    return origins, slopes


def tent(positions: Tensor, size: int) -> Tensor:
    """Weights of linear interpolation among `size` cells at fractional `positions`: (...) → (..., size).

    A position outside [0, size - 1] fades to zero weight within a cell, as with zero padding.
    """
    cells = torch.arange(size, device=positions.device, dtype=positions.dtype)
    return (1 - (positions.unsqueeze(-1) - cells).abs()).clamp(min=0)


class RefineHead(nn.Module):
    """Feature maps sampled along line proposals → a score, an extent and x offsets for each.

    Sampling is a product with interpolation weights instead of `grid_sample`: every proposal is
    read at the same rows, so a map is resampled vertically once, and one batched matrix product
    reads all levels horizontally. It is deterministic on every device, gradient included.
    """

    def __init__(self, config: LaneModelConfig) -> None:
        super().__init__()
        if config.num_sample_rows % config.num_segments:
            raise ValueError(f"{config.num_sample_rows} sample rows do not split into {config.num_segments} segments")
        self.num_rows = config.num_rows
        self.num_sample_rows = config.num_sample_rows
        self.num_segments = config.num_segments
        segment_rows = config.num_sample_rows // config.num_segments
        channels = SEGMENT_CHANNELS * config.num_segments
        self.level_position = nn.Parameter(torch.empty(config.num_sample_rows).normal_(0.93, 0.24))
        self.segment = nn.Linear(segment_rows * config.neck_channels, SEGMENT_CHANNELS)
        self.query = nn.Linear(channels, SEGMENT_CHANNELS)
        self.key = nn.Linear(SEGMENT_CHANNELS, SEGMENT_CHANNELS)
        self.mix = nn.Sequential(nn.Linear(channels, 2 * channels), nn.ReLU(), nn.Linear(2 * channels, channels))
        self.regress = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(), small_linear(channels, 2 + config.num_rows)
        )
        self.classify = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), small_linear(channels, 1))

    def forward(
        self, maps: list[Tensor], proposals: Tensor, height: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """maps 3 x (B, C, h, w), proposals (B, P, N) → logits, xs, start, length of LaneOutput."""
        sampled = self.sample(maps, proposals, height, width)
        segments = functional.relu(self.segment(sampled.reshape(*proposals.shape[:2], self.num_segments, -1)))
        features = segments.flatten(2)
        features = features + self.mix(self.attend(features, segments))

        logits = self.classify(features).squeeze(-1).float()
        regression = self.regress(features).float()
        xs = proposals + regression[..., 2:] * (OFFSET_UNIT * width)
        start = regression[..., 0] * EXTENT_UNIT_ROWS
        # A proposal starts at the bottom and reaches half-way up until the head has learnt better.
        length = regression[..., 1] * EXTENT_UNIT_ROWS + 0.5 * (self.num_rows - 1)
        return logits, xs, start, length

    def sample(self, maps: list[Tensor], xs: Tensor, height: int, width: int) -> Tensor:
        """Features along lanes xs (B, P, N), a weighted sum over the levels: (B, P, S, C)."""
        rows = torch.linspace(0, self.num_rows - 1, self.num_sample_rows, device=xs.device).round().long()
        y = row_heights(self.num_rows, height, xs.device)[rows]
        x = xs[..., rows].transpose(1, 2)
        # Level 0 is the coarsest: each row has a learnt position between the levels.
        distance = self.level_position[:, None] - torch.arange(len(maps), device=xs.device)
        level_weights = (-0.5 * distance.square()).softmax(dim=1)
        values, weights = [], []
        for level, level_map in enumerate(reversed(maps)):
            map_height, map_width = level_map.shape[2:]
            # Clamped: the bottom row lies half a cell below the lowest cell centre.
            v = ((y + 0.5) * (map_height / height) - 0.5).clamp(0, map_height - 1)
            u = (x + 0.5) * (map_width / width) - 0.5
            lines = level_map.permute(0, 2, 3, 1).reshape(len(xs), map_height, -1)
            values.append((tent(v, map_height).to(lines.dtype) @ lines).reshape(len(xs), len(y), map_width, -1))
            weights.append(tent(u, map_width) * level_weights[:, level, None, None])
        value = torch.cat(values, dim=2)
        return (torch.cat(weights, dim=3).to(value.dtype) @ value).transpose(1, 2)

    def attend(self, features: Tensor, segments: Tensor) -> Tensor:
        """Each proposal (B, P, G * 32) gathers, segment by segment, from all proposals' segments (B, P, G, 32)."""
        # Written out: for so few proposals it is twice as fast on a processor as the fused operator.
        query = self.query(features)[:, None]
        key = self.key(segments).permute(0, 2, 3, 1)
        attention = (query @ key / math.sqrt(query.shape[-1])).softmax(dim=-1)
        gathered: Tensor = attention @ segments.transpose(1, 2)
        return gathered.transpose(1, 2).flatten(2)


def row_heights(num_rows: int, height: int, device: torch.device | None = None) -> Tensor:
    """y of each row in input pixels, (num_rows,), from the bottom edge up to the top edge."""
    return height * (1 - torch.arange(num_rows, device=device) / (num_rows - 1))


def line_xs(origins: Tensor, slopes: Tensor, y: Tensor) -> Tensor:
    """x of the lines (P, 2), (B, P) at heights y (K,): (B, P, K)."""
    return origins[:, :1] + slopes[..., None] * (origins[:, 1:] - y)
