"""`evaluate`: score prediction files against label files with the official metrics.

python -m pipelines evaluate lane --predictions P --labels L --metric culane|tusimple|llamas|curvelanes|openlane
    [--list FILE] [--json FILE]
python -m pipelines evaluate sign --predictions P --labels L --format coco|gtsdb|… [--list LIST] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception.errors import UserError, nearest
from perception.run_folder import check_folder_of

if TYPE_CHECKING:
    from perception.metrics.lane_files import LaneEvaluation
    from perception.metrics.sign_files import SignEvaluation

TASKS = ("lane", "sign")
METRICS = ("culane", "tusimple", "llamas", "curvelanes", "openlane")
_GROUPINGS = {
    "size": "root of area, px",
    "side": "longer side, px",
    "superclass": "super-class",
    "class": "class",
}
_COLUMNS = ("truths", "ap", "ap50", "ap50_class_agnostic", "gtsdb_auc", "tt100k_accuracy", "tt100k_recall")
_CULANE_SIZE = (590, 1640)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=TASKS, help="what the files hold")
    parser.add_argument(
        "--predictions",
        type=Path,
        required=True,
        help="culane, llamas: folder of *.lines.txt; curvelanes: of *.lines.json; openlane: of *.json; both also of "
        "*.lines.txt; tusimple: file of JSON lines; sign: the folder that predict wrote, or a JSON file: a list of "
        "COCO results, or an object with images, categories and annotations that have scores",
    )
    parser.add_argument(
        "--labels",
        type=Path,
        required=True,
        help="culane, tusimple: the same layout as the predictions; llamas: labels/valid; curvelanes: valid; openlane: "
        "lane3d_1000/validation; sign: COCO label file, or folder of the data set",
    )
    parser.add_argument("--metric", choices=METRICS, help="lane: which")
    parser.add_argument("--format", help="sign: coco, gtsdb or another format of sign labels, or auto")
    parser.add_argument(
        "--list",
        type=Path,
        metavar="LIST",
        help="culane: list of images, or the folder of the test splits; curvelanes, openlane: list of images; without "
        "it all label files. sign: list of the format, or train, validation, test (without it: test); predictions of "
        "other images are then left out",
    )
    parser.add_argument(
        "--class-map", metavar="MAP", help="sign: TOML file or built-in map that merges or drops classes"
    )
    parser.add_argument("--corners", help="sign: corner convention of the labels, where it is not the format's own")
    parser.add_argument(
        "--score-threshold",
        type=float,
        metavar="S",
        help="sign: give TT100K's precision and recall from this score on too",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--strict", action="store_true", help="tusimple: drop lanes without a single point")
    parser.add_argument(
        "--image-size",
        metavar="WIDTHxHEIGHT",
        help="lane: size of the images, from which lanes are scaled to the metric's own, which is the default: culane "
        "1640x590, llamas 1276x717, openlane 1920x1280; curvelanes: each image's own",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the figures, warnings to stderr; UserError where nothing sound can be said."""
    json_path: Path | None = arguments.json
    check_folder_of("--json", json_path)
    _check_options(arguments)
    evaluation: LaneEvaluation | SignEvaluation
    if arguments.task == "sign":
        evaluation = evaluate_sign_files(
            arguments.predictions,
            arguments.labels,
            arguments.format,
            list_name="" if arguments.list is None else str(arguments.list),
            class_map=arguments.class_map or "",
            corners=arguments.corners or "",
            score_threshold=arguments.score_threshold,
        )
        lines = sign_table(evaluation)
    else:
        evaluation = evaluate_lane_files(
            arguments.predictions,
            arguments.labels,
            arguments.metric,
            list_path=arguments.list,
            strict=arguments.strict,
            image_size=None if arguments.image_size is None else _parse_size(arguments.image_size),
        )
        lines = [f"{evaluation.num_images} images", *_figure_lines(evaluation.metrics)]
    for warning in evaluation.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(*lines, sep="\n")
    if json_path is not None:
        _write_atomically(json_path, json.dumps(evaluation.metrics, indent=2) + "\n")
    return 0


def evaluate_sign_files(
    predictions: Path,
    labels: Path,
    format: str,
    list_name: str = "",
    class_map: str = "",
    corners: str = "",
    score_threshold: float | None = None,
) -> SignEvaluation:
    """Score one JSON file of predictions; see perception.metrics.sign_files for layouts and what counts how.

    Raises UserError for a wrong path, file, image or class.
    """
    # NumPy and the evaluator are imported here so that --help answers at once.
    from perception.metrics import sign_files

    return sign_files.evaluate_sign_files(predictions, labels, format, list_name, class_map, corners, score_threshold)


def sign_table(evaluation: SignEvaluation) -> list[str]:
    """Headline figures, then tables of sizes, super-classes and classes that have truths; printable lines."""
    metrics = evaluation.metrics
    headline = {name: value for name, value in metrics.items() if "/" not in name}
    lines = _figure_lines(headline)
    for grouping, title in _GROUPINGS.items():
        columns = [f"{name}_{grouping}" for name in _COLUMNS]
        columns = [column for column in columns if any(name.startswith(f"{column}/") for name in metrics)]
        members = [name.partition("/")[2] for name in metrics if name.startswith(f"truths_{grouping}/")]
        present = [member for member in members if metrics[f"truths_{grouping}/{member}"]]
        if not present:
            continue
        rows = [[title, *(column.removesuffix(f"_{grouping}") for column in columns)]]
        rows += [[member, *(_shown(metrics.get(f"{column}/{member}")) for column in columns)] for member in present]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines.append("")
        for first, *others in rows:
            cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
            lines.append("  ".join((f"{first:{widths[0]}}", *cells)))
        absent = [member for member in members if member not in present]
        if absent:
            lines.append(f"without truths, in no mean: {', '.join(absent)}")
    return lines


def evaluate_lane_files(
    predictions: Path,
    labels: Path,
    metric: str,
    list_path: Path | None = None,
    strict: bool = False,
    image_size: tuple[int, int] | None = None,
) -> LaneEvaluation:
    """Score files with one of `METRICS`: two folders, or for "tusimple" two files of JSON lines.

    `list_path` and the image size, (height, width), are not for tusimple, `strict` is for it alone; see
    perception.metrics.lane_files and lane_benchmark_files for what counts how. Raises UserError for a wrong path or
    file.
    """
    # NumPy, SciPy and OpenCV are imported here so that --help answers at once.
    from perception.metrics.lane_benchmark_files import evaluate_benchmark_folders
    from perception.metrics.lane_files import evaluate_culane_folders, evaluate_tusimple_files

    if metric not in METRICS:
        raise UserError(f'--metric "{metric}" is unknown{nearest(metric, METRICS)}')
    if metric == "tusimple":
        for option, value in (("--list", list_path), ("--image-size", image_size)):
            if value is not None:
                raise UserError(
                    f"{option} goes with --metric culane; a tusimple label file names its own images and rows"
                )
        return evaluate_tusimple_files(predictions, labels, strict)
    if strict:
        raise UserError(f"--strict goes with --metric tusimple; {metric} has no such mode")
    if metric == "culane":
        return evaluate_culane_folders(predictions, labels, list_path, *(image_size or _CULANE_SIZE))
    return evaluate_benchmark_folders(metric, predictions, labels, list_path, image_size)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UserError for an option of the other task, or a missing one of this."""
    of_task: dict[str, dict[str, Any]] = {
        "lane": {
            "--metric": arguments.metric,
            "--strict": arguments.strict,
            "--image-size": arguments.image_size is not None,
        },
        "sign": {
            "--format": arguments.format,
            "--class-map": arguments.class_map,
            "--corners": arguments.corners,
            "--score-threshold": arguments.score_threshold is not None,
        },
    }
    other = "lane" if arguments.task == "sign" else "sign"
    for option, value in of_task[other].items():
        if value:
            raise UserError(f"{option} goes with evaluate {other}")
    if arguments.task == "lane" and arguments.metric is None:
        raise UserError(f"give --metric; allowed: {', '.join(METRICS)}")
    if arguments.task == "sign" and arguments.format is None:
        raise UserError("give --format, the format of --labels: coco, gtsdb, …, or auto")


def _figure_lines(figures: dict[str, float]) -> list[str]:
    width = max(len(name) for name in figures)
    return [f"{name:{width}}  {_shown(value)}" for name, value in figures.items()]


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else format(value, ".6f")


def _parse_size(text: str) -> tuple[int, int]:
    """(height, width)."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise UserError(f"--image-size {text}: write it as WIDTHxHEIGHT, e.g. 1640x590")
    return int(match[2]), int(match[1])


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"--json {path}: cannot be written ({error.strerror})") from None
