"""From the lane network's tensors to lanes in original pixels, in NumPy alone: what runs outside an exported file.

Letters: P proposals, N rows of a lane (row 0 at the bottom).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import Lane, LanePrediction
from perception.geometry import Geometry
from perception.model_config import LaneModelConfig

LANE_OUTPUTS = ("logits", "xs", "start", "length")
"""The exported network's outputs, in their order; shapes (B, P), (B, P, N), (B, P), (B, P), float32."""
_NMS_WIDTH = 800
"""Input width for which `nms_distance_pixels` is given."""

Floats = NDArray[np.float32]


def lane_geometry(model: LaneModelConfig, height: int, width: int) -> Geometry:
    """How an image of any (height, width) is cut and resized to the network's input, and back."""
    return Geometry(
        source_height=height,
        source_width=width,
        crop_top=int(height * model.crop_top_fraction),
        input_height=model.input_height,
        input_width=model.input_width,
    )


def decode_lanes(
    logits: Floats, xs: Floats, start: Floats, length: Floats, geometry: Geometry, model: LaneModelConfig
) -> LanePrediction:
    """One image's outputs (P,), (P, N), (P,), (P,) → its lanes, the surest first.

    1. A proposal's score is sigmoid(logit); those under `score_threshold` go.
    2. In order of score, a proposal goes whose mean |dx| to one kept before, over the rows that both have, is under
       `nms_distance_pixels` (given for an input 800 wide).
    3. A lane is the rows start .. start + length - 1 of its xs; with `extend_to_bottom` also those below, down to the
       first at which x has left the image. Lanes of fewer than two rows go; the best `max_lanes` stay, the others
       are counted.
    4. Row k lies at y = H (1 - k / (N - 1)) input pixels; `geometry` takes the points to original pixels.
    """
    # tanh does not overflow where exp would.
    scores = (0.5 + 0.5 * np.tanh(0.5 * logits.astype(np.float64))).astype(np.float32)
    # Bounded before it is cast: an untrained network's extents may be any size, a diverged one's no number.
    limit = 2 * xs.shape[1]
    first, count = (np.rint(np.nan_to_num(extent).clip(-limit, limit)).astype(np.int32) for extent in (start, length))
    confident = np.flatnonzero(scores >= model.score_threshold)
    left = confident[np.argsort(-scores[confident], kind="stable")]
    nearest_allowed = model.nms_distance_pixels * geometry.input_width / _NMS_WIDTH
    rows = np.arange(xs.shape[1])
    inside = (rows >= first[:, None]) & (rows < (first + count)[:, None])
    kept: list[int] = []
    while len(left):
        kept.append(int(left[0]))
        left = left[1:][lane_distances(xs, inside, kept[-1], left[1:]) >= nearest_allowed]
    lanes: list[Lane] = []
    lane_scores: list[float] = []
    for index in kept:
        lane = decode_lane(xs[index], int(first[index]), int(count[index]), geometry, model.extend_to_bottom)
        if lane is not None:
            lanes.append(lane)
            lane_scores.append(float(scores[index]))
    most = model.max_lanes
    return LanePrediction(tuple(lanes[:most]), tuple(lane_scores[:most]), num_left_out=max(len(lanes) - most, 0))


def lane_distances(xs: Floats, inside: NDArray[np.bool_], index: int, others: NDArray[np.intp]) -> NDArray[np.float64]:
    """Mean |dx| of proposal `index` to each of `others` over the rows that both have, inf where they share none."""
    shared = inside[others] & inside[index]
    # What a diverged network says may overflow, be no number, or be of no row.
    with np.errstate(all="ignore"):
        gaps = np.where(shared, np.abs(xs[others] - xs[index]), 0).sum(axis=1, dtype=np.float64)
        return np.where(shared.any(axis=1), gaps / shared.sum(axis=1), np.inf)


def decode_lane(xs: Floats, start: int, length: int, geometry: Geometry, extend_to_bottom: bool) -> Lane | None:
    """Rows of `xs` (N,) in input pixels → a lane (K, 2) in original pixels, None if fewer than two rows are left."""
    first = max(start, 0)
    end = min(start + length, len(xs))
    if extend_to_bottom:
        outside = np.flatnonzero((xs[:first] < 0) | (xs[:first] > geometry.input_width - 1))
        first = int(outside[-1]) if len(outside) else 0
    if end - first < 2:
        return None
    heights = row_heights(len(xs), geometry.input_height)
    points = np.stack([xs[first:end].astype(np.float64), heights[first:end]], axis=1)
    return geometry.points_to_source(points)


def row_heights(num_rows: int, height: int) -> NDArray[np.float64]:
    """y of each row in input pixels, (num_rows,), from the bottom edge up to the top edge."""
    return height * (1 - np.arange(num_rows) / (num_rows - 1))
