"""What a label's two corners mean: formats differ by up to a pixel on each side, which costs small signs much.

| name                | first pixel | second corner             | formats                          |
|---------------------|-------------|---------------------------|----------------------------------|
| half-open           | 0           | just past the last pixel  | GTSRB, TT100K, MTSD, LISA, COCO  |
| inclusive           | 0           | the last pixel            | BDD100K                          |
| one-based-half-open | 1           | just past the last pixel  |                                  |
| one-based-inclusive | 1           | the last pixel            | GTSDB, VOC by tradition          |
"""

from __future__ import annotations

from perception.errors import UserError, nearest

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2 in pixels."""

_ADDED = {
    "half-open": (0, 0),
    "inclusive": (0, 1),
    "one-based-half-open": (-1, -1),
    "one-based-inclusive": (-1, 0),
}
CORNERS = tuple(_ADDED)


def check_corners(corners: str) -> None:
    """Raises UserError where there is no such convention."""
    if corners not in _ADDED:
        raise UserError(f'corners = "{corners}" is unknown{nearest(corners, CORNERS)}')


def half_open(box: Box, corners: str) -> Box:
    """The box as half-open, 0-based pixels.

    >>> half_open((984, 389, 1024, 432), "one-based-inclusive")
    (983, 388, 1024, 432)
    """
    check_corners(corners)
    first, last = _ADDED[corners]
    x1, y1, x2, y2 = box
    return x1 + first, y1 + first, x2 + last, y2 + last
