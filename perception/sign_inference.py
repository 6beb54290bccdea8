"""Signs in an image of any size, at its own resolution: as a whole, or in tiles that overlap."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from perception.data.signs.sample import SignPrediction
from perception.model_config import SignModelConfig
from perception.models.sign import SignOutput
from perception.models.sign_decode import SignDetections, decode_signs, without_duplicates
from perception.tiling import PADDING, padded_length, tile_starts

CUT_PIXELS = 2.0
"""A box that comes so near to an inner side of its tile is taken to be cut by it."""


@torch.no_grad()
def find_signs(model: nn.Module, image: Tensor, config: SignModelConfig) -> SignPrediction:
    """Predict on one image (H, W, 3) uint8 RGB. No other image takes part, so batches change nothing."""
    height, width = image.shape[:2]
    tile, overlap = config.tile_size, config.tile_overlap
    rows, columns = tile_starts(height, tile, overlap), tile_starts(width, tile, overlap)
    if len(rows) == len(columns) == 1:
        found = _in_tile(model, image, config)
    else:
        parts = []
        for top in rows:
            for left in columns:
                part = _in_tile(model, image[top : top + tile, left : left + tile], config)
                parts.append(_whole_ones(part, top, left, tile, height, width, overlap))
        found = without_duplicates(SignDetections(*(torch.cat(values) for values in zip(*parts, strict=True))), config)
    return SignPrediction(
        found.boxes.cpu().numpy().astype(np.float64),
        found.scores.cpu().numpy().astype(np.float64),
        found.labels.cpu().numpy(),
    )


def _in_tile(model: nn.Module, image: Tensor, config: SignModelConfig) -> SignDetections:
    height, width = image.shape[:2]
    padded_height, padded_width = padded_length(height), padded_length(width)
    padded = image.new_full((padded_height, padded_width, 3), PADDING)
    padded[:height, :width] = image
    output: SignOutput = model(padded[None])
    (found,) = decode_signs(output, padded_height, padded_width, config)
    boxes = found.boxes.minimum(torch.tensor([width, height] * 2, device=image.device))
    inside = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    return SignDetections(boxes[inside], found.scores[inside], found.labels[inside])


def _whole_ones(
    found: SignDetections, top: int, left: int, tile: int, height: int, width: int, overlap: int
) -> SignDetections:
    """In pixels of the image, without what an inner side of the tile cuts: another tile holds the whole of it.

    Of signs larger than the overlap that is not sure: they stay.
    """
    boxes = found.boxes
    cut = torch.zeros(len(boxes), dtype=torch.bool, device=boxes.device)
    for axis, (start, length) in enumerate(((left, width), (top, height))):
        small = boxes[:, axis + 2] - boxes[:, axis] < overlap - CUT_PIXELS
        if start > 0:
            cut |= small & (boxes[:, axis] < CUT_PIXELS)
        if start + tile < length:
            cut |= small & (boxes[:, axis + 2] > tile - CUT_PIXELS)
    moved = boxes + torch.tensor([left, top] * 2, device=boxes.device)
    return SignDetections(moved[~cut], found.scores[~cut], found.labels[~cut])
