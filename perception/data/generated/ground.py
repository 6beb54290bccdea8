"""The ground: verge, asphalt, lane paint and everything else that lies flat on the road."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.generated import textures
from perception.data.generated.light import Colour, by_row, fill, ground_polygon, rgb
from perception.data.generated.marks import UNDER_PAINT, draw_mark
from perception.data.generated.road import Floats, View
from perception.data.generated.scene import LineMarking, Scene, Variety, stream
from perception.data.generated.textures import TILE, Bytes

_ASPHALT_PIXELS_PER_METRE = 100.0
_VERGE_PIXELS_PER_METRE = 60.0
_GRAIN_FADES_METRES = 22.0
"""Farther than this a pixel averages over the grain and its contrast sinks."""
_WEAR_PIXELS_PER_METRE = 70.0


def draw_ground(canvas: Bytes, scene: Scene, view: View) -> None:
    """Lay verge, asphalt, seams and paint on the canvas below `ground_top`, under neutral light."""
    rng = stream(scene.seed, scene.index, 2)
    ground = canvas[view.ground_top :]
    asphalt_colour = _asphalt_colour(rng, scene)
    outline = _fill_surfaces(canvas, scene, view, rng, asphalt_colour)
    _draw_marks(canvas, scene, view, before_paint=True)
    _apply_grain(ground, scene, view, rng, outline)
    _draw_marks(canvas, scene, view, before_paint=False)
    # Paint holds glass beads that throw headlights back, so at night it stands out more than by day.
    brightness = float(rng.uniform(0.82, 1.0)) * (1.2 if scene.night else 1.0)
    for line in scene.lines:
        paint_line(canvas, view, line, brightness, rng)


def _asphalt_colour(rng: np.random.Generator, scene: Scene) -> Colour:
    grey = float(rng.uniform(78, 132) if rng.random() < 0.9 else rng.uniform(135, 160))
    if scene.night:
        grey *= 0.85
    if scene.wet:
        grey *= 0.66
    warmth = float(rng.normal(0, 3))
    return rgb(grey + warmth, grey, grey - warmth * 0.7 + 2)


def _fill_surfaces(canvas: Bytes, scene: Scene, view: View, rng: np.random.Generator, asphalt_colour: Colour) -> Floats:
    """Flat colours of all zones; returns the outline of the asphalt."""
    greens = [rgb(84, 108, 56), rgb(104, 112, 62), rgb(70, 92, 52), rgb(138, 126, 86), rgb(120, 104, 78)]
    verge = greens[int(rng.integers(len(greens)))]
    if scene.setting == "urban":
        verge = rgb(148, 144, 138) * float(rng.uniform(0.8, 1.1))
    ground = canvas[view.ground_top :]
    ground[:] = np.rint(verge).astype(np.uint8)

    picked = np.unique(np.append(np.arange(0, len(view.rows), 3), len(view.rows) - 1))
    rows, centre = view.rows[picked], view.row_centre[picked]
    metre = (view.row_scale * view.row_stretch)[picked]

    def edge(offset: float) -> Floats:
        points = np.empty((len(rows), 2))
        points[:, 0], points[:, 1] = (centre + metre * offset).clip(-8000, 8000), rows
        return points

    def band(from_offset: float, to_offset: float, colour: Colour) -> None:
        fill(canvas, np.concatenate([edge(from_offset), edge(to_offset)[::-1]]), colour)

    left, right = scene.asphalt_left_metres, scene.asphalt_right_metres
    if scene.setting == "urban":
        grass = greens[int(rng.integers(3))]
        width_left, width_right = rng.uniform(1.6, 4.5, 2)
        band(left - width_left - 30, left - width_left, grass)
        band(right + width_right, right + width_right + 30, grass)
        kerb = rgb(172, 170, 166)
        band(left - 0.25, left, kerb)
        band(right, right + 0.25, kerb)
        # The kerb's upright face, in the shade of its top.
        band(left - 0.02, left + 0.06, kerb * 0.6)
        band(right - 0.06, right + 0.02, kerb * 0.6)
    else:
        gravel = rgb(136, 128, 114) * float(rng.uniform(0.8, 1.05))
        width_left, width_right = rng.uniform(0.3, 1.8, 2)
        band(left - width_left, left, gravel)
        band(right, right + width_right, gravel)
    band(left, right, asphalt_colour)
    return np.concatenate([edge(left), edge(right)[::-1]])


def _apply_grain(ground: Bytes, scene: Scene, view: View, rng: np.random.Generator, asphalt: Floats) -> None:
    """Multiply the zones with noise that is fixed to the ground, so that it shrinks with distance."""
    columns = np.arange(view.canvas_width, dtype=np.float32)[None, :]
    centre = view.row_centre.astype(np.float32)[:, None]
    metres = (columns - centre) / (view.row_scale * view.row_stretch).astype(np.float32)[:, None]
    shift = rng.integers(0, TILE, 4)
    grain = _lookup(textures.asphalt(), metres, view.row_z, _ASPHALT_PIXELS_PER_METRE, shift[:2])
    tufts = _lookup(textures.verge(), metres, view.row_z, _VERGE_PIXELS_PER_METRE, shift[2:])
    off_road = np.ones(grain.shape, dtype=np.uint8)
    cv2.fillPoly(off_road, [np.rint(asphalt - (0, view.ground_top)).astype(np.int32)], 0)
    cv2.copyTo(tufts, off_road, grain)
    # Contrast falls with distance, as the mean of ever more grain falls in one pixel.
    contrast = 1.0 / (1.0 + view.row_z / _GRAIN_FADES_METRES)
    strength = float(rng.uniform(0.7, 1.3))
    weight = (contrast * strength * 128).clip(0, 255)[:, None]
    # 128 + (grain - 128) * weight / 128, a weight a row.
    faded = cv2.multiply(grain, by_row(weight, view.canvas_width), scale=1 / 128)
    faded = cv2.add(faded, by_row(128 - weight, view.canvas_width))
    profile = _lateral_profile(scene, rng)
    place = ((metres + np.float32(_PROFILE_ZERO_METRES)) * np.float32(_PROFILE_PIXELS_PER_METRE)).astype(np.int32)
    lateral = profile.take(place, mode="clip")
    factor = cv2.multiply(faded, lateral, scale=1 / 128)
    cv2.multiply(ground, cv2.merge([factor, factor, factor]), dst=ground, scale=1 / 128)


def _lookup(
    tile: Bytes, metres: NDArray[np.float32], z: Floats, pixels_per_metre: float, shift: NDArray[np.int64]
) -> Bytes:
    """The tile's value at every pixel: a row of the picture looks along one row of the tile."""
    index = (metres * np.float32(pixels_per_metre)).astype(np.int32)
    index += np.int32(shift[0])
    index &= TILE - 1
    # Features are longer along the road than across it, as rolled asphalt and mown grass are.
    row = ((z * (pixels_per_metre * 0.45)).astype(np.int32) + int(shift[1])) & (TILE - 1)
    index += (row * TILE).astype(np.int32)[:, None]
    return np.asarray(tile.ravel().take(index))


_PROFILE_PIXELS_PER_METRE = 32.0
_PROFILE_ZERO_METRES = 24.0


def _lateral_profile(scene: Scene, rng: np.random.Generator) -> Bytes:
    """(N,) brightness across the road (128 is one): wheel tracks, oil between them, dust at the edge."""
    offset = np.arange(0, 2 * _PROFILE_ZERO_METRES, 1 / _PROFILE_PIXELS_PER_METRE) - _PROFILE_ZERO_METRES
    profile = np.ones_like(offset)
    tracks, oil = float(rng.normal(0.0, 0.06)), float(rng.uniform(0.0, 0.07))
    for centre in scene.lane_centres_metres:
        for side in (-0.85, 0.85):
            profile += tracks * np.exp(-((offset - centre - side) ** 2) / (2 * 0.28**2))
        profile -= oil * np.exp(-((offset - centre) ** 2) / (2 * 0.35**2))
    for edge in (scene.asphalt_left_metres, scene.asphalt_right_metres):
        profile += float(rng.uniform(-0.05, 0.12)) * np.exp(-((offset - edge) ** 2) / (2 * 0.3**2))
    if scene.variety is not None:
        _lay_surfaces(profile, offset, scene, scene.variety)
    return np.clip(np.rint(profile * 128), 0, 255).astype(np.uint8)


def _lay_surfaces(profile: Floats, offset: Floats, scene: Scene, variety: Variety) -> None:
    """Lanes of different materials, the outer ones out to the edge of the asphalt, and bands along the road."""
    centres = np.array(scene.lane_centres_metres)
    nearest = np.abs(offset[:, None] - centres).argmin(axis=1)
    profile *= np.array(variety.lane_brightness)[nearest]
    for strip in variety.strips:
        profile[np.abs(offset - strip.offset_metres) < strip.width_metres / 2] *= strip.brightness


def _stripes(line: LineMarking) -> tuple[tuple[float, float, bool], ...]:
    """(lateral shift, width, dashed) of the stripes that make up a marking."""
    width, shift = line.width_metres, (line.gap_metres + line.width_metres) / 2
    match line.style:
        case "solid":
            return ((0.0, width, False),)
        case "dashed":
            return ((0.0, width, True),)
        case "double_solid":
            return ((-shift, width, False), (shift, width, False))
        case "double_dashed":
            return ((-shift, width, True), (shift, width, True))
        case "solid_dashed":
            return ((-shift, width, False), (shift, width, True))
        case "dashed_solid":
            return ((-shift, width, True), (shift, width, False))
    raise AssertionError(f"unknown line style {line.style}")


def paint_line(canvas: Bytes, view: View, line: LineMarking, brightness: float, rng: np.random.Generator) -> None:
    """Blend a marking into the canvas, each pixel by the exact share of it that the paint covers."""
    colour = rgb(214, 166, 62) if line.yellow else rgb(232, 232, 228)
    colour = colour * brightness * float(rng.uniform(0.95, 1.0))
    for shift, width, dashed in _stripes(line):
        _paint_stripe(canvas, view, line, line.offset_metres + shift, width, dashed, colour, rng)


def _paint_stripe(
    canvas: Bytes,
    view: View,
    line: LineMarking,
    offset: float,
    width: float,
    dashed: bool,
    colour: Colour,
    rng: np.random.Generator,
) -> None:
    pixels_per_metre = view.row_scale * view.row_stretch
    x = view.row_centre + pixels_per_metre * offset
    half = pixels_per_metre * width / 2
    # An oblique edge crosses several pixels of a row: its ramp is as wide as the line moves a row.
    ramp = np.clip(np.abs(np.gradient(x)), 1.0, 12.0) if len(x) > 1 else np.ones_like(x)
    alpha = _presence(view, line, dashed)
    first = np.floor(x - half - ramp / 2).astype(np.int64)
    last = np.ceil(x + half + ramp / 2).astype(np.int64)
    rows = np.flatnonzero((alpha > 0.004) & (last >= 0) & (first < view.canvas_width))
    if len(rows) == 0:
        return
    first = np.maximum(first[rows], 0)
    count = np.minimum(last[rows], view.canvas_width - 1) - first + 1
    rows, first, count = rows[count > 0], first[count > 0], count[count > 0]
    row = np.repeat(rows, count)
    column = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    left, right, slant = (x - half)[row], (x + half)[row], ramp[row]
    coverage = np.clip(column + slant / 2, left, right) - np.clip(column - slant / 2, left, right)
    coverage *= alpha[row] / slant
    tile = textures.wear()
    across = ((column - x[row]) / pixels_per_metre[row] * _WEAR_PIXELS_PER_METRE).astype(np.int64)
    along = (view.row_z[row] * (_WEAR_PIXELS_PER_METRE * 0.5)).astype(np.int64)
    shift_x, shift_y = rng.integers(0, TILE, 2)
    left_over = tile[(along + shift_y) % TILE, (across + shift_x) % TILE]
    # Far away a pixel holds the mean of many flakes, so the threshold softens with distance.
    softness = 0.18 + view.row_z[row] / 60
    kept = np.clip((left_over - line.wear) / softness + 1.0, 0.0, 1.0)
    share = (coverage * (0.12 + 0.88 * kept))[:, None]
    flat = canvas.reshape(-1, 3)
    index = (row + view.ground_top) * view.canvas_width + column
    below = flat[index].astype(np.float64)
    grit = 0.92 + 0.16 * left_over[:, None]
    flat[index] = np.clip(np.rint(below * (1 - share) + colour * grit * share), 0, 255).astype(np.uint8)


def _presence(view: View, line: LineMarking, dashed: bool) -> Floats:
    """Share of each row's stretch of road that is painted, 0 where the paint is missing."""
    rows = np.concatenate([view.rows - 0.5, view.rows[-1:] + 0.5])
    z = view.distance_at(rows)
    far, near = z[:-1], z[1:]
    length = np.maximum(far - near, 1e-6)

    if dashed:
        period, dash = line.period_metres, line.dash_metres

        def painted(at: Floats) -> Floats:
            turns = np.floor((at + line.phase_metres) / period)
            return turns * dash + np.minimum(at + line.phase_metres - turns * period, dash)

        share = (painted(far) - painted(near)) / length
    else:
        share = np.ones_like(length)
    for start, stop in line.missing_metres:
        gone = np.clip(np.minimum(far, stop) - np.maximum(near, start), 0, None) / length
        share = share * (1 - 0.94 * gone)
    return np.clip(share, 0.0, 1.0)


def _draw_marks(canvas: Bytes, scene: Scene, view: View, before_paint: bool) -> None:
    for mark in scene.marks:
        if (mark.kind in UNDER_PAINT) == before_paint:
            draw_mark(canvas, scene, view, mark)


def shadow_mask(scene: Scene, view: View, sun_side: float, sun_height: float) -> Bytes:
    """(canvas height, width) cast shadows on the ground, 255 full: trees, buildings, a bridge."""
    rng = stream(scene.seed, scene.index, 3)
    mask = np.zeros((view.canvas_height, view.canvas_width), np.uint8)
    heavy = scene.category == "shadow"
    reach = float(np.clip(1.0 / sun_height, 0.3, 4.0))
    side = 1.0 if sun_side < 0 else -1.0
    edge = scene.asphalt_left_metres if side > 0 else scene.asphalt_right_metres
    for _ in range(int(rng.integers(4, 10)) if heavy else int(rng.integers(0, 4))):
        z = float(rng.uniform(5, 60))
        kind = rng.random()
        if kind < 0.6:
            for _ in range(int(rng.integers(5, 14))):
                across = edge + side * float(rng.uniform(-3, 5.5 * reach))
                radius = float(rng.uniform(0.4, 1.5))
                angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
                wobble = radius * (1 + 0.35 * rng.standard_normal(12))
                outline = np.stack(
                    [across + wobble * np.cos(angle), z + rng.normal(0, 1.6) + wobble * np.sin(angle)], axis=1
                )
                _shade(mask, view, outline)
        elif kind < 0.85:
            depth, far = float(rng.uniform(4, 14)), edge + side * float(rng.uniform(2, 7)) * reach
            near = edge - side * 30
            _shade(mask, view, np.array([[near, z], [far, z + 1], [far, z + depth], [near, z + depth + 1]]))
        else:
            width = float(rng.uniform(0.15, 0.4))
            _shade(mask, view, np.array([[edge, z], [edge + side * 12, z + 6], [edge + side * 12, z + 6 + width],
                                         [edge, z + width]]))  # fmt: skip
    if scene.bridge_metres is not None:
        z = scene.bridge_metres - 1
        _shade(mask, view, np.array([[-60, z], [60, z], [60, z + 12], [-60, z + 12]]))
    return np.asarray(cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(0.8, 2.2))), dtype=np.uint8)


def _shade(mask: Bytes, view: View, outline: Floats) -> None:
    points = ground_polygon(view, outline)
    if points is not None:
        fill(mask, points, 255.0)
