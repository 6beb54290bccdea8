"""From images to the sign network's inputs and from its tensors to signs, in NumPy alone: what runs outside an
exported file.

The same as perception.sign_inference and perception.models.sign_decode with torch, to which tests hold it.
Letters: N points of all maps, C classes, D detections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perception.data.signs.sample import SignPrediction
from perception.model_config import SignModelConfig
from perception.tiling import PADDING, padded_length, tile_starts

SIGN_OUTPUTS = ("objectness", "classes", "offsets")
"""The exported network's outputs, in their order; shapes (B, N), (B, N, C), (B, N, 4), float32."""
STRIDES = (4, 8, 16)
"""Strides of the maps whose points predict, the finest first."""

_LOG_SIZE_LIMIT = 6.0
_CUT_PIXELS = 2.0

Floats = NDArray[np.float32]


class Detections(NamedTuple):
    """D signs, the surest first."""

    boxes: Floats
    """(D, 4) half-open xyxy."""
    scores: Floats
    labels: NDArray[np.int64]

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Detections:
        return Detections(self.boxes[chosen], self.scores[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Tiles:
    """How an image of `height` x `width` is laid out over inputs of the network."""

    height: int
    width: int
    tile_height: int
    tile_width: int
    """The most of the image that an input holds."""
    input_height: int
    input_width: int
    """Of every input: what is left beside the image is grey."""
    overlap: int
    """Pixels that neighbours share at least, 0 where there is one tile only."""

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Top and left of each tile, row by row."""
        rows = tile_starts(self.height, self.tile_height, self.overlap)
        columns = tile_starts(self.width, self.tile_width, self.overlap)
        return [(top, left) for top in rows for left in columns]

    def inputs(self, image: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        """(input_height, input_width, 3) of each tile of the image (height, width, 3)."""
        for top, left in self.corners:
            part = image[top : top + self.tile_height, left : left + self.tile_width]
            padded = np.full((self.input_height, self.input_width, 3), PADDING, np.uint8)
            padded[: part.shape[0], : part.shape[1]] = part
            yield padded


def lay_out(height: int, width: int, model: SignModelConfig, fixed_size: tuple[int, int] | None) -> Tiles:
    """The tiles of an image. At its own resolution in any case.

    A network that takes any size gets the image as a whole, or in tiles of `model.tile_size`. One of a fixed size
    (height, width) gets tiles of that size; they overlap by `model.tile_overlap`, at most by half a tile.
    """
    if fixed_size is not None:
        overlap = min(model.tile_overlap, min(fixed_size) // 2)
        return Tiles(height, width, *fixed_size, *fixed_size, overlap)
    tile_height, tile_width = (min(length, model.tile_size or length) for length in (height, width))
    sides = padded_length(tile_height), padded_length(tile_width)
    return Tiles(height, width, tile_height, tile_width, *sides, model.tile_overlap)


def decode_image(outputs: Sequence[Sequence[Floats]], tiles: Tiles, model: SignModelConfig) -> SignPrediction:
    """What the network says of each tile, `SIGN_OUTPUTS` without the batch dimension → signs in original pixels.

    1. Each tile by itself is decoded by `decode_signs`, then clipped to the image.
    2. A detection that an inner side of its tile cuts goes, since another tile holds the whole sign; not so one that
       is larger than the overlap.
    3. What all tiles found goes through `without_duplicates` once more.
    """
    corners = tiles.corners
    parts = []
    for (top, left), (objectness, classes, offsets) in zip(corners, outputs, strict=True):
        found = decode_signs(objectness, classes, offsets, tiles.input_height, tiles.input_width, model)
        height, width = min(tiles.tile_height, tiles.height - top), min(tiles.tile_width, tiles.width - left)
        boxes = np.minimum(found.boxes, np.array([width, height] * 2, np.float32))
        inside = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
        clipped = Detections(boxes, found.scores, found.labels).where(inside)
        parts.append(clipped if len(corners) == 1 else _whole_ones(clipped, top, left, tiles))
    found = parts[0]
    if len(parts) > 1:
        found = without_duplicates(Detections(*(np.concatenate(values) for values in zip(*parts, strict=True))), model)
    return SignPrediction(found.boxes.astype(np.float64), found.scores.astype(np.float64), found.labels)


def decode_signs(
    objectness: Floats, classes: Floats, offsets: Floats, height: int, width: int, model: SignModelConfig
) -> Detections:
    """One input's outputs (N,), (N, C), (N, 4) → its signs, in its pixels; it is `height` x `width`.

    1. A point's class is its best one, its score sigmoid(objectness) · sigmoid(class) ^ `class_score_power`; those
       under `score_threshold` go, and of each stride those behind the `max_candidates_per_stride` best.
    2. Its box has the centre point + offset_xy · stride and the size e ^ offset_wh · stride, the exponent within ±6;
       boxes are clipped to the input, those without area go.
    3. `without_duplicates`.

    Points lie at the centres of the cells of maps of stride 4, 8 and 16, row by row, the finest map first.
    """
    grid = _grid_points(height, width)
    sure = _sigmoid(objectness)
    points = np.flatnonzero(sure >= model.score_threshold)
    every = _sigmoid(classes[points])
    labels = every.argmax(axis=1) if len(points) else np.zeros(0, np.int64)
    best = every[np.arange(len(points)), labels]
    scores = sure[points] * best ** np.float32(model.class_score_power)
    order = np.argsort(-scores, kind="stable")
    among_best = np.zeros(len(points), bool)
    for stride in STRIDES:
        among_best[order[grid[points[order], 2] == stride][: model.max_candidates_per_stride]] = True
    order = order[among_best[order] & (scores[order] >= model.score_threshold)]
    points = points[order]
    boxes = _boxes(offsets[points], grid[points])
    boxes = np.minimum(np.maximum(boxes, 0), np.array([width, height] * 2, np.float32))
    found = Detections(boxes, scores[order], labels[order].astype(np.int64))
    return without_duplicates(found.where(_areas(boxes) > 0), model)


def without_duplicates(found: Detections, model: SignModelConfig) -> Detections:
    """Non-maximum suppression, surest first, until there are `max_detections`.

    A detection goes whose IoU with one kept before is above `nms_iou_threshold`: one of any class with
    `nms_class_agnostic`, else one of its own. Of equal scores the one that comes first is kept.
    """
    order = np.argsort(-found.scores, kind="stable")
    boxes, labels = found.boxes[order], found.labels[order]
    areas = _areas(boxes)
    stays = np.ones(len(order), bool)
    kept: list[int] = []
    for index in range(len(order)):
        if len(kept) == model.max_detections:
            break
        if not stays[index]:
            continue
        kept.append(index)
        later = slice(index + 1, None)
        falls = _iou(boxes[index], areas[index], boxes[later], areas[later]) > model.nms_iou_threshold
        if not model.nms_class_agnostic:
            falls &= labels[later] == labels[index]
        stays[later] &= ~falls
    return found.where(order[np.array(kept, np.int64)])


@lru_cache(maxsize=8)
def _grid_points(height: int, width: int) -> Floats:
    """(N, 3): x, y and stride of each point."""
    levels = []
    for stride in STRIDES:
        y, x = np.meshgrid(np.arange(height // stride), np.arange(width // stride), indexing="ij")
        centres = [(axis.astype(np.float32) + 0.5) * stride for axis in (x, y)]
        levels.append(np.stack([*centres, np.full_like(centres[0], stride)], axis=-1).reshape(-1, 3))
    points: Floats = np.concatenate(levels)
    points.setflags(write=False)
    return points


def _boxes(offsets: Floats, points: Floats) -> Floats:
    stride = points[:, 2:]
    centre = points[:, :2] + offsets[:, :2] * stride
    half = np.exp(offsets[:, 2:].clip(-_LOG_SIZE_LIMIT, _LOG_SIZE_LIMIT)) * (stride / 2)
    return np.concatenate([centre - half, centre + half], axis=1)


def _whole_ones(found: Detections, top: int, left: int, tiles: Tiles) -> Detections:
    """In pixels of the image, without what an inner side of the tile cuts."""
    boxes = found.boxes
    cut = np.zeros(len(boxes), bool)
    sides = ((left, tiles.tile_width, tiles.width), (top, tiles.tile_height, tiles.height))
    for axis, (start, tile, length) in enumerate(sides):
        small = boxes[:, axis + 2] - boxes[:, axis] < tiles.overlap - _CUT_PIXELS
        if start > 0:
            cut |= small & (boxes[:, axis] < _CUT_PIXELS)
        if start + tile < length:
            cut |= small & (boxes[:, axis + 2] > tile - _CUT_PIXELS)
    moved = boxes + np.array([left, top] * 2, np.float32)
    return Detections(moved, found.scores, found.labels).where(~cut)


def _iou(box: Floats, area: np.float32, others: Floats, areas: Floats) -> Floats:
    """IoU of one box (4,) with others (D, 4); 0 for two boxes without area."""
    width = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
    height = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
    overlap = width.clip(0) * height.clip(0)
    union = np.maximum(area + areas - overlap, np.float32(1e-9))
    return np.asarray(overlap / union, np.float32)


def _areas(boxes: Floats) -> Floats:
    return np.asarray((boxes[:, 2:] - boxes[:, :2]).clip(0).prod(axis=1), np.float32)


def _sigmoid(x: Floats) -> Floats:
    # tanh does not overflow where exp would.
    return (0.5 + 0.5 * np.tanh(0.5 * x.astype(np.float64))).astype(np.float32)
