"""The one image decoder that every reader uses.

Rules, the same whatever the file holds:

| file                    | result                                                          |
|-------------------------|-----------------------------------------------------------------|
| grey                    | the grey value three times                                      |
| alpha channel           | dropped; the colours are kept as stored                         |
| 16 bits a channel       | the upper 8 bits                                                |
| EXIF orientation        | ignored: labels are in the pixels as stored, not as displayed   |
| cut short or unreadable | UserError naming the file, never a half-grey image              |
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.sample import ReadReport
from perception.errors import UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
"""File name endings, in the order in which a missing image's twin of another format is looked for."""

_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_PNG_START, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
# Start-of-frame markers hold the size; C4, C8 and CC among them mean other things.
_JPEG_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE_MARKERS = frozenset((0x01, *range(0xD0, 0xD9)))
_HEADER_BYTES = 65536
_PPM_HEADER = re.compile(rb"P6(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)\s")


def read_image(path: Path) -> NDArray[np.uint8]:
    """Decode a file to (height, width, 3) uint8 RGB by the rules above.

    Raises UserError naming the file where it is missing, cut short or no image.
    """
    data = _read_bytes(path)
    if not data:
        raise UserError(f"{path}: image file is empty; copy it again from its source")
    cut_short = _is_cut_short(data)
    try:
        decoded = (
            None
            if cut_short
            else cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
        )
    except cv2.error:
        decoded = None
    if decoded is None:
        is_jpeg = data.startswith(_JPEG_START)
        what = "is cut short" if cut_short and is_jpeg else "cannot be decoded (cut short, or not an image)"
        raise UserError(f"{path}: image {what}; copy it again from its source")
    return np.asarray(decoded, dtype=np.uint8)


def image_size(path: Path) -> tuple[int, int]:
    """(height, width) of what `read_image` returns, from the file's header where it is JPEG, PNG or PPM.

    Raises UserError naming the file where it is missing or no image.
    """
    head = _read_bytes(path, _HEADER_BYTES)
    if head.startswith(_PNG_START) and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return height, width
    if head.startswith(_JPEG_START):
        size = _jpeg_size(head)
        if size is None and len(head) == _HEADER_BYTES:
            size = _jpeg_size(_read_bytes(path))
        if size is not None:
            return size
    if ppm := _PPM_HEADER.match(head):
        return int(ppm[2]), int(ppm[1])
    height, width = read_image(path).shape[:2]
    return height, width


def _read_bytes(path: Path, limit: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise UserError(f"{path}: image cannot be read ({error.strerror})") from None


def _is_cut_short(data: bytes) -> bool:
    if data.startswith(_JPEG_START):
        # Some OpenCV 4 builds return one that is cut short with its lower part grey, and no error.
        return _JPEG_END not in data[data.rfind(b"\xff\xda") :]
    # Of a PNG that is, they write a warning of their own beside the one line that the user gets.
    return data.startswith(_PNG_START) and data.rfind(_PNG_END) < 0


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Walk a JPEG's segments up to the frame header; None where the bytes end before it."""
    position = 2
    while position + 9 <= len(data):
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
        elif marker in _JPEG_BARE_MARKERS:
            position += 2
        elif marker in _JPEG_FRAME_MARKERS:
            height, width = struct.unpack(">HH", data[position + 5 : position + 9])
            return height, width
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None


def find_image(path: Path) -> Path | None:
    """The file itself, else one beside it with the same stem and another image suffix, else None.

    Copies of data sets are often converted (20.jpg in the labels, 20.png on disk).
    """
    if path.is_file():
        return path
    twins = (path.with_suffix(suffix) for suffix in IMAGE_SUFFIXES if suffix != path.suffix)
    return next((twin for twin in twins if twin.is_file()), None)


def locate_images(folder: Path, listed: Sequence[tuple[str, str]], required: bool, report: ReadReport) -> list[str]:
    """Name relative to `folder` of each listed image on disk, "" where there is none.

    `listed` holds (name, "file:line" that lists it). An image listed twice is kept twice, one found
    under another suffix is used; both are noted in `report`. Raises UserError with the count and first
    names where images are `required` and missing.
    """
    found, missing, seen = [], [], set()
    for name, where in listed:
        if name in seen:
            report.note("image listed twice: kept twice", where)
        seen.add(name)
        path = find_image(folder / name)
        if path is None:
            missing.append(name)
        elif path != folder / name:
            report.note(f"image {Path(name).suffix} found as {path.suffix}: used", where)
        found.append("" if path is None else path.relative_to(folder).as_posix())
    if required and missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(listed)} listed images are missing, first: {', '.join(missing[:3])}; "
            "give the folder that holds the images at these names"
        )
    return found
