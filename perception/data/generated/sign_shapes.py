"""What sign faces are drawn with: a pen on a unit face, outlines of plates, numerals and letters as strokes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from perception.data.generated.road import Floats
from perception.data.generated.textures import Bytes

FACE_PIXELS = 256
_DRAWN_PIXELS = 2 * FACE_PIXELS
_SHIFT = 4

Ink = tuple[int, int, int]
Points = Sequence[tuple[float, float]] | Floats


@dataclass(frozen=True)
class Pen:
    """Draws in face coordinates: x right, y down, the plate spans -1 to 1; `at` gives a smaller frame within."""

    picture: Bytes
    x: float = 0.0
    y: float = 0.0
    scale: float = 1.0
    turn: float = 0.0
    """Clockwise, in radians."""

    def at(self, x: float, y: float, scale: float, turn: float = 0.0) -> Pen:
        place = self._placed([(x, y)])[0]
        return Pen(self.picture, float(place[0]), float(place[1]), self.scale * scale, self.turn + turn)

    def _placed(self, points: Points) -> Floats:
        array = np.asarray(points, np.float64)
        cosine, sine = math.cos(self.turn) * self.scale, math.sin(self.turn) * self.scale
        return np.asarray(array @ np.array([[cosine, sine], [-sine, cosine]]) + (self.x, self.y), np.float64)

    def _pixels(self, points: Points) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        pixels = (self._placed(points) + 1) * (_DRAWN_PIXELS / 2) - 0.5
        return np.rint(pixels * (1 << _SHIFT)).astype(np.int32)

    def fill(self, points: Points, ink: Ink | int) -> None:
        cv2.fillPoly(self.picture, [self._pixels(points)], _value(ink), cv2.LINE_AA, _SHIFT)

    def line(self, points: Points, width: float, ink: Ink | int, closed: bool = False) -> None:
        """A stroke with round joints and ends."""
        thickness = max(round(width * self.scale * _DRAWN_PIXELS / 2), 1)
        cv2.polylines(self.picture, [self._pixels(points)], closed, _value(ink), thickness, cv2.LINE_AA, _SHIFT)

    def box(self, x1: float, y1: float, x2: float, y2: float, ink: Ink | int) -> None:
        self.fill([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], ink)

    def dot(self, x: float, y: float, radius: float, ink: Ink | int) -> None:
        self.fill(arc(x, y, radius, radius, 0, 360), ink)

    def arrow(self, path: Points, width: float, ink: Ink, head: float = 2.9) -> None:
        """A stroke that ends in a head, `head` times as wide as the stroke."""
        points = np.asarray(path, np.float64)
        ahead = points[-1] - points[-2]
        ahead /= np.hypot(*ahead)
        across, tip, half = np.array([-ahead[1], ahead[0]]), points[-1], head * width / 2
        # Butt ends: round ones would stick out of the head and thicken the foot.
        for a, b in zip(points[:-1], [*points[1:-1], tip - ahead * half], strict=True):
            along = (b - a) / max(float(np.hypot(*(b - a))), 1e-9)
            side = np.array([-along[1], along[0]]) * (width / 2)
            self.fill(np.array([a - side, b - side, b + side, a + side]), ink)
        for x, y in points[1:-1].tolist():
            self.dot(x, y, width / 2, ink)
        base = tip - ahead * half * 1.15
        self.fill(np.array([tip, base + across * half, base - across * half]), ink)


def _value(ink: Ink | int) -> tuple[int, ...]:
    return (ink,) if isinstance(ink, int) else ink


def blank_face(ink: Ink) -> Pen:
    picture = np.empty((_DRAWN_PIXELS, _DRAWN_PIXELS, 3), np.uint8)
    picture[:] = ink
    return Pen(picture)


def finished(picture: Bytes) -> Bytes:
    """The picture or mask at FACE_PIXELS."""
    return np.asarray(cv2.resize(picture, (FACE_PIXELS, FACE_PIXELS), interpolation=cv2.INTER_AREA), np.uint8)


def cut_out(outline: Floats) -> Bytes:
    """(FACE_PIXELS, FACE_PIXELS) alpha of a plate."""
    pen = Pen(np.zeros((_DRAWN_PIXELS, _DRAWN_PIXELS), np.uint8))
    pen.fill(outline, 255)
    return finished(pen.picture)


def arc(x: float, y: float, radius_x: float, radius_y: float, start: float, stop: float) -> Floats:
    """Points from `start` to `stop` degrees, clockwise from three o'clock."""
    count = max(int(abs(stop - start) / 7.5), 3)
    angle = np.radians(np.linspace(start, stop, count + 1))
    return np.stack([x + radius_x * np.cos(angle), y + radius_y * np.sin(angle)], axis=1)


def _rounded(corners: Sequence[tuple[float, float]], radius: float) -> Floats:
    """A convex outline, clockwise as seen, with its corners rounded."""
    points = np.asarray(corners, np.float64)
    parts = []
    for before, corner, after in zip(np.roll(points, 1, 0), points, np.roll(points, -1, 0), strict=True):
        arriving, leaving = corner - before, after - corner
        start = math.atan2(-arriving[0], arriving[1])
        turn = (math.atan2(-leaving[0], leaving[1]) - start) % (2 * math.pi)
        middle = start + turn / 2 + math.pi
        centre = corner + radius / math.cos(turn / 2) * np.array([math.cos(middle), math.sin(middle)])
        x, y = centre.tolist()
        parts.append(arc(x, y, radius, radius, math.degrees(start), math.degrees(start + turn)))
    return np.concatenate(parts)


def _outlines() -> dict[str, Floats]:
    root = math.sqrt(3)
    triangle = _rounded([(0.0, -2 / root), (1.0, 1 / root), (-1.0, 1 / root)], 0.07)
    triangle /= np.abs(triangle[:, 0]).max()
    eighth = math.tan(math.pi / 8)
    octagon = [(-eighth, -1.0), (eighth, -1.0), (1.0, -eighth), (1.0, eighth), (eighth, 1.0), (-eighth, 1.0),
               (-1.0, eighth), (-1.0, -eighth)]  # fmt: skip
    diamond = _rounded([(0.0, -1.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)], 0.08)
    return {
        "disc": arc(0, 0, 1, 1, 0, 360)[:-1],
        "triangle": triangle,
        "inverted-triangle": triangle * (1, -1),
        "octagon": np.array(octagon),
        "diamond": diamond / np.abs(diamond).max(),
        "square": _rounded([(-1, -1), (1, -1), (1, 1), (-1, 1)], 0.1),
        "wide": _rounded([(-1, -0.5), (1, -0.5), (1, 0.5), (-1, 0.5)], 0.07),
        "tall": _rounded([(-0.62, -1), (0.62, -1), (0.62, 1), (-0.62, 1)], 0.07),
    }


OUTLINES = _outlines()
"""Shape → outline (N, 2) in face coordinates, about the middle of the largest disc within; x spans -1 to 1."""


_BOWL = arc(0.3, 0.72, 0.28, 0.28, 0, 360)
_GLYPHS: dict[str, tuple[Floats, ...]] = {
    name: tuple(np.asarray(stroke, np.float64) for stroke in strokes)
    for name, strokes in {
        "0": ([*arc(0.3, 0.3, 0.28, 0.3, 180, 360), *arc(0.3, 0.7, 0.28, 0.3, 0, 180), (0.02, 0.3)],),
        "1": ([(0.08, 0.2), (0.36, 0.0), (0.36, 1.0)],),
        "2": ([*arc(0.3, 0.29, 0.27, 0.29, 190, 390), (0.03, 1.0), (0.58, 1.0)],),
        "3": ([*arc(0.28, 0.26, 0.27, 0.26, 205, 445), (0.2, 0.5), *arc(0.27, 0.74, 0.3, 0.26, 280, 515)],),
        "5": ([(0.54, 0.0), (0.1, 0.0), (0.06, 0.45), *arc(0.28, 0.69, 0.3, 0.31, 235, 515)],),
        "6": (_BOWL, [(0.03, 0.66), (0.1, 0.42), (0.42, 0.0)]),
        "7": ([(0.02, 0.0), (0.58, 0.0), (0.22, 1.0)],),
        "8": (arc(0.3, 0.24, 0.24, 0.24, 0, 360), arc(0.3, 0.74, 0.28, 0.26, 0, 360)),
        "H": ([(0.04, 0), (0.04, 1)], [(0.56, 0), (0.56, 1)], [(0.04, 0.5), (0.56, 0.5)]),
        "O": (arc(0.3, 0.5, 0.3, 0.5, 0, 360),),
        "P": ([(0.05, 1), (0.05, 0), (0.3, 0), *arc(0.3, 0.28, 0.28, 0.28, 270, 450), (0.05, 0.56)],),
        "S": ([*arc(0.3, 0.26, 0.27, 0.26, 340, 90), *arc(0.3, 0.74, 0.28, 0.26, 270, 520)],),
        "T": ([(0.0, 0), (0.6, 0)], [(0.3, 0), (0.3, 1)]),
    }.items()
}  # fmt: skip


def write(pen: Pen, text: str, height: float, width: float, stroke: float, ink: Ink, y: float = 0.0) -> None:
    """Text about (0, y): `height` and `stroke` in the pen's units, glyphs `width` times as wide as in DIN 1451."""
    cell, gap = 0.6 * height * width, stroke * 1.75
    x = -(len(text) * cell + (len(text) - 1) * gap) / 2
    for letter in text:
        for points in _GLYPHS[letter]:
            pen.line(points * (height * width, height) + (x, y - height / 2), stroke, ink)
        x += cell + gap
