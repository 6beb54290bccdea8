"""Losses of the sign detector: generalised IoU, offsets, objectness that foretells the IoU, class.

Shape letters as in `sign_targets`. Every loss is a mean over images of a per-image loss, so a batch split
over ranks, weighted by its number of images, has exactly the gradient of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from perception.losses import Losses
from perception.model_config import SignModelConfig
from perception.models.sign import SignOutput
from perception.models.sign_boxes import box_iou, decode_boxes, encode_boxes, grid_points
from perception.sign_targets import MAX_POINTS_PER_SIGN, SignTargets, assign_points, gather_labels, gather_points, mark


def quality_focal_loss(logits: Tensor, quality: Tensor) -> Tensor:
    """|q - sigma|^2 times the cross-entropy towards a quality q in [0, 1], elementwise (Li et al. 2020, beta = 2)."""
    cross_entropy = functional.binary_cross_entropy_with_logits(logits, quality, reduction="none")
    return (quality - logits.sigmoid()).square() * cross_entropy


def inside_any(points: Tensor, regions: Tensor) -> Tensor:
    """Which points (N, 3) lie in one of the regions (B, R, 4): (B, N) bool."""
    x, y = points[:, 0, None], points[:, 1, None]
    left, top, right, bottom = regions[:, None].unbind(dim=3)  # each (B, 1, R)
    return ((left <= x) & (x < right) & (top <= y) & (y < bottom)).any(dim=2)


def sign_losses(output: SignOutput, targets: SignTargets, config: SignModelConfig) -> Losses:
    """Terms box, offset, objectness and class of a batch; an image without signs has objectness only.

    A background point in an ignored region has no loss; a point that answers for a sign has, wherever it is. With
    `num_background_points` the class term has the surest of the other points too, whose right class is none.
    """
    grid = grid_points(targets.height, targets.width, output.offsets.device)
    boxes, points, chosen = assign_points(output, targets, grid, config)
    weights = chosen.float()
    num_chosen = weights.sum(dim=(1, 2))

    near_grid = grid[points]
    offsets = gather_points(output.offsets, points)
    target = boxes[:, :, None].expand(*points.shape, 4)
    iou, generalised_iou = box_iou(decode_boxes(offsets, near_grid), target)
    offset_errors = (offsets - encode_boxes(target, near_grid)).abs().sum(dim=3)

    logits = gather_points(output.classes, points).float()
    # Binary cross-entropy of every class, which is softplus(x) less x for the right one.
    class_errors = functional.softplus(logits).sum(dim=3) - gather_labels(logits, targets.labels)

    quality = mark(points, iou.detach() * weights, len(grid))
    answers = mark(points, weights, len(grid)) > 0
    silent = inside_any(grid, targets.ignored) & ~answers
    objectness = quality_focal_loss(output.objectness, quality).masked_fill(silent, 0.0).sum(dim=1)

    background_class = torch.zeros((), device=grid.device)
    if config.num_background_points:
        free = output.objectness.detach().masked_fill(answers | silent, -torch.inf)
        surest = free.topk(min(config.num_background_points, len(grid)), dim=1)
        errors = functional.softplus(gather_points(output.classes, surest.indices[:, None]).float()).sum(dim=3)
        background_class = (errors.squeeze(1) * surest.values.isfinite()).mean()

    def mean_over_chosen(values: Tensor) -> Tensor:
        return ((values * weights).sum(dim=(1, 2)) / num_chosen.clamp(min=1)).mean()

    return Losses(
        {
            "box": config.box_weight * mean_over_chosen(1 - generalised_iou),
            "offset": config.offset_weight * mean_over_chosen(offset_errors),
            # Not less than one well-learnt sign has: false alarms in an image without signs weigh no more.
            "objectness": config.objectness_weight * (objectness / num_chosen.clamp(min=MAX_POINTS_PER_SIGN)).mean(),
            "class": config.class_weight * (mean_over_chosen(class_errors) + background_class),
        }
    )
