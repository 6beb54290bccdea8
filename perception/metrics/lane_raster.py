"""IoU of lanes drawn as thick curves, pixel for pixel as the official CULane evaluator draws them.

Recipe (evaluator of Pan et al., "Spatial As Deep", AAAI 2018): points as float32; a natural
cubic spline over chord length, 50 steps a segment, two points stay straight; rounded to
whole pixels; joined by 8-connected lines of the lane's width.

Each lane is drawn once, in its own bounding box; a pair of lanes is compared where the
boxes overlap. The evaluator draws two full images for each pair.

Other benchmarks draw other curves in the same way: see perception/metrics/lane_benchmarks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dgtsv

_STEPS_PER_SEGMENT = 50
# What a 32-bit conversion makes of NaN and of numbers too large, there and here.
_OVERFLOWED = np.iinfo(np.int32).min
# Far enough out for any lane, near enough that offsets cannot overflow; beyond it the box is the whole canvas.
_SAFE_COORDINATE = 1 << 20


@dataclass(frozen=True)
class LaneMask:
    """Pixels of one drawn lane within its bounding box."""

    top: int
    left: int
    pixels: NDArray[np.uint8]
    """(height, width) of the box; 0 or 1."""
    area: int


def lane_ious(
    lanes: Sequence[NDArray[np.floating]],
    others: Sequence[NDArray[np.floating]],
    height: int,
    width: int,
    lane_width: int,
) -> NDArray[np.float64]:
    """(len(lanes), len(others)) IoU of lanes (K, 2), any K, drawn on a canvas of height x width pixels.

    A lane of fewer than two points, or wholly outside the canvas, has IoU 0 with every other
    (the official evaluator: 0, or 0/0 where both are outside).
    """
    masks = [draw_lane(lane, height, width, lane_width) for lane in lanes]
    return mask_ious(masks, [draw_lane(lane, height, width, lane_width) for lane in others])


def mask_ious(masks: Sequence[LaneMask | None], others: Sequence[LaneMask | None]) -> NDArray[np.float64]:
    """(len(masks), len(others)) IoU of drawn lanes; 0 where nothing was drawn."""
    ious = np.zeros((len(masks), len(others)))
    for row, mask in enumerate(masks):
        for column, other in enumerate(others):
            if mask is not None and other is not None:
                shared = _intersection(mask, other)
                ious[row, column] = shared / (mask.area + other.area - shared)
    return ious


def draw_lane(points: NDArray[np.floating], height: int, width: int, lane_width: int) -> LaneMask | None:
    """Draw (K, 2) points; None where nothing of the lane is on the canvas of height x width pixels."""
    return draw_vertices(lane_vertices(points), height, width, lane_width)


def draw_vertices(vertices: NDArray[np.int32], height: int, width: int, lane_width: int) -> LaneMask | None:
    """Draw the line that joins (M, 2) whole pixels; None where nothing of it is on the canvas."""
    if not len(vertices):
        return None
    margin = lane_width // 2 + 3
    left, top = (int(value) - margin for value in vertices.min(axis=0))
    right, bottom = (int(value) + margin + 1 for value in vertices.max(axis=0))
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    if left >= right or top >= bottom:
        return None
    if np.abs(vertices.astype(np.int64)).max() > _SAFE_COORDINATE:
        left, top, right, bottom = 0, 0, width, height
    pixels = np.zeros((bottom - top, right - left), np.uint8)
    shifted = (vertices - np.array([left, top], np.int32)).reshape(-1, 1, 2)
    cv2.polylines(pixels, [shifted], isClosed=False, color=(1,), thickness=lane_width)
    area = cv2.countNonZero(pixels)
    return LaneMask(top, left, pixels, area) if area else None


def lane_vertices(points: NDArray[np.floating]) -> NDArray[np.int32]:
    """(K, 2) points → (M, 2) whole pixels that the drawn line joins; none for fewer than two points."""
    if len(points) < 2:
        return np.empty((0, 2), np.int32)
    rounded = points.astype(np.float32)
    curve = rounded if len(points) == 2 else _spline(rounded)
    return whole_pixels(np.rint(curve))


def whole_pixels(curve: NDArray[np.floating]) -> NDArray[np.int32]:
    """(M, 2) whole numbers as pixels; of equal neighbours one is kept, but at least two pixels: a dot is drawn."""
    if not (curve.max() < 2**31 and curve.min() >= -(2**31)):  # NaN is neither
        with np.errstate(invalid="ignore"):
            curve = np.where(np.abs(curve) < 2**31, curve, _OVERFLOWED)
    vertices = curve.astype(np.int32)
    # A vertex as one number of 64 bits: equal neighbours are found in a single comparison.
    packed = vertices.view(np.int64).reshape(-1)
    keep = np.empty(len(packed), dtype=bool)
    keep[0] = True
    np.not_equal(packed[1:], packed[:-1], out=keep[1:])
    distinct = packed[keep] if keep[1:].any() else packed[:2]
    return distinct.view(np.int32).reshape(-1, 2)


def natural_cubics(
    knots: NDArray[np.float64], steps: NDArray[np.float64], chords: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Natural cubic spline over chord length through (K, 2) knots, K >= 2: its linear, quadratic and cubic
    coefficients, (K - 1, 2) each. `steps` are the differences of the knots, `chords` their lengths, above 0.
    """
    slopes = steps / chords[:, None]
    curvature = np.zeros_like(knots)
    # Tridiagonal system of the second derivatives at the inner knots.
    diagonal, right_side = 2 * (chords[:-1] + chords[1:]), 6 * np.diff(slopes, axis=0)
    if len(diagonal) == 1:  # which LAPACK's wrapper refuses
        curvature[1] = right_side[0] / diagonal[0]
    elif len(diagonal):
        *_, curvature[1:-1], failed = dgtsv(chords[1:-1], diagonal, chords[1:-1], right_side)
        assert not failed, "the system is diagonally dominant"
    length = chords[:, None]
    linear = slopes - length * (2 * curvature[:-1] + curvature[1:]) / 6
    return linear, curvature[:-1] / 2, np.diff(curvature, axis=0) / (6 * length)


def _spline(points: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural cubic spline through (K, 2) float32 points, K >= 3: (50 (K - 1) + 1, 2).

    A repeated point makes a chord of length 0 and the whole curve NaN but for its end,
    as in the official evaluator.
    """
    # The differences are taken in float32 there.
    steps = np.diff(points, axis=0).astype(np.float64)
    chords = np.sqrt((steps**2).sum(axis=1))
    if not np.isfinite(chords).all() or (chords == 0).any():
        broken = np.full((_STEPS_PER_SEGMENT * len(chords) + 1, 2), np.nan, dtype=np.float32)
        broken[-1] = points[-1]
        return broken
    knots = points.astype(np.float64)
    linear, quadratic, cubic = natural_cubics(knots, steps, chords)
    at = (chords[:, None] * (np.arange(_STEPS_PER_SEGMENT) / _STEPS_PER_SEGMENT))[:, :, None]
    inner = at * cubic[:, None]
    inner += quadratic[:, None]
    inner *= at
    inner += linear[:, None]
    inner *= at
    inner += knots[:-1, None]
    curve = np.empty((inner.shape[0] * _STEPS_PER_SEGMENT + 1, 2), dtype=np.float32)
    curve[:-1] = inner.reshape(-1, 2)
    curve[-1] = points[-1]
    return curve


def _intersection(a: LaneMask, b: LaneMask) -> int:
    top, left = max(a.top, b.top), max(a.left, b.left)
    bottom = min(a.top + a.pixels.shape[0], b.top + b.pixels.shape[0])
    right = min(a.left + a.pixels.shape[1], b.left + b.pixels.shape[1])
    if top >= bottom or left >= right:
        return 0
    part_of_a = a.pixels[top - a.top : bottom - a.top, left - a.left : right - a.left]
    part_of_b = b.pixels[top - b.top : bottom - b.top, left - b.left : right - b.left]
    return cv2.countNonZero(cv2.bitwise_and(part_of_a, part_of_b))
