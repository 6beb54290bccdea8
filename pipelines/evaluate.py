"""`evaluate lane`: score prediction files against label files with the official metrics.

python -m pipelines evaluate lane --predictions P --labels L --metric culane|tusimple [--list FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perception.errors import UserError, nearest
from perception.run_folder import check_folder_of

if TYPE_CHECKING:
    from perception.metrics.lane_files import LaneEvaluation

METRICS = ("culane", "tusimple")
_CULANE_SIZE = (1640, 590)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["lane"], help="what the files hold")
    parser.add_argument("--predictions", type=Path, required=True, help="culane: folder of *.lines.txt; tusimple: file")
    parser.add_argument("--labels", type=Path, required=True, help="the same layout as the predictions")
    parser.add_argument("--metric", choices=METRICS, required=True)
    parser.add_argument(
        "--list",
        type=Path,
        metavar="FILE",
        help="culane: list of images, or the folder of the test splits; without it all label files",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--strict", action="store_true", help="tusimple: drop lanes without a single point")
    parser.add_argument(
        "--image-size",
        default="x".join(str(length) for length in _CULANE_SIZE),
        metavar="WIDTHxHEIGHT",
        help="culane: size of the images; lanes are scaled from it to the metric's 1640x590 (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the figures, warnings to stderr; UserError where nothing sound can be said."""
    json_path: Path | None = arguments.json
    check_folder_of("--json", json_path)
    width, height = _parse_size(arguments.image_size)
    evaluation = evaluate_lane_files(
        arguments.predictions,
        arguments.labels,
        arguments.metric,
        list_path=arguments.list,
        strict=arguments.strict,
        image_height=height,
        image_width=width,
    )
    for warning in evaluation.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{evaluation.num_images} images")
    name_width = max(len(name) for name in evaluation.metrics)
    for name, value in evaluation.metrics.items():
        print(f"{name:{name_width}}  {value if isinstance(value, int) else format(value, '.6f')}")
    if json_path is not None:
        _write_atomically(json_path, json.dumps(evaluation.metrics, indent=2) + "\n")
    return 0


def evaluate_lane_files(
    predictions: Path,
    labels: Path,
    metric: str,
    list_path: Path | None = None,
    strict: bool = False,
    image_height: int = _CULANE_SIZE[1],
    image_width: int = _CULANE_SIZE[0],
) -> LaneEvaluation:
    """Score files with the metric "culane" (two folders) or "tusimple" (two files of JSON lines).

    `list_path` and the image size are for culane, `strict` is for tusimple; see
    perception.metrics.lane_files for what counts how. Raises UserError for a wrong path or file.
    """
    # NumPy, SciPy and OpenCV are imported here so that --help answers at once.
    from perception.metrics.lane_files import evaluate_culane_folders, evaluate_tusimple_files

    if metric not in METRICS:
        raise UserError(f'--metric "{metric}" is unknown{nearest(metric, METRICS)}')
    if metric == "tusimple":
        if list_path is not None:
            raise UserError("--list goes with --metric culane; a tusimple label file names its own images")
        return evaluate_tusimple_files(predictions, labels, strict)
    if strict:
        raise UserError("--strict goes with --metric tusimple; culane has no such mode")
    return evaluate_culane_folders(predictions, labels, list_path, image_height, image_width)


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise UserError(f"--image-size {text}: write it as WIDTHxHEIGHT, e.g. 1640x590")
    return int(match[1]), int(match[2])


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"--json {path}: cannot be written ({error.strerror})") from None
