"""Draw sheets of generated sign scenes with their boxes, or of all faces, to look at.

python -m perception.data.generated.sign_sheet --out sheet.png --seed 0 --count 40
python -m perception.data.generated.sign_sheet --faces --out faces.png
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from perception.data.generated.contact_sheet import arrange, check_out, write_sheet
from perception.data.generated.sign_faces import LOOK_ALIKES, NUM_VARIANTS, PLATE, face
from perception.data.generated.sign_render import render_sign_scene
from perception.data.generated.textures import Bytes
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.signs.sample import SignSample
from perception.errors import UserError

FACE_SIZES = (16, 32, 64, 128)
_FACE_COLUMNS = 6


def draw_boxes(sample: SignSample, scale: float, labels: bool = True) -> Bytes:
    """The picture enlarged, with labelled signs framed in green and numbered by class, ignored regions in grey."""
    truth = sample.truth
    image = np.asarray(cv2.resize(sample.image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), np.uint8)
    if not labels:
        return image
    for box in truth.ignored:
        _frame(image, box * scale, (190, 190, 190))
    for box, label in zip(truth.boxes, truth.labels.tolist(), strict=True):
        x1, y1 = _frame(image, box * scale, (40, 240, 60))
        place = (x1, y1 - 2 if y1 > 12 else y1 + 12)
        cv2.putText(image, str(label), place, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (40, 240, 60), 1, cv2.LINE_AA)
    return image


def _frame(
    image: Bytes, box: np.ndarray[tuple[int, ...], np.dtype[np.float64]], ink: tuple[int, int, int]
) -> tuple[int, int]:
    x1, y1, x2, y2 = (round(value) for value in box.tolist())
    cv2.rectangle(image, (x1 - 2, y1 - 2), (x2 + 1, y2 + 1), ink, 1)
    return x1, y1


def scenes_sheet(
    seed: int, first_index: int, count: int, height: int, width: int, labels: bool, tile_width: int
) -> tuple[Bytes, list[float]]:
    """The sheet as RGB, and the processor seconds that each scene took."""
    tiles, seconds = [], []
    for index in range(first_index, first_index + count):
        start = time.process_time()
        sample = render_sign_scene(seed, index, height, width)
        seconds.append(time.process_time() - start)
        tiles.append(draw_boxes(sample, tile_width / width, labels))
    return arrange(tiles), seconds


def faces_sheet() -> Bytes:
    """Every class's face, then look-alikes and plates, at FACE_SIZES; variants take turns."""
    tiles = []
    for number, name in enumerate((*GTSDB_CLASSES, *LOOK_ALIKES, PLATE)):
        tile = np.full((FACE_SIZES[-1] + 8, sum(FACE_SIZES) + 8 * len(FACE_SIZES), 3), 104, np.uint8)
        picture, alpha = face(name, number % NUM_VARIANTS).levels[0]
        x = 4
        for size in FACE_SIZES:
            weight = cv2.resize(alpha, (size, size), interpolation=cv2.INTER_AREA)[..., None] / 255
            small = cv2.resize(picture, (size, size), interpolation=cv2.INTER_AREA)
            patch = tile[4 : 4 + size, x : x + size]
            patch[:] = np.rint(small * weight + patch * (1 - weight)).astype(np.uint8)
            x += size + 8
        cv2.putText(tile, str(number), (4, 128), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (255, 255, 255), 1, cv2.LINE_AA)
        tiles.append(tile)
    return arrange(tiles, _FACE_COLUMNS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a sheet of generated sign scenes with their boxes.")
    parser.add_argument("--out", type=Path, required=True, help="PNG or JPEG file to write")
    parser.add_argument("--faces", action="store_true", help="draw the faces alone, at four sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-index", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--height", type=int, default=320, help="scene height in pixels")
    parser.add_argument("--width", type=int, default=800, help="scene width in pixels")
    parser.add_argument("--tile-width", type=int, default=400, help="width of one picture on the sheet, in pixels")
    parser.add_argument("--no-labels", action="store_true", help="leave the boxes undrawn")
    options = parser.parse_args(arguments)
    try:
        check_out(options.out, options.count, options.tile_width)
        if options.faces:
            write_sheet(options.out, faces_sheet())
            print(f"{options.out}: {len(GTSDB_CLASSES)} classes and {len(LOOK_ALIKES) + 1} others")
            return 0
        sheet, seconds = scenes_sheet(
            options.seed, options.first_index, options.count, options.height, options.width,
            not options.no_labels, options.tile_width,
        )  # fmt: skip
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    write_sheet(options.out, sheet)
    milliseconds = 1000 * float(np.median(seconds))
    print(f"{options.out}: {len(seconds)} scenes, median {milliseconds:.1f} ms of processor time each")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
