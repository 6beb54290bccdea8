"""Lanes in original pixels ↔ what the network learns: x at fixed rows, an extent, directions per cell.

Letters: B images, M lanes of the fullest image, N rows (row 0 at the bottom).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from perception.data.sample import Lane, LaneTruth
from perception.geometry import Geometry
from perception.lane_decode import row_heights

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SampleKey:
    """All that a sample's random draws depend on, besides the run's seed."""

    epoch: int
    index: int
    repeat: int = 0
    """How often the epoch has held this sample before, where it holds some more than once."""


@dataclass(frozen=True)
class LaneTargets:
    """Targets of one image with M lanes; x in input pixels."""

    xs: Floats
    """(M, N) x of each row; where the lane is not labelled its ends go on straight."""
    valid: NDArray[np.bool_]
    """(M, N) rows on which the lane is labelled and inside the image, or the first ones past that."""
    start: Floats
    """(M,) first valid row."""
    length: Floats
    """(M,) rows from the first to the last valid one."""
    angles: tuple[Floats, ...]
    """A level each (H/stride, W/stride): theta / pi where a lane crosses a cell, 0 elsewhere."""
    num_left_out: int = 0
    """Lanes of which fewer than two rows lie inside the input image."""


@dataclass(frozen=True)
class LaneExample:
    """One prepared image, ready to be collated."""

    image: NDArray[np.uint8]
    """(H, W, 3) uint8 RGB at input size."""
    targets: LaneTargets
    truth: LaneTruth
    """The labels as they were read: neither augmented nor cropped."""
    geometry: Geometry


@dataclass(frozen=True)
class LaneBatch:
    """B images and their targets, padded to the M lanes of the fullest image.

    M is at least 1: a batch without lanes runs through the same operations as any other.
    """

    images: torch.Tensor
    """(B, H, W, 3) uint8 RGB."""
    xs: torch.Tensor
    """(B, M, N) float32 input pixels."""
    valid: torch.Tensor
    """(B, M, N) bool; False in padding."""
    start: torch.Tensor
    """(B, M) float32 rows."""
    length: torch.Tensor
    """(B, M) float32 rows."""
    present: torch.Tensor
    """(B, M) bool: a lane, not padding."""
    angles: tuple[torch.Tensor, ...]
    """A level each (B, H/stride, W/stride) float32, 0 where there is nothing to learn."""
    aspect: torch.Tensor
    """(B,) float32: scale_y / scale_x, which turns dx/dy of the input into that of the original."""
    truths: tuple[LaneTruth, ...]
    geometries: tuple[Geometry, ...]
    num_left_out: int
    """Lanes of the batch that have no target; see LaneTargets."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(truth.name for truth in self.truths)

    def to(self, device: torch.device) -> LaneBatch:
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> LaneBatch:
        """In page-locked memory, from which a copy to a GPU need not wait; called by torch's loader."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, move: Callable[[torch.Tensor], torch.Tensor]) -> LaneBatch:
        return LaneBatch(
            images=move(self.images),
            xs=move(self.xs),
            valid=move(self.valid),
            start=move(self.start),
            length=move(self.length),
            present=move(self.present),
            angles=tuple(move(level) for level in self.angles),
            aspect=move(self.aspect),
            truths=self.truths,
            geometries=self.geometries,
            num_left_out=self.num_left_out,
        )


def encode_lanes(lanes: Sequence[Lane], height: int, width: int, num_rows: int, strides: Sequence[int]) -> LaneTargets:
    """Lanes in input pixels, each (K, 2) bottom to top → targets.

    A lane gets one row of slack at both ends, extrapolated, so that decoded rows cover
    every labelled y. A lane with fewer than two points or two rows inside the image is left
    out and counted.
    """
    num_given = len(lanes)
    lanes = [lane for lane in lanes if len(lane) >= 2]
    heights = row_heights(num_rows, height)
    spacing = height / (num_rows - 1)
    xs = np.empty((len(lanes), num_rows), dtype=np.float32)
    valid = np.empty((len(lanes), num_rows), dtype=bool)
    for xs_row, valid_row, lane in zip(xs, valid, lanes, strict=True):
        y_up = lane[::-1, 1]
        x = np.interp(heights, y_up, lane[::-1, 0])
        x += np.maximum(heights - lane[0, 1], 0) * end_slope(lane[:2])
        x += np.minimum(heights - lane[-1, 1], 0) * end_slope(lane[-2:])
        labelled = (heights < lane[0, 1] + spacing) & (heights > lane[-1, 1] - spacing)
        inside = (x >= -0.5) & (x <= width - 0.5)
        # The first row past the border is kept too: the labelled part in between ends there.
        reached = inside.copy()
        reached[1:] |= inside[:-1]
        reached[:-1] |= inside[1:]
        valid_row[:] = labelled & reached
        # Bounded: a nearly level end goes on straight to where float32 squares overflow.
        xs_row[:] = x.clip(-4 * width, 5 * width)
    kept = valid.sum(axis=1) >= 2
    xs, valid = xs[kept], valid[kept]
    start = valid.argmax(axis=1)
    end = num_rows - valid[:, ::-1].argmax(axis=1)
    return LaneTargets(
        xs=xs,
        valid=valid,
        start=start.astype(np.float32),
        length=(end - start).astype(np.float32),
        angles=angle_maps(lanes, height, width, strides),
        num_left_out=num_given - len(xs),
    )


def end_slope(points: Lane) -> float:
    """dx/dy over the last two points of a lane's end."""
    (x0, y0), (x1, y1) = points
    return float((x1 - x0) / (y1 - y0))


def angle_maps(lanes: Sequence[Lane], height: int, width: int, strides: Sequence[int]) -> tuple[Floats, ...]:
    """theta / pi in each cell that a lane crosses, 0 in the others; (height/stride, width/stride) a stride.

    theta in (0, pi) is the direction up the lane, counted from the x axis: 0.5 is vertical,
    less leans right.
    """
    maps = tuple(np.zeros((height // stride, width // stride), dtype=np.float32) for stride in strides)
    step = min(strides) / 2
    for lane in lanes:
        deltas = np.diff(lane, axis=0)
        lengths = np.hypot(deltas[:, 0], deltas[:, 1])
        travelled = np.concatenate([[0.0], np.cumsum(lengths)])
        # Twice a cell of the finest map at least, so that no crossed cell is passed over but by its corner.
        distances = np.arange(step / 2, travelled[-1], step)
        x = np.interp(distances, travelled, lane[:, 0])
        y = np.interp(distances, travelled, lane[:, 1])
        segment = np.minimum(np.searchsorted(travelled, distances, side="right") - 1, len(deltas) - 1)
        theta = np.arctan2(-deltas[segment, 1], deltas[segment, 0]) / math.pi
        inside = (x >= -0.5) & (x < width - 0.5) & (y >= -0.5) & (y < height - 0.5)
        x, y, theta = x[inside], y[inside], theta[inside]
        for stride, level in zip(strides, maps, strict=True):
            level[((y + 0.5) / stride).astype(np.intp), ((x + 0.5) / stride).astype(np.intp)] = theta
    return maps


def collate(examples: Sequence[LaneExample]) -> LaneBatch:
    """Stack examples of one input size, padding the lanes."""
    if not examples:
        raise ValueError("a batch needs at least one example")
    most = max(1, *(len(example.targets.xs) for example in examples))
    num_rows = examples[0].targets.xs.shape[1]
    xs = np.zeros((len(examples), most, num_rows), dtype=np.float32)
    valid = np.zeros((len(examples), most, num_rows), dtype=bool)
    start = np.zeros((len(examples), most), dtype=np.float32)
    length = np.zeros((len(examples), most), dtype=np.float32)
    present = np.zeros((len(examples), most), dtype=bool)
    for index, example in enumerate(examples):
        targets = example.targets
        count = len(targets.xs)
        xs[index, :count] = targets.xs
        valid[index, :count] = targets.valid
        start[index, :count] = targets.start
        length[index, :count] = targets.length
        present[index, :count] = True
    num_levels = len(examples[0].targets.angles)
    aspect = [example.geometry.scale_y / example.geometry.scale_x for example in examples]
    return LaneBatch(
        images=torch.from_numpy(np.stack([example.image for example in examples])),
        xs=torch.from_numpy(xs),
        valid=torch.from_numpy(valid),
        start=torch.from_numpy(start),
        length=torch.from_numpy(length),
        present=torch.from_numpy(present),
        angles=tuple(
            torch.from_numpy(np.stack([example.targets.angles[level] for example in examples]))
            for level in range(num_levels)
        ),
        aspect=torch.tensor(aspect, dtype=torch.float32),
        truths=tuple(example.truth for example in examples),
        geometries=tuple(example.geometry for example in examples),
        num_left_out=sum(example.targets.num_left_out for example in examples),
    )
