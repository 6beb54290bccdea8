"""Boxes and the points that predict them.

Boxes are half-open xyxy in float pixels, (..., 4). A point (..., 3) is the centre x, y of a cell of a
feature map and its stride. All in float32: bfloat16 resolves no more than 4 pixels at x = 1000.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIDES = (4, 8, 16)
"""Strides of the maps with a head. The points of a map follow each other row by row, the finest map first."""
LOG_SIZE_LIMIT = 6.0
"""A side is at most e^6 strides and at least e^-6."""


def grid_points(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """The N points of an input of `height` x `width` pixels, multiples of 16: (N, 3)."""
    levels = []
    for stride in STRIDES:
        y = (torch.arange(height // stride, device=device) + 0.5) * stride
        x = (torch.arange(width // stride, device=device) + 0.5) * stride
        y, x = torch.meshgrid(y, x, indexing="ij")
        levels.append(torch.stack([x, y, torch.full_like(x, stride)], dim=-1).flatten(0, 1))
    return torch.cat(levels)


def decode_boxes(offsets: Tensor, points: Tensor) -> Tensor:
    """Offsets (..., 4) of points (..., 3) → boxes: centre = point + t_xy * stride, size = exp(t_wh) * stride.

    Unlike distances to the four sides, these let a point outside a small box predict it.
    """
    offsets, stride = offsets.float(), points[..., 2:]
    centre = points[..., :2] + offsets[..., :2] * stride
    half = offsets[..., 2:].clamp(-LOG_SIZE_LIMIT, LOG_SIZE_LIMIT).exp() * (stride / 2)
    return torch.cat([centre - half, centre + half], dim=-1)


def encode_boxes(boxes: Tensor, points: Tensor) -> Tensor:
    """The inverse of `decode_boxes`; sizes beyond its limits, zero among them, are drawn to them."""
    stride = points[..., 2:]
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2
    size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0) / stride
    limits = torch.tensor([-LOG_SIZE_LIMIT, LOG_SIZE_LIMIT], device=boxes.device).exp()
    return torch.cat([(centre - points[..., :2]) / stride, size.clamp(limits[0], limits[1]).log()], dim=-1)


def box_areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


def box_iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU (Rezatofighi et al. 2019) of boxes that broadcast with each other: (...) twice.

    IoU is in [0, 1], the generalised one in (-1, 1]; both are finite for boxes without area.
    """
    overlap = box_areas(torch.cat([torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], -1))
    hull = box_areas(torch.cat([torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])], -1))
    union = box_areas(a) + box_areas(b) - overlap
    iou = overlap / union.clamp(min=1e-9)
    return iou, iou - (hull - union) / hull.clamp(min=1e-9)


def pairwise_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU of each of boxes (D, 4) with each of (E, 4): (D, E); 0 for two boxes without area."""
    # Coordinate by coordinate: a quarter of the memory of `box_iou`.
    width = torch.minimum(a[:, 2, None], b[:, 2]) - torch.maximum(a[:, 0, None], b[:, 0])
    height = torch.minimum(a[:, 3, None], b[:, 3]) - torch.maximum(a[:, 1, None], b[:, 1])
    overlap = width.clamp_(min=0) * height.clamp_(min=0)
    return overlap / (box_areas(a)[:, None] + box_areas(b) - overlap).clamp_(min=1e-9)
