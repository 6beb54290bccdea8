"""Scenes of style v2: those of v1, seen by other cameras on other roads, in other light.

v1 has one image format, even asphalt and moderate nights. v2 adds, each from draws of its own: images of another
aspect squeezed to one size; lanes of different materials, joints and removed paint that run along the road; nights
lit by little but a narrow beam or by lamps of one colour; our own bonnet over a third of the picture; exposure,
saturation, motion and dark corners.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perception.data.generated.scene import Scene, Strip, Variety, draw_scene, stream

_NIGHT_FROM_NORMAL = 0.3
"""Share of the v1 scenes of ordinary days that are nights instead."""
_LAMP_COLOURS = ((1.3, 1.0, 0.3), (1.15, 1.1, 0.2), (1.8, 0.35, 0.3), (0.8, 1.1, 1.1), (0.8, 0.9, 1.4), (1.0, 1.0, 1.0))
"""Sodium, its yellow kind, red and other neon, white."""


def draw_varied_scene(seed: int, index: int) -> Scene:
    """The v2 scene of (seed, index): the layout of the v1 scene, and its labels but for the camera's place."""
    scene = draw_scene(seed, index)
    rng = stream(seed, index, 9)
    if scene.category == "normal" and rng.random() < _NIGHT_FROM_NORMAL:
        scene = replace(scene, category="night", night=True)
    camera = replace(
        scene.camera,
        height_metres=float(rng.choice([rng.uniform(1.0, 1.7), rng.uniform(1.7, 2.6)], p=[0.8, 0.2])),
        focal_fraction=float(rng.uniform(0.55, 1.1)),
        horizon_fraction=float(rng.uniform(0.29, 0.5)),
        vertical_stretch=float(np.exp(rng.uniform(np.log(0.62), np.log(1.2)))),
    )
    bonnet = float(rng.uniform(0.05, 0.2) if rng.random() < 0.5 else rng.uniform(0.2, 0.36))
    return replace(
        scene,
        camera=camera,
        bonnet_fraction=bonnet if rng.random() < (0.6 if scene.night else 0.15) else 0.0,
        variety=_variety(rng, scene),
    )


def _variety(rng: np.random.Generator, scene: Scene) -> Variety:
    dark = scene.night and rng.random() < 0.65
    lamp = np.array(_LAMP_COLOURS[int(rng.integers(len(_LAMP_COLOURS)))]) * rng.uniform(0.85, 1.15, 3)
    red, green, blue = (lamp * float(rng.uniform(0.1, 0.6) if dark else rng.uniform(0.5, 1.2))).tolist()
    coloured = scene.night and rng.random() < 0.35
    cast = lamp / lamp.max() if coloured else rng.uniform(0.94, 1.06, 3)
    moving = rng.random() < (0.4 if scene.night else 0.15)
    exposures = (0.7, 1.3) if scene.night else (0.4, 1.0) if rng.random() < 0.4 else (0.8, 1.15)
    return Variety(
        lane_brightness=_lane_brightness(rng, len(scene.lane_centres_metres)),
        strips=_strips(rng, scene),
        ambient=(red, green, blue),
        beam_width=float(rng.uniform(0.35, 1.1)),
        exposure=float(rng.uniform(*exposures)),
        saturation=float(rng.uniform(0.3, 1.1)),
        cast=(float(cast[0]), float(cast[1]), float(cast[2])),
        zoom_blur=float(rng.uniform(0.01, 0.06)) if moving else 0.0,
        vignette=float(rng.uniform(0.1, 0.6)) if rng.random() < 0.3 else 0.0,
    )


def _lane_brightness(rng: np.random.Generator, num_lanes: int) -> tuple[float, ...]:
    """Mostly even; else some lanes are of concrete or of fresh asphalt."""
    if rng.random() < 0.55:
        return (1.0,) * num_lanes
    other = float(rng.uniform(0.7, 1.4))
    return tuple(other * float(rng.uniform(0.95, 1.05)) if rng.random() < 0.5 else 1.0 for _ in range(num_lanes))


def _strips(rng: np.random.Generator, scene: Scene) -> tuple[Strip, ...]:
    """Joints of tar beside or between the lines, and paint that was ground off, neither of them a marking."""
    strips = []
    if rng.random() < 0.4:
        away = float(rng.uniform(0.15, 0.7)) * float(rng.choice([-1, 1]))
        width, tone = float(rng.uniform(0.04, 0.1)), float(rng.uniform(0.5, 0.85))
        strips += [Strip(line.offset_metres + away, width, tone) for line in scene.lines if rng.random() < 0.8]
    if rng.random() < 0.2:
        tone = float(rng.uniform(1.05, 1.25) if rng.random() < 0.6 else rng.uniform(0.75, 0.95))
        for centre in scene.lane_centres_metres:
            if rng.random() < 0.5:
                strips.append(Strip(centre + float(rng.uniform(-1.2, 1.2)), float(rng.uniform(0.1, 0.25)), tone))
    return tuple(strips)
