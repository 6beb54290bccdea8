"""A small segmentation network with clustering, in the manner of LaneNet (Neven et al. 2018).

It says of each pixel whether it is of a lane, and gives it a vector that is alike within a lane; lanes are clusters.
Shape letters: B images, h and w rows and columns of the map at stride 4, E of the vector, M lanes of a batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from perception.data.lane_targets import LaneBatch
from perception.data.sample import Lane, LanePrediction
from perception.geometry import Geometry
from perception.losses import Losses
from perception.model_config import LaneModelConfig
from perception.models.lane import conv
from perception.models.resnet import ResNet, normalise

STRIDE = 4
_CHANNELS = 32
_EMBEDDING = 4
_LANE_WEIGHT = 4.0
"""How much more a pixel of a lane weighs: there are few."""
_PULL_DISTANCE, _PUSH_DISTANCE = 0.5, 3.0
_CLUSTER_DISTANCE = 1.5
_LEAST_ROWS = 4
_LEAST_PIXELS = 10


class SegmentationOutput(NamedTuple):
    logits: Tensor
    """(B, h, w): of a lane, before the sigmoid."""
    embedding: Tensor
    """(B, E, h, w)"""


class SegmentationModel(nn.Module):
    """uint8 RGB images (B, H, W, 3), H and W multiples of 32 → SegmentationOutput at stride 4."""

    def __init__(self, config: LaneModelConfig) -> None:
        super().__init__()
        self.backbone = ResNet(config.backbone_widths, config.backbone_blocks, config.stem)
        self.lateral = nn.ModuleList(conv(width, _CHANNELS, 1) for width in config.backbone_widths)
        self.fuse = nn.Sequential(
            nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(_CHANNELS), nn.ReLU(inplace=True)
        )
        self.head = nn.Conv2d(_CHANNELS, 1 + _EMBEDDING, 1)

    def forward(self, images: Tensor) -> SegmentationOutput:
        maps = [lateral(x) for lateral, x in zip(self.lateral, self.backbone(normalise(images)), strict=True)]
        merged = maps[-1]
        for finer in maps[-2::-1]:
            merged = finer + functional.interpolate(merged, scale_factor=2.0, mode="nearest")
        output = self.head(self.fuse(merged)).float()
        return SegmentationOutput(output[:, 0], output[:, 1:])


def lane_map(batch: LaneBatch) -> Tensor:
    """(B, h, w): the lane that each pixel is of, the nearest if it is of several; -1 for none."""
    height, width = batch.images.shape[1:3]
    num_rows, device = batch.xs.shape[2], batch.xs.device
    y = (torch.arange(height // STRIDE, device=device) + 0.5) * STRIDE - 0.5
    row = (1 - y / height) * (num_rows - 1)
    below = row.floor().long().clamp(0, num_rows - 2)
    share = row - below
    xs = batch.xs[..., below] * (1 - share) + batch.xs[..., below + 1] * share  # (B, M, h)
    valid = batch.valid[..., below] & batch.valid[..., below + 1]
    slope = (batch.xs[..., below + 1] - batch.xs[..., below]).abs() * ((num_rows - 1) / height)
    # As wide as a pixel and a half, and as far as a slanted lane moves within the row.
    half = 0.75 * STRIDE + 0.5 * STRIDE * slope.clamp(max=8.0)
    x = (torch.arange(width // STRIDE, device=device) + 0.5) * STRIDE - 0.5
    away = (x - xs[..., None]).abs()  # (B, M, h, w)
    away = away.masked_fill(~(valid[..., None] & (away <= half[..., None])), torch.inf)
    nearest = away.min(dim=1)
    return torch.where(nearest.values.isfinite(), nearest.indices, -1)


def loss(output: SegmentationOutput, batch: LaneBatch, config: LaneModelConfig) -> Losses:
    """Cross entropy of the mask; vectors pulled to their lane's mean, means pushed apart."""
    lanes = lane_map(batch)
    mask = (lanes >= 0).float()
    weight = torch.tensor(_LANE_WEIGHT, device=mask.device)
    masked = functional.binary_cross_entropy_with_logits(output.logits, mask, pos_weight=weight)

    member = (lanes[:, None] == torch.arange(batch.xs.shape[1], device=lanes.device)[:, None, None]).float()
    member, vectors = member.flatten(2), output.embedding.flatten(2)  # (B, M, h*w), (B, E, h*w)
    counts = member.sum(2)
    means = torch.einsum("bmp,bep->bme", member, vectors) / counts.clamp(min=1)[..., None]
    # Of each pixel the mean of its own lane; pixels of no lane have no part in it.
    own = torch.einsum("bmp,bme->bep", member, means)
    stray = ((vectors - own).square().sum(1) + 1e-6).sqrt() - _PULL_DISTANCE
    spread = torch.einsum("bmp,bp->bm", member, stray.clamp(min=0).square()) / counts.clamp(min=1)
    there = counts > 0
    num_lanes = there.sum(1)
    pull = (spread.sum(1) / num_lanes.clamp(min=1)).mean()

    apart = ((means[:, :, None] - means[:, None]).square().sum(-1) + 1e-6).sqrt()
    pairs = there[:, :, None] & there[:, None] & ~torch.eye(means.shape[1], dtype=torch.bool, device=means.device)
    close = (_PUSH_DISTANCE - apart).clamp(min=0).square() * pairs
    push = (close.sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)).mean()
    return Losses({"mask": masked, "pull": pull, "push": push})


def decode(
    output: SegmentationOutput, geometries: tuple[Geometry, ...], config: LaneModelConfig
) -> list[LanePrediction]:
    """The clusters of the pixels that are more likely of a lane than not, each as a curve."""
    probabilities = output.logits.sigmoid().cpu().numpy()
    embeddings = output.embedding.cpu().numpy()
    predictions = []
    for probability, embedding, geometry in zip(probabilities, embeddings, geometries, strict=True):
        rows, columns = np.nonzero(probability > 0.5)
        weights, vectors = probability[rows, columns], embedding[:, rows, columns].T
        found: list[tuple[float, Lane]] = []
        for cluster in clusters(weights, vectors, config.max_lanes):
            lane = curve(rows[cluster], columns[cluster], weights[cluster])
            if lane is not None:
                found.append((float(weights[cluster].mean()), geometry.points_to_source(lane)))
        found.sort(key=lambda pair: -pair[0])
        predictions.append(LanePrediction(tuple(lane for _, lane in found), tuple(score for score, _ in found)))
    return predictions


def clusters(weights: NDArray[np.float32], vectors: NDArray[np.float32], most: int) -> list[NDArray[np.int64]]:
    """Pixels (P,) with vectors (P, E) → at most `most` groups of them, by mean shift from the surest pixel left."""
    left = np.arange(len(weights))
    groups: list[NDArray[np.int64]] = []
    while len(left) and len(groups) < most:
        centre = vectors[left[np.argmax(weights[left])]]
        near = np.zeros(len(left), dtype=bool)
        for _ in range(5):
            closer = ((vectors[left] - centre) ** 2).sum(1) < _CLUSTER_DISTANCE**2
            if not closer.any() or (closer == near).all():
                break
            near, centre = closer, vectors[left[closer]].mean(0)
        if not near.any():
            break
        if near.sum() >= _LEAST_PIXELS:
            groups.append(left[near])
        left = left[~near]
    return groups


def curve(rows: NDArray[np.int64], columns: NDArray[np.int64], weights: NDArray[np.float32]) -> Lane | None:
    """A cluster's mean place in each row, smoothed by a cubic, from bottom to top; None where it is too short."""
    mass = np.bincount(rows, weights)
    found = np.flatnonzero(mass)
    if len(found) < _LEAST_ROWS:
        return None
    x = (np.bincount(rows, weights * columns)[found] / mass[found] + 0.5) * STRIDE - 0.5
    y = (found + 0.5) * STRIDE - 0.5
    # Each row weighs the same: a slanted lane has more pixels in a row, not more certain ones.
    fit = np.polynomial.Polynomial.fit(y, x, min(3, len(found) - 2))
    every = (np.arange(found[0], found[-1] + 1)[::-1] + 0.5) * STRIDE - 0.5
    return np.stack([fit(every), every], axis=1)
