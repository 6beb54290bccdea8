"""German Traffic Sign Detection Benchmark: gt.txt, a line a sign, beside 900 street scenes of 1360x800.

A line is `00001.ppm;983;388;1024;432;40`: image, left, top, right, bottom, class. Corners are inclusive and counted
from 1. Images lie beside gt.txt or in images/, as .ppm or converted; one without a line has no sign.

| part       | images                                                                     |
|------------|----------------------------------------------------------------------------|
| test       | number 600 and more, as published                                          |
| validation | number under 600 and divisible by 8; the same ones in an incomplete copy   |
| train      | the others under 600                                                       |
| all-train  | train and validation                                                       |
| all        | every image                                                                |

| in the folder                                     | rule                                      |
|---------------------------------------------------|-------------------------------------------|
| image on disk with another suffix (.jpg for .ppm) | used, noted                               |
| image whose name is no number                     | left out, noted                           |
| line twice (00340.ppm in the published file)      | kept twice, noted                         |
| blank line; byte order mark                       | skipped, noted                            |
| another number of fields, no number, class not 0-42 | UserError with file:line and field      |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perception.data.images import image_size
from perception.data.sample import ReadReport
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_number, a_whole_number, read_text
from perception.data.signs.listing import check_split, find_images
from perception.errors import UserError

GTSDB_HEIGHT, GTSDB_WIDTH = 800, 1360
FIRST_TEST_NUMBER = 600
VALIDATION_EVERY = 8
GTSDB_SPLITS: dict[str, Callable[[int], bool]] = {
    "train": lambda number: number < FIRST_TEST_NUMBER and number % VALIDATION_EVERY != 0,
    "validation": lambda number: number < FIRST_TEST_NUMBER and number % VALIDATION_EVERY == 0,
    "test": lambda number: number >= FIRST_TEST_NUMBER,
    "all-train": lambda number: number < FIRST_TEST_NUMBER,
    "all": lambda number: True,
}
"""Name of a part → does the image of a number belong to it."""


@dataclass(frozen=True)
class _Line:
    image: str
    corners: Box
    class_name: str
    where: str


def is_gtsdb(folder: Path) -> bool:
    return (folder / "gt.txt").is_file()


def read_gtsdb(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "one-based-inclusive",
) -> SignFolder:
    """Images of one part, those without signs too, in the order of their numbers.

    `list_name` names a part too, and then `split` is not applied: the format has no list files. Raises UserError for
    a wrong line of gt.txt, with its number, and, if required, for images that are missing.
    """
    check_corners(corners)
    check_split(list_name or split, tuple(GTSDB_SPLITS))
    belongs = GTSDB_SPLITS[list_name or split]
    builder = SignFolderBuilder(folder, GTSDB_CLASSES)
    label_file = folder / "gt.txt"
    signs: dict[int, list[_Line]] = {}
    for line in _read_lines(label_file, builder.report):
        signs.setdefault(_number(line), []).append(line)
    images: dict[int, str] = {}
    for stem, name in find_images(folder, ("images", ".")).items():
        if not _is_number(stem):
            builder.report.note("image whose name is no number: left out", str(folder / name))
        elif int(stem) in images:
            builder.report.note("image of the same number as another: left out", str(folder / name))
        else:
            images[int(stem)] = name
    wanted = sorted(number for number in {*signs, *images} if belongs(number))
    missing = [signs[number][0] for number in wanted if number not in images]
    if missing and images_required:
        raise UserError(
            f"{missing[0].where}: {len(missing)} of {len(wanted)} images are missing, first: {missing[0].image}; "
            f"put them into {folder} or its images/"
        )
    if not wanted:
        raise UserError(f"{folder}: no image of the part {list_name or split} in it or its images/")
    for number in wanted:
        lines = signs.get(number, [])
        where = lines[0].where if lines else str(folder / images[number])
        if number in images:
            name = images[number]
            builder.add_image(name, where, image_size(folder / name))
            if lines and Path(name).suffix != Path(lines[0].image).suffix:
                suffixes = f"{Path(lines[0].image).suffix} found as {Path(name).suffix}"
                builder.report.note(f"image {suffixes}: used", where)
        else:
            builder.add_image(lines[0].image, where, (GTSDB_HEIGHT, GTSDB_WIDTH))
            builder.report.note("image is not there: labels kept", where)
        for line in lines:
            box = box_from_corners(line.corners, corners, line.where, builder.report)
            builder.add_box(line.class_name, box, line.where)
    return builder.finish()


def _read_lines(path: Path, report: ReadReport) -> list[_Line]:
    lines = []
    for number, text in enumerate(read_text(path, "GTSDB label file", report).splitlines(), start=1):
        where = f"{path}:{number}"
        fields = [field.strip() for field in text.split(";")]
        if not text.strip():
            report.note("blank line: skipped", where)
            continue
        if len(fields) != 6:
            raise UserError(
                f"{where}: {len(fields)} fields, 6 are wanted: image;left;top;right;bottom;class, "
                f"got {text.strip()!r:.60}"
            )
        left, top, right, bottom = (
            a_number(field, where, name)
            for field, name in zip(fields[1:5], ("left", "top", "right", "bottom"), strict=True)
        )
        label = a_whole_number(fields[5], where, "class")
        if label >= len(GTSDB_CLASSES):
            raise UserError(f"{where}: field class = {label} is unknown; allowed: 0 to {len(GTSDB_CLASSES) - 1}")
        lines.append(_Line(fields[0], (left, top, right, bottom), GTSDB_CLASSES[label], where))
    if not lines:
        raise UserError(f"{path}: GTSDB label file is empty; it has a line a sign: image;left;top;right;bottom;class")
    return lines


def _number(line: _Line) -> int:
    stem = Path(line.image).stem
    if not _is_number(stem):
        raise UserError(f"{line.where}: field image = {line.image!r:.60} must be a number, such as 00012.ppm")
    return int(stem)


def _is_number(stem: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", stem) is not None
