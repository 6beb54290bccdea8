"""Sky and horizon: clouds, a low sun, hills, far trees and a skyline."""

from __future__ import annotations

import cv2
import numpy as np

from perception.data.generated import textures
from perception.data.generated.light import Light, blend_glow, fill, rgb, transmission
from perception.data.generated.road import Floats, View
from perception.data.generated.scene import Scene, stream
from perception.data.generated.textures import Bytes


def draw_sky(canvas: Bytes, scene: Scene, view: View, light: Light) -> None:
    """Fill the canvas above the ground: gradient, clouds, the sun's glow, hills and far trees."""
    rng = stream(scene.seed, scene.index, 4)
    bottom = view.ground_top
    rows = np.clip((np.arange(bottom) - view.pad_y) / max(view.horizon - view.pad_y, 1.0), 0, 1)[:, None] ** 1.4
    gradient = light.sky_top * (1 - rows) + light.sky_low * rows
    column = np.rint(gradient).clip(0, 255).astype(np.uint8)[:, None, :]
    clear = np.ascontiguousarray(np.broadcast_to(column, (bottom, view.canvas_width, 3)))
    if light.cloud_cover > 0.05:
        x, y = int(rng.integers(0, 1000)), int(rng.integers(0, 300))
        window = textures.clouds()[y : y + 200, x : x + 1000]
        cover = cv2.resize(window, (view.canvas_width, bottom), interpolation=cv2.INTER_LINEAR)
        table = np.clip((np.arange(256) - 255 * (1 - light.cloud_cover)) / 110, 0, 1).astype(np.float32)
        share = cv2.LUT(cover, (table * 0.9)[None, :])
        shaded = light.cloud * (1 - 0.25 * light.cloud_cover)
        texture = np.clip(np.linspace(0.82, 1.06, 256)[:, None] * shaded, 0, 255).astype(np.uint8)
        cloudy = cv2.LUT(cv2.merge([cover, cover, cover]), texture[None])
        clear = np.asarray(cv2.blendLinear(cloudy, clear, share, 1 - share), dtype=np.uint8)
    canvas[:bottom] = clear
    if light.sun_height < 0.3 and light.headlight == 0:
        sun_column = view.centre_x + light.sun_x * view.focal * 0.5
        sun_row = view.horizon - light.sun_height * view.focal_y
        sky = canvas[:bottom]
        blend_glow(sky, sun_column, sun_row, view.width * 0.16, rgb(255, 220, 150), 0.55)
        blend_glow(sky, sun_column, sun_row, view.width * 0.045, rgb(255, 244, 214), 0.9)
    _draw_far(canvas, scene, view, light, rng)


def _draw_far(canvas: Bytes, scene: Scene, view: View, light: Light, rng: np.random.Generator) -> None:
    """Silhouettes that end the ground: hills, a line of trees, in town a skyline."""
    base = view.end_row + 2
    columns = np.arange(0, view.canvas_width + 4, 3, dtype=np.float64)

    def outline(heights: Floats) -> Floats:
        top = np.stack([columns, base - heights], axis=1)
        return np.concatenate([top, [[columns[-1], base + 4], [0.0, base + 4]]])

    scale = view.width / 800
    if rng.random() < 0.6:
        place = int(rng.integers(0, 3000))
        ridge = np.interp(columns / scale * 0.9 + place, np.arange(4096), textures.ridge())
        hills = rgb(96, 112, 120) * light.direct + light.haze * 0.25
        share = float(np.clip(transmission(light, 900.0), 0.0, 0.75))
        fill(canvas, outline(ridge * rng.uniform(10, 48) * scale), hills * share + light.haze * (1 - share))
    share = float(transmission(light, 160.0))
    if scene.setting == "urban" and rng.random() < 0.8:
        x = -10.0
        while x < view.canvas_width:
            width, height = float(rng.uniform(14, 60)) * scale, float(rng.uniform(6, 55)) * scale
            tone = rgb(120, 118, 118) * rng.uniform(0.7, 1.2) * light.direct
            colour = tone * share + light.haze * (1 - share)
            corners = np.array([[x, base - height], [x + width, base - height], [x + width, base + 4], [x, base + 4]])
            fill(canvas, corners, np.clip(colour, 0, 255))
            if light.headlight > 0:
                for _ in range(int(rng.integers(0, 6))):
                    spot = np.array([x + rng.uniform(0, width), base - rng.uniform(0.1, 1) * height])
                    size = rng.uniform(0.6, 1.5) * scale
                    fill(canvas, spot + np.array([[0, 0], [size, 0], [size, size], [0, size]]), rgb(220, 190, 120))
            x += width * float(rng.uniform(0.8, 1.6))
    for shade in (1.0, 0.8):
        place = int(rng.integers(0, 3000))
        trees = np.interp(columns / scale * 1.7 + place, np.arange(4096), textures.canopy())
        low = rng.uniform(0, 5) * scale
        wood = rgb(66, 84, 52) * shade * light.direct
        colour = np.clip(wood * share + light.haze * (1 - share), 0, 255)
        fill(canvas, outline(low + trees * rng.uniform(5, 26) * scale), colour)
