"""CULane lanes: text lines "x y x y ..." in NNNNN.lines.txt beside each image, images named by list files.

`parse_lane_file` reads a file just as the official evaluator does; the data set
repairs what it reads. Rules, each counted in ReadReport with file:line of the first:

| in a label file                                   | rule                                                       |
|---------------------------------------------------|------------------------------------------------------------|
| empty file                                        | an image without lanes                                     |
| blank line; line with one point                   | dropped                                                    |
| odd count of numbers                              | the last number dropped                                    |
| NaN, infinity, a number beyond any image          | the point dropped                                          |
| consecutive duplicate points                      | one kept                                                   |
| points from top to bottom                         | reversed                                                   |
| y that does not fall strictly                     | the longest run of points whose y does is kept             |
| fewer than two points left                        | lane dropped                                               |
| x left or right of the image                      | kept (usual in CULane)                                     |
| byte order mark                                   | skipped                                                    |
| text that is no number                            | UserError with file:line                                   |
| points far below the image (labels of another size) | UserError as soon as the image's size is known           |

| in a list file                                    | rule                                                       |
|---------------------------------------------------|------------------------------------------------------------|
| leading slash, mask column                        | ignored (usual in CULane)                                  |
| trailing space, blank line, byte order mark       | skipped                                                    |
| number of lane flags differs from lanes labelled  | the label file counts                                      |
| image listed twice                                | kept twice                                                 |
| image on disk with another suffix                 | used                                                       |
| line without an image name, not UTF-8             | UserError with file:line                                   |
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perception.data.images import image_size, locate_images, read_image
from perception.data.lane_folder import check_size
from perception.data.lane_repair import repair_points
from perception.data.lane_store import pack_lanes, pack_names, unpack_name
from perception.data.sample import LaneSample, LaneTruth, ReadReport
from perception.data.signs.fields import LARGEST_NUMBER
from perception.errors import UserError

CULANE_HEIGHT, CULANE_WIDTH = 590, 1640
TEST_SPLIT_FOLDER = Path("list/test_split")

_PLAIN_NUMBERS = re.compile(rb"[0-9eE+\-. \t\r]*\Z")
# What C++'s `stream >> double` takes from the text at hand; it fails on an exponent without digits.
_STREAM_NUMBER = re.compile(rb"[ \t\r\v\f]*((?>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))(?![eE])")
_LIST_LINE = re.compile(r"(?P<name>.*?\.(?:jpe?g|png|bmp|ppm|webp))(?:\s+(?P<columns>.*))?", re.IGNORECASE)
_SPLIT_NAME = re.compile(r"test\d_(\w+)")


@dataclass(frozen=True)
class ParsedLane:
    """One line of a .lines.txt file as the official evaluator understands it."""

    points: NDArray[np.float32]
    """(K, 2), in the file's order; K may be 0 or 1."""
    line: int
    rest: bytes
    """What was left unread: an odd last number, or everything from the first text that is no number."""


@dataclass(frozen=True, slots=True)
class ListEntry:
    name: str
    """Image path relative to the data set's folder."""
    num_flagged_lanes: int | None
    """Lanes that the list claims, from the 0/1 columns of train_gt.txt and val_gt.txt."""
    category: str | None
    where: str
    """file:line."""


def parse_lane_file(data: bytes) -> list[ParsedLane]:
    """Every line is a lane, blank ones too; numbers are read in pairs up to the first that is none."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [_parse_lane(line, number) for number, line in enumerate(lines, start=1)]


def label_name(image_name: str) -> str:
    """Relative path of an image's label or prediction file.

    >>> label_name("driver_1/05.MP4/00000.jpg")
    'driver_1/05.MP4/00000.lines.txt'
    """
    return image_name.rpartition(".")[0] + ".lines.txt"


def read_label_file(path: Path, report: ReadReport) -> list[NDArray[np.float32]]:
    """Lanes of one image, (K, 2) from bottom to top, repaired by the table at the top of this file."""
    data = _read(path)
    if data.startswith(codecs.BOM_UTF8):
        report.note("byte order mark: skipped", f"{path}:1")
        data = data[len(codecs.BOM_UTF8) :]
    lanes = []
    for number, line in enumerate(data.splitlines(), start=1):
        lane = _repaired_lane(line, f"{path}:{number}", report)
        if lane is not None:
            lanes.append(lane)
    if not lanes:
        report.note("image without lanes: kept", f"{path}:1")
    return lanes


def read_image_list(path: Path, report: ReadReport) -> list[ListEntry]:
    """Entries of train_gt.txt, val_gt.txt, train.txt, test.txt or a test split (whose name is the category)."""
    try:
        text = _read(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: list file is not UTF-8; save it as UTF-8") from None
    if text.startswith("\ufeff"):
        report.note("list: byte order mark: skipped", f"{path}:1")
    category = split_category(path)
    entries = []
    lines = text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
        where = f"{path}:{number}"
        if not line.strip():
            report.note("list: blank line: skipped", where)
            continue
        match = _LIST_LINE.fullmatch(line.strip())
        if match is None:
            raise UserError(f"{where}: no image name in {line.strip()[:60]!r}; a list has an image path a line")
        if line.removesuffix("\r") != line.rstrip():
            report.note("list: trailing space: skipped", where)
        flags = [column for column in (match["columns"] or "").split() if column in ("0", "1")]
        entries.append(
            ListEntry(
                name=match["name"].lstrip("/"),
                num_flagged_lanes=flags.count("1") if flags else None,
                category=category,
                where=where,
            )
        )
    if not entries:
        raise UserError(f"{path}: list file names no image")
    return entries


def read_categories(folder: Path) -> dict[str, str]:
    """Image name → category, from the official test splits where the data set has them."""
    entries = (
        entry
        for path in sorted((folder / TEST_SPLIT_FOLDER).glob("test*.txt"))
        for entry in read_image_list(path, ReadReport())
    )
    return {entry.name: entry.category for entry in entries if entry.category}


def split_category(path: Path) -> str | None:
    """Category that a test split's file name tells.

    >>> split_category(Path("list/test_split/test8_night.txt"))
    'night'
    """
    match = _SPLIT_NAME.fullmatch(path.stem)
    return match[1] if match else None


class CulaneDataset:
    """Images and lanes that one or more list files name, in their order."""

    def __init__(self, folder: Path, list_files: Sequence[Path], images_required: bool = True) -> None:
        """Read all labels; raises UserError where a file is wrong or missing.

        With `images_required=False` an absent image is taken to be of the format's 590x1640.
        Categories come from list/test_split where it is there.
        """
        self.report = ReadReport()
        self._folder = folder
        entries = [entry for path in list_files for entry in read_image_list(path, self.report)]
        categories = read_categories(folder)
        names_of_categories = [entry.category or categories.get(entry.name, "") for entry in entries]
        self._category_names = tuple(sorted(set(names_of_categories)))
        numbers = {name: number for number, name in enumerate(self._category_names)}
        self._category_of_image = np.array([numbers[name] for name in names_of_categories], dtype=np.int16)
        self._names = pack_names([entry.name for entry in entries])
        self._image_names = pack_names(
            locate_images(folder, [(entry.name, entry.where) for entry in entries], images_required, self.report)
        )
        self.lanes = pack_lanes(self._read_labels(entries))
        self.report.images = len(entries)
        self.report.count_lanes(self.lanes.lanes_of_images)

    def __len__(self) -> int:
        return len(self.lanes)

    def truth(self, index: int) -> LaneTruth:
        """Labels of one image, in the image's own size (from its header)."""
        path = self.image_path(index)
        if path is None:
            name = unpack_name(self._names, index)
            return LaneTruth(name, CULANE_HEIGHT, CULANE_WIDTH, self.lanes.lanes(index), None, self._category(index))
        return self._truth(index, *image_size(path))

    def sample(self, index: int) -> LaneSample:
        path = self.image_path(index)
        if path is None:
            raise UserError(f"{self._folder / unpack_name(self._names, index)}: image is missing")
        image = read_image(path)
        return LaneSample(image, self._truth(index, image.shape[0], image.shape[1]))

    def _truth(self, index: int, height: int, width: int) -> LaneTruth:
        name, lanes = unpack_name(self._names, index), self.lanes.lanes(index)
        check_size(lanes, height, f"{self._folder / label_name(name)}: lanes")
        return LaneTruth(name, height, width, lanes, None, self._category(index))

    def _category(self, index: int) -> str | None:
        return self._category_names[self._category_of_image[index]] or None

    def image_path(self, index: int) -> Path | None:
        """None where the image is absent."""
        name = unpack_name(self._image_names, index)
        return self._folder / name if name else None

    def _read_labels(self, entries: list[ListEntry]) -> Iterator[list[NDArray[np.float32]]]:
        """Lanes of each entry; raises UserError at the end where label files are missing."""
        missing = []
        for entry in entries:
            path = self._folder / label_name(entry.name)
            try:
                lanes = read_label_file(path, self.report)
            except UserError:
                if path.is_file():
                    raise
                missing.append(label_name(entry.name))
                continue
            if entry.num_flagged_lanes is not None and entry.num_flagged_lanes != len(lanes):
                self.report.note("list: lane flags differ from the label file: label file counts", entry.where)
            yield lanes
        if missing:
            raise UserError(
                f"{self._folder}: {len(missing)} of {len(entries)} label files are missing, first: "
                f"{', '.join(missing[:3])}; an image without lanes has an empty label file"
            )


def _parse_lane(line: bytes, number: int) -> ParsedLane:
    values: list[float] = []
    position = 0
    tokens = line.split()
    try:
        if _PLAIN_NUMBERS.match(line):
            values = [float(token) for token in tokens]
            position = len(line) if len(values) % 2 == 0 else line.rindex(tokens[-1])
    except ValueError:
        values = []
    if not np.isfinite(values).all() or (tokens and not values):
        values, position = _stream_numbers(line)
    num_points = len(values) // 2
    points = np.array(values[: 2 * num_points], dtype=np.float64).reshape(num_points, 2)
    with np.errstate(over="ignore"):
        return ParsedLane(points.astype(np.float32), number, line[position:].strip())


def _stream_numbers(line: bytes) -> tuple[list[float], int]:
    """Numbers up to the first failure, and where the unread rest starts (an odd last number included)."""
    values: list[float] = []
    position = pair_end = 0
    while match := _STREAM_NUMBER.match(line, position):
        value = float(match[1])
        if not np.isfinite(value):
            break
        values.append(value)
        position = match.end()
        if len(values) % 2 == 0:
            pair_end = position
    return values, pair_end


def _repaired_lane(line: bytes, where: str, report: ReadReport) -> NDArray[np.float32] | None:
    tokens = line.split()
    if not tokens:
        report.note("blank line: dropped", where)
        return None
    try:
        numbers = list(map(float, tokens))
    except ValueError:
        wrong = next(token for token in tokens if not _is_number(token))
        text = wrong[:40].decode("utf-8", "replace")
        raise UserError(f'{where}: "{text}" is no number; a lane is "x y x y ..." in pixels') from None
    if len(numbers) % 2:
        report.note("odd count of numbers: last dropped", where)
    with np.errstate(over="ignore", invalid="ignore"):
        points = np.array(numbers[: len(numbers) // 2 * 2], dtype=np.float32).reshape(-1, 2)
        total = float(np.abs(points).sum())
    # As nearly every lane is. A sum with a number that is not finite, or in no image, is none or larger.
    if total <= LARGEST_NUMBER and len(points) > 1 and (points[1:, 1] < points[:-1, 1]).all():
        return points
    return repair_points(points, where, report, in_sequence=True)


def _is_number(token: bytes) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: CULane file cannot be read ({error.strerror})") from None
