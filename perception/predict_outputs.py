"""What `predict` writes: official-format files, drawings, an annotated video; each appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np

from perception.data.culane import label_name
from perception.data.sample import LanePrediction, LaneTruth
from perception.data.signs.sample import SignPrediction
from perception.errors import UserError, nearest
from perception.lane_follow import FollowedPrediction
from perception.metrics.tusimple import default_rows, x_at_rows
from perception.onnx_model import Prediction
from perception.overlay import draw_prediction
from perception.predict_inputs import Frame
from perception.video import VideoWriter

FORMATS = {"lane": ("culane", "tusimple"), "sign": ("coco",)}
"""Official formats by task, the default first."""
TUSIMPLE_MOST_MILLISECONDS = 200
_DRAWING_QUALITY = 90


class Writer(Protocol):
    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        """Take one frame's prediction. Raises UserError where it cannot be written."""

    def finish(self) -> list[str]:
        """Close what is open, also after an interruption; a line for each file or folder written, and notes."""


def check_format(task: str, format: str, is_tusimple_list: bool) -> str:
    """The format to write, "auto" resolved. Raises UserError for one that the task does not have."""
    allowed = FORMATS[task]
    if format == "auto":
        return "tusimple" if task == "lane" and is_tusimple_list else allowed[0]
    if format not in allowed:
        raise UserError(f'--format "{format}" is not for a {task} model{nearest(format, (*allowed, "auto"))}')
    return format


def official_writer(format: str, folder: Path, classes: tuple[str, ...]) -> Writer:
    if format == "culane":
        return CulaneWriter(folder)
    if format == "tusimple":
        return TusimpleWriter(folder / "predictions.json")
    return CocoWriter(folder, classes)


class CulaneWriter:
    """NAME.lines.txt an image, in the images' relative layout: what `evaluate lane --predictions FOLDER` takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        assert isinstance(prediction, LanePrediction)
        lines = [" ".join(f"{x:.3f} {y:.3f}" for x, y in lane) + "\n" for lane in prediction.lanes]
        _write(self._folder / label_name(frame.name), "".join(lines).encode())
        self._count += 1

    def finish(self) -> list[str]:
        return [f"wrote {self._count} files *.lines.txt (CULane) under {self._folder}"]


class TusimpleWriter:
    """One file of JSON lines. Rows are the list's; else every 10th from 160 to 710 of a height of 720, scaled.

    `run_time` is that of network and decoding, in milliseconds. Scores are added: the official tool passes them over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _TemporaryText(path)
        self._num_slow = 0

    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        assert isinstance(prediction, LanePrediction) and frame.image is not None
        height, width = frame.image.shape[:2]
        rows = frame.h_samples
        if rows is None:
            grid = default_rows(LaneTruth(frame.name, height, width, ()))
            rows = tuple(sorted({int(row) for row in np.rint(grid)}))
        xs = x_at_rows(prediction.lanes, np.array(rows, dtype=np.float64))
        line = {
            "raw_file": frame.name,
            "lanes": [[round(float(x), 2) if x >= 0 else -2 for x in lane] for lane in xs],
            "h_samples": list(rows),
            "run_time": round(run_time_milliseconds, 3),
            "scores": [round(score, 4) for score in prediction.scores],
        }
        self._num_slow += run_time_milliseconds > TUSIMPLE_MOST_MILLISECONDS
        self._file.write(json.dumps(line) + "\n")

    def finish(self) -> list[str]:
        self._file.finish()
        lines = [f"wrote {self._path} (TuSimple)"]
        if self._num_slow:
            lines.append(
                f"note: run_time is above {TUSIMPLE_MOST_MILLISECONDS} ms for {self._num_slow} images; the official "
                "TuSimple tool counts those as wrong"
            )
        return lines


class CocoWriter:
    """results.json as COCO wants detections, and images.json that tells image and category ids, both from 1."""

    def __init__(self, folder: Path, classes: tuple[str, ...]) -> None:
        self._folder, self._classes = folder, classes
        self._images: list[dict[str, Any]] = []
        self._results: list[dict[str, Any]] = []

    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        assert isinstance(prediction, SignPrediction) and frame.image is not None
        height, width = frame.image.shape[:2]
        number = len(self._images) + 1
        self._images.append({"id": number, "file_name": frame.name, "height": height, "width": width})
        for box, score, label in zip(prediction.boxes, prediction.scores, prediction.labels, strict=True):
            x1, y1, x2, y2 = (round(float(value), 3) for value in box)
            bbox = [x1, y1, round(x2 - x1, 3), round(y2 - y1, 3)]
            self._results.append(
                {"image_id": number, "category_id": int(label) + 1, "bbox": bbox, "score": round(float(score), 6)}
            )

    def finish(self) -> list[str]:
        categories = [{"id": number, "name": name} for number, name in enumerate(self._classes, 1)]
        images = {"images": self._images, "annotations": [], "categories": categories}
        _write(self._folder / "images.json", (json.dumps(images) + "\n").encode())
        _write(self._folder / "results.json", (json.dumps(self._results) + "\n").encode())
        return [f"wrote {self._folder / 'results.json'} (COCO; ids in images.json)"]


class IdentityWriter:
    """JSON lines {"frame", "lanes": [numbers]}: the numbers of a frame's lanes, in the order of its other files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _TemporaryText(path)

    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        assert isinstance(prediction, FollowedPrediction)
        self._file.write(json.dumps({"frame": frame.name, "lanes": list(prediction.identities)}) + "\n")

    def finish(self) -> list[str]:
        self._file.finish()
        return [f"wrote {self._path}"]


class DrawingWriter:
    """NAME.jpg an image, drawn upon."""

    def __init__(self, folder: Path, classes: tuple[str, ...]) -> None:
        self._folder, self._classes = folder, classes
        self._count = 0

    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        assert frame.image is not None
        picture = cv2.cvtColor(draw_prediction(frame.image, prediction, self._classes), cv2.COLOR_RGB2BGR)
        path = (self._folder / frame.name).with_suffix(".jpg")
        done, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, _DRAWING_QUALITY])
        if not done:
            raise UserError(f"{path}: a picture of {picture.shape[1]}x{picture.shape[0]} is no JPEG; use --no-drawings")
        _write(path, data.tobytes())
        self._count += 1

    def finish(self) -> list[str]:
        return [f"wrote {self._count} drawings under {self._folder}"]


class VideoDrawingWriter:
    """One annotated video of the frames, at the rate of the one they come from."""

    def __init__(self, path: Path, frames_per_second: float, classes: tuple[str, ...]) -> None:
        self._path, self._rate, self._classes = path, frames_per_second, classes
        self._video: VideoWriter | None = None

    def write(self, frame: Frame, prediction: Prediction, run_time_milliseconds: float) -> None:
        assert frame.image is not None
        if self._video is None:
            height, width = frame.image.shape[:2]
            _make_folder(self._path.parent)
            self._video = VideoWriter(self._path, height, width, self._rate)
        self._video.write(draw_prediction(frame.image, prediction, self._classes))

    def finish(self) -> list[str]:
        if self._video is None:
            return []
        self._video.finish()
        return [f"wrote {self._path}"]


class _TemporaryText:
    """A text file that gets its name when it is finished."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("w", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from None

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def finish(self) -> None:
        try:
            self._file.close()
            self._temporary.replace(self._path)
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            raise _unwritable(self._path, error) from None


def _write(path: Path, data: bytes) -> None:
    """Replace `path` as a whole. Not synced to the disk: thousands of small files would wait for it one by one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); make room or permission, or give another --out")
