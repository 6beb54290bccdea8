"""Vehicles as boxes in perspective: shaded sides, windows, wheels, lamps and a shadow under them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from perception.data.generated.light import Colour, Light, blend_glow, fill, headlight_at, rgb, transmission
from perception.data.generated.road import Frame, View
from perception.data.generated.scene import Vehicle, vehicle_length
from perception.data.generated.textures import Bytes

_Point = tuple[float, float, float]


@dataclass(frozen=True)
class _Body:
    """Cross-section and profile of a kind of vehicle, in metres, from the end that faces the camera."""

    width: float
    belt: float
    """Height of the lower body, where the windows begin."""
    height: float
    cabin_from: float
    cabin_to: float
    """Where the windows begin and end along the body, as fractions of its length."""
    slope: float
    """How far the windows lean in at each end, as a fraction of the length."""
    inset: float
    """How much narrower than the belt the roof is, on each side."""
    clearance: float


_REAR = {
    "car": _Body(1.78, 0.90, 1.45, 0.13, 0.68, 0.14, 0.17, 0.2),
    "suv": _Body(1.88, 1.02, 1.70, 0.02, 0.70, 0.07, 0.14, 0.25),
    "van": _Body(1.98, 1.18, 2.25, 0.01, 0.88, 0.03, 0.1, 0.25),
    "truck": _Body(2.45, 1.2, 3.4, 0.0, 1.0, 0.0, 0.0, 0.55),
    "bus": _Body(2.5, 1.25, 3.15, 0.0, 1.0, 0.01, 0.05, 0.35),
}
_FRONT = {
    "car": _Body(1.78, 0.84, 1.45, 0.27, 0.86, 0.15, 0.17, 0.2),
    "suv": _Body(1.88, 0.98, 1.70, 0.24, 0.98, 0.10, 0.14, 0.25),
    "van": _Body(1.98, 1.12, 2.25, 0.10, 0.99, 0.07, 0.1, 0.25),
    "truck": _Body(2.45, 1.2, 3.2, 0.0, 1.0, 0.01, 0.05, 0.45),
    "bus": _Body(2.5, 1.1, 3.15, 0.0, 1.0, 0.01, 0.05, 0.35),
}
_RUBBER = rgb(20, 20, 22)
_HEAD, _TAIL = rgb(255, 247, 226), rgb(255, 40, 30)


@dataclass(frozen=True)
class _Brush:
    """Draws polygons given in a vehicle's own frame, under the light at its place."""

    canvas: Bytes
    frame: Frame
    gain: Colour
    clear: float
    veil: Colour
    wet: bool
    """Whether lamps are mirrored in the road."""

    def shade(self, colour: Colour, factor: float) -> Colour:
        return np.minimum(colour * self.gain * (factor * self.clear) + self.veil, 255.0)

    def face(self, points: Sequence[_Point], colour: Colour, factor: float) -> None:
        fill(self.canvas, self.frame.project(points), self.shade(colour, factor))

    def panel(self, x1: float, x2: float, y1: float, y2: float, colour: Colour, factor: float) -> None:
        """A rectangle in the end that faces the camera."""
        self.face([(x1, 0, y1), (x2, 0, y1), (x2, 0, y2), (x1, 0, y2)], colour, factor)


def draw_vehicle(canvas: Bytes, view: View, light: Light, vehicle: Vehicle, wet: bool) -> None:
    """Draw one vehicle; the caller goes from far to near."""
    z = vehicle.distance_metres
    if z >= view.end_metres:
        return
    frame = view.frame(vehicle.offset_metres, z)
    clear = float(transmission(light, z))
    gain = light.direct + float(headlight_at(light, frame.x_metres, z)) if light.headlight else light.direct
    brush = _Brush(canvas, frame, gain, clear, light.haze * (1 - clear), wet)
    length = min(vehicle_length(vehicle.kind), view.end_metres - z)
    if vehicle.kind == "motorcycle":
        _contact_shadow(brush, light, 0.3, length)
        _draw_rider(brush, light, vehicle)
        return
    body = (_FRONT if vehicle.oncoming else _REAR)[vehicle.kind]
    _contact_shadow(brush, light, body.width / 2, length)
    _draw_side(brush, light, vehicle, body, length)
    _draw_end(brush, vehicle, body, length)
    _draw_lamps(brush, light, vehicle, body)


def _draw_side(brush: _Brush, light: Light, vehicle: Vehicle, body: _Body, length: float) -> None:
    """The side that shows: the left one of a vehicle to our right, and the other way round."""
    paint, glass = np.asarray(vehicle.colour, np.float64), rgb(40, 48, 56)
    side = -body.width / 2 if brush.frame.x_metres > 0 else body.width / 2
    top = side - math.copysign(body.inset, side)
    sunlit = 1.0 if not light.casts_shadows else 1.06 if (light.sun_x > 0) == (side > 0) else 0.72
    low, belt, roof = body.clearance, body.belt, body.height
    rear_sill = min(0.02 * length, 0.1)
    brush.face([(side, rear_sill, low), (side, length, low), (side, length, belt * 0.9), (side, 0, belt)], paint,
               0.8 * sunlit)  # fmt: skip
    brush.face([(side, rear_sill, low), (side, length, low), (side, length, (low + belt) * 0.45),
                (side, 0, (low + belt) * 0.47)], paint, 0.64 * sunlit)  # fmt: skip
    radius = 0.5 if vehicle.kind in ("truck", "bus") else 0.33
    for along in (0.2, 0.78) if vehicle.kind != "truck" else (0.14, 0.25, 0.86):
        for size, colour, factor in ((1.18, _RUBBER, 0.7), (1.0, _RUBBER + 8, 1.0), (0.58, rgb(140, 142, 146), sunlit)):
            rim = [
                (side * 1.001, along * length + radius * size * math.cos(a), radius * (1 + size * math.sin(a)))
                for a in np.linspace(0, 2 * math.pi, 14)[:-1].tolist()
            ]
            brush.face(rim, colour, factor)
    start, stop = body.cabin_from * length, min((body.cabin_to + body.slope * 0.6) * length, length)
    top_start, top_stop = start + body.slope * length, stop - body.slope * length * 1.3
    if vehicle.kind == "truck":
        # The load ends before the driver's cab.
        load = length * 0.78
        brush.face([(side, 0, belt * 0.9), (side, load, belt * 0.9), (side, load, roof), (side, 0, roof)], paint,
                   0.8 * sunlit)  # fmt: skip
        return
    brush.face([(side, start, belt), (side, stop, belt), (top, top_stop, roof), (top, top_start, roof)], paint,
               0.78 * sunlit)  # fmt: skip
    lift = (roof - belt) * 0.15
    count = 5 if vehicle.kind == "bus" else 2
    for i in range(count):
        a, b = (i + 0.07) / count, (i + 0.93) / count
        brush.face(
            [(side, start + (stop - start) * a, belt + lift * 0.2),
             (side, start + (stop - start) * b, belt + lift * 0.2),
             (top, top_start + (top_stop - top_start) * b, roof - lift),
             (top, top_start + (top_stop - top_start) * a, roof - lift)], glass, sunlit,
        )  # fmt: skip


def _draw_end(brush: _Brush, vehicle: Vehicle, body: _Body, length: float) -> None:
    """The end that faces us: the rear of a vehicle going our way, the front of an oncoming one."""
    half, low, belt, roof = body.width / 2, body.clearance, body.belt, body.height
    top = half - body.inset
    paint = np.asarray(vehicle.colour, np.float64)
    for x in (-half + 0.05, half - 0.29):
        brush.panel(x, x + 0.24, 0.0, 0.5, _RUBBER, 1.0)
    start = body.cabin_from * length
    top_start = start + body.slope * length
    if brush.frame.eye_metres > roof:
        far = (body.cabin_to - body.slope) * length
        brush.face([(-top, top_start, roof), (top, top_start, roof), (top, far, roof), (-top, far, roof)], paint, 1.08)
    brush.face([(-half, 0, belt), (half, 0, belt), (half, start, belt), (-half, start, belt)], paint, 1.12)
    if vehicle.kind == "truck" and not vehicle.oncoming:
        brush.panel(-half, half, low + 0.35, roof, paint, 0.94)
        brush.panel(-half * 0.95, -0.02, low + 0.5, roof - 0.08, paint, 0.86)
        brush.panel(0.02, half * 0.95, low + 0.5, roof - 0.08, paint, 0.86)
        brush.panel(-half * 0.98, half * 0.98, low, low + 0.2, rgb(60, 60, 62), 1.0)
        brush.panel(-0.26, 0.26, low + 0.22, low + 0.34, rgb(215, 215, 200), 0.9)
        return
    brush.face(
        [(-half + 0.03, start, belt), (half - 0.03, start, belt), (top, top_start - 0.02, roof - 0.05),
         (top - 0.07, top_start, roof), (-top + 0.07, top_start, roof), (-top, top_start - 0.02, roof - 0.05)],
        paint, 0.95,
    )  # fmt: skip
    # Glass, darker below and with the sky in its upper part.
    rise, lean = roof - belt, top_start - start
    for from_share, to_share, tone in ((0.10, 0.88, rgb(36, 44, 52)), (0.52, 0.88, rgb(66, 78, 90))):
        wide_low = half + (top - half) * from_share - 0.1
        wide_top = half + (top - half) * to_share - 0.1
        brush.face(
            [(-wide_low, start + lean * from_share, belt + rise * from_share),
             (wide_low, start + lean * from_share, belt + rise * from_share),
             (wide_top, start + lean * to_share, belt + rise * to_share),
             (-wide_top, start + lean * to_share, belt + rise * to_share)], tone, 1.0,
        )  # fmt: skip
    # Lower body with cut corners, lighter towards the top.
    brush.face(
        [(-half + 0.06, 0, low), (half - 0.06, 0, low), (half, 0, low + 0.14), (half, 0, belt - 0.16),
         (half - 0.08, 0, belt), (-half + 0.08, 0, belt), (-half, 0, belt - 0.16), (-half, 0, low + 0.14)], paint, 0.80,
    )  # fmt: skip
    middle = low + (belt - low) * 0.5
    brush.face(
        [(-half, 0, middle), (half, 0, middle), (half, 0, belt - 0.16), (half - 0.08, 0, belt),
         (-half + 0.08, 0, belt), (-half, 0, belt - 0.16)], paint, 0.92,
    )  # fmt: skip
    brush.panel(-half + 0.08, half - 0.08, belt - 0.05, belt, paint, 1.05)
    brush.panel(-half + 0.04, half - 0.04, low, low + 0.16, rgb(44, 44, 46), 1.0)
    brush.panel(-half * 0.96, half * 0.96, middle - 0.03, middle, paint, 0.62)
    if vehicle.oncoming:
        brush.panel(-half * 0.5, half * 0.5, middle + 0.02, belt - 0.1, rgb(34, 35, 37), 1.0)
    brush.panel(-0.26, 0.26, middle - 0.17, middle - 0.06, rgb(222, 222, 208), 0.95)


def _draw_lamps(brush: _Brush, light: Light, vehicle: Vehicle, body: _Body) -> None:
    half = body.width / 2
    tall = vehicle.kind in ("suv", "van", "bus") and not vehicle.oncoming
    level = body.clearance + (body.belt - body.clearance) * 0.72
    high, wide = (0.2, 0.16) if tall else (0.08, 0.34)
    if vehicle.kind == "truck":
        level, high, wide = body.clearance + 0.28, 0.07, 0.3
    burning = light.headlight > 0 or light.haze_metres < 200 or vehicle.braking
    glow = _HEAD if vehicle.oncoming else _TAIL
    for sign in (-1, 1):
        inner, outer = sign * (half - 0.04 - wide), sign * (half - 0.03)
        points = [(inner, 0.0, level - high * 0.7), (outer, 0.0, level - high), (outer, 0.0, level + high),
                  (inner, 0.0, level + high * 0.8)]  # fmt: skip
        quad = brush.frame.project(points)
        if burning and not (vehicle.oncoming and light.headlight == 0 and light.haze_metres > 200):
            fill(brush.canvas, quad, np.clip(glow * brush.clear + brush.veil, 0, 255))
        else:
            fill(brush.canvas, quad, brush.shade(rgb(208, 210, 206) if vehicle.oncoming else rgb(140, 20, 18), 1.0))
        if brush.wet and burning:
            x, y = quad.mean(axis=0).tolist()
            scale = brush.frame.focal / brush.frame.z_metres
            mirrored = y + 1.6 * level * (brush.frame.focal_y / brush.frame.z_metres)
            blend_glow(brush.canvas, x, mirrored, 0.09 * scale, glow, 0.4 * brush.clear, 5.0)
        if light.headlight > 0:
            _draw_glow(brush, quad.mean(axis=0).tolist(), vehicle.oncoming)


def _draw_glow(brush: _Brush, place: list[float], oncoming: bool) -> None:
    """Halo of a burning lamp at night."""
    scale = brush.frame.focal / brush.frame.z_metres
    if oncoming:
        blend_glow(brush.canvas, place[0], place[1], max(0.42 * scale, 3.0), _HEAD, 0.75)
        blend_glow(brush.canvas, place[0], place[1], max(0.12 * scale, 1.2), _HEAD, 1.0)
    else:
        blend_glow(brush.canvas, place[0], place[1], max(0.2 * scale, 1.6), _TAIL, 0.5)


def _contact_shadow(brush: _Brush, light: Light, half: float, length: float) -> None:
    """The dark, soft patch under every vehicle, drawn out away from the sun where there is one."""
    shift = -0.9 * math.copysign(1.0, light.sun_x) if light.casts_shadows else 0.0
    left, right = -half - 0.12 + min(shift, 0.0), half + 0.12 + max(shift, 0.0)
    outline = [(left, -0.15, 0.0), (right, -0.15, 0.0), (right, length + 0.2, 0.0), (left, length + 0.2, 0.0)]
    points = brush.frame.project(outline)
    sigma = min(max(0.13 * brush.frame.focal / brush.frame.z_metres, 0.6), 14.0)
    margin = 2 * sigma + 1
    height, width = brush.canvas.shape[:2]
    x1, x2 = max(int(points[:, 0].min() - margin), 0), min(int(points[:, 0].max() + margin) + 1, width)
    y1, y2 = max(int(points[:, 1].min() - margin), 0), min(int(points[:, 1].max() + margin) + 1, height)
    if x2 - x1 < 2 or y2 - y1 < 2:
        return
    mask = np.zeros((y2 - y1, x2 - x1), np.uint8)
    fill(mask, points - (x1, y1), 255.0)
    box = 2 * int(sigma * 1.5) + 1
    mask = np.asarray(cv2.blur(mask, (box, box)), dtype=np.uint8)
    table = np.rint(255 - np.arange(256) * 0.66).astype(np.uint8)
    keep = cv2.LUT(mask, table[None])
    patch = brush.canvas[y1:y2, x1:x2]
    cv2.multiply(patch, cv2.merge([keep, keep, keep]), dst=patch, scale=1 / 255)


def _draw_rider(brush: _Brush, light: Light, vehicle: Vehicle) -> None:
    """A motorcycle from the end: one wheel, a body, a rider with a helmet."""

    def shape(points: Sequence[tuple[float, float]], colour: Colour, factor: float = 1.0) -> None:
        brush.face([(x, 0.0, y) for x, y in points], colour, factor)

    paint = np.asarray(vehicle.colour, np.float64)
    shape([(-0.07, 0), (0.07, 0), (0.08, 0.6), (-0.08, 0.6)], rgb(24, 24, 26))
    shape([(-0.2, 0.4), (0.2, 0.4), (0.26, 0.85), (-0.26, 0.85)], paint)
    shape([(-0.24, 0.8), (0.24, 0.8), (0.27, 1.3), (0.16, 1.42), (-0.16, 1.42), (-0.27, 1.3)], rgb(52, 56, 66), 0.9)
    shape([(-0.36, 0.95), (-0.22, 0.95), (-0.2, 1.3), (-0.3, 1.25)], rgb(46, 50, 60))
    shape([(0.36, 0.95), (0.22, 0.95), (0.2, 1.3), (0.3, 1.25)], rgb(46, 50, 60))
    turn = np.linspace(0, 2 * math.pi, 13)[:-1].tolist()
    shape([(0.14 * math.cos(a), 1.55 + 0.15 * math.sin(a)) for a in turn], paint * 0.6 + 60)
    lamp = rgb(250, 246, 230) if vehicle.oncoming else rgb(190, 24, 20)
    shape([(-0.08, 0.72), (0.08, 0.72), (0.08, 0.8), (-0.08, 0.8)], lamp, 1.2)
    if light.headlight > 0:
        _draw_glow(brush, brush.frame.project([(0.0, 0.0, 0.76)])[0].tolist(), vehicle.oncoming)
