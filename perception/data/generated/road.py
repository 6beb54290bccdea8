"""Where the road runs and how the camera sees it: every pixel of a label comes from here.

World frame: x right, y up, z ahead of the camera along the ground, in metres. A point of the
ground is given by its lateral offset from the road's reference line and its distance z. The
ground has one height at a given z, so an image row of the unrolled view is one distance, and
the far side of a crest is hidden as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NEAREST_METRES = 0.5
_FARTHEST_METRES = 700.0
_NUM_TABLE_SAMPLES = 1200
"""Spread geometrically: between two of them a projected line is straight to 0.02 pixels."""


@dataclass(frozen=True)
class VerticalCurve:
    """A change of slope that begins at `start_metres` and is spread evenly over `length_metres`."""

    start_metres: float
    length_metres: float
    slope_change: float


@dataclass(frozen=True)
class RoadShape:
    """The reference line, seen from the camera: a cubic in the plane and a chain of vertical curves."""

    lateral_metres: float
    """Lateral position of the reference line at the camera; the camera stands at x = 0."""
    heading: float
    """Its direction there, as dx/dz."""
    curvature: float
    """1 / radius there, in 1 / metres; positive turns right."""
    curvature_rate: float
    """Change of curvature per metre."""
    vertical_curves: tuple[VerticalCurve, ...] = ()

    def centre(self, z: Floats) -> Floats:
        bend = self.heading + z * (self.curvature / 2 + z * (self.curvature_rate / 6))
        return self.lateral_metres + z * bend

    def centre_at(self, z: float) -> float:
        return self.lateral_metres + z * (self.heading + z * (self.curvature / 2 + z * (self.curvature_rate / 6)))

    def direction(self, z: Floats) -> Floats:
        """dx/dz of the reference line."""
        return self.heading + z * (self.curvature + z * (self.curvature_rate / 2))

    def direction_at(self, z: float) -> float:
        return self.heading + z * (self.curvature + z * (self.curvature_rate / 2))

    def ground_at(self, z: float) -> tuple[float, float]:
        """(elevation, slope) at one distance."""
        height = slope = 0.0
        for curve in self.vertical_curves:
            run = max(z - curve.start_metres, 0.0)
            inside = min(run, curve.length_metres)
            height += curve.slope_change * (inside**2 / (2 * curve.length_metres) + run - inside)
            slope += curve.slope_change * inside / curve.length_metres
        return height, slope

    def elevation(self, z: Floats) -> Floats:
        total = np.zeros_like(z)
        for curve in self.vertical_curves:
            run = np.maximum(z - curve.start_metres, 0.0)
            inside = np.minimum(run, curve.length_metres)
            total += curve.slope_change * (inside**2 / (2 * curve.length_metres) + run - inside)
        return total


@dataclass(frozen=True)
class Camera:
    """A pinhole camera. Pitch is held as the row of the level horizon, as if the lens were shifted."""

    height_metres: float
    focal_fraction: float
    """Focal length in image widths."""
    horizon_fraction: float
    """Row of the level horizon in image heights, at the middle of the image."""
    roll_radians: float
    vertical_stretch: float = 1.0
    """Focal length along y, as a share of that along x: images of another aspect, squeezed to one size."""


@dataclass(frozen=True)
class Frame:
    """A place on the ground, turned with the road: rigid things are drawn in its coordinates."""

    origin_x: float
    """Canvas column and row of the vanishing point of straight ahead, and the focal lengths in pixels."""
    origin_y: float
    focal: float
    focal_y: float
    x_metres: float
    z_metres: float
    eye_metres: float
    """Height of the camera over the ground there."""
    direction: float
    """dx/dz of the road there, and the slope of the ground."""
    slope: float
    stretch: float

    def project(self, points: Sequence[tuple[float, float, float]]) -> Floats:
        """Canvas points (N, 2) of (metres to the right, metres ahead, metres above the ground)."""
        out = []
        for right, ahead, above in points:
            z = max(self.z_metres + ahead, _NEAREST_METRES)
            x = self.x_metres + right * self.stretch + self.direction * ahead
            y = self.eye_metres - self.slope * ahead - above
            out.append((self.origin_x + self.focal * x / z, self.origin_y + self.focal_y * y / z))
        return np.array(out)


class View:
    """One camera on one road at one image size.

    Drawing happens on an unrolled canvas, a little larger than the image; `to_image` is the roll
    that maps canvas points to image points. `row_*` are tables over the canvas rows from
    `ground_top` (the crest or the far end of the ground) down to the bottom.
    """

    def __init__(self, camera: Camera, road: RoadShape, height: int, width: int) -> None:
        self.camera, self.road, self.height, self.width = camera, road, height, width
        sine = abs(math.sin(camera.roll_radians))
        self.pad_x = math.ceil(height / 2 * sine) + 2
        self.pad_y = math.ceil(width / 2 * sine) + 2
        self.canvas_width = width + 2 * self.pad_x
        self.canvas_height = height + 2 * self.pad_y
        self.focal = camera.focal_fraction * width
        self.focal_y = self.focal * camera.vertical_stretch
        self.centre_x = (self.canvas_width - 1) / 2
        self.centre_y = (self.canvas_height - 1) / 2
        self.horizon = self.pad_y + camera.horizon_fraction * height

        z = np.geomspace(_NEAREST_METRES, _FARTHEST_METRES, _NUM_TABLE_SAMPLES)
        row = self.horizon + self.focal_y * (camera.height_metres - road.elevation(z)) / z
        rising = np.flatnonzero(np.diff(row) >= -1e-9)
        end = int(rising[0]) + 1 if len(rising) else len(z)
        self.table_z, self.table_row = z[:end], row[:end]
        self.end_metres = float(z[end - 1])
        """Distance of the crest, or of the far end of the ground."""
        self.end_row = float(row[end - 1])

        self.ground_top = min(max(math.ceil(self.end_row), 1), self.canvas_height - 8)
        self.rows = np.arange(self.ground_top, self.canvas_height, dtype=np.float64)
        self.row_z = self.distance_at(self.rows)
        self.row_scale = self.focal / self.row_z
        """Pixels a metre."""
        self.row_stretch = np.hypot(1.0, road.direction(self.row_z))
        self.row_centre = self.centre_x + self.row_scale * road.centre(self.row_z)

    def distance_at(self, rows: Floats) -> Floats:
        """Distance z at which the ground crosses canvas rows."""
        return np.interp(rows, self.table_row[::-1], self.table_z[::-1])

    def project(self, offset: Floats | float, z: Floats | float, above: Floats | float = 0.0) -> Floats:
        """Canvas points (..., 2) of places `offset` metres right of the line, `above` metres over the ground.

        The offset is taken at right angles to the road, hence the stretch along x where it is oblique.
        """
        z = np.asarray(z, np.float64)
        x = self.road.centre(z) + offset * np.hypot(1.0, self.road.direction(z))
        y = self.camera.height_metres - self.road.elevation(z) - above
        x, y = np.broadcast_arrays(x * (self.focal / z), y * (self.focal_y / z))
        points = np.empty((*x.shape, 2))
        points[..., 0], points[..., 1] = x, y
        points += (self.centre_x, self.horizon)
        return points

    def frame(self, offset: float, z: float) -> Frame:
        """The frame `offset` metres right of the reference line and z metres ahead."""
        direction = self.road.direction_at(z)
        stretch = math.hypot(1.0, direction)
        ground, slope = self.road.ground_at(z)
        return Frame(
            origin_x=self.centre_x,
            origin_y=self.horizon,
            focal=self.focal,
            focal_y=self.focal_y,
            x_metres=self.road.centre_at(z) + offset * stretch,
            z_metres=z,
            eye_metres=self.camera.height_metres - ground,
            direction=direction,
            slope=slope,
            stretch=stretch,
        )

    def to_image(self, points: Floats) -> Floats:
        """Canvas points (..., 2) → image points, by the camera's roll about the middle."""
        cosine, sine = math.cos(self.camera.roll_radians), math.sin(self.camera.roll_radians)
        dx, dy = points[..., 0] - self.centre_x, points[..., 1] - self.centre_y
        return np.stack(
            [
                (self.width - 1) / 2 + cosine * dx - sine * dy,
                (self.height - 1) / 2 + sine * dx + cosine * dy,
            ],
            axis=-1,
        )

    def window(self, points: Floats, margin: int = 0) -> tuple[int, int, int, int] | None:
        """The part (x1, y1, x2, y2) of the canvas around canvas points; None where it holds under two pixels."""
        x1, y1 = max(int(points[:, 0].min()) - margin, 0), max(int(points[:, 1].min()) - margin, 0)
        x2 = min(int(points[:, 0].max()) + margin + 2, self.canvas_width)
        y2 = min(int(points[:, 1].max()) + margin + 2, self.canvas_height)
        return (x1, y1, x2, y2) if x2 - x1 >= 2 and y2 - y1 >= 2 else None

    def image_to_canvas_matrix(self) -> Floats:
        """(2, 3) matrix that takes image points to canvas points, for an inverse-map warp."""
        cosine, sine = math.cos(self.camera.roll_radians), math.sin(self.camera.roll_radians)
        middle_x, middle_y = (self.width - 1) / 2, (self.height - 1) / 2
        return np.array(
            [
                [cosine, sine, self.centre_x - cosine * middle_x - sine * middle_y],
                [-sine, cosine, self.centre_y + sine * middle_x - cosine * middle_y],
            ]
        )
