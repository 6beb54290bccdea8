"""The simple shapes on sign faces, each drawn about the middle of its pen's frame and about 2 units wide."""

from __future__ import annotations

import math

import numpy as np

from perception.data.generated.sign_shapes import Ink, Pen, arc

BLACK: Ink = (22, 22, 24)
RED: Ink = (192, 22, 34)


def car(pen: Pen, ink: Ink, ground: Ink) -> None:
    """From behind."""
    pen.fill(
        [(-1, 0.02), (-0.82, -0.1), (-0.6, -0.62), (0.6, -0.62), (0.82, -0.1), (1, 0.02), (1, 0.5), (-1, 0.5)], ink
    )
    pen.fill([(-0.6, -0.12), (-0.46, -0.48), (0.46, -0.48), (0.6, -0.12)], ground)
    for side in (-1, 1):
        pen.box(0.55 * side, 0.45, 0.92 * side, 0.74, ink)
        pen.dot(0.74 * side, 0.2, 0.13, ground)


def lorry_from_behind(pen: Pen, ink: Ink, ground: Ink) -> None:
    pen.box(-0.85, -1.15, 0.85, 0.45, ink)
    pen.box(-0.7, -1.0, 0.7, -0.1, ink)
    pen.line([(-0.7, 0.08), (0.7, 0.08)], 0.07, ground)
    for side in (-1, 1):
        pen.box(0.42 * side, 0.4, 0.8 * side, 0.74, ink)


def lorry(pen: Pen, ink: Ink, ground: Ink) -> None:
    """From the side, going left."""
    pen.box(-0.3, -0.55, 1.0, 0.22, ink)
    pen.fill([(-0.36, 0.22), (-0.36, -0.38), (-0.72, -0.38), (-0.96, -0.05), (-0.98, 0.22)], ink)
    pen.fill([(-0.46, -0.06), (-0.46, -0.28), (-0.66, -0.28), (-0.82, -0.06)], ground)
    pen.box(-0.98, 0.2, 1.0, 0.32, ink)
    for x in (-0.66, 0.62):
        pen.dot(x, 0.36, 0.24, ground)
        pen.dot(x, 0.36, 0.19, ink)


def walker(pen: Pen, ink: Ink, stride: float = 1.0) -> None:
    """A person walking to the left, 2 units tall."""
    pen.dot(-0.02, -0.82, 0.17, ink)
    pen.fill([(-0.2, -0.6), (0.2, -0.6), (0.18, 0.1), (-0.16, 0.1)], ink)
    for side in (-1, 1):
        pen.line([(0.0, 0.05), (0.18 * side * stride, 0.5), ((0.36 * side + 0.05) * stride, 0.98)], 0.19, ink)
        pen.line([(0.0, -0.52), (0.3 * side, -0.2), (0.36 * side - 0.12, 0.06)], 0.12, ink)


def pedestrians(pen: Pen, ink: Ink) -> None:
    walker(pen.at(0, -0.1, 0.86), ink)
    for x in (-0.95, -0.55, 0.5, 0.9):
        pen.fill([(x - 0.12, 0.95), (x + 0.12, 0.95), (x * 0.8 + 0.08, 0.66), (x * 0.8 - 0.08, 0.66)], ink)


def children(pen: Pen, ink: Ink) -> None:
    walker(pen.at(-0.42, 0.1, 0.8, -0.14), ink, 1.3)
    walker(pen.at(0.46, 0.22, 0.7, -0.14), ink, 1.5)
    pen.line([(-0.2, -0.1), (0.3, 0.06)], 0.12, ink)


def bicycle(pen: Pen, ink: Ink) -> None:
    for x in (-0.6, 0.6):
        pen.line(arc(x, 0.3, 0.38, 0.38, 0, 360), 0.1, ink)
    for stroke in (
        [(-0.6, 0.3), (-0.36, -0.36), (-0.56, -0.46)], [(-0.42, -0.18), (0.24, -0.22), (0.04, 0.3), (-0.42, -0.18)],
        [(0.04, 0.3), (0.6, 0.3), (0.2, -0.36)], [(0.08, -0.38), (0.36, -0.38)],
    ):  # fmt: skip
        pen.line(stroke, 0.1, ink)


def snowflake(pen: Pen, ink: Ink) -> None:
    for k in range(6):
        arm = pen.at(0, 0, 0.95, k * math.pi / 3)
        arm.line([(0, 0), (0, -0.95)], 0.14, ink)
        for side in (-1, 1):
            arm.line([(0, -0.48), (0.24 * side, -0.72)], 0.12, ink)


def deer(pen: Pen, ink: Ink) -> None:
    """Leaping to the left."""
    body = pen.at(0.08, 0.08, 1.0, 0.3)
    body.fill([(-0.5, -0.2), (0.42, -0.22), (0.58, -0.05), (0.46, 0.2), (-0.1, 0.16), (-0.46, 0.2)], ink)
    body.fill([(-0.32, -0.12), (-0.52, 0.15), (-0.86, -0.42), (-0.68, -0.5)], ink)
    body.fill([(-0.68, -0.56), (-0.74, -0.36), (-1.04, -0.3), (-1.02, -0.4)], ink)
    for tips in ([(-0.72, -0.5), (-0.5, -0.72), (-0.36, -1.02)], [(-0.56, -0.64), (-0.68, -0.98)]):
        body.line(tips, 0.07, ink)
    for leg in (
        [(-0.4, 0.1), (-0.82, 0.24), (-0.7, 0.44)], [(-0.3, 0.12), (-0.6, 0.42), (-0.44, 0.56)],
        [(0.46, 0.02), (0.8, 0.32), (1.08, 0.4)], [(0.36, 0.1), (0.62, 0.48), (0.9, 0.62)],
    ):  # fmt: skip
        body.line(leg, 0.12, ink)


def digger(pen: Pen, ink: Ink) -> None:
    """A worker with a shovel before a heap."""
    pen.dot(-0.1, -0.8, 0.18, ink)
    pen.line([(-0.16, -0.46), (-0.36, 0.1)], 0.32, ink)
    pen.line([(-0.36, 0.1), (-0.16, 0.48), (-0.22, 0.9)], 0.2, ink)
    pen.line([(-0.4, 0.1), (-0.66, 0.46), (-0.86, 0.9)], 0.2, ink)
    pen.line([(-0.1, -0.5), (0.22, -0.06), (0.02, 0.1)], 0.14, ink)
    pen.line([(-0.34, -0.12), (0.44, 0.5)], 0.09, ink)
    pen.fill([(0.1, 0.96), (0.56, 0.3), (0.8, 0.42), (1.1, 0.96)], ink)


def skidding_car(pen: Pen, ink: Ink, ground: Ink) -> None:
    car(pen.at(0.0, -0.42, 0.56, 0.2), ink, ground)
    height = np.linspace(0.1, 0.95, 14)
    for side in (-0.36, 0.34):
        sway = side + 0.16 * np.sin((height - 0.1) * 9) + 0.1
        pen.line(np.stack([sway, height], axis=1), 0.12, ink)


def signals(pen: Pen) -> None:
    pen.box(-0.36, -1.02, 0.36, 1.02, BLACK)
    for y, ink in ((-0.66, (214, 30, 34)), (0.0, (240, 190, 30)), (0.66, (24, 150, 80))):
        pen.dot(0, y, 0.27, ink)


def bumps(pen: Pen, ink: Ink) -> None:
    top = [*arc(-0.46, 0.3, 0.38, 0.42, 180, 360), *arc(0.46, 0.3, 0.38, 0.42, 180, 360)]
    pen.fill([(-1.0, 0.3), *top, (1.0, 0.3), (1.0, 0.52), (-1.0, 0.52)], ink)


def narrowing(pen: Pen, ink: Ink) -> None:
    """The right side comes in."""
    pen.line([(-0.3, 0.9), (-0.3, -0.9)], 0.2, ink)
    pen.line([(0.52, 0.9), (0.52, 0.3), (0.18, -0.2), (0.18, -0.9)], 0.2, ink)


def exclamation(pen: Pen, ink: Ink) -> None:
    pen.fill([*arc(0, -0.84, 0.17, 0.17, 180, 360), (0.08, 0.42), (-0.08, 0.42)], ink)
    pen.dot(0, 0.78, 0.17, ink)


def crossing_with_priority(pen: Pen, ink: Ink) -> None:
    pen.fill(
        [(-0.17, 0.95), (-0.17, -0.45), (-0.36, -0.45), (0, -0.98), (0.36, -0.45), (0.17, -0.45), (0.17, 0.95)], ink
    )
    pen.box(-0.62, 0.1, 0.62, 0.3, ink)


def bend(pen: Pen, ink: Ink) -> None:
    """To the right."""
    pen.arrow([(-0.3, 0.85), (-0.3, 0.1), (-0.22, -0.14), (0.0, -0.26), (0.78, -0.26)], 0.27, ink, 2.5)


def double_bend(pen: Pen, ink: Ink) -> None:
    """First to the left."""
    pen.arrow([(0.3, 0.95), (0.3, 0.46), (-0.22, 0.06), (-0.22, -0.14), (0.12, -0.4), (0.12, -1.0)], 0.22, ink, 2.5)


def roundabout(pen: Pen, ink: Ink) -> None:
    for start in (-25, 95, 215):
        pen.arrow(arc(0, 0, 0.58, 0.58, start, start - 92), 0.24, ink, 2.3)


def stripes(pen: Pen, ink: Ink, radius: float, count: int = 5) -> None:
    """Parallel strokes from lower left to upper right."""
    for k in range(count):
        off = (k - (count - 1) / 2) * 0.115
        half = math.sqrt(radius**2 - off**2)
        along, across = np.array([0.72, -0.694]), np.array([0.694, 0.72])
        pen.line(np.stack([across * off - along * half, across * off + along * half]), 0.05, ink)
