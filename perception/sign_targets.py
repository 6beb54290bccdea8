"""Signs of a batch, and which points of the network answer for each (SimOTA, Ge et al. 2021).

Shape letters: B images, M signs of the fullest image, N points, K points near a sign, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from perception.model_config import SignModelConfig
from perception.models.sign import SignOutput
from perception.models.sign_boxes import STRIDES, box_areas, box_iou, decode_boxes

RADIUS_STRIDES = 1.5
"""A point is near a sign if both its coordinates are within this of the sign's centre."""
MAX_POINTS_PER_SIGN = 10


@dataclass(frozen=True)
class SignTargets:
    """Signs of B images in input pixels, padded to the M signs and R ignored regions of the fullest image.

    M and R are at least 1: a batch without signs runs through the same operations as any other.
    """

    boxes: Tensor
    """(B, M, 4) float32 half-open xyxy; 0 in padding. They may leave the image."""
    labels: Tensor
    """(B, M) int64 class; -1 in padding."""
    ignored: Tensor
    """(B, R, 4) float32 boxes in which what is not labelled teaches nothing; 0 in padding."""
    height: int
    """Of the input, in pixels, as is `width`."""
    width: int

    def __len__(self) -> int:
        return len(self.boxes)

    def to(self, device: torch.device) -> SignTargets:
        boxes, labels, ignored = (x.to(device, non_blocking=True) for x in (self.boxes, self.labels, self.ignored))
        return SignTargets(boxes, labels, ignored, self.height, self.width)

    def pin_memory(self) -> SignTargets:
        boxes, labels, ignored = (x.pin_memory() for x in (self.boxes, self.labels, self.ignored))
        return SignTargets(boxes, labels, ignored, self.height, self.width)


def pad_targets(
    boxes: Sequence[Tensor], labels: Sequence[Tensor], ignored: Sequence[Tensor], height: int, width: int
) -> SignTargets:
    """Put images together: boxes (m, 4), labels (m,) and ignored regions (r, 4) of each.

    Raises ValueError where an image has not as many labels as boxes, or a negative label.
    """
    for index, (image_boxes, image_labels) in enumerate(zip(boxes, labels, strict=True)):
        if len(image_boxes) != len(image_labels):
            raise ValueError(f"image {index} has {len(image_boxes)} boxes and {len(image_labels)} labels")
        if len(image_labels) and image_labels.min() < 0:
            raise ValueError(f"image {index} has the label {int(image_labels.min())}: they count from 0")

    def padded(parts: Sequence[Tensor], row_shape: tuple[int, ...], dtype: torch.dtype, filling: float) -> Tensor:
        rows = max([1, *(len(part) for part in parts)])
        out = torch.full((len(parts), rows, *row_shape), filling, dtype=dtype)
        for index, part in enumerate(parts):
            out[index, : len(part)] = part.reshape(-1, *row_shape)
        return out

    return SignTargets(
        padded(boxes, (4,), torch.float32, 0.0),
        padded(labels, (), torch.int64, -1),
        padded(ignored, (4,), torch.float32, 0.0),
        height,
        width,
    )


class Assignment(NamedTuple):
    """For each sign the points near it and which of them answer for it; a point answers for one sign at most."""

    boxes: Tensor
    """(B, M, 4) the signs' boxes, clipped to the image; 0 where there is none to learn."""
    points: Tensor
    """(B, M, K) int64, an index among the N points."""
    chosen: Tensor
    """(B, M, K) bool."""


@torch.no_grad()
def assign_points(output: SignOutput, targets: SignTargets, grid: Tensor, config: SignModelConfig) -> Assignment:
    """Choose the points that answer for each sign, in float32, in a way that no order of execution changes.

    `grid` (N, 3) is that of `grid_points`. A sign without area inside the image gets none. Any other
    gets at least one, unless all points near it answer for other signs.
    """
    limits = torch.tensor([targets.width, targets.height] * 2, device=targets.boxes.device)
    clipped = targets.boxes.clamp(min=0).minimum(limits)
    present = (targets.labels >= 0) & (box_areas(clipped) > 0)
    boxes = torch.where(present[..., None], clipped, 0.0)
    points, near = near_points((boxes[..., :2] + boxes[..., 2:]) / 2, targets.height, targets.width)
    near &= present[..., None]

    iou, cost = _iou_and_cost(output, targets.labels, boxes, points, grid, config)
    # A diverged network must not end the run here; the loss will tell.
    iou = iou.nan_to_num(0.0).masked_fill(~near, 0.0)
    cost = cost.nan_to_num(1e6)
    num_points = iou.topk(MAX_POINTS_PER_SIGN, dim=2).values.sum(dim=2).int().clamp(min=1)
    # Stable: equal costs must not be broken differently on another device or run.
    rank = cost.masked_fill(~near, torch.inf).argsort(dim=2, stable=True).argsort(dim=2)
    chosen = _settle(near & (rank < num_points[..., None]), cost, points, len(grid))
    while True:
        # A sign that lost all its points to others takes the best free one.
        taken = gather_points(mark(points, chosen.float(), len(grid)), points) > 0
        free = near & ~taken & ~chosen.any(dim=2, keepdim=True)
        if not free.any():
            return Assignment(boxes, points, chosen)
        best = cost.masked_fill(~free, torch.inf).argmin(dim=2)
        wanted = free & functional.one_hot(best, free.shape[2]).bool()
        chosen |= _settle(wanted, cost, points, len(grid))


def near_points(centres: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Points within RADIUS_STRIDES of centres (B, M, 2), in x and in y: indices (B, M, K) and whether they are.

    K = 27: at each stride the 3x3 cells around the centre, which are all that can be so near.
    """
    steps = torch.arange(-1, 2, device=centres.device)
    all_points, all_near, first = [], [], 0
    for stride in STRIDES:
        rows, columns = height // stride, width // stride
        cells = (centres / stride).floor().long()[..., None] + steps  # (B, M, 2, 3)
        distances = ((cells + 0.5) * stride - centres[..., None]).abs()
        size = torch.tensor([columns, rows], device=centres.device)[:, None]
        near = (distances < RADIUS_STRIDES * stride) & (cells >= 0) & (cells < size)
        column, row = cells.clamp(min=0).minimum(size - 1).unbind(dim=2)
        all_points.append((first + row[..., :, None] * columns + column[..., None, :]).flatten(2))
        all_near.append((near[:, :, 1, :, None] & near[:, :, 0, None, :]).flatten(2))
        first += rows * columns
    return torch.cat(all_points, dim=2), torch.cat(all_near, dim=2)


def gather_points(values: Tensor, points: Tensor) -> Tensor:
    """Values (B, N) or (B, N, D) at points (B, M, K): (B, M, K) or (B, M, K, D)."""
    # By whole rows of the flattened batch: the gradient of `gather` takes several times as long.
    first = torch.arange(len(values), device=points.device)[:, None, None] * values.shape[1]
    rows = values.flatten(0, 1).index_select(0, (first + points).flatten())
    return rows.reshape(*points.shape, *values.shape[2:])


def gather_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Of values (B, M, K, C) those of the signs' classes (B, M), anything in padding: (B, M, K)."""
    index = labels.clamp(min=0)[:, :, None, None].expand(-1, -1, values.shape[2], 1)
    return values.gather(3, index).squeeze(3)


def mark(points: Tensor, values: Tensor, num_points: int) -> Tensor:
    """Of values (B, M, K) at points (B, M, K) the largest at each point, 0 where there is none: (B, N)."""
    empty = torch.zeros(len(points), num_points, device=points.device)
    return empty.scatter_reduce(1, points.flatten(1), values.flatten(1), "amax")


def _iou_and_cost(
    output: SignOutput, labels: Tensor, boxes: Tensor, points: Tensor, grid: Tensor, config: SignModelConfig
) -> tuple[Tensor, Tensor]:
    """IoU of what each near point predicts with its sign, and the cost of choosing it: (B, M, K) twice."""
    predicted = decode_boxes(gather_points(output.offsets, points), grid[points])
    iou, _ = box_iou(predicted, boxes[:, :, None])
    objectness = gather_points(output.objectness, points).float().sigmoid()
    scores = (gather_points(output.classes, points).float().sigmoid() * objectness[..., None]).sqrt()
    scores = scores.clamp(1e-6, 1 - 1e-6)
    own = gather_labels(scores, labels)
    wrong_class = -torch.log1p(-scores).sum(dim=3) + torch.log1p(-own) - own.log()
    return iou, wrong_class - config.iou_cost_weight * (iou + 1e-8).log()


def _settle(wanted: Tensor, cost: Tensor, points: Tensor, num_points: int) -> Tensor:
    """Of signs that want the same point leave it to the one it costs least, the first of equals: (B, M, K) bool."""
    index = points.flatten(1)

    def least(values: Tensor, filling: float) -> Tensor:
        start = torch.full((len(points), num_points), filling, device=values.device)
        return start.scatter_reduce(1, index, values.flatten(1), "amin").gather(1, index).view_as(values)

    price = cost.masked_fill(~wanted, torch.inf)
    cheapest = wanted & (price == least(price, torch.inf))
    order = torch.arange(points.shape[1], device=points.device, dtype=torch.float32)[None, :, None]
    order = order.expand_as(price).masked_fill(~cheapest, torch.inf)
    return cheapest & (order == least(order, torch.inf))
