"""From (seed, index) to a labelled picture."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from perception.data.generated.backdrop import draw_sky
from perception.data.generated.effects import (
    air_and_sheen,
    draw_bonnet,
    draw_rain,
    glare,
    light_ground,
    shoot,
    through_another_camera,
)
from perception.data.generated.ground import draw_ground, shadow_mask
from perception.data.generated.light import Light, draw_light
from perception.data.generated.road import View
from perception.data.generated.roadside import draw_roadside
from perception.data.generated.scene import Scene, draw_scene, stream
from perception.data.generated.textures import Bytes
from perception.data.generated.truth import label_scene
from perception.data.generated.variety import draw_varied_scene
from perception.data.generated.vehicles import draw_vehicle
from perception.data.sample import LaneSample, LaneTruth, ReadReport
from perception.errors import UserError, nearest

DEFAULT_STYLE = "v1"

_SCENES: dict[str, Callable[[int, int], Scene]] = {DEFAULT_STYLE: draw_scene, "v2": draw_varied_scene}
SCENE_STYLES: tuple[str, ...] = tuple(_SCENES)
"""How scenes are drawn. A style's pictures and labels never change: what differs is another style, and caches are
keyed by it."""

_SMALLEST_PIXELS = 64
_LARGEST_PIXELS = 4096


def render_scene(seed: int, index: int, height: int = 320, width: int = 800, style: str = DEFAULT_STYLE) -> LaneSample:
    """Picture and labels of scene (seed, index); the same bytes in every process.

    Raises UserError for a negative seed or index, a size outside 64 to 4096 pixels or an unknown style.
    """
    check_scene(seed, index, height, width)
    scene = _scene(seed, index, style)
    view = View(scene.camera, scene.road, height, width)
    return LaneSample(image=render(scene, view), truth=label_scene(scene, view))


def scene_truth(seed: int, index: int, height: int = 320, width: int = 800, style: str = DEFAULT_STYLE) -> LaneTruth:
    """The labels that `render_scene` gives, without drawing."""
    check_scene(seed, index, height, width)
    scene = _scene(seed, index, style)
    return label_scene(scene, View(scene.camera, scene.road, height, width))


def _scene(seed: int, index: int, style: str) -> Scene:
    if style not in _SCENES:
        raise UserError(f'generated scenes: style "{style}" is unknown{nearest(style, SCENE_STYLES)}')
    return _SCENES[style](seed, index)


def render(scene: Scene, view: View) -> Bytes:
    """(height, width, 3) uint8 RGB of a scene."""
    light = draw_light(scene)
    canvas = draw_backdrop(scene, view, light)
    draw_roadside(canvas, scene, view, light)
    for vehicle in scene.vehicles:
        draw_vehicle(canvas, view, light, vehicle, scene.wet)
    if scene.bonnet_fraction:
        draw_bonnet(canvas, scene, view, light)
    return finish(canvas, scene, view, light)


def draw_backdrop(scene: Scene, view: View, light: Light) -> Bytes:
    """A canvas with the ground and the sky: what nothing stands behind."""
    canvas = np.empty((view.canvas_height, view.canvas_width, 3), np.uint8)
    draw_ground(canvas, scene, view)
    shadows = shadow_mask(scene, view, light.sun_x, light.sun_height) if light.casts_shadows else None
    light_ground(canvas, view, light, shadows)
    air_and_sheen(canvas, view, light, 0.65 if scene.wet else 0.0)
    draw_sky(canvas, scene, view, light)
    return canvas


def finish(canvas: Bytes, scene: Scene, view: View, light: Light) -> Bytes:
    """What lies before everything, and the camera: (height, width, 3) uint8 RGB."""
    if scene.category == "glare":
        glare(canvas, view, light)
    if scene.rain:
        draw_rain(canvas, scene, view, stream(scene.seed, scene.index, 6))
    if scene.variety is not None:
        through_another_camera(canvas, view, scene.variety)
    return shoot(canvas, scene, view)


def check_scene(seed: int, index: int, height: int, width: int) -> None:
    """Raises UserError for a negative seed or index or a size that cannot be drawn."""
    for name, value in (("seed", seed), ("index", index)):
        if value < 0:
            raise UserError(f"generated scenes: {name} = {value} must not be negative")
    for name, value in (("height", height), ("width", width)):
        if not _SMALLEST_PIXELS <= value <= _LARGEST_PIXELS:
            raise UserError(
                f"generated scenes: {name} = {value} must be between {_SMALLEST_PIXELS} and {_LARGEST_PIXELS} pixels"
            )


class GeneratedScenes:
    """Scenes first_index ... first_index + count - 1 of a seed, as a LaneDataset."""

    def __init__(
        self,
        seed: int,
        first_index: int,
        count: int,
        height: int = 320,
        width: int = 800,
        style: str = DEFAULT_STYLE,
    ) -> None:
        """Labels are drawn at once, to count them; pictures when asked for."""
        check_scene(seed, first_index, height, width)
        if count < 1:
            raise UserError(f"generated scenes: count = {count} must be at least 1")
        self.seed, self.first_index, self.count = seed, first_index, count
        self.height, self.width, self.style = height, width, style
        self.report = ReadReport()
        for index in range(first_index, first_index + count):
            truth = scene_truth(seed, index, height, width, style)
            self.report.images += 1
            self.report.lanes += len(truth.lanes)
            self.report.lane_counts[len(truth.lanes)] += 1
            if not truth.lanes:
                self.report.note("scene without a lane, kept", truth.name)

    def __len__(self) -> int:
        return self.count

    def truth(self, index: int) -> LaneTruth:
        return scene_truth(self.seed, self._scene_index(index), self.height, self.width, self.style)

    def sample(self, index: int) -> LaneSample:
        return render_scene(self.seed, self._scene_index(index), self.height, self.width, self.style)

    def _scene_index(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        return self.first_index + index
