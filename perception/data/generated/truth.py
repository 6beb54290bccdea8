"""Exact labels of a scene: the projected centre lines of its lane markings."""

from __future__ import annotations

import math

import numpy as np

from perception.data.generated.road import Floats, View
from perception.data.generated.scene import Scene
from perception.data.sample import Lane, LaneTruth

ROW_STEP_PIXELS = 4
_SHORTEST_LANE_PIXELS = 20.0
_NARROWEST_LANE_FRACTION = 0.015
"""A lane is labelled out to where a 3.5 m wide lane fills this share of the image width."""
_FOG_END = 1.6
"""... or, in haze, to this many haze distances, where a fifth of the contrast is left."""


def h_samples(height: int) -> tuple[int, ...]:
    """Rows at which lanes are labelled: every fourth one, from a fifth of the height down."""
    first = math.ceil(height / 5 / ROW_STEP_PIXELS) * ROW_STEP_PIXELS
    return tuple(range(first, height, ROW_STEP_PIXELS))


def label_scene(scene: Scene, view: View) -> LaneTruth:
    end = min(
        view.end_metres,
        view.focal * 3.5 / (_NARROWEST_LANE_FRACTION * view.width),
        _FOG_END * scene.haze_metres,
    )
    grid = np.asarray(h_samples(view.height), dtype=np.float64)
    lanes = []
    for line in scene.lines:
        lane = _lane(view, line.offset_metres, end, grid)
        if lane is not None:
            lanes.append(lane)
    return LaneTruth(
        name=f"generated-{scene.index:06d}",
        height=view.height,
        width=view.width,
        lanes=tuple(lanes),
        h_samples=h_samples(view.height),
        category=scene.category if lanes else "empty",
    )


def _lane(view: View, offset: float, end_metres: float, grid: Floats) -> Lane | None:
    z = view.table_z[view.table_z <= end_metres]
    points = view.to_image(view.project(offset, z))
    # Near to far is bottom to top; a roll could bend the very near end back under the image.
    falls = np.flatnonzero(np.diff(points[:, 1]) >= 0)
    below = falls[points[falls, 1] > view.height]
    start = int(below[-1]) + 1 if len(below) else 0
    later = falls[falls >= start]
    points = points[start : int(later[0]) + 1 if len(later) else len(points)]
    if len(points) < 2:
        return None
    rows = grid[(grid >= points[-1, 1]) & (grid <= points[0, 1])][::-1]
    x = np.interp(rows, points[::-1, 1], points[::-1, 0])
    inside = np.flatnonzero((x >= 0) & (x <= view.width - 1))
    if len(inside) < 2:
        return None
    runs = np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1)
    longest = max(runs, key=len)
    lane = np.stack([x[longest], rows[longest]], axis=1)
    if len(lane) < 2 or lane[0, 1] - lane[-1, 1] < _SHORTEST_LANE_PIXELS:
        return None
    return lane
