"""The light and the air of a scene, and the few drawing calls that everything shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.generated.road import Floats, View
from perception.data.generated.scene import Scene, Variety, stream
from perception.data.generated.textures import Bytes

Colour = NDArray[np.float64]
_SHIFT = 4


def rgb(red: float, green: float, blue: float) -> Colour:
    return np.array([red, green, blue], dtype=np.float64)


@dataclass(frozen=True)
class Light:
    """Factors and colours that hold over the whole scene; colours are RGB, 0 to 255."""

    direct: Colour
    """What sunlit (or, at night, merely sky-lit) surfaces are multiplied with."""
    shadow: Colour
    """The same in full shadow."""
    sky_top: Colour
    sky_low: Colour
    cloud: Colour
    cloud_cover: float
    """0 clear ... 1 overcast."""
    haze: Colour
    haze_metres: float
    sun_x: float
    """Where the sun stands: -1 left ... 1 right of the view, beyond that outside it."""
    sun_height: float
    """Tangent of its elevation."""
    casts_shadows: bool
    headlight: float
    """Strength of our own headlights, 0 by day."""
    lamps: bool
    """Whether street lamps stand and burn."""
    beam_width: float = 1.0
    """Of our headlights, against that of a usual pair."""


def draw_light(scene: Scene) -> Light:
    rng = stream(scene.seed, scene.index, 1)
    sun_x = float(rng.uniform(-2.5, 2.5))
    sun_height = float(rng.uniform(0.5, 1.6))
    overcast = rng.random() < 0.35
    cover = float(rng.uniform(0.75, 1.0) if overcast else rng.uniform(0.0, 0.6))
    top, low = rgb(88, 132, 196), rgb(190, 208, 226)
    direct, shadow = rgb(1.0, 0.985, 0.95), rgb(0.42, 0.46, 0.54)
    cloud, haze = rgb(240, 240, 242), rgb(198, 208, 218)
    headlight, lamps, casts = 0.0, False, not overcast
    if overcast:
        direct = rgb(0.84, 0.85, 0.87) * rng.uniform(0.85, 1.05)
        top, low, cloud = rgb(150, 160, 174), rgb(205, 210, 214), rgb(222, 224, 228)
    if scene.category == "shadow":
        cover, casts = min(cover, 0.5), True
        direct, top, low = rgb(1.08, 1.05, 0.99), rgb(88, 132, 196), rgb(190, 208, 226)
        shadow = rgb(0.36, 0.39, 0.46) * rng.uniform(0.75, 1.15)
    if scene.category == "glare":
        sun_x, sun_height, cover, casts = float(rng.uniform(-0.8, 0.8)), float(rng.uniform(0.04, 0.2)), 0.35, True
        direct, shadow = rgb(0.86, 0.76, 0.62), rgb(0.45, 0.43, 0.45)
        top, low, cloud, haze = rgb(120, 140, 176), rgb(252, 220, 160), rgb(250, 214, 170), rgb(232, 206, 170)
    if scene.category in ("rain", "fog"):
        grey = rng.uniform(0.8, 1.0)
        cover, casts = 1.0, False
        direct = rgb(0.70, 0.72, 0.75) * grey
        top, low, cloud = rgb(140, 148, 158) * grey, rgb(192, 196, 200) * grey, rgb(176, 181, 188) * grey
        haze = rgb(186, 190, 195) * grey
        if scene.category == "fog":
            top, low, cloud, haze, cover = *((rgb(206, 208, 210) * grey,) * 4), 0.0
    if scene.night:
        lamps = bool(scene.setting != "rural" and rng.random() < 0.7)
        ambient = float(rng.uniform(0.15, 0.30) if lamps else rng.uniform(0.08, 0.15))
        tint = rgb(1.15, 0.95, 0.68) if lamps and rng.random() < 0.6 else rgb(0.86, 0.95, 1.1)
        direct = shadow = ambient * tint
        top, low = rgb(8, 9, 14), rgb(24, 24, 30) * (1.6 if lamps else 1.0)
        cloud, haze, cover, casts = rgb(20, 20, 26), rgb(20, 20, 26) * (1.5 if lamps else 1.0), 0.4, False
        headlight = float(rng.uniform(0.8, 1.35))
    light = Light(
        direct, shadow, top, low, cloud, cover, haze, scene.haze_metres, sun_x, sun_height, casts, headlight, lamps
    )
    return light if scene.variety is None or not scene.night else _dimmed(light, scene.variety)


def _dimmed(light: Light, variety: Variety) -> Light:
    """The night as the variety has it: its own brightness and colour beside the headlights, a beam of its own."""
    names = ("direct", "shadow", "sky_top", "sky_low", "cloud", "haze")
    colours = {name: getattr(light, name) * variety.ambient for name in names}
    return replace(light, **colours, beam_width=variety.beam_width)


def transmission(light: Light, z: Floats | float) -> Floats:
    """Share of an object's own colour that reaches the camera from z metres."""
    return np.exp(-np.asarray(z, np.float64) / light.haze_metres)


def headlight_at(light: Light, x: Floats | float, z: Floats | float) -> Floats:
    """How much our headlights add at x metres to the side and z ahead."""
    x, z = np.asarray(x, np.float64), np.asarray(z, np.float64)
    beam = np.exp(-((x - 0.03 * z) ** 2) / ((1.6 + 0.16 * z) * light.beam_width) ** 2 / 2)
    return light.headlight * beam * np.clip((z - 2.0) / 6.0, 0.25, 1) * np.exp(-(np.maximum(z - 8, 0.0) / 30))


def lit(light: Light, colour: Sequence[float] | Colour, x: float, z: float, factor: float = 1.0) -> Colour:
    """Colour of a surface at (x, z) as the camera sees it."""
    gain = light.direct * factor + (float(headlight_at(light, x, z)) if light.headlight else 0.0)
    share = float(transmission(light, z))
    return np.clip(np.asarray(colour, np.float64) * gain * share + light.haze * (1 - share), 0, 255)


def fixed(points: Floats) -> NDArray[np.int32]:
    """Points in the fixed-point form cv2 takes, kept far inside its integer range."""
    return np.rint(np.clip(points, -20000, 20000) * (1 << _SHIFT)).astype(np.int32)


def by_row(values: Floats, width: int) -> Bytes:
    """(rows, width, C) bytes from (rows, C) values, the same across each row."""
    column = np.rint(values).clip(0, 255).astype(np.uint8)[:, None, :]
    return np.asarray(cv2.resize(column, (width, len(values)), interpolation=cv2.INTER_NEAREST), dtype=np.uint8)


def fill(canvas: Bytes, points: Floats, colour: Colour | Sequence[float] | float) -> None:
    """Fill a polygon of (N, 2) canvas points with sub-pixel edges."""
    value = (float(colour),) if isinstance(colour, (int, float)) else tuple(float(c) for c in colour)
    cv2.fillPoly(canvas, [fixed(points)], value, cv2.LINE_AA, _SHIFT)


def ground_polygon(view: View, outline: Floats) -> Floats | None:
    """Project a closed outline (N, 2) of (offset, z); edges are cut up so that they follow the road.

    None where all of it is behind the crest or the camera.
    """
    nearest = float(view.row_z[-1]) * 0.85
    if outline[:, 1].min() >= view.end_metres or outline[:, 1].max() <= nearest:
        return None
    step = np.roll(outline, -1, axis=0) - outline
    counts = np.minimum(np.ceil(np.abs(step[:, 1]) / 2.5), 60).astype(np.int64).clip(1)
    if counts.max() == 1:
        points = outline
    else:
        edge = np.repeat(np.arange(len(outline)), counts)
        share = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) / counts[edge]
        points = outline[edge] + step[edge] * share[:, None]
    return view.project(points[:, 0], points[:, 1].clip(nearest, view.end_metres))


def blend_glow(
    canvas: Bytes, x: float, y: float, radius: float, colour: Colour, strength: float, tall: float = 1.0
) -> None:
    """Add a soft glow, `tall` times as high as it is wide."""
    radius_y = radius * tall
    x1, x2 = max(0, math.floor(x - 3 * radius)), min(canvas.shape[1], math.ceil(x + 3 * radius) + 1)
    y1, y2 = max(0, math.floor(y - 3 * radius_y)), min(canvas.shape[0], math.ceil(y + 3 * radius_y) + 1)
    if x1 >= x2 or y1 >= y2:
        return
    fall_x = np.exp(-((np.arange(x1, x2) - x) ** 2) / (2 * radius**2)).astype(np.float32)
    fall_y = np.exp(-((np.arange(y1, y2) - y) ** 2) / (2 * radius_y**2)).astype(np.float32)
    glow = (fall_y[:, None] * fall_x[None, :] * strength)[..., None] * colour.astype(np.float32)
    patch = canvas[y1:y2, x1:x2]
    cv2.add(patch, glow.astype(np.uint8), dst=patch)
