"""What the sign network says → detections: scores, the best points of each stride, non-maximum suppression."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perception.model_config import SignModelConfig
from perception.models.sign import SignOutput
from perception.models.sign_boxes import STRIDES, box_areas, decode_boxes, grid_points, pairwise_iou

BLOCK_BOXES = 256
"""Boxes that non-maximum suppression takes at once: their IoUs with all others should fit the cache."""


class SignDetections(NamedTuple):
    """D signs of one image, the surest first."""

    boxes: Tensor
    """(D, 4) float32 half-open xyxy in input pixels, inside the image and not empty."""
    scores: Tensor
    """(D,) float32."""
    labels: Tensor
    """(D,) int64 class."""


@torch.no_grad()
def decode_signs(output: SignOutput, height: int, width: int, config: SignModelConfig) -> list[SignDetections]:
    """Detections in each of B input images of `height` x `width` pixels; a point gives its best class only.

    With `config.nms_class_agnostic` a detection suppresses those of any class, else those of its own.
    """
    grid = grid_points(height, width, output.objectness.device)
    limits = torch.tensor([width, height] * 2, device=grid.device)
    detections = []
    for objectness, classes, offsets in zip(*output, strict=True):
        points, scores, labels = _best_points(objectness.float().sigmoid(), classes, grid[:, 2], config)
        boxes = decode_boxes(offsets[points], grid[points]).clamp(min=0).minimum(limits)
        inside = box_areas(boxes) > 0
        boxes, scores, labels = boxes[inside], scores[inside], labels[inside]
        detections.append(without_duplicates(SignDetections(boxes, scores, labels), config))
    return detections


def without_duplicates(found: SignDetections, config: SignModelConfig) -> SignDetections:
    """Non-maximum suppression and the limit on their number."""
    boxes, scores, labels = found
    groups = torch.zeros_like(labels) if config.nms_class_agnostic else labels
    kept = suppress(boxes, scores, groups, config.nms_iou_threshold)[: config.max_detections]
    return SignDetections(boxes[kept], scores[kept], labels[kept])


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, iou_threshold: float) -> Tensor:
    """Non-maximum suppression: indices of the boxes (D, 4) that stay, best score first.

    A box falls if one of its group (D,) that stays has a higher score (of equals, a lower index) and an IoU
    with it above the threshold.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes, groups = boxes[order].float(), groups[order]
    stays = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for start in range(0, len(boxes), BLOCK_BOXES):
        block = slice(start, start + BLOCK_BOXES)
        beats = (pairwise_iou(boxes[block], boxes[start:]) > iou_threshold) & (groups[block, None] == groups[start:])
        beats.triu_(diagonal=1)
        left = own = stays[block].clone()
        # The whole block, again until nothing changes: greedy's result in few rounds (Cluster-NMS, Zheng et al. 2020).
        while True:
            still = left & ~(beats[:, : len(own)] & own[:, None]).any(dim=0)
            if torch.equal(still, own):
                break
            own = still
        stays[start:] &= ~(beats & own[:, None]).any(dim=0)
    return order[stays]


def _best_points(
    objectness: Tensor, classes: Tensor, strides: Tensor, config: SignModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, scores and labels of the surest points of one image, best first, so many of each stride at most."""
    # Objectness bounds the score: the classes of few points need be looked at.
    points = (objectness >= config.score_threshold).nonzero().squeeze(1)
    scores, labels = classes[points].float().sigmoid().max(dim=1)
    scores = objectness[points] * scores**config.class_score_power
    order = scores.argsort(descending=True, stable=True)
    points, scores, labels = points[order], scores[order], labels[order]
    of_stride = strides[points, None] == torch.tensor(STRIDES, device=points.device)
    among_best = of_stride & (of_stride.cumsum(dim=0) <= config.max_candidates_per_stride)
    kept = among_best.any(dim=1) & (scores >= config.score_threshold)
    return points[kept], scores[kept], labels[kept]
