"""Losses of the lane detector and the assignment of proposals to lanes.

Shape letters: B images, P proposals, M lanes (padded), N rows. Every loss is a mean over
images of a per-image loss, so a batch split over ranks, weighted by its number of images,
has exactly the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from perception.data.lane_targets import LaneBatch
from perception.model_config import LaneModelConfig
from perception.models.lane import LaneOutput

COST_HALF_WIDTH_FRACTION = 30 / 800
"""Half the width of a lane in the assignment's cost, as a share of the input width: wide, so that distant
proposals differ too. That of the loss is a setting."""
LEVEL_WEIGHTS = (0.2, 0.2, 1.0)
"""Weights of the angle loss at strides 8, 16 and 32."""


@dataclass(frozen=True)
class Losses:
    """Named scalar terms, already weighted; `total` is their sum and carries the gradient."""

    terms: dict[str, Tensor]
    of_images: Tensor | None = None
    """(B,) the total of each image, without gradient, by which scenes are told to be hard; None: not known."""

    @property
    def total(self) -> Tensor:
        return torch.stack(list(self.terms.values())).sum()


def focal_terms(logits: Tensor, alpha: float = 0.5, gamma: float = 2.0) -> tuple[Tensor, Tensor]:
    """Focal loss of each logit if it were a lane, and if it were none (Lin et al. 2017)."""
    probability = logits.sigmoid()
    positive = alpha * (1 - probability) ** gamma * functional.softplus(-logits)
    negative = (1 - alpha) * probability**gamma * functional.softplus(logits)
    return positive, negative


def half_widths(xs: Tensor, spacing: Tensor | float, half_width: float) -> Tensor:
    """Half the horizontal extent of a lane of constant width, at each row (..., N).

    A leaning lane is cut slantwise by a row, so it is wider there by sqrt(dx^2 + dy^2) / dy, with dx over
    two rows (LaneIoU, Honda and Uchida 2023). `spacing` is the distance of two rows in
    the unit of x once the original image's aspect is restored; it broadcasts with (..., N).
    """
    centred = (xs[..., 2:] - xs[..., :-2]) / 2
    slope = torch.cat([centred[..., :1], centred, centred[..., -1:]], dim=-1) / spacing
    return half_width * (1 + slope.square()).sqrt()


def lane_iou(xs_a: Tensor, xs_b: Tensor, half_a: Tensor, half_b: Tensor, rows: Tensor) -> Tensor:
    """IoU of lanes as bands over `rows` (..., N) bool: 1 for the same, below 0 for disjoint ones.

    The overlap is not clamped, so lanes apart still attract each other. 0 where no row is set.
    """
    overlap = torch.minimum(xs_a + half_a, xs_b + half_b) - torch.maximum(xs_a - half_a, xs_b - half_b)
    # The union reaches from the leftmost edge to the rightmost, so the two add up to both widths.
    union = 2 * (half_a + half_b) - overlap
    weights = rows.to(overlap.dtype)
    return (overlap * weights).sum(-1) / (union * weights).sum(-1).clamp(min=1e-6)


@torch.no_grad()
def assign_lanes(output: LaneOutput, batch: LaneBatch, spacing: Tensor, config: LaneModelConfig) -> Tensor:
    """Choose the proposals that answer for each lane (dynamic top-k of SimOTA, Ge et al. 2021).

    `spacing` (B, 1, 1) is that of `half_widths`. Returns for each proposal the lane it answers
    for, -1 for none: (B, P) int64.
    """
    width = batch.images.shape[2]
    slants = half_widths(output.xs, spacing, 1.0)[:, None]  # (B, 1, P, N)
    target_slants = half_widths(batch.xs, spacing, 1.0)[:, :, None]  # (B, M, 1, N)
    xs, target_xs, rows = output.xs[:, None], batch.xs[:, :, None], batch.valid[:, :, None]

    def iou(half_width: float) -> Tensor:
        return lane_iou(xs, target_xs, slants * half_width, target_slants * half_width, rows)  # (B, M, P)

    lanes = batch.present[:, :, None]
    gap = (1 - iou(COST_HALF_WIDTH_FRACTION * width)).masked_fill(~lanes, 0)
    # Relative to the worst gap: that is never negative, while the best IoU may well be.
    similarity = 1 - gap / gap.amax(dim=(1, 2), keepdim=True).clamp(min=1e-6) + 0.01
    positive, negative = focal_terms(output.logits)
    cost = (positive - negative)[:, None] - config.assignment_lambda * similarity

    fits = iou(config.iou_half_width_fraction * width).clamp(min=0)
    candidates = fits.topk(min(config.assignment_candidates, fits.shape[2]), dim=2).values
    num_chosen = candidates.sum(dim=2).int().clamp(min=1)
    # Stable: equal costs must not be broken differently on another device or run.
    rank = cost.argsort(dim=2, stable=True).argsort(dim=2)
    chosen = (rank < num_chosen[:, :, None]) & lanes
    # A proposal wanted by several lanes goes to the one it costs least.
    cheapest = cost.masked_fill(~chosen, torch.inf).argmin(dim=1)
    return torch.where(chosen.any(dim=1), cheapest, -1)


def lane_losses(output: LaneOutput, batch: LaneBatch, config: LaneModelConfig) -> Losses:
    """Terms class, iou, extent and angle of a batch; an image without lanes contributes to the class term only."""
    height, width = batch.images.shape[1:3]
    spacing = (height / (config.num_rows - 1) / batch.aspect)[:, None, None]
    assigned = assign_lanes(output, batch, spacing, config)
    matched = assigned >= 0
    weights = matched.float()
    num_matched = weights.sum(1).clamp(min=1)
    num_lanes = batch.present.sum(1).clamp(min=1)

    positive, negative = focal_terms(output.logits)
    class_loss = torch.where(matched, positive, negative).sum(1) / num_lanes

    lane = assigned.clamp(min=0)
    rows = lane[:, :, None].expand(-1, -1, config.num_rows)
    target_xs, target_valid = batch.xs.gather(1, rows), batch.valid.gather(1, rows)
    half_width = config.iou_half_width_fraction * width
    iou = lane_iou(
        output.xs,
        target_xs,
        half_widths(output.xs.detach(), spacing, half_width),
        half_widths(target_xs, spacing, half_width),
        target_valid,
    )
    iou_loss = ((1 - iou) * weights).sum(1) / num_matched

    start_error = output.start - batch.start.gather(1, lane)
    # The lane's end should stay where it is: what the start comes late, the length must give up.
    length_error = output.length - (batch.length.gather(1, lane) - start_error.detach())
    errors = torch.stack([start_error, length_error])
    extent = functional.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none").mean(0)
    extent_loss = (extent * weights).sum(1) / num_matched

    angle_losses = [
        level_weight * masked_l1(predicted, target)
        for level_weight, predicted, target in zip(LEVEL_WEIGHTS, output.angles, batch.angles, strict=True)
    ]
    return mean_losses(
        {
            "class": (config.class_weight, class_loss),
            "iou": (config.iou_weight, iou_loss),
            "extent": (config.extent_weight, extent_loss),
            "angle": (config.angle_weight, torch.stack(angle_losses).sum(0)),
        }
    )


def mean_losses(weighted: Mapping[str, tuple[float, Tensor]]) -> Losses:
    """Losses of a batch from a weight and (B,) values of its images for each term."""
    with torch.no_grad():
        of_images = torch.stack([weight * values.float() for weight, values in weighted.values()]).sum(0)
    return Losses({name: weight * values.mean() for name, (weight, values) in weighted.items()}, of_images)


def masked_l1(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean |error| of each image over the cells whose target is not 0: (B, h, w) twice → (B,)."""
    mask = (target > 0).float()
    return ((predicted - target).abs() * mask).sum((1, 2)) / mask.sum((1, 2)).clamp(min=1)
