"""TuSimple lanes: JSON lines {"raw_file", "lanes", "h_samples"} beside clips/.

A lane is a list of x, one for each row of `h_samples`; -2 means no point.
What the reader meets and does, each counted in ReadReport with file:line of the first:

| in the file                                           | rule                                                  |
|-------------------------------------------------------|-------------------------------------------------------|
| lane entirely -2 (537 in label_data_0313.json)        | dropped                                               |
| lane with one point                                   | dropped                                               |
| -2 between points of a lane                           | kept: its neighbours are joined straight              |
| negative x other than -2; NaN, infinity, beyond 1e7   | no point at this row                                  |
| x at or past the right border                         | kept                                                  |
| lanes not listed left to right                        | kept in the file's order                              |
| image without lanes                                   | kept                                                  |
| image listed twice                                    | kept twice                                            |
| h_samples not rising                                  | sorted together with the x                            |
| blank line; byte order mark                           | skipped                                               |
| image on disk with another suffix (.png for .jpg)     | used                                                  |
| no JSON, missing field, wrong length, not UTF-8       | UserError with file:line                              |
| rows below the image's last (labels of another size)  | UserError as soon as the image's size is known        |

`h_samples` are read from each line, never assumed: 48 rows in 0313, 56 in the others.
"""

from __future__ import annotations

import codecs
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.images import image_size, locate_images, read_image
from perception.data.lane_store import pack_lanes, pack_names, unpack_name
from perception.data.sample import LaneSample, LaneTruth, ReadReport
from perception.data.signs.fields import LARGEST_NUMBER
from perception.errors import UserError

TUSIMPLE_HEIGHT, TUSIMPLE_WIDTH = 720, 1280
NO_POINT = -2.0


@dataclass(frozen=True)
class TusimpleRecord:
    """One line of a label or prediction file, as it stands there."""

    raw_file: str
    rows: NDArray[np.float64]
    """(L, R) x of each lane at each row; -2 where there is no point."""
    h_samples: tuple[int, ...] | None
    """(R,) rows in pixels; None where a prediction file leaves them out."""
    run_time_milliseconds: float | None
    where: str
    """file:line."""


def read_tusimple_file(path: Path, report: ReadReport, needs_rows: bool = True) -> list[TusimpleRecord]:
    """Read a label file, or with `needs_rows=False` a prediction file; nothing but NaN is repaired.

    Raises UserError naming file:line for whatever is no TuSimple line.
    """
    return list(_records(path, report, needs_rows))


def _records(path: Path, report: ReadReport, needs_rows: bool = True) -> Iterator[TusimpleRecord]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: TuSimple file cannot be read ({error.strerror})") from None
    if data.startswith(codecs.BOM_UTF8):
        report.note("byte order mark: skipped", f"{path}:1")
        data = data[len(codecs.BOM_UTF8) :]
    has_records = False
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            has_records = True
            yield _parse_line(line, f"{path}:{number}", report, needs_rows)
        else:
            report.note("blank line: skipped", f"{path}:{number}")
    if not has_records:
        raise UserError(f"{path}: no line of labels in it; a TuSimple file has a JSON object a line")


class TusimpleDataset:
    """Images and lanes of one or more TuSimple label files, in their order."""

    def __init__(self, folder: Path, label_files: Sequence[Path], images_required: bool = True) -> None:
        """Read all labels; raises UserError where a label is wrong or, if required, an image is missing.

        With `images_required=False` an absent image is taken to be of the format's 720x1280.
        """
        self.report = ReadReport()
        self._folder = folder
        listed: list[tuple[str, str]] = []
        grid_numbers: dict[tuple[int, ...], int] = {}
        grid_of_image = array("i")

        def read_lanes() -> Iterator[list[NDArray[np.float32]]]:
            for record in (record for path in label_files for record in _records(path, self.report)):
                listed.append((record.raw_file, record.where))
                grid_of_image.append(grid_numbers.setdefault(_sorted_rows(record), len(grid_numbers)))
                yield _repaired_lanes(record, self.report)

        self.lanes = pack_lanes(read_lanes())
        self._names = pack_names([name for name, _ in listed])
        self._grids, self._grid_of_image = tuple(grid_numbers), np.asarray(grid_of_image)
        self._image_names = pack_names(locate_images(folder, listed, images_required, self.report))
        self.report.images = len(listed)
        self.report.count_lanes(self.lanes.lanes_of_images)

    def __len__(self) -> int:
        return len(self.lanes)

    def truth(self, index: int) -> LaneTruth:
        """Labels of one image, in the image's own size (from its header)."""
        path = self.image_path(index)
        height, width = (TUSIMPLE_HEIGHT, TUSIMPLE_WIDTH) if path is None else image_size(path)
        return self._truth(index, height, width)

    def sample(self, index: int) -> LaneSample:
        path = self.image_path(index)
        if path is None:
            raise UserError(f"{self._folder / unpack_name(self._names, index)}: image is missing")
        image = read_image(path)
        return LaneSample(image, self._truth(index, image.shape[0], image.shape[1]))

    def _truth(self, index: int, height: int, width: int) -> LaneTruth:
        name, h_samples = unpack_name(self._names, index), self._grids[self._grid_of_image[index]]
        if h_samples[-1] > height:
            raise UserError(
                f"{self._folder / name}: image is {height} pixels high, its h_samples reach {h_samples[-1]}; "
                "use images and labels of one size"
            )
        return LaneTruth(name, height, width, self.lanes.lanes(index), h_samples)

    def image_path(self, index: int) -> Path | None:
        """None where the image is absent."""
        name = unpack_name(self._image_names, index)
        return self._folder / name if name else None


def _parse_line(line: bytes, where: str, report: ReadReport, needs_rows: bool) -> TusimpleRecord:
    try:
        raw = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); a TuSimple file has a JSON object a line"
        ) from None
    except (RecursionError, ValueError):
        raise UserError(f"{where}: no usable JSON (nested too deep, or a number of thousands of digits)") from None
    if not isinstance(raw, dict):
        raise UserError(f"{where}: a JSON object with raw_file, lanes and h_samples is wanted, not {_kind(raw)}")
    raw_file = _field(raw, "raw_file", where)
    if not isinstance(raw_file, str) or not raw_file.strip("/ "):
        raise UserError(f"{where}: field raw_file must be an image path, got {raw_file!r}")
    h_samples = None
    if needs_rows or raw.get("h_samples") is not None:
        h_samples = _row_grid(_field(raw, "h_samples", where), where)
    run_time = raw.get("run_time")
    if run_time is not None and not _is_finite_number(run_time):
        raise UserError(f"{where}: field run_time must be milliseconds, got {run_time!r}")
    rows = _lane_rows(_field(raw, "lanes", where), h_samples, where)
    unusable = ~np.isfinite(rows)
    if unusable.any():
        report.note("x that is no finite number: no point", where, int(unusable.sum()))
        rows = np.where(unusable, NO_POINT, rows)
    return TusimpleRecord(raw_file.lstrip("/"), rows, h_samples, None if run_time is None else float(run_time), where)


def _row_grid(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: field h_samples must be a list of rows in pixels, got {_kind(value)}")
    for row in value:
        if not _is_finite_number(row) or row != int(row) or row < 0:
            raise UserError(f"{where}: field h_samples must hold whole numbers from 0, got {row!r}")
    if len(set(value)) != len(value):
        raise UserError(f"{where}: field h_samples names a row twice")
    return tuple(int(row) for row in value)


def _lane_rows(value: Any, h_samples: tuple[int, ...] | None, where: str) -> NDArray[np.float64]:
    if not isinstance(value, list) or not all(isinstance(lane, list) for lane in value):
        raise UserError(f"{where}: field lanes must be a list of lists of x")
    num_rows = len(h_samples) if h_samples is not None else (len(value[0]) if value else 0)
    for number, lane in enumerate(value):
        if len(lane) != num_rows:
            wanted = "h_samples has" if h_samples is not None else "lane 0 has"
            raise UserError(f"{where}: field lanes[{number}] has {len(lane)} values, {wanted} {num_rows}")
        for x in lane:
            if isinstance(x, bool) or not isinstance(x, (int, float)) or (isinstance(x, int) and abs(x) > 2**53):
                raise UserError(f"{where}: field lanes[{number}] must hold numbers in pixels, got {x!r:.40}")
    return np.array(value, dtype=np.float64).reshape(len(value), num_rows)


def _repaired_lanes(record: TusimpleRecord, report: ReadReport) -> list[NDArray[np.float32]]:
    """Lanes of one label line as (K, 2) points from bottom to top, by the table at the top of this file."""
    assert record.h_samples is not None
    heights = np.array(record.h_samples)
    if (np.diff(heights) < 0).any():
        report.note("h_samples not rising: sorted", record.where)
    bottom_to_top = np.argsort(heights)[::-1]
    lanes = []
    for x in record.rows[:, bottom_to_top]:
        valid = (x >= 0) & (x <= LARGEST_NUMBER)
        if (x > LARGEST_NUMBER).any():
            report.note("x beyond any image: no point", record.where, int((x > LARGEST_NUMBER).sum()))
        odd_negatives = int(((x < 0) & (x != NO_POINT)).sum())
        if odd_negatives:
            report.note("negative x other than -2: no point", record.where, odd_negatives)
        rows = np.flatnonzero(valid)
        if len(rows) == 0:
            report.note("lane without a point: dropped", record.where)
            continue
        if len(rows) == 1:
            report.note("lane with one point: dropped", record.where)
            continue
        if rows[-1] - rows[0] + 1 != len(rows):
            report.note("gap inside a lane: kept, joined straight", record.where)
        if (x[valid] >= TUSIMPLE_WIDTH).any():
            report.note("lane past the right border: kept", record.where)
        lanes.append(np.stack([x[valid], heights[bottom_to_top][valid]], axis=1).astype(np.float32))
    if not lanes:
        report.note("image without lanes: kept", record.where)
    if _right_of_next(record.rows):
        report.note("lanes not listed left to right: kept in their order", record.where)
    return lanes


def _right_of_next(rows: NDArray[np.float64]) -> bool:
    """Does a lane of (L, R) x lie right of the one listed after it, at a row that both have?"""
    rows = rows[(rows >= 0).any(axis=1)]
    left, right = rows[:-1], rows[1:]
    return bool(((left > right) & (left >= 0) & (right >= 0)).any())


def _sorted_rows(record: TusimpleRecord) -> tuple[int, ...]:
    assert record.h_samples is not None
    return tuple(sorted(record.h_samples))


def _field(raw: dict[str, Any], name: str, where: str) -> Any:
    if name not in raw:
        raise UserError(f"{where}: field {name} is missing; found {', '.join(sorted(raw)) or 'none'}")
    return raw[name]


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**53 if isinstance(value, int) else math.isfinite(value)


def _kind(value: Any) -> str:
    return {list: "a list", dict: "an object", str: "a text", bool: "a truth value"}.get(type(value), repr(value))
