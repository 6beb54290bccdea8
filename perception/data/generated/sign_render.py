"""From (seed, index) to a picture with traffic signs and the boxes of those that show.

A face is labelled where its visible part is at least SMALLEST_SIDE_PIXELS wide and high, is at least VISIBLE_SHARE of
the whole face, and stands out by LEAST_CONTRAST levels; its box is the tight bounds of that part. A face that falls
short of one of the three is an ignored region, or nothing where under a tenth of it shows. Supplementary plates, backs
of signs and look-alikes have no box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from perception.data.generated.effects import draw_bonnet
from perception.data.generated.light import Light, draw_light, fixed
from perception.data.generated.render import check_scene, draw_backdrop, finish
from perception.data.generated.road import View
from perception.data.generated.roadside import draw_roadside
from perception.data.generated.scene import Scene, draw_scene
from perception.data.generated.sign_drawing import DrawnFace, Layer, support_layers
from perception.data.generated.sign_scene import Support, draw_supports
from perception.data.generated.textures import Bytes
from perception.data.generated.vehicles import draw_vehicle
from perception.data.signs.sample import SignSample, SignTruth

SIGN_RENDERER_VERSION = 1
"""Grows whenever the pictures or labels of a (seed, index) change; caches are keyed by it."""

SMALLEST_SIDE_PIXELS = 8.0
VISIBLE_SHARE = 0.4
LEAST_CONTRAST = 20.0
_SMALLEST_IGNORED_PIXELS = 2.0
_SMALLEST_IGNORED_SHARE = 0.1
_CHANGED_CONTRAST = 0.07
"""A pixel of a face that later drawing changes by more than this share of the face's contrast is hidden."""
_LEAST_CHANGED_LEVELS, _MOST_CHANGED_LEVELS = 4.0, 14.0
_BOUNDS_TOLERANCE_PIXELS = 1.3


@dataclass(frozen=True, eq=False)
class SeenFace:
    """A class's face in the image, whether labelled or not."""

    label: int
    box: tuple[float, float, float, float]
    """Tight bounds of its visible part, half-open image pixels."""
    visible_share: float
    contrast: float

    @property
    def labelled(self) -> bool:
        x1, y1, x2, y2 = self.box
        return (
            min(x2 - x1, y2 - y1) >= SMALLEST_SIDE_PIXELS
            and self.visible_share >= VISIBLE_SHARE
            and self.contrast >= LEAST_CONTRAST
        )


def render_sign_scene(seed: int, index: int, height: int = 320, width: int = 800) -> SignSample:
    """Picture and signs of scene (seed, index), classes as in GTSDB_CLASSES; the same bytes in every process.

    Raises UserError for a negative seed or index or a size outside 64 to 4096 pixels.
    """
    check_scene(seed, index, height, width)
    scene = draw_scene(seed, index)
    view = View(scene.camera, scene.road, height, width)
    image, faces = render_signs(scene, view, draw_supports(scene))
    labelled = [face for face in faces if face.labelled]
    ignored = [face.box for face in faces if not face.labelled]
    truth = SignTruth(
        name=f"generated-{scene.index:06d}",
        height=height,
        width=width,
        boxes=np.array([face.box for face in labelled], dtype=np.float64).reshape(-1, 4),
        labels=np.array([face.label for face in labelled], dtype=np.int64),
        ignored=np.array(ignored, dtype=np.float64).reshape(-1, 4),
        # "empty" is said of lanes.
        category="night" if scene.night else "normal" if scene.category == "empty" else scene.category,
    )
    return SignSample(image, truth)


def render_signs(scene: Scene, view: View, supports: Sequence[Support]) -> tuple[Bytes, list[SeenFace]]:
    """(height, width, 3) uint8 RGB of a scene with these supports, and the faces that show."""
    light = draw_light(scene)
    canvas = draw_backdrop(scene, view, light)
    layers = [layer for support in supports for layer in support_layers(view, light, support)]
    fresh = [layer.colour for layer in layers]

    def drawer(number: int) -> tuple[float, Callable[[Bytes], None]]:
        def lay(onto: Bytes) -> None:
            layers[number].lay(onto)
            fresh[number] = layers[number].part(onto).copy()

        return layers[number].distance_metres, lay

    draw_roadside(canvas, scene, view, light, [drawer(number) for number in range(len(layers))])
    _draw_vehicles(canvas, scene, view, light, layers, fresh)
    if scene.bonnet_fraction:
        draw_bonnet(canvas, scene, view, light)
    faces = []
    for layer, before in zip(layers, fresh, strict=True):
        if layer.faces:
            change = _change(before, layer.part(canvas))
            found = (_seen(face, layer, change, view) for face in layer.faces)
            faces += [face for face in found if face is not None]
    return finish(canvas, scene, view, light), faces


def _draw_vehicles(
    canvas: Bytes, scene: Scene, view: View, light: Light, layers: Sequence[Layer], fresh: Sequence[Bytes]
) -> None:
    """Vehicles from far to near; supports that stand before one are laid over it again, as they were.

    `fresh` is how each layer looked when it was laid: what shows of it now is brought up to date, as soft edges let
    the vehicle shine through.
    """
    waiting = sorted(
        ((layer, before, layer.part(canvas).copy()) for layer, before in zip(layers, fresh, strict=True)),
        key=lambda item: item[0].distance_metres,
    )

    def restore(nearest_metres: float) -> None:
        while waiting and waiting[-1][0].distance_metres >= nearest_metres:
            layer, first, before = waiting.pop()
            part = layer.part(canvas)
            if not np.array_equal(part, before):
                kept = _change(first, before) <= _LEAST_CHANGED_LEVELS
                weight = layer.alpha.astype(np.float32) * np.float32(1 / 255)
                part[:] = cv2.blendLinear(before, np.ascontiguousarray(part), weight, 1 - weight)
                first[kept] = part[kept]

    for vehicle in scene.vehicles:
        restore(vehicle.distance_metres)
        draw_vehicle(canvas, view, light, vehicle, scene.wet)
    restore(0.0)


def _change(before: Bytes, after: Bytes) -> Bytes:
    return np.asarray(cv2.absdiff(before, after).max(axis=2), dtype=np.uint8)


def _seen(face: DrawnFace, layer: Layer, change: Bytes, view: View) -> SeenFace | None:
    """What is left of a face after a `change` (rows, columns) of its layer's window; None for next to nothing."""
    corner = layer.window[:2]
    mask = np.zeros(change.shape, np.uint8)
    cv2.fillPoly(mask, [fixed(face.outline - corner)], 1.0, cv2.LINE_8, 4)
    hidden = np.clip(_CHANGED_CONTRAST * face.contrast, _LEAST_CHANGED_LEVELS, _MOST_CHANGED_LEVELS)
    rows, columns = np.nonzero((mask != 0) & (change <= hidden))
    places = np.stack([columns, rows], axis=1).astype(np.float64) + corner
    pixels = view.to_image(places)
    pixels = pixels[((pixels > -0.5) & (pixels < (view.width - 0.5, view.height - 0.5))).all(axis=1)]
    if not len(pixels):
        return None
    size = (view.width, view.height)
    outline = view.to_image(face.outline) + 0.5
    whole = np.concatenate([outline.min(axis=0), outline.max(axis=0)]).clip(0, (*size, *size))
    part = np.concatenate([pixels.min(axis=0), pixels.max(axis=0) + 1])
    # The outline is exact to a fraction of a pixel wherever the face's own edge shows.
    bounds = np.where(np.abs(part - whole) <= _BOUNDS_TOLERANCE_PIXELS, whole, part).clip(0, (*size, *size))
    closed = face.outline.astype(np.float32)
    # What the mask of the whole face would count: its edge's pixels belong to it.
    area = cv2.contourArea(closed) + cv2.arcLength(closed, True) / 2 + 1
    share = min(len(pixels) / area, 1.0)
    if (bounds[2:] - bounds[:2]).min() < _SMALLEST_IGNORED_PIXELS or share < _SMALLEST_IGNORED_SHARE:
        return None
    x1, y1, x2, y2 = bounds.tolist()
    return SeenFace(face.label, (x1, y1, x2, y2), share, face.contrast)
