"""Signs on their supports as layers that are laid over the canvas: perspective, age, light, air and motion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

from perception.data.generated import textures
from perception.data.generated.light import Colour, Light, fill, headlight_at, rgb, transmission
from perception.data.generated.road import Floats, Frame, View
from perception.data.generated.sign_faces import Face, face
from perception.data.generated.sign_scene import Board, Support
from perception.data.generated.sign_shapes import FACE_PIXELS
from perception.data.generated.textures import Bytes

_RETROREFLECTION = 2.2
"""How much more of our headlights a face returns than a wall would."""
_EXPOSURE_METRES = 0.16
"""How far we drive, at most, while the shutter is open."""


@dataclass(frozen=True, eq=False)
class DrawnFace:
    """A class's face where it was drawn."""

    label: int
    outline: Floats
    """(N, 2) canvas points."""
    contrast: float
    """Levels between white and black on it as they reach the camera, 0 to 255."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A part of the canvas to be covered: colour is premultiplied by alpha."""

    distance_metres: float
    window: tuple[int, int, int, int]
    colour: Bytes
    alpha: Bytes
    faces: tuple[DrawnFace, ...]

    def part(self, canvas: Bytes) -> Bytes:
        x1, y1, x2, y2 = self.window
        return canvas[y1:y2, x1:x2]

    def lay(self, canvas: Bytes) -> None:
        patch = self.part(canvas)
        rest = cv2.bitwise_not(self.alpha)
        cv2.multiply(patch, cv2.merge([rest, rest, rest]), dst=patch, scale=1 / 255)
        cv2.add(patch, self.colour, dst=patch)


@dataclass(frozen=True)
class _Surface:
    """What a surface's own colour becomes: gain and air."""

    gain: Colour
    clear: float
    veil: Colour

    def seen(self, colour: Colour, factor: float = 1.0) -> Colour:
        return np.minimum(colour * self.gain * (factor * self.clear) + self.veil, 255.0)

    def table(self) -> Bytes:
        values = np.arange(256)[:, None] * (self.gain * self.clear)[None, :] + self.veil
        return np.rint(values).clip(0, 255).astype(np.uint8)[None]


def support_layers(view: View, light: Light, support: Support) -> tuple[Layer, ...]:
    """The support with its boards, then what hangs before it; none where it is behind the crest or off the canvas."""
    z = support.distance_metres
    if z >= view.end_metres:
        return ()
    rng = np.random.Generator(np.random.PCG64(support.variant))
    frame = view.frame(support.offset_metres, z)
    layers = [_boards_layer(view, light, support, frame, rng)]
    if support.branch is not None:
        layers.append(_branch_layer(view, light, support, rng))
    if support.pole_metres is not None:
        layers.append(_pole_layer(view, light, support))
    return tuple(layer for layer in layers if layer is not None)


def _surface(light: Light, x: float, z: float, share: float, retroreflection: float = 1.0) -> _Surface:
    """`share` is 0 for a surface against the light, 1 for one in full sun."""
    clear = float(transmission(light, z))
    if light.headlight > 0:
        gain = light.direct * (0.6 + 0.5 * share) + float(headlight_at(light, x, z)) * retroreflection
    elif light.casts_shadows:
        # A camera exposes for the road: what stands against the light is dark, what the sun hits saturates.
        dark = light.shadow * 0.62
        gain = dark * (1 - share) + light.direct * 1.22 * share
    else:
        gain = light.direct * (0.62 + 0.55 * share)
    return _Surface(np.asarray(gain, np.float64), clear, light.haze * (1 - clear))


def _boards_layer(view: View, light: Light, support: Support, frame: Frame, rng: np.random.Generator) -> Layer | None:
    steel = _surface(light, frame.x_metres, frame.z_metres, support.light)
    plates = [(board, _corners(frame, board)) for board in support.boards]
    parts = _structure(support, view, frame, rng)
    everything = np.concatenate([frame.project(part) for part, _, _ in parts] + [corners for _, corners in plates])
    blur = _motion(view, everything, frame, rng)
    margin = 3 + math.ceil(max(abs(blur[0]), abs(blur[1])))
    window = view.window(everything, margin)
    if window is None:
        return None
    x1, y1, x2, y2 = window
    colour = np.zeros((y2 - y1, x2 - x1, 3), np.uint8)
    alpha = np.zeros((y2 - y1, x2 - x1), np.uint8)
    backs = all(board.name == "blank-back" for board, _ in plates)

    def structure() -> None:
        for part, tone, factor in parts:
            points = frame.project(part) - (x1, y1)
            fill(colour, points, steel.seen(tone, factor))
            fill(alpha, points, 255.0)

    if not backs:
        structure()
    faces = []
    for board, corners in plates:
        plate = face(board.name, board.variant, board.shape if board.name == "blank-back" else "")
        signal = 3.0 if board.name == "signal-heads" and light.headlight > 0 else 1.0
        surface = _surface(light, frame.x_metres, frame.z_metres, support.light, _RETROREFLECTION * signal)
        matrix = _draw_board(colour, alpha, board, plate, surface, corners - (x1, y1), rng)
        if board.label is not None:
            outline = cv2.perspectiveTransform(plate.outline[None], matrix)[0] + (x1, y1)
            contrast = float((surface.seen(rgb(243, 243, 240)) - surface.seen(rgb(22, 22, 24))).max())
            faces.append(DrawnFace(board.label, np.asarray(outline, np.float64), contrast))
    if backs:
        structure()
    if max(abs(blur[0]), abs(blur[1])) >= 0.7:
        kernel = _line_kernel(*blur)
        colour = np.asarray(cv2.filter2D(colour, -1, kernel, borderType=cv2.BORDER_CONSTANT), np.uint8)
        alpha = np.asarray(cv2.filter2D(alpha, -1, kernel, borderType=cv2.BORDER_CONSTANT), np.uint8)
    return Layer(frame.z_metres, window, colour, alpha, tuple(faces))


def _corners(frame: Frame, board: Board) -> Floats:
    """(4, 2) canvas points of the face's square, clockwise from the upper left."""
    half = board.width_metres / 2
    cosine, sine = math.cos(board.tilt_radians) * half, math.sin(board.tilt_radians) * half
    points = []
    for u, v in ((-1, -1), (1, -1), (1, 1), (-1, 1)):
        across, down = u * cosine - v * sine, u * sine + v * cosine
        # A face that leans back has its upper edge farther off.
        ahead = across * math.sin(board.yaw_radians) - down * math.sin(board.lean_radians)
        points.append((board.right_metres + across * math.cos(board.yaw_radians), ahead,
                       board.above_metres - down * math.cos(board.lean_radians)))  # fmt: skip
    return frame.project(points)


def _structure(
    support: Support, view: View, frame: Frame, rng: np.random.Generator
) -> list[tuple[list[tuple[float, float, float]], Colour, float]]:
    """Polygons (right, ahead, above) of the support with their colour and a factor."""
    top = max(board.above_metres + board.width_metres * 0.42 for board in support.boards)

    def upright(x1: float, x2: float, low: float, high: float) -> list[tuple[float, float, float]]:
        return [(x1, 0.0, low), (x2, 0.0, low), (x2, 0.0, high), (x1, 0.0, high)]

    grey = rgb(150, 153, 154) * float(rng.uniform(0.65, 1.1))
    if support.kind == "wall":
        widest = max(board.width_metres for board in support.boards)
        half, tall = max(0.7 * widest, float(rng.uniform(0.5, 1.7))), top + float(rng.uniform(0.2, 0.9))
        masonry = (rgb(168, 158, 146), rgb(146, 96, 78), rgb(182, 180, 174))[int(rng.integers(3))]
        courses = [
            (upright(-half, half, 0.0, tall), masonry, 0.9),
            (upright(-half, half, tall - 0.12, tall), masonry, 1.08),
        ]
        for _ in range(14):
            x, y = float(rng.uniform(-half, half * 0.7)), float(rng.uniform(0.1, tall - 0.4))
            courses.append((upright(x, min(x + 0.5, half), y, y + 0.2), masonry, float(rng.uniform(0.8, 0.98))))
        return courses
    if support.kind == "gantry":
        beam = min(board.above_metres for board in support.boards)
        reach = float(rng.uniform(5.5, 9.0)) + max(abs(board.right_metres) for board in support.boards)
        parts = [(upright(-reach, reach, beam - 0.3, beam - 0.16), grey, 0.9),
                 (upright(-reach, reach, beam + 0.3, beam + 0.44), grey, 1.0)]  # fmt: skip
        for k in range(int(reach)):
            x = -reach + 2 * k
            parts.append(([(x, 0, beam - 0.2), (x + 0.08, 0, beam - 0.2), (x + 1.05, 0, beam + 0.34),
                           (x + 0.97, 0, beam + 0.34)], grey, 0.8))  # fmt: skip
        parts += [(upright(x, x + 0.35, 0.0, beam + 0.44), grey, 0.85) for x in (-reach, reach - 0.35)]
        return parts
    radius = float(rng.uniform(0.03, 0.05))
    return [
        (upright(-radius, radius, 0.0, top), grey, 0.8),
        (upright(-radius * 0.5, radius * 0.3, 0.0, top), grey, 1.15),
    ]


def _draw_board(
    colour: Bytes, alpha: Bytes, board: Board, plate: Face, surface: _Surface, corners: Floats, rng: np.random.Generator
) -> Floats:
    """Warp a face into a layer; gives the matrix from face coordinates to the layer's."""
    size = float(max(np.ptp(corners[:, 0]), np.ptp(corners[:, 1])))
    level = 0
    while level + 1 < len(plate.levels) and FACE_PIXELS >> (level + 1) >= size:
        level += 1
    picture, cut = plate.levels[level]
    lit = cv2.LUT(_aged(picture, board, rng), surface.table())
    lit = cv2.multiply(lit, cv2.merge([cut, cut, cut]), scale=1 / 255)
    square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.float32)
    matrix = np.asarray(cv2.getPerspectiveTransform(square, corners.astype(np.float32)), np.float64)
    half = len(cut) / 2
    from_pixels = matrix @ np.array([[1 / half, 0, 0.5 / half - 1], [0, 1 / half, 0.5 / half - 1], [0, 0, 1]])
    # A gantry's layer is far larger than a board of it.
    x1, y1 = (max(int(value) - 2, 0) for value in corners.min(axis=0))
    x2, y2 = (max(int(value) + 3, 0) for value in corners.max(axis=0))
    colour, alpha = colour[y1:y2, x1:x2], alpha[y1:y2, x1:x2]
    if not alpha.size:
        return matrix
    from_pixels = np.array([[1, 0, -x1], [0, 1, -y1], [0, 0, 1]]) @ from_pixels
    shape = (colour.shape[1], colour.shape[0])
    warped = cv2.warpPerspective(lit, from_pixels, shape, flags=cv2.INTER_LINEAR)
    mask = cv2.warpPerspective(cut, from_pixels, shape, flags=cv2.INTER_LINEAR)
    rest = cv2.bitwise_not(mask)
    cv2.multiply(colour, cv2.merge([rest, rest, rest]), dst=colour, scale=1 / 255)
    cv2.add(colour, warped, dst=colour)
    cv2.multiply(alpha, rest, dst=alpha, scale=1 / 255)
    cv2.add(alpha, mask, dst=alpha)
    return matrix


def _aged(picture: Bytes, board: Board, rng: np.random.Generator) -> Bytes:
    """Bleached, dirty, and with the edge of a shadow across it."""
    size = len(picture)
    fading = max(board.fading - 0.2, 0.0)
    if fading > 0.02:
        picture = np.asarray(
            cv2.addWeighted(picture, 1 - 0.62 * fading, np.full_like(picture, 205), 0.62 * fading, 0), np.uint8
        )
    factor = np.ones((size, size), np.float32)
    dirt = max(board.dirt - 0.15, 0.0)
    top, left = (int(value) for value in rng.integers(0, textures.TILE - size, 2))
    if dirt > 0.02:
        spots = textures.wear()[top : top + size, left : left + size]
        factor -= np.float32(0.75 * dirt) * np.clip((spots - (1 - dirt)) * 2.5, 0, 1).astype(np.float32)
        factor *= np.float32(1 - 0.25 * dirt)
    if board.shade_edge is not None:
        angle, place = board.shade_edge
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        along = axis[None, :] * np.float32(math.cos(angle)) + axis[:, None] * np.float32(math.sin(angle))
        factor *= 1 - 0.55 * np.clip((along - np.float32(place)) * 9 + 0.5, 0, 1)
    # A plate is never lit quite evenly.
    upper, lower = (1 + rng.normal(0, 0.05, 2)).tolist()
    factor *= np.linspace(upper, lower, size, dtype=np.float32)[:, None]
    scaled = np.rint(factor * 200).clip(0, 255).astype(np.uint8)
    return np.asarray(cv2.multiply(picture, cv2.merge([scaled, scaled, scaled]), scale=1 / 200), np.uint8)


def _motion(view: View, points: Floats, frame: Frame, rng: np.random.Generator) -> tuple[float, float]:
    """Pixels that the support moves while the shutter is open: away from where we drive to, as it comes nearer."""
    travelled = _EXPOSURE_METRES * float(rng.uniform(0, 1)) ** 2
    middle = points.mean(axis=0) - (frame.origin_x, frame.origin_y)
    shift = middle * (travelled / frame.z_metres)
    if rng.random() < 0.08:
        shift = shift + rng.normal(0, 1.6, 2) * view.width / 800
    limit = 9.0 * view.width / 800
    dx, dy = np.clip(shift, -limit, limit).tolist()
    return dx, dy


def _line_kernel(dx: float, dy: float) -> Floats:
    radius = math.ceil(max(abs(dx), abs(dy)) / 2)
    kernel = np.zeros((2 * radius + 1, 2 * radius + 1))
    for share in np.linspace(-0.5, 0.5, 4 * radius + 3).tolist():
        x, y = radius + dx * share, radius + dy * share
        i, j = int(y), int(x)
        for row, column, weight in (
            (i, j, (1 - y + i) * (1 - x + j)), (i + 1, j, (y - i) * (1 - x + j)),
            (i, j + 1, (1 - y + i) * (x - j)), (i + 1, j + 1, (y - i) * (x - j)),
        ):  # fmt: skip
            if weight > 0:
                kernel[row, column] += weight
    return np.asarray(kernel / kernel.sum())


def _branch_layer(view: View, light: Light, support: Support, rng: np.random.Generator) -> Layer | None:
    """A clump of leaves a little nearer than the boards."""
    assert support.branch is not None
    right, above, wide = support.branch
    z = support.distance_metres * 0.97
    frame = view.frame(support.offset_metres, z)
    corners = frame.project([(right - wide / 2, 0, above + wide / 2), (right + wide / 2, 0, above - wide / 2)])
    window = view.window(corners)
    if window is None:
        return None
    level = 0
    width = float(corners[1, 0] - corners[0, 0])
    kind = int(rng.integers(0, textures.NUM_TREES))
    while level < textures.TREE_LEVELS - 1 and textures.TREE_HEIGHT >> level > 1.6 * width:
        level += 1
    colour, alpha = textures.tree(kind, level)
    # Its crown alone: what lies below is trunk.
    crown = slice(0, int(len(alpha) * 0.62))
    colour, alpha = colour[crown], alpha[crown]
    rows, columns = alpha.shape
    x1, y1, x2, y2 = window
    scale_x, scale_y = columns / width, rows / width
    matrix = np.array([[scale_x, 0, (x1 - corners[0, 0]) * scale_x], [0, scale_y, (y1 - corners[0, 1]) * scale_y]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    leaf = rgb(88, 108, 58) * float(rng.uniform(0.7, 1.15)) / 128
    surface = _surface(light, frame.x_metres, z, support.light)
    lit = cv2.LUT(colour, _Surface(surface.gain * leaf, surface.clear, surface.veil).table())
    lit = cv2.multiply(lit, cv2.merge([alpha, alpha, alpha]), scale=1 / 255)
    size = (x2 - x1, y2 - y1)
    return Layer(
        z,
        window,
        np.asarray(cv2.warpAffine(lit, matrix, size, flags=flags), np.uint8),
        np.asarray(cv2.warpAffine(alpha, matrix, size, flags=flags), np.uint8),
        (),
    )


def _pole_layer(view: View, light: Light, support: Support) -> Layer | None:
    """A lamp's or another sign's pole before the boards."""
    assert support.pole_metres is not None
    z = support.distance_metres * 0.94
    frame = view.frame(support.offset_metres, z)
    middle, tall = support.pole_metres, max(board.above_metres for board in support.boards) + 3.0
    points = frame.project(
        [(middle - 0.06, 0, 0), (middle + 0.06, 0, 0), (middle + 0.06, 0, tall), (middle - 0.06, 0, tall)]
    )
    window = view.window(points, 2)
    if window is None:
        return None
    x1, y1, x2, y2 = window
    colour, alpha = np.zeros((y2 - y1, x2 - x1, 3), np.uint8), np.zeros((y2 - y1, x2 - x1), np.uint8)
    fill(colour, points - (x1, y1), _surface(light, frame.x_metres, z, support.light).seen(rgb(120, 122, 124)))
    fill(alpha, points - (x1, y1), 255.0)
    return Layer(z, window, colour, alpha, ())
