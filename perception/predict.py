"""Predict a stream of frames: read, network, decode, write, with the time that each takes.

The next frames are read and resized in a thread of their own while the network computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perception.data.sample import LanePrediction
from perception.errors import UserError
from perception.lane_follow import LaneFollower
from perception.onnx_model import OnnxModel, Prediction, Predictor
from perception.overlay import DRAWN_SCORE
from perception.predict_inputs import Frame, Input
from perception.predict_outputs import Writer

_PROGRESS_SECONDS = 5.0
PARTS = ("waiting for reading and resizing", "network", "decoding", "drawing and writing")


@dataclass
class PredictReport:
    """What a prediction did and where its time went."""

    num_images: int = 0
    num_objects: int = 0
    """Lanes, or signs that are sure enough to be drawn."""
    num_empty: int = 0
    """Images without any."""
    num_left_out: int = 0
    """Lanes beyond the model's `max_lanes`."""
    problems: list[str] = field(default_factory=list)
    """A line an image that could not be read."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    interrupted: bool = False
    written: list[str] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        return self.num_images / max(sum(self.seconds.values()), 1e-9)

    def timing(self) -> str:
        """images/s, with the share of each part."""
        total = max(sum(self.seconds.values()), 1e-9)
        shares = ", ".join(f"{name} {100 * spent / total:.0f} %" for name, spent in self.seconds.items())
        return f"{self.images_per_second:.1f} images/s: {shares}"


def open_predictor(path: Path, num_threads: int = 0) -> Predictor:
    """An exported file (.onnx), which needs no torch, or a run folder or checkpoint, which does."""
    if path.suffix.lower() == ".onnx":
        return OnnxModel(path, num_threads)
    if not path.exists():
        raise UserError(f"{path}: no such run folder, checkpoint or exported file")
    # Only now: an exported file is predicted without torch.
    from perception.run_model import RunModel, load_trained

    return RunModel(load_trained(path), num_threads)


def predict_frames(
    predictor: Predictor,
    frames: Input,
    writers: Sequence[Writer],
    batch_size: int = 1,
    say: Callable[[str], None] = print,
    follower: LaneFollower | None = None,
) -> PredictReport:
    """Predict every frame and hand it to the writers, which are finished in any case.

    A `follower` smooths the lanes of a video and gives them numbers, before they are written.
    An interruption (Ctrl-C) ends the run early, what is done is kept; an image that cannot be read is a problem in
    the report. Raises UserError where nothing can be written.
    """
    report = PredictReport()
    try:
        _run(predictor, frames, writers, batch_size, report, say, follower)
    except KeyboardInterrupt:
        report.interrupted = True
    except BaseException:
        for writer in writers:
            # The first cause is the one to tell.
            with contextlib.suppress(Exception):
                writer.finish()
        raise
    with _Clock(report, "drawing and writing"):
        for writer in writers:
            report.written += writer.finish()
    return report


def _run(
    predictor: Predictor,
    frames: Input,
    writers: Sequence[Writer],
    batch_size: int,
    report: PredictReport,
    say: Callable[[str], None],
    follower: LaneFollower | None,
) -> None:
    stream = iter(frames)
    told = started = time.monotonic()
    # One thread, and one batch ahead of it: frames stay in order, and few of them are held.
    with ThreadPoolExecutor(1, "frames") as reader:
        coming = reader.submit(_read, stream, predictor, batch_size)
        while True:
            with _Clock(report, PARTS[0]):
                batch = coming.result()
            if not batch:
                return
            coming = reader.submit(_read, stream, predictor, batch_size)
            for frame, _ in batch:
                if frame.image is None:
                    report.problems.append(frame.problem)
                    say(f"cannot be predicted: {frame.problem}")
            readable = [(frame, prepared) for frame, prepared in batch if frame.image is not None]
            if readable:
                _predict(predictor, readable, writers, report, follower)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                total = "" if frames.num_frames is None else f" of {frames.num_frames}"
                say(f"{report.num_images}{total} images, {report.num_images / (told - started):.1f} images/s")


def _read(stream: Iterator[Frame], predictor: Predictor, batch_size: int) -> list[tuple[Frame, Any]]:
    """The next frames up to `batch_size` that can be read, prepared; those that cannot among them. Empty at the end."""
    batch: list[tuple[Frame, Any]] = []
    num_readable = 0
    while num_readable < batch_size and (frame := next(stream, None)) is not None:
        batch.append((frame, None if frame.image is None else predictor.prepare(frame.image, frame.name)))
        num_readable += frame.image is not None
    return batch


def _predict(
    predictor: Predictor,
    pending: Sequence[tuple[Frame, Any]],
    writers: Sequence[Writer],
    report: PredictReport,
    follower: LaneFollower | None,
) -> None:
    started = time.perf_counter()
    predictions, network_seconds = predictor.predict([prepared for _, prepared in pending])
    num_left_out = sum(found.num_left_out for found in predictions if isinstance(found, LanePrediction))
    if follower is not None:
        predictions = [
            _followed(follower, frame, lanes) for (frame, _), lanes in zip(pending, predictions, strict=True)
        ]
    seconds = time.perf_counter() - started
    report.num_left_out += num_left_out
    report.seconds["network"] += network_seconds
    report.seconds["decoding"] += seconds - network_seconds
    milliseconds = 1000 * seconds / len(pending)
    with _Clock(report, "drawing and writing"):
        for (frame, _), prediction in zip(pending, predictions, strict=True):
            for writer in writers:
                writer.write(frame, prediction, milliseconds)
            count = _num_objects(prediction)
            report.num_images += 1
            report.num_objects += count
            report.num_empty += not count


def _followed(follower: LaneFollower, frame: Frame, prediction: Prediction) -> Prediction:
    assert isinstance(prediction, LanePrediction) and frame.image is not None
    return follower.update(prediction, *frame.image.shape[:2])


def _num_objects(prediction: Prediction) -> int:
    if isinstance(prediction, LanePrediction):
        return len(prediction.lanes)
    return int((prediction.scores >= DRAWN_SCORE).sum())


class _Clock:
    """Adds the time of a block to one part of the report."""

    def __init__(self, report: PredictReport, part: str) -> None:
        self._report, self._part = report, part

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._report.seconds[self._part] += time.perf_counter() - self._started
