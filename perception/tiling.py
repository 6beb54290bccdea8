"""How an image of any size is laid over inputs of the sign network, trained or exported. No torch."""

from __future__ import annotations

SIZE_MULTIPLE = 32
"""Height and width of an input are multiples of it."""
PADDING = 114
"""Grey beside an image that does not fill an input."""


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin along a side: as few as cover it, evenly spread, sharing `overlap` pixels or more.

    `tile` 0: the whole side is one.
    """
    if tile == 0 or length <= tile:
        return [0]
    steps = -(-(length - tile) // (tile - overlap))
    return [round(number * (length - tile) / steps) for number in range(steps + 1)]


def padded_length(length: int) -> int:
    """The shortest side of an input that holds so many pixels."""
    return -(-length // SIZE_MULTIPLE) * SIZE_MULTIPLE
