"""Draw a sheet of generated scenes with their labels, to look at.

python -m perception.data.generated.contact_sheet --out sheet.png --seed 0 --count 40
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from perception.data.generated.render import DEFAULT_STYLE, SCENE_STYLES, render_scene
from perception.data.generated.textures import Bytes
from perception.data.sample import LaneSample
from perception.errors import UserError

_COLOURS = ((255, 60, 60), (60, 220, 60), (70, 130, 255), (255, 220, 0), (255, 80, 255), (0, 230, 230))
_COLUMNS = 4


def draw_labels(sample: LaneSample) -> Bytes:
    """The picture with a dot on every label point, a colour a lane, and the category's name."""
    image = sample.image.copy()
    for number, lane in enumerate(sample.truth.lanes):
        for x, y in lane:
            cv2.circle(image, (round(x * 16), round(y * 16)), 24, _COLOURS[number % len(_COLOURS)], -1, cv2.LINE_AA, 4)
    text = f"{sample.truth.name[-6:]} {sample.truth.category} {len(sample.truth.lanes)}"
    cv2.rectangle(image, (0, 0), (14 + 11 * len(text), 30), (0, 0, 0), -1)
    cv2.putText(image, text, (8, 22), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (255, 255, 255), 1, cv2.LINE_AA)
    return image


def contact_sheet(
    seed: int, first_index: int, count: int, height: int, width: int, labels: bool, tile_width: int, style: str
) -> tuple[Bytes, list[float]]:
    """The sheet as RGB, and the processor seconds that each scene took."""
    tiles, seconds = [], []
    size = (tile_width, round(height * tile_width / width))
    for index in range(first_index, first_index + count):
        start = time.process_time()
        sample = render_scene(seed, index, height, width, style)
        seconds.append(time.process_time() - start)
        picture = draw_labels(sample) if labels else sample.image
        tiles.append(np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8))
    return arrange(tiles), seconds


def arrange(tiles: Sequence[Bytes], columns: int = _COLUMNS) -> Bytes:
    """Pictures of one size in rows, filled up with black."""
    filled = [*tiles, *[np.zeros_like(tiles[0])] * (-len(tiles) % columns)]
    return np.vstack([np.hstack(filled[start : start + columns]) for start in range(0, len(filled), columns)])


def check_out(out: Path, count: int, tile_width: int) -> None:
    """Raises UserError for a sheet that cannot be drawn or written."""
    if count < 1 or tile_width < 1:
        raise UserError("--count and --tile-width must be at least 1")
    if out.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise UserError(f"--out {out}: name a .png or .jpg file")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; create it first")


def write_sheet(out: Path, sheet: Bytes) -> None:
    ok, code = cv2.imencode(out.suffix.lower(), sheet[..., ::-1])
    assert ok
    partial = out.with_name(out.name + ".partial")
    partial.write_bytes(code.tobytes())
    partial.replace(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a sheet of generated scenes with their labels.")
    parser.add_argument("--out", type=Path, required=True, help="PNG or JPEG file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-index", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--height", type=int, default=320, help="scene height in pixels")
    parser.add_argument("--width", type=int, default=800, help="scene width in pixels")
    parser.add_argument("--tile-width", type=int, default=400, help="width of one picture on the sheet, in pixels")
    parser.add_argument("--style", default=DEFAULT_STYLE, help=f"{' or '.join(SCENE_STYLES)} (default: %(default)s)")
    parser.add_argument("--no-labels", action="store_true", help="leave the lanes undrawn")
    options = parser.parse_args(arguments)
    try:
        check_out(options.out, options.count, options.tile_width)
        sheet, seconds = contact_sheet(
            options.seed, options.first_index, options.count, options.height, options.width,
            not options.no_labels, options.tile_width, options.style,
        )  # fmt: skip
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    write_sheet(options.out, sheet)
    print(
        f"{options.out}: {len(seconds)} scenes, median {1000 * float(np.median(seconds)):.1f} ms of processor time each"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
