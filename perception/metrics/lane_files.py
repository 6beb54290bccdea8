"""Evaluate prediction files against label files, as the official tools do it.

Files count exactly as there. What an official tool passes over in silence (a missing
file, a blank line, text in a lane) is counted and named in a warning, and what can only
be a wrong path is an error: none of several files found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perception.data.culane import (
    TEST_SPLIT_FOLDER,
    ListEntry,
    label_name,
    parse_lane_file,
    read_categories,
    split_category,
)
from perception.data.images import IMAGE_SUFFIXES
from perception.data.lane_folder import BELOW_IMAGE_TOLERANCE
from perception.data.sample import LanePrediction, LaneTruth, ReadReport
from perception.data.tusimple import TusimpleRecord, read_tusimple_file
from perception.errors import UserError
from perception.metrics.culane import CulaneMetric
from perception.metrics.tusimple import TusimpleMetric

_NUM_NAMED = 10


@dataclass
class Warnings:
    """What was met that the user should know: each kind with its count and first places."""

    places: dict[str, list[str]] = field(default_factory=dict)

    def note(self, what: str, where: str) -> None:
        self.places.setdefault(what, []).append(where)

    def lines(self) -> list[str]:
        out = []
        for what, places in sorted(self.places.items()):
            more = f" and {len(places) - _NUM_NAMED} more" if len(places) > _NUM_NAMED else ""
            out.append(f"{len(places)} x {what}: {', '.join(places[:_NUM_NAMED])}{more}")
        return out


@dataclass(frozen=True)
class LaneEvaluation:
    metrics: dict[str, float]
    """By the names of result.json; per category as name/category."""
    num_images: int
    warnings: tuple[str, ...]


def evaluate_culane_folders(
    predictions: Path, labels: Path, list_path: Path | None, image_height: int, image_width: int
) -> LaneEvaluation:
    """Compare *.lines.txt of one relative layout under two folders.

    `list_path` is a list file or a folder of test splits (test8_night.txt → category night); None takes
    every label file. Lanes are in pixels of image_height x image_width. A missing file is an image
    without lanes. Raises UserError where a folder or list is missing, or where of several
    listed images none has a label, or none a prediction.
    """
    for folder, option in ((predictions, "--predictions"), (labels, "--labels")):
        if not folder.is_dir():
            raise UserError(f"{option} {folder}: folder does not exist; for culane give the folder above driver_*")
    warnings = Warnings()
    entries = _listed_images(labels, list_path, warnings)
    _require_some(entries, predictions, "prediction", "--predictions")
    _require_some(entries, labels, "label", "--labels")
    metric = CulaneMetric()
    for entry in entries:
        size = (image_height, image_width)
        truth_lanes = _read_lanes(labels / label_name(entry.name), "label", size, warnings)
        predicted_lanes = _read_lanes(predictions / label_name(entry.name), "prediction", size, warnings)
        metric.update(
            [LanePrediction(predicted_lanes, (1.0,) * len(predicted_lanes))],
            [LaneTruth(entry.name, image_height, image_width, truth_lanes, None, entry.category)],
        )
    return LaneEvaluation(metric.compute(), len(entries), tuple(warnings.lines()))


def evaluate_tusimple_files(predictions: Path, labels: Path, strict: bool) -> LaneEvaluation:
    """Compare two files of JSON lines, {"raw_file", "lanes", "run_time"} against labels.

    An unpredicted image counts as one without predicted lanes (the official tool stops there). Raises
    UserError where a file is missing or wrong, rows differ, or no labelled image is predicted.
    """
    for path, option in ((predictions, "--predictions"), (labels, "--labels")):
        if not path.is_file():
            raise UserError(f"{option} {path}: file does not exist; for tusimple give a file of JSON lines")
    warnings = Warnings()
    labelled = _by_image(labels, warnings, needs_rows=True)
    predicted = _by_image(predictions, warnings, needs_rows=False)
    if not labelled.keys() & predicted.keys():
        raise UserError(
            f"{predictions}: predicts none of the {len(labelled)} images of {labels}, first: {next(iter(predicted))} "
            f"against {next(iter(labelled))}; raw_file must be the same in both"
        )
    for name in predicted.keys() - labelled.keys():
        warnings.note("prediction of an image that is not labelled: ignored", predicted[name].where)
    metric = TusimpleMetric(strict=strict)
    for name, record in labelled.items():
        assert record.h_samples is not None
        rows = np.array(record.h_samples, dtype=np.float64)
        prediction = predicted.get(name)
        if prediction is None:
            warnings.note("image without a prediction: counted as one without predicted lanes", name)
            metric.update_rows(np.zeros((0, len(rows))), record.rows, rows)
            continue
        if prediction.run_time_milliseconds is None:
            warnings.note("prediction without run_time: taken as 0", prediction.where)
        run_time = prediction.run_time_milliseconds or 0.0
        metric.update_rows(_predicted_rows(prediction, record), record.rows, rows, run_time)
    return LaneEvaluation(metric.compute(), len(labelled), tuple(warnings.lines()))


def _listed_images(labels: Path, list_path: Path | None, warnings: Warnings) -> list[ListEntry]:
    if list_path is None:
        files = sorted(labels.rglob("*.lines.txt"))
        if not files:
            raise UserError(f"--labels {labels}: no *.lines.txt below this folder; give the folder above driver_*")
        names = [file.relative_to(labels).as_posix().removesuffix(".lines.txt") + ".jpg" for file in files]
        categories = read_categories(labels)
        return [ListEntry(name, None, categories.get(name), name) for name in names]
    if list_path.is_dir():
        lists = sorted(list_path.glob("*.txt"))
        if not lists:
            raise UserError(f"--list {list_path}: no *.txt list in this folder")
    elif list_path.is_file():
        lists = [list_path]
    else:
        hint = f"; try {labels / TEST_SPLIT_FOLDER}" if (labels / TEST_SPLIT_FOLDER).is_dir() else ""
        raise UserError(f"--list {list_path}: list file does not exist{hint}")
    categories = read_categories(labels)
    entries, num_with_columns = [], 0
    for path in lists:
        for entry, has_columns in _official_list(path, warnings):
            category = split_category(path) or categories.get(entry.name)
            entries.append(ListEntry(entry.name, None, category, entry.where))
            num_with_columns += has_columns
    if not entries:
        raise UserError(f"--list {list_path}: names no image")
    if num_with_columns == len(entries) > 1:
        raise UserError(
            f"--list {list_path}: all {num_with_columns} lines have mask or flag columns, for which the official tool "
            "counts nothing; keep only the first column"
        )
    return entries


def _official_list(path: Path, warnings: Warnings) -> Iterator[tuple[ListEntry, bool]]:
    """Every line is a name to its last dot, whatever is in it, as in the official tool; and: has it columns?"""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"--list {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--list {path}: not UTF-8; save it as UTF-8") from None
    if text.startswith("\ufeff"):
        warnings.note("list: byte order mark: skipped", f"{path}:1")
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        where = f"{path}:{number}"
        if line.endswith("\r"):
            warnings.note("list: CRLF line end: read as a plain one", where)
        name = line.removesuffix("\r")
        if not name.strip():
            if number <= text.count("\n"):
                warnings.note("list: blank line: skipped", where)
            continue
        if name != name.rstrip():
            warnings.note("list: trailing space: skipped", where)
        columns = name.split()
        has_columns = len(columns) > 1 and columns[0].lower().endswith(IMAGE_SUFFIXES)
        if has_columns:
            warnings.note("list: line with mask or flag columns: counts nothing; keep only the first column", where)
        yield ListEntry(name.strip().lstrip("/"), None, None, where), has_columns


def _require_some(entries: list[ListEntry], folder: Path, kind: str, option: str) -> None:
    """An error if none of several files is there: a wrong path. A list of one image may miss its one file."""
    if len(entries) == 1 or any((folder / label_name(entry.name)).is_file() for entry in entries):
        return
    first = ", ".join(str(folder / label_name(entry.name)) for entry in entries[:3])
    raise UserError(f"{option} {folder}: all {len(entries)} listed {kind} files are missing, first: {first}")


def _read_lanes(path: Path, kind: str, size: tuple[int, int], warnings: Warnings) -> tuple[NDArray[np.float64], ...]:
    """Lanes exactly as the official tool reads them; none where the file is missing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        warnings.note(f"{kind} file is missing: counted as no lanes", str(path))
        return ()
    except OSError as error:
        raise UserError(f"{path}: {kind} file cannot be read ({error.strerror})") from None
    if b"\r" in data:
        warnings.note(f"{kind} file has CRLF line ends: read as plain ones", str(path))
    if b"e" in data or b"E" in data:
        warnings.note(f"{kind} file has scientific notation or text", str(path))
    lanes: list[NDArray[np.float64]] = []
    for lane in parse_lane_file(data):
        points = lane.points.astype(np.float64)
        for what in _oddities(points, lane.rest, size):
            warnings.note(f"{kind} {what}", f"{path}:{lane.line}")
        if len(points) and any(np.array_equal(points, other) for other in lanes):
            warnings.note(f"{kind} lane repeats one above it: at most one of them matches", f"{path}:{lane.line}")
        lanes.append(points)
    return tuple(lanes)


def _oddities(points: NDArray[np.float64], rest: bytes, size: tuple[int, int]) -> Iterator[str]:
    """Warnings about one lane of a file whose images are (height, width)."""
    height, width = size
    if rest and _is_number(rest):
        yield "line with an odd count of numbers: last ignored"
    elif rest:
        yield "line with text that is no number: the lane ends before it"
    if len(points) < 2:
        yield "line with fewer than two points: a lane that matches nothing"
        return
    if len(points) == 2:
        yield "lane of two points: drawn straight"
    elif (np.diff(points, axis=0) == 0).all(axis=1).any():
        yield "lane with consecutive duplicate points: its curve breaks, as in the official tool"
    if points[-1, 1] > points[0, 1]:
        yield "lane from top to bottom: counts the same"
    x, y = points.T
    if x.max() < 0 or x.min() >= width or y.max() < 0 or y.min() >= height:
        yield "lane outside the image: matches nothing"
    elif y.max() > BELOW_IMAGE_TOLERANCE * height:
        yield f"lane reaches below an image of {width}x{height}: give --image-size if that is not the size"


def _by_image(path: Path, warnings: Warnings, needs_rows: bool) -> dict[str, TusimpleRecord]:
    report = ReadReport()
    records: dict[str, TusimpleRecord] = {}
    for record in read_tusimple_file(path, report, needs_rows):
        if record.raw_file in records:
            first = records[record.raw_file].where
            if not needs_rows:
                raise UserError(f"{record.where}: field raw_file is predicted a second time, first at {first}")
            warnings.note("image labelled twice: the last counts", record.where)
        records[record.raw_file] = record
    for anomaly, where in report.examples.items():
        warnings.note(f"{anomaly} ({report.anomalies[anomaly]} in all)", where)
    return records


def _predicted_rows(prediction: TusimpleRecord, label: TusimpleRecord) -> NDArray[np.float64]:
    assert label.h_samples is not None
    if prediction.h_samples is not None and prediction.h_samples != label.h_samples:
        raise UserError(f"{prediction.where}: field h_samples differs from the label's at {label.where}")
    num_rows = len(label.h_samples)
    if len(prediction.rows) and prediction.rows.shape[1] != num_rows:
        raise UserError(
            f"{prediction.where}: field lanes has {prediction.rows.shape[1]} values a lane, the label at "
            f"{label.where} has {num_rows} h_samples"
        )
    return prediction.rows.reshape(len(prediction.rows), num_rows)


def _is_number(text: bytes) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
