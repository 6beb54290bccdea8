"""Things on the asphalt that are no lane marking: arrows, crossings, letters, patches, seams, skids."""

from __future__ import annotations

import numpy as np

from perception.data.generated.light import Colour, fill, ground_polygon, rgb
from perception.data.generated.road import Floats, View
from perception.data.generated.scene import GroundMark, Scene
from perception.data.generated.textures import Bytes

UNDER_PAINT = ("patch", "seam", "skid", "crack", "manhole")

_STRAIGHT = [(-0.08, 0), (0.08, 0), (0.08, 3), (0.3, 3), (0, 5), (-0.3, 3), (-0.08, 3)]
_TURN = [(-0.08, 0), (0.08, 0), (0.08, 2.2), (0.45, 2.9), (0.45, 2.5), (0.95, 3.5), (0.45, 4.5), (0.45, 3.7),
         (-0.08, 3.0)]  # fmt: skip
_BOTH = [(-0.08, 0), (0.08, 0), (0.08, 1.6), (0.45, 2.2), (0.45, 1.8), (0.9, 2.6), (0.45, 3.4), (0.45, 2.8),
         (0.08, 2.5), (0.08, 3.4), (0.28, 3.4), (0, 5), (-0.28, 3.4), (-0.08, 3.4)]  # fmt: skip


def draw_mark(canvas: Bytes, scene: Scene, view: View, mark: GroundMark) -> None:
    """Draw one mark in neutral light; marks that lie behind the crest leave no trace."""
    rng = np.random.Generator(np.random.PCG64(mark.variant))
    paint = rgb(226, 226, 222) * float(rng.uniform(0.72, 0.98))
    offset, z = mark.offset_metres, mark.distance_metres
    left, right = scene.asphalt_left_metres, scene.asphalt_right_metres

    def polygon(points: Floats, colour: Colour) -> None:
        projected = ground_polygon(view, points)
        if projected is not None:
            fill(canvas, projected, colour)

    def rectangle(x1: float, x2: float, z1: float, z2: float, colour: Colour) -> None:
        polygon(np.array([[x1, z1], [x2, z1], [x2, z2], [x1, z2]]), colour)

    def road_colour(factor: float) -> Colour:
        """The asphalt's own colour there, darkened or lightened."""
        place = view.project(offset, min(max(z, float(view.row_z[-1])), view.end_metres))
        column = int(np.clip(place[0], 0, view.canvas_width - 1))
        row = int(np.clip(place[1], view.ground_top, view.canvas_height - 1))
        return np.asarray(canvas[row, column].astype(np.float64) * factor)

    match mark.kind:
        case "arrow":
            shape = np.array((_STRAIGHT, _TURN, _BOTH)[int(rng.integers(3))], dtype=np.float64)
            shape *= (float(rng.choice([-1, 1])) * rng.uniform(0.8, 1.1), rng.uniform(0.7, 1.2))
            polygon(shape + np.array([offset, z]), paint)
        case "text":
            for column in (-0.8, 0.0, 0.8)[: int(rng.integers(1, 4))]:
                for _ in range(int(rng.integers(3, 6))):
                    if rng.random() < 0.5:
                        x = offset + column + float(rng.uniform(-0.28, 0.28))
                        start = z + float(rng.uniform(0, 1.2))
                        rectangle(x - 0.06, x + 0.06, start, start + float(rng.uniform(0.8, 1.8)), paint)
                    else:
                        start = z + float(rng.uniform(0, 2.6))
                        rectangle(offset + column - 0.3, offset + column + 0.3, start, start + 0.25, paint)
        case "crossing":
            stripe, depth = float(rng.uniform(0.4, 0.6)), float(rng.uniform(2.5, 4.5))
            for x in np.arange(left + 0.3, right - 0.3, 2 * stripe):
                rectangle(float(x), float(x) + stripe, z, z + depth, paint)
        case "stop_line":
            x1, x2 = (offset - 1.6, offset + 1.6) if rng.random() < 0.5 else (left + 0.2, right - 0.2)
            rectangle(x1, x2, z, z + float(rng.uniform(0.3, 0.5)), paint)
        case "hatch":
            outer = right if offset > (left + right) / 2 else left
            inner = outer - 1.4 * np.sign(outer - (left + right) / 2)
            for i in range(8):
                start = z + 2.5 * i
                polygon(
                    np.array([[outer, start], [inner, start + 1.5], [inner, start + 2.1], [outer, start + 0.6]]), paint
                )
        case "manhole":
            angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
            ring = np.stack([np.cos(angle), np.sin(angle)], axis=1)
            centre = np.array([offset + rng.normal(0, 0.6), z])
            rim, lid = road_colour(0.6), road_colour(0.85)
            polygon(centre + ring * 0.36, rim)
            polygon(centre + ring * 0.30, lid)
        case "patch":
            half, length = float(rng.uniform(0.4, 1.8)), float(rng.uniform(1.5, 14))
            x = offset + float(rng.normal(0, 0.9))
            fresh = road_colour(float(rng.uniform(0.72, 1.12)))
            rectangle(x - half - 0.03, x + half + 0.03, z - 0.03, z + length + 0.03, fresh * 0.8)
            rectangle(x - half, x + half, z, z + length, fresh)
        case "seam":
            tar = road_colour(float(rng.uniform(0.5, 0.75)))
            half = float(rng.uniform(0.02, 0.05))
            if rng.random() < 0.65:
                along = np.arange(max(z - 10, 3.0), z + float(rng.uniform(15, 70)), 2.0)
                wobble = np.cumsum(rng.normal(0, 0.03, len(along))) + offset + float(rng.choice([-1.7, 0.4, 1.7, -0.9]))
                _ribbon(polygon, wobble, along, half, tar)
            else:
                for i in range(int(rng.integers(1, 5))):
                    rectangle(left, right, z + 7 * i, z + 7 * i + 2.5 * half, tar)
        case "skid":
            rubber = road_colour(0.7)
            along = np.arange(z, z + float(rng.uniform(6, 25)), 1.0)
            drift = float(rng.normal(0, 0.004)) * (along - z) ** 2 + offset
            for side in (-0.72, 0.72):
                _ribbon(polygon, drift + side, along, 0.1, rubber)
        case "crack":
            dark = road_colour(0.62)
            along = np.linspace(z, z + float(rng.uniform(2, 9)), 18)
            _ribbon(polygon, offset + np.cumsum(rng.normal(0, 0.1, 18)), along, 0.012 + z / 1500, dark)
        case _:
            raise AssertionError(f"unknown ground mark {mark.kind}")


def _ribbon(polygon: object, offsets: Floats, along: Floats, half: float, colour: Colour) -> None:
    assert callable(polygon)
    outline = np.concatenate(
        [np.stack([offsets - half, along], axis=1), np.stack([offsets + half, along], axis=1)[::-1]]
    )
    polygon(outline, colour)
