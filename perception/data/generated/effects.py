"""What light, air, rain and the camera do to whole pictures."""

from __future__ import annotations

import cv2
import numpy as np

from perception.data.generated import textures
from perception.data.generated.light import Light, blend_glow, by_row, fill, headlight_at, rgb, transmission
from perception.data.generated.road import View
from perception.data.generated.scene import Scene, Variety, stream
from perception.data.generated.textures import TILE, Bytes


def light_ground(canvas: Bytes, view: View, light: Light, shadows: Bytes | None) -> None:
    """Turn the ground's own colours into what the camera sees: sun and shadow, or headlights at night."""
    ground = canvas[view.ground_top :]
    if light.headlight > 0:
        _light_by_lamps(ground, view, light)
        return
    if shadows is None:
        table = np.rint(np.arange(256)[:, None] * light.direct).clip(0, 255).astype(np.uint8)
        cv2.LUT(ground, table[None], dst=ground)
        return
    mask = shadows[view.ground_top :]
    share = np.linspace(0, 1, 256)[:, None]
    factors = np.rint(128 * (light.direct * (1 - share) + light.shadow * share)).clip(0, 255).astype(np.uint8)
    cv2.multiply(ground, cv2.LUT(cv2.merge([mask, mask, mask]), factors[None]), dst=ground, scale=1 / 128)


def _light_by_lamps(ground: Bytes, view: View, light: Light) -> None:
    step = 8
    rows = view.rows[::step]
    z = view.distance_at(rows)[:, None]
    columns = np.arange(0, view.canvas_width, step)[None, :]
    x = (columns - view.centre_x) / view.focal * z
    beam = headlight_at(light, x, z)
    if light.lamps:
        pools = np.maximum(np.cos((z - 16) / 28 * 2 * np.pi), 0) ** 2
        beam = beam + 0.22 * pools * np.exp(-((x / 14) ** 2))
    factors = np.stack([128 * (light.direct[c] + beam * (1.0, 0.97, 0.88)[c]) for c in range(3)], axis=-1)
    small = np.rint(factors).clip(0, 255).astype(np.uint8)
    full = cv2.resize(small, (view.canvas_width, ground.shape[0]), interpolation=cv2.INTER_LINEAR)
    cv2.multiply(ground, full, dst=ground, scale=1 / 128)


def air_and_sheen(canvas: Bytes, view: View, light: Light, sheen: float) -> None:
    """Fade the ground towards the haze by distance; before that, if wet, let it mirror the sky.

    `sheen` is the share of sky that the road gives back where it is seen flattest, 0 when dry.
    """
    ground = canvas[view.ground_top :]
    clear = transmission(light, view.row_z)[:, None]
    mirror = (sheen * np.exp(-(view.rows - view.ground_top) / (0.22 * view.height)))[:, None]
    keep = np.repeat(clear * (1 - mirror) * 255, 3, axis=1)
    added = light.sky_low * 0.9 * mirror * clear + light.haze * (1 - clear)
    cv2.multiply(ground, by_row(keep, view.canvas_width), dst=ground, scale=1 / 255)
    cv2.add(ground, by_row(added, view.canvas_width), dst=ground)


def glare(canvas: Bytes, view: View, light: Light) -> None:
    """A low sun: veil over the picture and its mirror image on the road."""
    x = view.centre_x + light.sun_x * view.focal * 0.5
    y = view.horizon - light.sun_height * view.focal_y
    small = np.zeros((canvas.shape[0] // 8, canvas.shape[1] // 8, 3), np.uint8)
    blend_glow(small, x / 8, y / 8, view.width * 0.22 / 8, rgb(255, 232, 190), 0.36)
    blend_glow(small, x / 8, (view.ground_top + view.height * 0.12) / 8, view.width * 0.06 / 8, rgb(255, 228, 180), 0.4)
    veil = cv2.resize(small, (canvas.shape[1], canvas.shape[0]), interpolation=cv2.INTER_LINEAR)
    cv2.add(canvas, veil, dst=canvas)


def through_another_camera(canvas: Bytes, view: View, variety: Variety) -> None:
    """Motion, exposure, colour and dark corners as the variety has them."""
    height, width = canvas.shape[:2]
    if variety.zoom_blur:
        moved = []
        # Both ways, so that the middle of what is blurred stays where its label is.
        for share in (-0.5, 0.5):
            scale = 1 + variety.zoom_blur * share
            matrix = np.array(
                [[scale, 0, (1 - scale) * view.centre_x], [0, scale, (1 - scale) * view.horizon]], dtype=np.float64
            )
            moved.append(cv2.warpAffine(canvas, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE))
        cv2.addWeighted(canvas, 0.5, moved[0], 0.5, 0, dst=moved[0])
        cv2.addWeighted(moved[0], 0.67, moved[1], 0.33, 0, dst=canvas)
    grey = np.tile(np.array([0.299, 0.587, 0.114]), (3, 1))
    colours = variety.saturation * np.eye(3) + (1 - variety.saturation) * grey
    gains = variety.exposure * np.array(variety.cast)[:, None]
    cv2.transform(canvas, colours * gains, dst=canvas)
    if variety.vignette:
        x, y = np.linspace(-1, 1, 40), np.linspace(-1, 1, 20)[:, None]
        small = np.rint(255 * (1 - variety.vignette * (x**2 + y**2) / 2)).astype(np.uint8)
        corners = cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)
        cv2.multiply(canvas, cv2.merge([corners, corners, corners]), dst=canvas, scale=1 / 255)


def draw_bonnet(canvas: Bytes, scene: Scene, view: View, light: Light) -> None:
    """Our own bonnet at the bottom of the picture: a curved, glossy rim that mirrors the sky."""
    rng = stream(scene.seed, scene.index, 8)
    paint = rgb(*(float(rng.choice([18, 40, 110, 190])) + rng.uniform(-6, 6, 3)))
    middle = view.centre_x + float(rng.normal(0, 0.05)) * view.width
    bottom = view.pad_y + view.height
    across = np.linspace(-0.75, 0.75, 41)
    arch = float(rng.uniform(0.25, 0.6))
    gloss = light.sky_low * float(rng.uniform(0.15, 0.4))
    for share in np.linspace(0, 1, 9).tolist():
        top = bottom - scene.bonnet_fraction * view.height * (1 - arch * (across / 0.75) ** 2) * (1 - 0.75 * share)
        outline = np.stack([middle + across * view.width, top], axis=1)
        floor = canvas.shape[0] + 8.0
        outline = np.concatenate([outline, [[outline[-1, 0], floor], [outline[0, 0], floor]]])
        tone = paint * light.direct * (0.55 + 0.35 * share) + gloss * (1 - share) ** 2
        fill(canvas, outline, tone.clip(0, 255))


def draw_rain(canvas: Bytes, scene: Scene, view: View, rng: np.random.Generator) -> None:
    """Streaks of falling drops, and drops on the windscreen that smear what is behind them."""
    layer = np.zeros(canvas.shape[:2], np.uint8)
    count = int(260 * scene.rain)
    slant = float(rng.normal(0, 0.12))
    start = rng.uniform(0, 1, (count, 2)) * (canvas.shape[1], canvas.shape[0])
    length = rng.uniform(0.02, 0.08, count) * canvas.shape[0]
    for (x, y), tall in zip(start, length, strict=True):
        cv2.line(layer, (int(x), int(y)), (int(x + slant * tall), int(y + tall)), 38, 1, cv2.LINE_AA)
    cv2.add(canvas, cv2.merge([layer, layer, layer]), dst=canvas)
    if rng.random() < 0.6:
        drops = np.zeros(canvas.shape[:2], np.uint8)
        for _ in range(int(60 * scene.rain)):
            centre = (int(rng.uniform(0, canvas.shape[1])), int(rng.uniform(0, canvas.shape[0])))
            axes = (int(rng.uniform(1, 4) * view.width / 800), int(rng.uniform(2, 6) * view.width / 800))
            cv2.ellipse(drops, centre, axes, 0.0, 0.0, 360.0, 255, -1)
        soft = cv2.blur(drops, (3, 3)).astype(np.float32) * np.float32(0.75 / 255)
        smeared = cv2.blur(canvas, (15, 21))
        canvas[:] = cv2.blendLinear(smeared, canvas, soft, 1 - soft)


def shoot(canvas: Bytes, scene: Scene, view: View) -> Bytes:
    """Roll, blur, exposure, noise and JPEG: (height, width, 3) uint8 RGB as a camera would store it."""
    rng = stream(scene.seed, scene.index, 7)
    size = (view.width, view.height)
    if scene.camera.roll_radians == 0.0:
        image = canvas[view.pad_y : view.pad_y + view.height, view.pad_x : view.pad_x + view.width].copy()
    else:
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        image = np.asarray(
            cv2.warpAffine(canvas, view.image_to_canvas_matrix(), size, flags=flags, borderMode=cv2.BORDER_REPLICATE),
            dtype=np.uint8,
        )
    blur = float(rng.choice([0.0, rng.uniform(0.3, 0.6), rng.uniform(0.6, 1.1)], p=[0.45, 0.35, 0.2]))
    if blur:
        image = np.asarray(cv2.GaussianBlur(image, (5, 5), blur * max(view.width / 800, 1.0)), dtype=np.uint8)
    warmth = rng.normal(0, 0.035) * np.array([1.0, 0.1, -1.0])
    gain = float(rng.uniform(0.88, 1.1)) * np.exp(warmth + rng.normal(0, 0.008, 3))
    gamma = float(rng.uniform(0.88, 1.12))
    levels = np.clip(255 * (np.arange(256)[:, None] / 255 * gain) ** gamma, 0, 255)
    image = np.asarray(cv2.LUT(image, np.rint(levels).astype(np.uint8)[None]), dtype=np.uint8)
    noise = float(rng.uniform(2.0, 6.0) if scene.night else rng.exponential(1.2))
    if noise > 0.4:
        _add_noise(image, min(noise, 8.0), rng)
    if rng.random() < 0.5:
        quality = int(rng.uniform(45, 95))
        ok, code = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])
        assert ok
        image = np.asarray(cv2.imdecode(code, cv2.IMREAD_COLOR_RGB), dtype=np.uint8)
    return image


def _add_noise(image: Bytes, deviation: float, rng: np.random.Generator) -> None:
    """Add grey noise of the given deviation, cut from one tile at a random place."""
    levels = np.rint(np.arange(-128, 128) * (deviation / 24)).astype(np.int8)
    tile = textures.sensor_noise()
    for y in range(0, image.shape[0], TILE):
        for x in range(0, image.shape[1], TILE):
            part = image[y : y + TILE, x : x + TILE]
            top = int(rng.integers(0, TILE - part.shape[0] + 1))
            left = int(rng.integers(0, 2 * TILE - part.shape[1] + 1))
            grain = levels.take(tile[top : top + part.shape[0], left : left + part.shape[1]].astype(np.int16) + 128)
            part[:] = cv2.add(part, cv2.merge([grain, grain, grain]), dtype=cv2.CV_8U)
