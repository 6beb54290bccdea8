"""Where traffic signs and their look-alikes stand in a scene, as plain data, drawn from a stream of their own.

The lanes' draws are untouched by this, and the image size has no say: a sign's size is chosen as a share of the image's
width, and kept inside an image 2.5 times as wide as high.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perception.data.generated.scene import Scene, stream
from perception.data.generated.sign_faces import LOOK_ALIKES, NUM_VARIANTS, PLATE, shape_of
from perception.data.signs.classes import GTSDB_CLASSES

SUPPORTS = ("post", "gantry", "wall")
_SMALLEST, _MEDIAN, _LARGEST = 11.5 / 800, 42.0 / 1360, 128 / 800
_SPREAD = 0.56
"""Sizes in image widths, log-normal. Large signs fit into the image less often, so more of them are drawn: what then
shows is about as large as in GTSDB (5, 50, 95 %: 21, 39, 92 of 1360 pixels)."""
_NONE_SHARE = 0.13
"""Scenes without any sign."""
_NUM_SUPPORTS = (0.26, 0.36, 0.25, 0.13)
"""Of the others, shares with 1, 2, ... places that carry signs."""
_ASPECT = 2.5
_NEAREST_METRES = 4.0
_OVERHEAD = tuple(
    name for name in GTSDB_CLASSES if name.startswith(("speed-limit", "no-overtaking", "end-of"))
)  # fmt: skip


@dataclass(frozen=True)
class Board:
    """One plate: a sign of a class, a look-alike, a supplementary plate, or the back of any."""

    name: str
    """A class or look-alike of sign_faces."""
    shape: str
    variant: int
    right_metres: float
    """The middle of the plate, from the support's, and over the ground."""
    above_metres: float
    width_metres: float
    yaw_radians: float
    lean_radians: float
    """Backwards."""
    tilt_radians: float
    """Clockwise, about its own middle."""
    fading: float
    """0 new ... 1 bleached; `dirt` likewise."""
    dirt: float
    shade_edge: tuple[float, float] | None
    """A shadow's edge across the face: its direction in radians and place, -1 to 1."""

    @property
    def label(self) -> int | None:
        return GTSDB_CLASSES.index(self.name) if self.name in GTSDB_CLASSES else None


@dataclass(frozen=True)
class Support:
    """A post, gantry or wall with its boards, and a branch that hangs before it or not."""

    kind: str
    offset_metres: float
    distance_metres: float
    boards: tuple[Board, ...]
    light: float
    """How the sun takes it: 0 against the light ... 1 in full sun."""
    branch: tuple[float, float, float] | None
    """Foliage before it: right, above and width in metres."""
    pole_metres: float | None
    """Another pole before it, this far to the right."""
    variant: int


def draw_supports(scene: Scene) -> tuple[Support, ...]:
    """All signs and look-alikes of a scene, from far to near."""
    rng = stream(scene.seed, scene.index, 20)
    placed: list[Support] = []
    if rng.random() >= _NONE_SHARE:
        count = 1 + _pick(rng, _NUM_SUPPORTS)
        for _ in range(count):
            _place(rng, scene, placed, False)
    for _ in range(int(rng.poisson(0.75))):
        _place(rng, scene, placed, True)
    return tuple(sorted(placed, key=lambda support: -support.distance_metres))


def _pick(rng: np.random.Generator, weights: tuple[float, ...]) -> int:
    return min(int(np.searchsorted(np.cumsum(weights), rng.random(), side="right")), len(weights) - 1)


def _place(rng: np.random.Generator, scene: Scene, placed: list[Support], look_alike: bool) -> None:
    """Add a support that shows in the image and hides none of the others; give up after some tries."""
    # Drawn once, or trying again would thin out the large ones.
    share = float(np.clip(np.exp(rng.normal(math.log(_MEDIAN), _SPREAD)), _SMALLEST, _LARGEST))
    for _ in range(20):
        support = _support(rng, scene, share, look_alike)
        if _shows(scene, support) and all(_apart(scene, support, other) for other in placed):
            placed.append(support)
            return


def _support(rng: np.random.Generator, scene: Scene, share: float, look_alike: bool) -> Support:
    overhead = {"urban": 0.05, "rural": 0.02, "highway": 0.3}[scene.setting] if not look_alike else 0.1
    draw = rng.random()
    kind = "gantry" if draw < overhead else "wall" if draw < overhead + 0.08 else "post"
    scale = {"urban": 0.92, "rural": 1.05, "highway": 1.25}[scene.setting] * float(rng.uniform(0.9, 1.12))
    if kind == "gantry":
        scale = max(scale, 1.25)
    names = _names(rng, kind, look_alike)
    # Large in the image are large plates too, not only near ones.
    scale *= max(share / 0.05, 1.0) ** 0.35
    widths = [_width(name) * scale for name in names]
    distance = scene.camera.focal_fraction * widths[0] / share
    left, right = scene.asphalt_left_metres, scene.asphalt_right_metres
    if kind == "gantry":
        offset, bottom = (left + right) / 2, float(rng.uniform(5.2, 6.0))
    else:
        on_right = (rng.random() < 0.76) == scene.drives_on_right
        away = float(rng.uniform(0.4, 2.6) if kind == "post" else rng.uniform(2.2, 4.5))
        offset = right + away if on_right else left - away
        # On islands signs stand low: keep-right and the like.
        low = kind == "post" and rng.random() < 0.15
        bottom = float(rng.uniform(0.6, 1.2) if low else rng.uniform(1.7, 2.6))
    yaw, tilt = float(rng.normal(0, 0.16)), float(rng.normal(0, 0.035))
    if rng.random() < 0.1:
        yaw += float(rng.choice([-1, 1])) * float(rng.uniform(0.3, 0.75))
    if rng.random() < 0.08:
        tilt += float(rng.normal(0, 0.15))
    boards, tops = [], bottom
    aged, dirty = float(rng.beta(1, 3)), float(rng.beta(1, 2.5))
    edge = (float(rng.uniform(0, 2 * math.pi)), float(rng.uniform(-0.7, 0.7))) if rng.random() < 0.14 else None
    spread = float(rng.uniform(1.5, 4.0))
    for number, (name, width) in enumerate(zip(names, widths, strict=True)):
        shape = shape_of(name)
        if name == "blank-back":
            shape = ("disc", "triangle", "square", "inverted-triangle", "octagon")[int(rng.integers(5))]
        half_height = width / 2 * {"wide": 0.5, "triangle": 0.87, "inverted-triangle": 0.87}.get(shape, 1.0)
        if kind == "gantry":
            sideways, above = (number - (len(names) - 1) / 2) * (width + spread), bottom + width / 2
        else:
            sideways, above = float(rng.normal(0, 0.01)), tops + half_height
            tops += 2 * half_height + float(rng.uniform(0.03, 0.12))
        boards.append(
            Board(
                name=name,
                shape=shape,
                variant=int(rng.integers(NUM_VARIANTS)),
                right_metres=sideways,
                above_metres=above,
                width_metres=width,
                yaw_radians=yaw + float(rng.normal(0, 0.02)),
                lean_radians=float(rng.normal(0, 0.03)),
                tilt_radians=tilt + float(rng.normal(0, 0.012)),
                fading=float(np.clip(aged + rng.normal(0, 0.1), 0, 1)),
                dirt=float(np.clip(dirty + rng.normal(0, 0.1), 0, 1)),
                shade_edge=edge,
            )
        )
    middle = boards[int(rng.integers(len(boards)))]
    branch = pole = None
    if rng.random() < 0.15:
        reach = middle.width_metres * float(rng.uniform(0.6, 1.5))
        angle = float(rng.uniform(-math.pi, math.pi))
        branch = (middle.right_metres + math.cos(angle) * middle.width_metres * 0.62,
                  middle.above_metres + math.sin(angle) * middle.width_metres * 0.62, reach)  # fmt: skip
    if rng.random() < 0.05:
        pole = middle.right_metres + float(rng.uniform(-0.5, 0.5)) * middle.width_metres
    light = float(
        rng.choice([rng.uniform(0.0, 0.35), rng.uniform(0.35, 0.7), rng.uniform(0.7, 1.0)], p=[0.25, 0.3, 0.45])
    )
    return Support(kind, offset, distance, tuple(boards), light, branch, pole, int(rng.integers(1 << 30)))


def _names(rng: np.random.Generator, kind: str, look_alike: bool) -> list[str]:
    """What hangs there, from below."""
    if look_alike and kind == "gantry":
        return ["direction"] * (1 + int(rng.integers(3)))
    if look_alike:
        count = 1 + int(rng.random() < 0.2)
        return [LOOK_ALIKES[int(rng.integers(len(LOOK_ALIKES)))] for _ in range(count)]
    pool = _OVERHEAD if kind == "gantry" else GTSDB_CLASSES
    count = 1 + _pick(rng, (0.62, 0.29, 0.09))
    if kind == "gantry" and rng.random() < 0.6:
        names = [pool[int(rng.integers(len(pool)))]] * (1 + int(rng.integers(1, 3)))
    else:
        names = [pool[number] for number in rng.permutation(len(pool))[:count].tolist()]
    if kind != "gantry" and len(names) < 3:
        if rng.random() < 0.22:
            names.insert(0, PLATE)
        if rng.random() < 0.06:
            names.append(LOOK_ALIKES[int(rng.integers(len(LOOK_ALIKES)))])
    return names


def _width(name: str) -> float:
    """Of a plate, in metres, as road authorities use on urban roads, in the mean."""
    special = {"stop": 0.8, "priority-road": 0.78, "give-way": 0.85, PLATE: 0.6, "shop-board": 1.5, "direction": 1.3,
               "advert-disc": 0.75, "signal-heads": 0.42, "mirror": 0.7}  # fmt: skip
    return special.get(name, 0.85 if shape_of(name) == "triangle" else 0.64)


def _extent(scene: Scene, support: Support) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of the boards in image widths from the middle and the horizon; crude."""
    z, road = support.distance_metres, scene.road
    middle = road.centre_at(z) + support.offset_metres * math.hypot(1.0, road.direction_at(z))
    drop = scene.camera.height_metres - road.ground_at(z)[0]
    scale = scene.camera.focal_fraction / z
    half = [board.width_metres / 2 for board in support.boards]
    rights = [board.right_metres for board in support.boards]
    aboves = [board.above_metres for board in support.boards]
    return (
        (middle + min(r - h for r, h in zip(rights, half, strict=True))) * scale,
        (drop - max(a + h for a, h in zip(aboves, half, strict=True))) * scale,
        (middle + max(r + h for r, h in zip(rights, half, strict=True))) * scale,
        (drop - min(a - h for a, h in zip(aboves, half, strict=True))) * scale,
    )


def _shows(scene: Scene, support: Support) -> bool:
    """Whether the boards lie within the image but for a little."""
    if support.distance_metres < _NEAREST_METRES:
        return False
    left, top, right, bottom = _extent(scene, support)
    slack = 0.3 * (bottom - top) if support.variant % 16 == 0 else 0.0
    horizon = scene.camera.horizon_fraction / _ASPECT
    return (
        left > -0.5 - slack
        and right < 0.5 + slack
        and top > -horizon - slack
        and bottom < 1 / _ASPECT - horizon + slack
    )


def _apart(scene: Scene, one: Support, other: Support) -> bool:
    a, b = _extent(scene, one), _extent(scene, other)
    overlap = min(a[2], b[2]) - max(a[0], b[0]) > 0 and min(a[3], b[3]) - max(a[1], b[1]) > 0
    # Now and then one sign hides a part of another.
    return not overlap or (one.variant + other.variant) % 12 == 0
