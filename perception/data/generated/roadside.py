"""What stands beside and over the road: trees, buildings, lamps, rails, posts, bridges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import cv2
import numpy as np

from perception.data.generated import textures
from perception.data.generated.light import Colour, Light, blend_glow, fill, headlight_at, lit, rgb, transmission
from perception.data.generated.road import View
from perception.data.generated.scene import Scene, stream
from perception.data.generated.textures import Bytes

_NEAREST_METRES = 0.6


def draw_roadside(
    canvas: Bytes, scene: Scene, view: View, light: Light, others: Sequence[tuple[float, Callable[[Bytes], None]]] = ()
) -> None:
    """Everything upright that is no vehicle, from far to near; then rails, which run the whole length.

    `others` are (distance in metres, what draws it) of more things, drawn in their turn.
    """
    rng = stream(scene.seed, scene.index, 5)
    # (distance, kind, offset, side, variant)
    things: list[tuple[float, str, float, float, int]] = []
    barriers: list[tuple[float, str]] = []
    for side, edge in ((-1.0, scene.asphalt_left_metres), (1.0, scene.asphalt_right_metres)):

        def put(z: float, kind: str, away: float, side: float = side, edge: float = edge) -> None:
            if z < view.end_metres:
                things.append((z, kind, edge + side * away, side, int(rng.integers(1 << 30))))

        if scene.setting == "urban":
            z, setback = float(rng.uniform(8, 30)), float(rng.uniform(5, 11))
            while z < 140 and rng.random() < 0.93:
                length = float(rng.uniform(12, 34))
                put(z + length, "building", setback + float(rng.uniform(0, 3)))
                z += length + float(rng.exponential(6))
        for _ in range(int(rng.poisson({"urban": 3, "rural": 8, "highway": 5}[scene.setting]))):
            away = float(rng.uniform(2.2, 4.5) if scene.setting == "urban" else rng.uniform(4.5, 22))
            put(float(rng.uniform(9, 120)), "tree", away)
        for _ in range(int(rng.poisson({"urban": 1, "rural": 4, "highway": 3}[scene.setting]))):
            put(float(rng.uniform(6, 60)), "bush", float(rng.uniform(2.5, 9)))
        if light.lamps or (scene.setting != "rural" and rng.random() < 0.4):
            for z in np.arange(float(rng.uniform(8, 25)), 150, float(rng.uniform(22, 35))):
                put(float(z), "lamp", 1.2)
        if rng.random() < {"urban": 0.15, "rural": 0.25, "highway": 0.75}[scene.setting]:
            kind = "wall" if rng.random() < 0.3 and scene.setting == "highway" else "rail"
            barriers.append((edge + side * float(rng.uniform(0.5, 1.2)), kind))
        elif scene.setting != "urban" and rng.random() < 0.6:
            for z in np.arange(float(rng.uniform(5, 25)), 150, 25.0):
                put(float(z), "post", 0.7)
    if scene.bridge_metres is not None and scene.bridge_metres < view.end_metres - 12:
        things.append((scene.bridge_metres, "bridge", 0.0, 0.0, 0))
    waiting = sorted(others, key=lambda other: other[0])
    for z, kind, offset, side, variant in sorted(things, reverse=True):
        while waiting and waiting[-1][0] >= z:
            waiting.pop()[1](canvas)
        match kind:
            case "building":
                _draw_building(canvas, view, light, offset, side, z, variant)
            case "tree" | "bush":
                _draw_tree(canvas, view, light, offset, z, variant, kind == "bush")
            case "lamp":
                _draw_lamp(canvas, view, light, offset, side, z)
            case "post":
                _draw_post(canvas, view, light, offset, z)
            case _:
                _draw_bridge(canvas, scene, view, light, z)
    while waiting:
        waiting.pop()[1](canvas)
    for offset, kind in barriers:
        _draw_barrier(canvas, view, light, offset, kind)


def _blend(canvas: Bytes, window: tuple[int, int, int, int], picture: Bytes, alpha: Bytes) -> None:
    x1, y1, x2, y2 = window
    patch = canvas[y1:y2, x1:x2]
    weight = alpha.astype(np.float32)
    weight *= np.float32(1 / 255)
    patch[:] = cv2.blendLinear(picture, np.ascontiguousarray(patch), weight, 1 - weight)


def _seen(light: Light, gain: Colour, z: float) -> Bytes:
    """(1, 256, 3) table from a texture's own value (128 is `gain`) to what arrives from distance z."""
    clear = float(transmission(light, z))
    table = np.arange(256)[:, None] * (gain * clear)[None, :] + light.haze * (1 - clear)
    return table.clip(0, 255).astype(np.uint8)[None]


def _gain(light: Light, x_metres: float, z: float, tone: Colour | float) -> Colour:
    beam = float(headlight_at(light, x_metres, z)) * 0.6 if light.headlight else 0.0
    return np.asarray((light.direct + beam) * tone, np.float64)


def _draw_tree(canvas: Bytes, view: View, light: Light, offset: float, z: float, variant: int, bush: bool) -> None:
    rng = np.random.Generator(np.random.PCG64(variant))
    frame = view.frame(offset, z)
    tall = float(rng.uniform(0.9, 2.0) if bush else rng.uniform(4.5, 10))
    foot_x, foot_y = frame.project([(0.0, 0.0, 0.0)])[0].tolist()
    height = tall * view.focal_y / z
    width = tall * view.focal / z * float(rng.uniform(1.2, 1.9) if bush else rng.uniform(0.65, 0.9))
    window = view.window(np.array([[foot_x - width / 2, foot_y - height], [foot_x + width / 2, foot_y]]))
    if window is None:
        return
    kind = textures.NUM_TREES if bush else variant % textures.NUM_TREES
    level = 0
    while level < textures.TREE_LEVELS - 1 and textures.TREE_HEIGHT >> level > 1.6 * height:
        level += 1
    colour, alpha = textures.tree(kind, level)
    rows, columns = alpha.shape
    x1, y1, x2, y2 = window
    # Only the part on the canvas is resampled: near trees are far larger than the image.
    matrix = np.array([[columns / width, 0, (x1 - foot_x + width / 2) * columns / width],
                       [0, rows / height, (y1 - foot_y + height) * rows / height]])  # fmt: skip
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    shades = cv2.warpAffine(colour, matrix, (x2 - x1, y2 - y1), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    mask = np.asarray(cv2.warpAffine(alpha, matrix, (x2 - x1, y2 - y1), flags=flags), dtype=np.uint8)
    leaf = (rgb(88, 108, 58) * rng.uniform(0.75, 1.2) + rng.normal(0, 7, 3)) / 128
    picture = cv2.LUT(shades, _seen(light, _gain(light, frame.x_metres, z, leaf), z))
    _blend(canvas, window, np.asarray(picture, dtype=np.uint8), mask)


def _draw_building(
    canvas: Bytes, view: View, light: Light, offset: float, side: float, far: float, variant: int
) -> None:
    """A block whose long side runs along the road; `far` is its farther end."""
    rng = np.random.Generator(np.random.PCG64(variant))
    kind = int(rng.integers(textures.NUM_FACADES))
    near = max(far - float(rng.uniform(10, 26)), float(view.row_z[-1]) * 0.8)
    tall = float(rng.uniform(6, 22))
    x_metres = view.road.centre_at(near) + offset
    toward_sun = 0.75 if light.casts_shadows and (light.sun_x > 0) == (side > 0) else 1.0
    above = np.array([0.0, 0.0, tall, tall])
    end = view.project(offset + side * np.array([0.0, 14.0, 14.0, 0.0]), near, above)
    front = view.project(offset, np.array([near, far, far, near]), above)
    for corners, tone, share in ((end, 0.86, 0.55), (front, toward_sun, 1.0)):
        window = view.window(corners)
        if window is None:
            continue
        image, lights = textures.facade(kind)
        rows, columns = lights.shape
        wide = columns * share
        source = np.array([[0, rows], [wide, rows], [wide, 0], [0, 0]], np.float32)
        x1, y1, x2, y2 = window
        local = corners - (x1, y1)
        matrix = cv2.getPerspectiveTransform(source, local.astype(np.float32))
        size = (x2 - x1, y2 - y1)
        table = _seen(light, _gain(light, x_metres, near, tone), (near + far) / 2)
        picture = cv2.LUT(cv2.warpPerspective(image, matrix, size, flags=cv2.INTER_LINEAR), table)
        if light.headlight > 0:
            glow = cv2.warpPerspective(lights, matrix, size, flags=cv2.INTER_LINEAR)
            warm = _seen(light, rgb(0.85, 0.66, 0.36), near) - _seen(light, rgb(0, 0, 0), near)
            picture = cv2.add(picture, cv2.LUT(cv2.merge([glow, glow, glow]), warm))
        mask = np.zeros((y2 - y1, x2 - x1), np.uint8)
        fill(mask, local, 255.0)
        _blend(canvas, window, np.asarray(picture, np.uint8), mask)


def _draw_lamp(canvas: Bytes, view: View, light: Light, offset: float, side: float, z: float) -> None:
    frame = view.frame(offset, z)
    steel = lit(light, rgb(110, 112, 114), frame.x_metres, z)
    fill(canvas, frame.project([(-0.08, 0, 0), (0.08, 0, 0), (0.05, 0, 8.5), (-0.05, 0, 8.5)]), steel)
    arm = [(0.0, 0, 8.3), (0.0, 0, 8.5), (-2.0 * side, 0, 9.0), (-2.0 * side, 0, 8.85)]
    fill(canvas, frame.project(arm), steel)
    if light.lamps:
        x, y = frame.project([(-2.0 * side, 0, 8.85)])[0].tolist()
        clear = float(transmission(light, z))
        radius = max(0.35 * view.focal / z, 2.0)
        blend_glow(canvas, x, y, radius, rgb(255, 214, 140), 0.9 * clear)
        blend_glow(canvas, x, y, radius * 3.5, rgb(255, 190, 110), 0.22 * clear)


def _draw_post(canvas: Bytes, view: View, light: Light, offset: float, z: float) -> None:
    frame = view.frame(offset, z)
    for low, high, colour in ((0.0, 1.0, rgb(226, 226, 222)), (0.7, 0.88, rgb(40, 40, 42))):
        points = [(-0.06, 0, low), (0.06, 0, low), (0.06, 0, high), (-0.06, 0, high)]
        fill(canvas, frame.project(points), lit(light, colour, frame.x_metres, z))


def _draw_bridge(canvas: Bytes, scene: Scene, view: View, light: Light, z: float) -> None:
    """A road crossing above ours: underside in the dark, a parapet, two piers."""
    frame = view.frame(0.0, z)
    concrete = rgb(164, 160, 154)

    def wall(points: list[tuple[float, float, float]], tone: float) -> None:
        fill(canvas, frame.project(points), lit(light, concrete, frame.x_metres, z, tone))

    for x in (scene.asphalt_left_metres - 2.0, scene.asphalt_right_metres + 1.0):
        for ahead, tone in ((9.0, 0.5), (1.0, 0.8)):
            wall([(x, ahead, 0.0), (x + 1.0, ahead, 0.0), (x + 1.0, ahead, 5.6), (x, ahead, 5.6)], tone)
    wall([(-90, 0, 5.5), (90, 0, 5.5), (90, 10, 5.5), (-90, 10, 5.5)], 0.35)
    wall([(-90, 0, 5.5), (90, 0, 5.5), (90, 0, 7.0), (-90, 0, 7.0)], 0.85)
    wall([(-90, 0, 6.7), (90, 0, 6.7), (90, 0, 7.0), (-90, 0, 7.0)], 1.0)


def _draw_barrier(canvas: Bytes, view: View, light: Light, offset: float, kind: str) -> None:
    bands = (
        ((0.0, 0.9, 0.9), (0.82, 0.9, 1.15), (0.0, 0.3, 0.78))
        if kind == "wall"
        else ((0.45, 0.76, 0.95), (0.57, 0.63, 0.68), (0.71, 0.76, 1.2))
    )
    far_end = min(view.end_metres, 240.0)
    stops = [stop for stop in (_NEAREST_METRES, 7.0, 14.0, 28.0, 60.0, 120.0) if stop < far_end] + [far_end]
    for near, far in reversed(list(itertools.pairwise(stops))):
        z = np.geomspace(near, far, 10)
        middle = (near * far) ** 0.5
        x_metres = view.road.centre_at(middle) + offset
        if kind == "rail" and middle < 70:
            for post in np.arange(far - far % 4.0, near, -4.0).tolist():
                foot = view.frame(offset, post).project([(-0.05, 0, 0), (0.05, 0, 0), (0.05, 0, 0.6), (-0.05, 0, 0.6)])
                fill(canvas, foot, lit(light, rgb(100, 100, 100), x_metres, post))
        for low, high, tone in bands:
            points = np.concatenate([view.project(offset, z, low), view.project(offset, z, high)[::-1]])
            fill(canvas, points, lit(light, rgb(168, 170, 172) * tone, x_metres, middle))
