"""The faces of GTSDB's classes and of look-alikes that are none of them, each at several scales."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from perception.data.generated import sign_pictograms as pictograms
from perception.data.generated.road import Floats
from perception.data.generated.sign_pictograms import BLACK, RED
from perception.data.generated.sign_shapes import (
    FACE_PIXELS,
    OUTLINES,
    Ink,
    Pen,
    arc,
    blank_face,
    cut_out,
    finished,
    write,
)
from perception.data.generated.textures import Bytes
from perception.data.signs.classes import GTSDB_CLASSES

WHITE: Ink = (243, 243, 240)
_BLUE: Ink = (6, 78, 160)
_YELLOW: Ink = (248, 196, 16)
_GREY: Ink = (132, 132, 132)
NUM_VARIANTS = 3
_MIRRORED = {"bend-left": "bend-right", "turn-left-ahead": "turn-right-ahead", "ahead-or-left": "ahead-or-right",
             "keep-left": "keep-right"}  # fmt: skip
_NUMBERS = {name: name.rsplit("-", 1)[1] for name in GTSDB_CLASSES if name.startswith("speed-limit")}

LOOK_ALIKES = (
    "advert-disc", "shop-board", "no-parking", "no-stopping", "cycle-path", "bus-stop", "parking", "crossing-here",
    "direction", "mirror", "signal-heads", "blank-back",
)  # fmt: skip
"""Faces that carry no class: boards, other signs, signal heads; "blank-back" is any plate seen from behind."""
PLATE = "supplementary-plate"


@dataclass(frozen=True, eq=False)
class Face:
    """A plate: picture (S, S, 3) RGB and alpha (S, S) for S = FACE_PIXELS, then half, a quarter, an eighth of it."""

    levels: tuple[tuple[Bytes, Bytes], ...]
    outline: Floats
    """(N, 2) in face coordinates, x right, y down, -1 to 1."""


def shape_of(name: str) -> str:
    if name in _DANGER:
        return "triangle"
    others = {"give-way": "inverted-triangle", "stop": "octagon", "priority-road": "diamond"}
    boards = {"shop-board": "wide", "direction": "wide", PLATE: "wide", "parking": "square", "crossing-here": "square",
              "signal-heads": "tall"}  # fmt: skip
    return (others | boards).get(name, "disc")


@functools.cache
def face(name: str, variant: int, shape: str = "") -> Face:
    """The face of a class or look-alike; `variant` below NUM_VARIANTS varies strokes, borders and inks.

    `shape` names another outline for "blank-back". Raises KeyError for an unknown name.
    """
    number = (*GTSDB_CLASSES, *LOOK_ALIKES, PLATE).index(name)
    rng = np.random.Generator(np.random.PCG64(7000 + 16 * number + variant))
    outline = OUTLINES[shape or shape_of(name)]
    # The middle of a triangle's border is not the middle of its height.
    down = -float(outline[:, 1].min() + outline[:, 1].max()) / 2
    plate = np.add(outline, (0.0, down))
    if name in _MIRRORED:
        twin = face(_MIRRORED[name], variant)
        levels = tuple((np.ascontiguousarray(p[:, ::-1]), np.ascontiguousarray(a[:, ::-1])) for p, a in twin.levels)
        return Face(levels, plate)
    pen = blank_face(WHITE)
    _draw(pen.at(0.0, down, 1.0), name, outline, rng)
    tinted = np.clip(finished(pen.picture) * np.exp(rng.normal(0, 0.025, 3)), 0, 255).astype(np.uint8)
    level, alpha = tinted, cut_out(plate)
    levels_list = [(level, alpha)]
    for halving in (1, 2, 3):
        size = (FACE_PIXELS >> halving,) * 2
        level = np.asarray(cv2.resize(tinted, size, interpolation=cv2.INTER_AREA), np.uint8)
        levels_list.append((level, np.asarray(cv2.resize(alpha, size, interpolation=cv2.INTER_AREA), np.uint8)))
    return Face(tuple(levels_list), plate)


def _draw(pen: Pen, name: str, outline: Floats, rng: np.random.Generator) -> None:
    size = float(rng.uniform(0.94, 1.06))
    border = float(rng.uniform(0.9, 1.1))
    red: Ink = (int(rng.integers(176, 208)), int(rng.integers(14, 40)), int(rng.integers(24, 48)))
    blue: Ink = (int(rng.integers(0, 26)), int(rng.integers(66, 96)), int(rng.integers(140, 178)))
    if name in _DANGER:
        ground: Ink = _YELLOW if name == "danger" and rng.random() < 0.25 else WHITE
        _plate(pen, outline, ((0.93, red), (0.93 - 0.27 * border, ground)))
        _DANGER[name](pen.at(0.0, 0.05, 0.43 * size), ground)
    elif name in _NUMBERS:
        _plate(pen, outline, ((0.96, red), (0.96 - 0.22 * border, WHITE)))
        _write_number(pen, _NUMBERS[name], size, BLACK)
    elif name in _ROUND:
        _plate(pen, outline, ((0.96, red), (0.96 - 0.19 * border, WHITE)))
        _ROUND[name](pen.at(0, 0, size))
    elif name.startswith("end-of"):
        _plate(pen, outline, ((0.96, BLACK), (0.92, WHITE)))
        if name == "end-of-speed-limit-80":
            _write_number(pen, "80", 1.05 * size, _GREY)
        elif name == "end-of-no-overtaking":
            _ROUND["no-overtaking"](pen.at(0, 0, size), _GREY)
        elif name == "end-of-no-overtaking-by-trucks":
            _ROUND["no-overtaking-by-trucks"](pen.at(0, 0, size), _GREY)
        pictograms.stripes(pen, BLACK, 0.88)
    elif name in _BLUE_DISCS:
        _plate(pen, outline, ((0.95, blue),))
        _BLUE_DISCS[name](pen.at(0, 0, size), WHITE)
    else:
        _SINGLE[name](pen, outline, red, blue, rng)


def _plate(pen: Pen, outline: Floats, rings: tuple[tuple[float, Ink], ...]) -> None:
    for scale, ink in rings:
        pen.fill(outline * scale, ink)


def _write_number(pen: Pen, text: str, size: float, ink: Ink) -> None:
    if len(text) == 3:
        write(pen, text, 0.7 * size, 0.62, 0.115 * size, ink)
    else:
        write(pen, text, 0.8 * size, 0.9, 0.15 * size, ink)


def _overtaking(left: Callable[[Pen, Ink, Ink], None]) -> Callable[..., None]:
    def draw(pen: Pen, ink: Ink | None = None) -> None:
        left(pen.at(-0.34, 0.02, 0.31), ink or RED, WHITE)
        pictograms.car(pen.at(0.35, 0.02, 0.29), ink or BLACK, WHITE)

    return draw


def _only(draw: Callable[[Pen, Ink], None], scale: float, y: float = 0.0) -> Callable[[Pen, Ink], None]:
    return lambda pen, _: draw(pen.at(0.0, y, scale), BLACK)


_DANGER: dict[str, Callable[[Pen, Ink], None]] = {
    "crossroads-with-priority": _only(pictograms.crossing_with_priority, 1.0, -0.1),
    "danger": _only(pictograms.exclamation, 0.86, -0.08),
    "bend-right": _only(pictograms.bend, 1.02),
    "bends": _only(pictograms.double_bend, 1.0, -0.06),
    "uneven-road": _only(pictograms.bumps, 1.0, 0.2),
    "slippery-road": lambda pen, ground: pictograms.skidding_car(pen.at(0.0, 0.02, 0.92), BLACK, ground),
    "road-narrows": _only(pictograms.narrowing, 0.84),
    "road-works": _only(pictograms.digger, 0.9, -0.02),
    "traffic-signals": lambda pen, _: pictograms.signals(pen.at(0.0, -0.04, 0.82)),
    "pedestrians": _only(pictograms.pedestrians, 0.92),
    "children": _only(pictograms.children, 0.95),
    "cyclists": _only(pictograms.bicycle, 0.95, 0.1),
    "snow": _only(pictograms.snowflake, 0.78, 0.06),
    "wild-animals": _only(pictograms.deer, 0.86, 0.06),
}
_DANGER["bend-left"] = _DANGER["bend-right"]

_ROUND: dict[str, Callable[..., None]] = {
    "no-overtaking": _overtaking(pictograms.car),
    "no-overtaking-by-trucks": _overtaking(pictograms.lorry_from_behind),
    "no-traffic-both-ways": lambda pen: None,
    "no-trucks": lambda pen: pictograms.lorry(pen.at(0, 0.04, 0.56), BLACK, WHITE),
}


def _ahead_or_right(pen: Pen, ink: Ink) -> None:
    pen.arrow([(-0.18, 0.7), (-0.18, -0.76)], 0.19, ink)
    pen.arrow([(-0.18, 0.56), (-0.16, 0.3), (0.0, 0.14), (0.64, 0.14)], 0.17, ink)


_BLUE_DISCS: dict[str, Callable[[Pen, Ink], None]] = {
    "turn-right-ahead": lambda pen, ink: pen.arrow(
        [(-0.34, 0.66), (-0.34, -0.05), (-0.26, -0.24), (-0.06, -0.3), (0.64, -0.3)], 0.23, ink
    ),
    "ahead-only": lambda pen, ink: pen.arrow([(0, 0.68), (0, -0.74)], 0.24, ink, 3.1),
    "ahead-or-right": _ahead_or_right,
    "keep-right": lambda pen, ink: pen.arrow([(-0.46, -0.46), (0.5, 0.5)], 0.24, ink, 3.2),
    "roundabout": pictograms.roundabout,
    "cycle-path": lambda pen, ink: pictograms.bicycle(pen.at(0, 0, 0.66), ink),
}


def _give_way(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((0.94, red), (0.94 - 0.34 * float(rng.uniform(0.9, 1.1)), WHITE)))


def _stop(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((0.93, red),))
    write(pen, "STOP", 0.62, 0.72, 0.11, WHITE)


def _no_entry(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((0.96, red),))
    pen.box(-0.72, -0.16, 0.72, 0.16, WHITE)


def _priority(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    edge = float(rng.uniform(0.56, 0.64))
    _plate(pen, outline, ((0.965, BLACK), (0.93, WHITE), (edge + 0.03, BLACK), (edge, _YELLOW)))


def _no_parking(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((0.97, red), (0.78, blue)))
    pen.line([(-0.55, -0.55), (0.55, 0.55)], 0.18, red)


def _no_stopping(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _no_parking(pen, outline, red, blue, rng)
    pen.line([(-0.55, 0.55), (0.55, -0.55)], 0.18, red)


def _bus_stop(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((1.0, (20, 110, 60)), (0.8, _YELLOW)))
    write(pen, "H", 0.8, 1.0, 0.2, (20, 110, 60))


def _parking(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((0.93, blue),))
    write(pen, "P", 1.1, 1.0, 0.24, WHITE)


def _crossing_here(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((0.93, blue),))
    pen.fill([(0, -0.7), (0.74, 0.62), (-0.74, 0.62)], WHITE)
    pictograms.walker(pen.at(0, 0.14, 0.42), BLACK)


def _advert(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    inks = [_loud_ink(rng) for _ in range(3)]
    inner = float(rng.uniform(0.55, 0.9))
    _plate(pen, outline, ((1.0, inks[0]), (inner, WHITE if rng.random() < 0.4 else inks[1])))
    match int(rng.integers(3)):
        case 0:
            _scribble(pen, inks[2], rng, -0.6, 0.6, 2)
        case 1:
            pen.fill(arc(0, 0, 0.4, 0.4, 0, 360)[:: int(rng.integers(8, 16))], inks[2])
        case _:
            pen.line(arc(0, 0.1, 0.4, 0.3, 150, 390), 0.16, inks[2])


def _shop_board(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    ground = _loud_ink(rng)
    _plate(pen, outline, ((1.0, ground),))
    _scribble(pen, WHITE if sum(ground) < 380 else BLACK, rng, -0.85, 0.85, int(rng.integers(1, 3)))


def _direction(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    ground, ink = ((_YELLOW, BLACK), (WHITE, BLACK), (_BLUE, WHITE))[int(rng.integers(3))]
    _plate(pen, outline, ((1.0, ink), (0.96, ground)))
    _scribble(pen, ink, rng, -0.5, 0.85, 2)
    pen.arrow([(-0.55, 0.0), (-0.88, 0.0)], 0.1, ink)


def _supplementary(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((1.0, BLACK), (0.95, WHITE)))
    _scribble(pen, BLACK, rng, -0.7, 0.7, int(rng.integers(1, 3)))


def _mirror(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((1.0, (190, 70, 30)), (0.88, (120, 134, 146))))
    pen.fill(arc(0, 0, 0.88, 0.88, 10, 170), (88, 92, 92))


def _signal_heads(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    _plate(pen, outline, ((1.0, (34, 38, 36)),))
    burning = int(rng.integers(3))
    for k, ink in enumerate(((250, 50, 40), (250, 190, 40), (60, 230, 150))):
        pen.dot(0, 0.62 * (k - 1), 0.26, ink if k == burning else (52, 50, 48))


def _back(pen: Pen, outline: Floats, red: Ink, blue: Ink, rng: np.random.Generator) -> None:
    tone = int(rng.integers(112, 165))
    _plate(pen, outline, ((1.0, (tone - 18,) * 3), (0.95, (tone, tone + 2, tone + 3))))
    for y in (-0.34, 0.34):
        pen.box(-0.75, y - 0.05, 0.75, y + 0.05, (tone - 26,) * 3)


def _loud_ink(rng: np.random.Generator) -> Ink:
    inks = ((200, 30, 40), (20, 80, 170), (240, 190, 20), (20, 120, 70), (230, 110, 20), (120, 30, 110), (30, 30, 34))
    return inks[int(rng.integers(len(inks)))]


def _scribble(pen: Pen, ink: Ink, rng: np.random.Generator, left: float, right: float, num_lines: int) -> None:
    """Lines of strokes that look like writing from afar."""
    tall = 0.46 / num_lines
    for row in range(num_lines):
        y, x = (row - (num_lines - 1) / 2) * tall * 1.5, left
        while x < right - tall * 0.5:
            wide = tall * float(rng.uniform(0.25, 0.6))
            if rng.random() < 0.85:
                pen.line(rng.uniform(-0.5, 0.5, (3, 2)) * (wide, tall) + (x + wide / 2, y), tall * 0.2, ink)
                pen.line([(x, y - tall / 2), (x, y + tall / 2)], tall * 0.2, ink)
            x += wide + tall * 0.3


_SINGLE: dict[str, Callable[[Pen, Floats, Ink, Ink, np.random.Generator], None]] = {
    "give-way": _give_way, "stop": _stop, "no-entry": _no_entry, "priority-road": _priority,
    "no-parking": _no_parking, "no-stopping": _no_stopping, "bus-stop": _bus_stop, "parking": _parking,
    "crossing-here": _crossing_here, "advert-disc": _advert, "shop-board": _shop_board, "direction": _direction,
    "mirror": _mirror, "signal-heads": _signal_heads, "blank-back": _back, PLATE: _supplementary,
}  # fmt: skip
