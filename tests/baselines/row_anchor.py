"""A row-anchor classifier in the manner of UFLD (Qin et al. 2020): in which cell of each row is the lane of each slot.

Shape letters: B images, S slots, R rows (row 0 at the bottom), C cells across the image, M lanes of a batch.
A slot is a lane's place beside the middle of the image: what the slots cannot hold is not learnt, but counted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from perception.data.lane_targets import LaneBatch
from perception.data.sample import LanePrediction
from perception.geometry import Geometry
from perception.lane_decode import row_heights
from perception.losses import Losses
from perception.model_config import LaneModelConfig
from perception.models.resnet import ResNet, normalise

SLOTS_PER_SIDE = 4
NUM_SLOTS = 2 * SLOTS_PER_SIDE
NUM_CELLS = 64
ROW_STEP = 2
"""Of the rows that the targets have, every second one is an anchor."""
_POOLED_CHANNELS = 8
_HIDDEN = 256
_LOCATION_WEIGHT = 0.05
_SIMILARITY_WEIGHT = 0.2


class RowAnchorModel(nn.Module):
    """uint8 RGB images (B, H, W, 3) → logits (B, S, R, C + 1), the last of them for no lane.

    The fully connected layers fix the size of the input.
    """

    def __init__(self, config: LaneModelConfig) -> None:
        super().__init__()
        self.num_rows = -(-config.num_rows // ROW_STEP)
        cells = (config.input_height // 32) * (config.input_width // 32)
        self.backbone = ResNet(config.backbone_widths, config.backbone_blocks, config.stem)
        self.pool = nn.Conv2d(config.backbone_widths[-1], _POOLED_CHANNELS, 1)
        self.classify = nn.Sequential(
            nn.Linear(_POOLED_CHANNELS * cells, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, NUM_SLOTS * self.num_rows * (NUM_CELLS + 1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.backbone(normalise(images))[-1])
        logits: Tensor = self.classify(pooled.flatten(1)).float()
        return logits.unflatten(1, (NUM_SLOTS, self.num_rows, NUM_CELLS + 1))


def lane_slots(batch: LaneBatch) -> tuple[NDArray[np.int64], int]:
    """Which lane is in each slot (B, S), -1 for none, and how many lanes have no slot.

    Slots are filled from the middle of the image outwards, by where a lane meets the bottom edge.
    """
    middle = (batch.images.shape[2] - 1) / 2
    slots = np.full((len(batch), NUM_SLOTS), -1)
    num_lost = 0
    bottoms, present = batch.xs[:, :, 0].cpu().numpy(), batch.present.cpu().numpy()
    for image, (bottom, there) in enumerate(zip(bottoms, present, strict=True)):
        lanes = np.flatnonzero(there)
        lanes = lanes[np.argsort(bottom[lanes], kind="stable")]
        left, right = lanes[bottom[lanes] < middle][::-1], lanes[bottom[lanes] >= middle]
        for nearest, step, side in ((SLOTS_PER_SIDE - 1, -1, left), (SLOTS_PER_SIDE, 1, right)):
            for place, lane in enumerate(side[:SLOTS_PER_SIDE]):
                slots[image, nearest + step * place] = lane
            num_lost += max(0, len(side) - SLOTS_PER_SIDE)
    return slots, num_lost


def count_lost(batch: LaneBatch) -> LaneBatch:
    """The batch with the lanes that have no slot among those left out."""
    return replace(batch, num_left_out=batch.num_left_out + lane_slots(batch)[1])


def targets(batch: LaneBatch) -> tuple[Tensor, Tensor]:
    """Of each slot and row the position in cells (B, S, R), and whether the lane is there."""
    slots = torch.from_numpy(lane_slots(batch)[0]).to(batch.xs.device)
    lanes = slots.clamp(min=0)[:, :, None].expand(-1, -1, batch.xs.shape[2])
    xs, valid = batch.xs.gather(1, lanes)[..., ::ROW_STEP], batch.valid.gather(1, lanes)[..., ::ROW_STEP]
    width = batch.images.shape[2]
    inside = (xs >= -0.5) & (xs < width - 0.5)
    return (xs + 0.5) * (NUM_CELLS / width), valid & inside & (slots >= 0)[:, :, None]


def loss(output: Tensor, batch: LaneBatch, config: LaneModelConfig) -> Losses:
    """Classification of cells; the mean place; neighbouring rows alike."""
    places, there = targets(batch)
    cells = torch.where(there, places.floor().long().clamp(0, NUM_CELLS - 1), NUM_CELLS)
    classes = functional.cross_entropy(output.flatten(0, 2), cells.flatten())
    error = functional.smooth_l1_loss(mean_places(output), places, reduction="none") * there
    # A mean of images' means, as everywhere in this loop: shares of a batch then add up to the whole.
    location = (error.sum((1, 2)) / there.sum((1, 2)).clamp(min=1)).mean()
    similarity = (output[:, :, 1:] - output[:, :, :-1]).abs().mean()
    return Losses(
        {"class": classes, "location": _LOCATION_WEIGHT * location, "similarity": _SIMILARITY_WEIGHT * similarity}
    )


def mean_places(output: Tensor) -> Tensor:
    """Expected position in cells if there is a lane, (B, S, R)."""
    centres = torch.arange(NUM_CELLS, device=output.device) + 0.5
    return (output[..., :NUM_CELLS].softmax(-1) * centres).sum(-1)


def decode(output: Tensor, geometries: tuple[Geometry, ...], config: LaneModelConfig) -> list[LanePrediction]:
    """A lane for each slot that has at least two rows at which a cell beats "no lane"."""
    probabilities = output.softmax(-1)
    there = (output.argmax(-1) < NUM_CELLS).cpu().numpy()
    present = (1 - probabilities[..., NUM_CELLS]).cpu().numpy()
    places = mean_places(output).cpu().numpy().astype(np.float64)
    heights = row_heights(config.num_rows, config.input_height)[::ROW_STEP]
    predictions = []
    for image, geometry in enumerate(geometries):
        found = []
        for slot in range(NUM_SLOTS):
            rows = np.flatnonzero(there[image, slot])
            if len(rows) >= 2:
                x = places[image, slot, rows] * (config.input_width / NUM_CELLS) - 0.5
                lane = geometry.points_to_source(np.stack([x, heights[rows]], axis=1))
                found.append((float(present[image, slot, rows].mean()), lane))
        found.sort(key=lambda pair: -pair[0])
        predictions.append(LanePrediction(tuple(lane for _, lane in found), tuple(score for score, _ in found)))
    return predictions
