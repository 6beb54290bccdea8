"""Evaluate prediction files of LLAMAS, CurveLanes and OpenLane (2D) in the layouts of their own tools.

|            | --labels L                                    | --predictions P, an image                               |
|------------|-----------------------------------------------|---------------------------------------------------------|
| llamas     | labels/valid, or another folder above DRIVE/  | DRIVE/ID.lines.txt, a lane a line: x y x y ...          |
|            |                                               | (or ID_color_rect.lines.txt)                            |
| curvelanes | valid: labels/NAME.lines.json and images/     | NAME.lines.json: {"Lines": [[{"x": .., "y": ..}, ...]]} |
| openlane   | lane3d_*/validation, or another above SEGMENT | SEGMENT/TIME.json: {"lane_lines": [{"uv": [[u], [v]]}]} |

Where an image has no such file, one that `predict` wrote for the folder of images is taken: NAME.lines.txt.
Points are taken as they stand there, unlike those of data to train on. A missing prediction is an image without lanes,
counted in a warning; each tool does something else with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data import llamas
from perception.data.culane import parse_lane_file
from perception.data.images import find_image, image_size
from perception.data.sample import LanePrediction, LaneTruth, ReadReport
from perception.data.signs.fields import a_list, a_number, an_object, member, read_json
from perception.data.signs.listing import image_name, read_keys
from perception.errors import UserError
from perception.metrics.culane import CulaneMetric
from perception.metrics.lane_benchmarks import BENCHMARKS
from perception.metrics.lane_files import LaneEvaluation, Warnings

_LINES_SUFFIX = ".lines.txt"

Lanes = tuple[NDArray[np.float64], ...]
Reader = Callable[[Path, ReadReport], Lanes]


@dataclass(frozen=True)
class _Layout:
    label_suffix: str
    prediction_suffixes: tuple[str, ...]
    """The tool's own first."""
    read_label: Reader
    """Of predictions too, where those are not text."""
    counts_single_points: bool
    drops_repeats: bool
    """Of a point twice in a row; else the lane matches nothing."""


def evaluate_benchmark_folders(
    benchmark: str, predictions: Path, labels: Path, list_path: Path | None, size: tuple[int, int] | None
) -> LaneEvaluation:
    """Compare files of the layouts above by the rules of `BENCHMARKS`.

    `list_path` names an image a line (CurveLanes and OpenLane); None takes every label. `size` is the images'
    (height, width); None: the benchmark's, and for CurveLanes each image's own. Raises UserError where a folder, list
    or label is missing or wrong, or where of several images none is predicted.
    """
    for folder, option in ((predictions, "--predictions"), (labels, "--labels")):
        if not folder.is_dir():
            raise UserError(f"{option} {folder}: folder does not exist")
    if benchmark == "curvelanes" and (labels / "labels").is_dir():
        labels = labels / "labels"
    layout, report = _LAYOUTS[benchmark], ReadReport()
    if list_path is None:
        keys = _labelled(labels, layout.label_suffix)
    else:
        keys = _listed(benchmark, labels, list_path, report)
    found = {key: _first_file([predictions / (key + suffix) for suffix in layout.prediction_suffixes]) for key in keys}
    if len(keys) > 1 and not any(found.values()):
        first = predictions / (keys[0] + layout.prediction_suffixes[0])
        raise UserError(f"--predictions {predictions}: all {len(keys)} prediction files are missing, first: {first}")
    rules, warnings = BENCHMARKS[benchmark], Warnings()
    metric = CulaneMetric(rules=rules)
    for key in keys:
        label, path = labels / (key + layout.label_suffix), found[key]
        truths = layout.read_label(label, report)
        if path is None:
            warnings.note("prediction file is missing: counted as no lanes", key)
        predicted = () if path is None else _read_prediction(layout, path, report)
        for what, file, lanes in (("label", label, truths), ("prediction", path, predicted)):
            for odd in _oddities(layout, lanes):
                warnings.note(f"{what}: {odd}", str(file))
        if size is not None:
            height, width = size
        elif benchmark == "curvelanes":
            height, width = _curvelanes_size(labels, key)
        else:
            height, width = rules.canvas_height, rules.canvas_width
        metric.update([LanePrediction(predicted, (1.0,) * len(predicted))], [LaneTruth(key, height, width, truths)])
    for anomaly, where in report.examples.items():
        warnings.note(f"{anomaly} ({report.anomalies[anomaly]} in all)", where)
    return LaneEvaluation(metric.compute(), len(keys), tuple(warnings.lines()))


def _labelled(labels: Path, suffix: str) -> list[str]:
    """The path of every label file relative to the folder of labels, without its ending."""
    keys = sorted(path.relative_to(labels).as_posix().removesuffix(suffix) for path in labels.rglob(f"*{suffix}"))
    if not keys:
        raise UserError(f"--labels {labels}: no *{suffix} in this folder or below it")
    return keys


def _listed(benchmark: str, labels: Path, list_path: Path, report: ReadReport) -> list[str]:
    """The same of the images that a list names; CurveLanes's lists have images/ before a name."""
    if benchmark == "llamas":
        raise UserError("--list goes with --metric culane, curvelanes and openlane; LLAMAS has none")
    keys = []
    for line, where in read_keys(list_path, "list of images", report).items():
        name = PurePosixPath(image_name(line, where, "image"))
        keys.append(name.stem if benchmark == "curvelanes" else name.with_suffix("").as_posix())
    files = [key + _LAYOUTS[benchmark].label_suffix for key in keys]
    missing = [file for file in files if not (labels / file).is_file()]
    if missing:
        raise UserError(
            f"--labels {labels}: {len(missing)} of {len(keys)} listed label files are missing, first: {missing[0]}"
        )
    return keys


def _first_file(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _curvelanes_size(labels: Path, key: str) -> tuple[int, int]:
    path = labels.parent / "images" / f"{key}.jpg"
    image = find_image(path)
    if image is None:
        raise UserError(f"{path}: image is missing, and its size is needed: give --image-size if all are of one")
    return image_size(image)


def _read_prediction(layout: _Layout, path: Path, report: ReadReport) -> Lanes:
    return (_read_lines if path.name.endswith(_LINES_SUFFIX) else layout.read_label)(path, report)


def _read_llamas_label(path: Path, report: ReadReport) -> Lanes:
    return tuple(lane.astype(np.float64) for lane in llamas.read_label(path, report))


def _read_lines(path: Path, report: ReadReport) -> Lanes:
    try:
        lanes = parse_lane_file(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: prediction file cannot be read ({error.strerror})") from None
    for lane in lanes:
        if lane.rest:
            report.note(
                "prediction: text that is no number, or an odd count of numbers: lane ends before it", str(path)
            )
    return tuple(lane.points.astype(np.float64) for lane in lanes)


def _read_curvelanes(path: Path, report: ReadReport) -> Lanes:
    raw = an_object(read_json(path, "CurveLanes file", report), str(path))
    lanes = []
    for number, line in enumerate(a_list(member(raw, "Lines", str(path)), str(path), "Lines")):
        where = f"{path}: Lines[{number}]"
        # Some tools write a score beside a lane's points.
        line = member(line, "points", where) if isinstance(line, dict) else line
        points = [_point(point, f"{where}[{i}]") for i, point in enumerate(a_list(line, where, "Lines"))]
        lanes.append(np.array(points, dtype=np.float64).reshape(-1, 2))
    return tuple(lanes)


def _point(raw: Any, where: str) -> tuple[float, float]:
    return a_number(member(raw, "x", where), where, "x"), a_number(member(raw, "y", where), where, "y")


def _read_openlane(path: Path, report: ReadReport) -> Lanes:
    raw = an_object(
        read_json(path, "OpenLane file", report, ("xyz", "visibility", "extrinsic", "intrinsic")), str(path)
    )
    lanes = []
    for number, line in enumerate(a_list(member(raw, "lane_lines", str(path)), str(path), "lane_lines")):
        where = f"{path}: lane_lines[{number}]"
        axes = a_list(member(line, "uv", where), where, "uv")
        if len(axes) != 2 or len(a_list(axes[0], where, "uv[0]")) != len(a_list(axes[1], where, "uv[1]")):
            raise UserError(f"{where}: field uv must have two lists of equal length, u and v")
        points = [[a_number(value, where, "uv") for value in axis] for axis in axes]
        lanes.append(np.array(points, dtype=np.float64).T.reshape(-1, 2))
    return tuple(lanes)


def _oddities(layout: _Layout, lanes: Lanes) -> list[str]:
    """What of the lanes the benchmark's tool stops at or passes over in silence, each as often as it is met."""
    odd = []
    for lane in lanes:
        if not len(lane):
            odd.append("lane without a point: not counted")
        elif len(lane) == 1:
            odd.append(f"lane of one point: {'matches nothing' if layout.counts_single_points else 'not counted'}")
        elif (np.diff(lane, axis=0) == 0).all(axis=1).any():
            odd.append(f"point twice in a row: {'one dropped' if layout.drops_repeats else 'the lane matches nothing'}")
    return odd


_LAYOUTS = {
    "llamas": _Layout(
        ".json",
        (_LINES_SUFFIX, f"_color_rect{_LINES_SUFFIX}"),
        _read_llamas_label,
        counts_single_points=False,
        drops_repeats=True,
    ),
    "curvelanes": _Layout(
        ".lines.json",
        (".lines.json", _LINES_SUFFIX),
        _read_curvelanes,
        counts_single_points=True,
        drops_repeats=True,
    ),
    "openlane": _Layout(
        ".json", (".json", _LINES_SUFFIX), _read_openlane, counts_single_points=False, drops_repeats=False
    ),
}
