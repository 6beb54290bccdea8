"""What is in a scene, as plain data: drawn from (seed, index) alone, before a pixel is touched.

Lateral places are offsets in metres from the road's reference line (right is positive), distances
are metres ahead of the camera.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perception.data.generated.road import Camera, RoadShape, VerticalCurve

CATEGORY_SHARES: dict[str, float] = {
    "normal": 0.42,
    "curve": 0.07,
    "crowd": 0.09,
    "shadow": 0.09,
    "worn": 0.05,
    "glare": 0.05,
    "rain": 0.07,
    "fog": 0.05,
    "night": 0.11,
}
"""Shares of the drawn conditions; a scene that then has no lane is "empty" instead."""
CATEGORIES: tuple[str, ...] = (*CATEGORY_SHARES, "empty")

NUM_LINES_SHARES: tuple[float, ...] = (0.035, 0.04, 0.17, 0.24, 0.30, 0.145, 0.07)
"""Share of scenes with 0, 1, ... 6 lines across the road."""

LINE_STYLES = ("solid", "dashed", "double_solid", "double_dashed", "solid_dashed", "dashed_solid")
_DASH_PATTERNS = ((3.0, 9.0), (6.0, 15.0), (2.0, 6.0), (4.0, 10.0), (3.0, 12.0), (6.0, 9.0), (2.0, 4.0))
"""(painted metres, period in metres), as road authorities use them."""


@dataclass(frozen=True)
class LineMarking:
    """One lane marking; a double line is one marking, its label runs between the two."""

    offset_metres: float
    style: str
    width_metres: float
    gap_metres: float
    """Between the inner edges of a double line."""
    dash_metres: float
    period_metres: float
    phase_metres: float
    yellow: bool
    wear: float
    """0 fresh paint ... 1 hardly any left."""
    missing_metres: tuple[tuple[float, float], ...]
    """Stretches of z where the paint is gone; labelled all the same."""


@dataclass(frozen=True)
class Vehicle:
    offset_metres: float
    distance_metres: float
    """To its near end."""
    kind: str
    """car, suv, van, truck, bus or motorcycle."""
    colour: tuple[int, int, int]
    oncoming: bool
    braking: bool


@dataclass(frozen=True)
class GroundMark:
    """Something on the asphalt that is no lane marking."""

    kind: str
    offset_metres: float
    distance_metres: float
    variant: int


@dataclass(frozen=True)
class Strip:
    """A band along the road that is lighter or darker than the rest and no marking: a joint, removed paint."""

    offset_metres: float
    width_metres: float
    brightness: float


@dataclass(frozen=True)
class Variety:
    """What scenes of style v2 have that those of v1 lack: see `variety.py`."""

    lane_brightness: tuple[float, ...]
    """Of each lane's surface, which may be of another material than its neighbour's."""
    strips: tuple[Strip, ...]
    ambient: tuple[float, float, float]
    """Factors, by colour, on all light at night but that of headlights."""
    beam_width: float
    """Of our headlights, 1 as in v1."""
    exposure: float
    saturation: float
    cast: tuple[float, float, float]
    """Factors, by colour, on the whole picture, as of a camera that takes the lamps' light for white or does not."""
    zoom_blur: float
    """How far the picture moves away from the vanishing point while it is taken, as a share of the distance to it."""
    vignette: float
    """Share of the light that the picture's corners lack."""


@dataclass(frozen=True)
class Scene:
    seed: int
    index: int
    category: str
    camera: Camera
    road: RoadShape
    setting: str
    """urban, rural or highway."""
    asphalt_left_metres: float
    asphalt_right_metres: float
    lane_centres_metres: tuple[float, ...]
    own_lane: int
    divider_metres: float | None
    """Offset that parts oncoming traffic from ours; None on a one-way carriageway."""
    drives_on_right: bool
    lines: tuple[LineMarking, ...]
    vehicles: tuple[Vehicle, ...]
    marks: tuple[GroundMark, ...]
    bridge_metres: float | None
    """Distance of a bridge over the road."""
    night: bool
    wet: bool
    bonnet_fraction: float
    """How much of the image height our own bonnet covers, 0 where the camera does not see it."""
    rain: float
    """0 none ... 1 heavy."""
    haze_metres: float
    """Distance at which the air has taken 63 % of the contrast."""
    variety: Variety | None = None
    """None in style v1."""


def stream(seed: int, index: int, purpose: int) -> np.random.Generator:
    """A generator of its own for each purpose, so that one part's draws never shift another's."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, purpose))))


def draw_scene(seed: int, index: int) -> Scene:
    """The scene of (seed, index); the image size has no say in it."""
    rng = stream(seed, index, 0)
    names = tuple(CATEGORY_SHARES)
    category = names[_pick(rng, tuple(CATEGORY_SHARES.values()))]
    num_lines = _pick(rng, NUM_LINES_SHARES)
    setting = ("urban", "rural", "highway")[_pick(rng, (0.36, 0.28, 0.36))]
    if num_lines < 3 and setting == "highway":
        setting = "rural"
    night = category == "night" or (category == "rain" and rng.random() < 0.2)
    camera = Camera(
        height_metres=float(rng.choice([rng.uniform(1.15, 1.6), rng.uniform(1.6, 2.6)], p=[0.75, 0.25])),
        focal_fraction=float(rng.uniform(0.6, 1.0)),
        horizon_fraction=float(np.clip(rng.normal(0.40, 0.05), 0.27, 0.53)),
        roll_radians=float(np.radians(np.clip(rng.normal(0.0, 0.9), -2.5, 2.5))) if rng.random() < 0.75 else 0.0,
    )
    drives_on_right = rng.random() < 0.85
    offsets, divider, lane_centres, own_lane, asphalt = _layout(rng, num_lines, setting, drives_on_right)
    own_centre = lane_centres[own_lane]
    changing_lane = rng.random() < 0.08
    lateral = own_centre + rng.normal(0, 0.9 if changing_lane else 0.22)
    road = _road_shape(rng, -lateral, category, setting, changing_lane)
    lines = _lines(rng, offsets, divider, setting, category, drives_on_right)
    fog = category == "fog"
    haze = rng.uniform(32, 85) if fog else rng.uniform(110, 260) if category == "rain" else rng.uniform(600, 3500)
    vehicles = _vehicles(rng, category, setting, lane_centres, own_lane, divider, asphalt, drives_on_right)
    marks = _marks(rng, setting, lane_centres, own_lane, category)
    bridge = float(rng.uniform(16, 60)) if rng.random() < (0.3 if category == "shadow" else 0.03) else None
    _pass_over_sign_draws(rng, setting)
    return Scene(
        seed=seed,
        index=index,
        category=category if lines else "empty",
        camera=camera,
        road=road,
        setting=setting,
        asphalt_left_metres=asphalt[0],
        asphalt_right_metres=asphalt[1],
        lane_centres_metres=lane_centres,
        own_lane=own_lane,
        divider_metres=divider,
        drives_on_right=drives_on_right,
        lines=lines,
        vehicles=vehicles,
        marks=marks,
        bridge_metres=bridge,
        night=night,
        wet=category == "rain" or (category in ("night", "fog", "normal") and rng.random() < 0.12),
        bonnet_fraction=float(rng.uniform(0.05, 0.16)) if rng.random() < 0.1 else 0.0,
        rain=float(rng.uniform(0.3, 1.0)) if category == "rain" else 0.0,
        haze_metres=float(haze),
    )


def _pick(rng: np.random.Generator, weights: tuple[float, ...]) -> int:
    cumulative = np.cumsum(weights)
    return min(int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")), len(weights) - 1)


def _layout(
    rng: np.random.Generator, num_lines: int, setting: str, drives_on_right: bool
) -> tuple[tuple[float, ...], float | None, tuple[float, ...], int, tuple[float, float]]:
    """Line offsets, divider, lane centres, own lane, (left, right) edge of the asphalt."""
    lane_width = float(rng.uniform(3.3, 3.9) if setting == "highway" else rng.uniform(2.9, 3.6))
    shoulder = (1.0, 3.0) if setting == "highway" else (0.15, 0.9)
    num_lanes = max(num_lines - 1, 2 if num_lines == 1 or rng.random() < 0.7 else 1)
    if num_lines <= 1:
        # At most a centre line: the asphalt ends where an edge line would be.
        offsets: tuple[float, ...] = (lane_width,) if num_lines else ()
        shoulder = (0.0, 0.4)
    else:
        offsets = tuple(lane_width * i for i in range(num_lines))
        if rng.random() < 0.25:
            offsets = tuple(o + float(rng.uniform(-0.15, 0.15)) for o in offsets)
    centres = tuple(lane_width * (i + 0.5) for i in range(num_lanes))
    edges = (-float(rng.uniform(*shoulder)), lane_width * num_lanes + float(rng.uniform(*shoulder)))
    two_way = num_lanes >= 2 and (num_lines <= 1 or num_lanes == 2 or setting != "highway") and rng.random() < 0.6
    if num_lines == 1:
        two_way = True
    divider = None
    own_lanes = list(range(num_lanes))
    if two_way:
        cut = num_lanes // 2 if num_lanes % 2 == 0 else (num_lanes - 1) // 2
        if not drives_on_right:
            cut = num_lanes - cut
        divider = offsets[cut] if num_lines >= 2 else lane_width * cut
        own_lanes = list(range(cut, num_lanes)) if drives_on_right else list(range(cut))
    middle = (num_lanes - 1) / 2
    weights = tuple(1.0 / (1.0 + abs(i - middle)) for i in own_lanes)
    return offsets, divider, centres, own_lanes[_pick(rng, weights)], edges


def _road_shape(
    rng: np.random.Generator, lateral: float, category: str, setting: str, changing_lane: bool
) -> RoadShape:
    if category == "curve":
        curvature = float(rng.choice([-1, 1]) / rng.uniform(70, 260))
    elif rng.random() < 0.45:
        curvature = float(rng.normal(0, 1 / 1200 if setting == "highway" else 1 / 600))
    else:
        curvature = float(rng.normal(0, 1 / 6000))
    rate = float(rng.normal(0, 1.0) * (abs(curvature) / 150 + 1e-6))
    curves: list[VerticalCurve] = []
    if rng.random() < 0.45:
        start = 0.0
        for _ in range(int(rng.integers(1, 4))):
            start += float(rng.uniform(0, 60))
            length = float(rng.uniform(30, 130))
            curves.append(VerticalCurve(start, length, float(np.clip(rng.normal(0, 0.04), -0.09, 0.09))))
            start += length
    return RoadShape(
        lateral_metres=float(lateral),
        heading=float(rng.normal(0, 0.05 if changing_lane else 0.012)),
        curvature=curvature,
        curvature_rate=rate,
        vertical_curves=tuple(curves),
    )


def _lines(
    rng: np.random.Generator,
    offsets: tuple[float, ...],
    divider: float | None,
    setting: str,
    category: str,
    drives_on_right: bool,
) -> tuple[LineMarking, ...]:
    base_wear = float(rng.uniform(0.42, 0.7) if category == "worn" else rng.beta(1.3, 5) * 0.6)
    yellow_divider, yellow_median = rng.random() < 0.45, rng.random() < 0.3
    all_yellow = rng.random() < 0.03
    dash, period = _DASH_PATTERNS[int(rng.integers(len(_DASH_PATTERNS)))]
    width = float(rng.uniform(0.10, 0.20))
    phase = float(rng.uniform(0, period))
    lines = []
    for i, offset in enumerate(offsets):
        edge = len(offsets) > 1 and i in (0, len(offsets) - 1)
        yellow = all_yellow
        if divider is not None and abs(offset - divider) < 0.01:
            weights = (0.16, 0.34, 0.30, 0.04, 0.08, 0.08)
            yellow = yellow or yellow_divider
        elif edge:
            weights = (0.86, 0.11, 0.03, 0.0, 0.0, 0.0)
            median = divider is None and i == (0 if drives_on_right else len(offsets) - 1)
            yellow = yellow or (median and yellow_median)
        else:
            weights = (0.12, 0.80, 0.01, 0.03, 0.02, 0.02)
        missing: list[tuple[float, float]] = []
        if rng.random() < (0.55 if category == "worn" else 0.08):
            for _ in range(int(rng.integers(1, 3))):
                start = float(rng.uniform(6, 60))
                missing.append((start, start + float(rng.uniform(4, 25))))
        lines.append(
            LineMarking(
                offset_metres=float(offset),
                style=LINE_STYLES[_pick(rng, weights)],
                width_metres=width * float(rng.uniform(0.9, 1.3 if edge else 1.1)),
                gap_metres=float(rng.uniform(0.10, 0.22)),
                dash_metres=dash,
                period_metres=period,
                phase_metres=phase if rng.random() < 0.7 else float(rng.uniform(0, period)),
                yellow=yellow,
                wear=float(np.clip(base_wear + rng.normal(0, 0.06), 0.0, 0.75)),
                missing_metres=tuple(missing),
            )
        )
    return tuple(lines)


_CAR_COLOURS = (
    (225, 226, 228), (240, 240, 238), (30, 31, 34), (55, 58, 62), (120, 124, 128), (165, 168, 172),
    (120, 20, 24), (26, 44, 92), (60, 90, 130), (90, 84, 70), (40, 62, 50), (190, 150, 60),
)  # fmt: skip
_LENGTHS = {"car": 4.5, "suv": 4.8, "van": 5.4, "truck": 10.0, "bus": 12.0, "motorcycle": 2.1}


def vehicle_length(kind: str) -> float:
    return _LENGTHS[kind]


def _vehicles(
    rng: np.random.Generator,
    category: str,
    setting: str,
    centres: tuple[float, ...],
    own_lane: int,
    divider: float | None,
    asphalt: tuple[float, float],
    drives_on_right: bool,
) -> tuple[Vehicle, ...]:
    crowd = category == "crowd"
    wanted = int(rng.integers(7, 15)) if crowd else int(rng.choice(7, p=[0.18, 0.2, 0.2, 0.16, 0.12, 0.08, 0.06]))
    placed: list[Vehicle] = []
    taken: list[tuple[int, float, float]] = []
    kinds = ("car", "suv", "van", "truck", "bus", "motorcycle")

    def put(lane: int, offset: float, distance: float, oncoming: bool, kind: str) -> None:
        end = distance + _LENGTHS[kind]
        if any(other == lane and distance < to + 3 and start < end + 3 for other, start, to in taken):
            return
        taken.append((lane, distance, end))
        colour = _CAR_COLOURS[int(rng.integers(len(_CAR_COLOURS)))]
        placed.append(Vehicle(offset, distance, kind, colour, oncoming, bool(rng.random() < 0.25)))

    for _ in range(wanted):
        lane = int(rng.integers(len(centres)))
        kind = kinds[_pick(rng, (0.5, 0.2, 0.1, 0.09, 0.05, 0.06))]
        nearest = 9.0 if lane == own_lane else 6.0
        distance = nearest + float(rng.exponential(16.0 if crowd else 32.0))
        if distance > 140:
            continue
        oncoming = divider is not None and (centres[lane] < divider) == drives_on_right
        put(lane, centres[lane] + float(rng.normal(0, 0.2)), distance, oncoming, kind)
    if setting == "urban" and rng.random() < 0.3:
        right = bool(rng.random() < 0.7)
        offset = asphalt[1] + 1.1 if right else asphalt[0] - 1.1
        distance = float(rng.uniform(7, 20))
        for _ in range(int(rng.integers(2, 7))):
            kind = kinds[_pick(rng, (0.6, 0.25, 0.15))]
            put(-1, offset, distance, not right and divider is not None, kind)
            distance += _LENGTHS[kind] + float(rng.uniform(3.2, 9))
    return tuple(sorted(placed, key=lambda v: -v.distance_metres))


MARK_KINDS = ("arrow", "text", "crossing", "stop_line", "manhole", "patch", "seam", "skid", "crack", "hatch")


def _marks(
    rng: np.random.Generator, setting: str, centres: tuple[float, ...], own_lane: int, category: str
) -> tuple[GroundMark, ...]:
    chances = {
        "arrow": 0.22, "text": 0.06, "crossing": 0.08, "stop_line": 0.06, "manhole": 0.2,
        "patch": 0.3, "seam": 0.3, "skid": 0.12, "crack": 0.3, "hatch": 0.03,
    }  # fmt: skip
    if setting != "urban":
        chances |= {"crossing": 0.01, "stop_line": 0.01, "manhole": 0.02, "arrow": 0.08}
    marks: list[GroundMark] = []
    for kind, chance in chances.items():
        if rng.random() >= chance:
            continue
        several = kind in ("arrow", "manhole", "patch", "seam", "crack", "skid")
        for _ in range(int(rng.integers(1, 4)) if several else 1):
            lane = own_lane if rng.random() < 0.5 else int(rng.integers(len(centres)))
            near, far = (12, 45) if kind in ("crossing", "stop_line") else (6, 40)
            marks.append(GroundMark(kind, centres[lane], float(rng.uniform(near, far)), int(rng.integers(1 << 30))))
    return tuple(marks)


def _pass_over_sign_draws(rng: np.random.Generator, setting: str) -> None:
    """Places for signs were once drawn here; what is drawn after them keeps its place in the stream."""
    for _ in range(int(rng.choice(4, p=[0.35, 0.35, 0.2, 0.1]))):
        rng.random()
        overhead = setting == "highway" and rng.random() < 0.4
        rng.random(2 if overhead else 4)
