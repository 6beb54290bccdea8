"""Videos read frame by frame and written whole, through OpenCV's FFmpeg."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.errors import UserError

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg", ".webm", ".ts")
_ASSUMED_FRAMES_PER_SECOND = 25.0


class VideoReader:
    """Frames as (H, W, 3) uint8 RGB, turned as the file says they are shown."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where the file is missing or no video."""
        if not path.is_file():
            raise UserError(f"{path}: no such video")
        self.path = path
        self.notes: list[str] = []
        with _quiet():
            self._capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        self.height = int(self._capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
        self.width = int(self._capture.get(cv2.CAP_PROP_FRAME_WIDTH))
        if not self._capture.isOpened() or self.height < 1 or self.width < 1:
            raise UserError(f"{path}: cannot be read as a video (cut short, or of an unknown kind)")
        count = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.num_frames = count if count > 0 else None
        """What the file claims; None where it does not."""
        rate = float(self._capture.get(cv2.CAP_PROP_FPS))
        self.frames_per_second = rate if 0 < rate < 1000 else _ASSUMED_FRAMES_PER_SECOND
        if rate != self.frames_per_second:
            self.notes.append(f"{path}: tells no frame rate; {self.frames_per_second:g} frames/s assumed")

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        """Every frame once. Raises UserError where not one can be read; notes an end before the claimed number."""
        number = 0
        try:
            while True:
                read, frame = self._capture.read()
                if not read:
                    break
                number += 1
                yield np.asarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), dtype=np.uint8)
        finally:
            self._capture.release()
        if not number:
            raise UserError(f"{self.path}: not one frame can be read from this video")
        if self.num_frames is not None and number < self.num_frames:
            self.notes.append(f"{self.path}: {number} frames could be read, the file claims {self.num_frames}")


class VideoWriter:
    """An MP4 file; it gets its name when it is finished, so that a half-written one is never taken for whole."""

    def __init__(self, path: Path, height: int, width: int, frames_per_second: float) -> None:
        """Raises UserError where no video can be written."""
        self.path = path
        self._size = (width, height)
        self._num_frames = 0
        self._temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        with _quiet():
            self._writer = cv2.VideoWriter(str(self._temporary), cv2.CAP_FFMPEG, codec, frames_per_second, self._size)
        if not self._writer.isOpened():
            raise UserError(f"{path}: a video cannot be written there; make room or permission, or leave drawings out")

    def write(self, image: NDArray[np.uint8]) -> None:
        """(H, W, 3) RGB, scaled to the video's size where it is of another."""
        if image.shape[1::-1] != self._size:
            image = np.asarray(cv2.resize(image, self._size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
        self._writer.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
        self._num_frames += 1

    def finish(self) -> None:
        """Give the file its name. Raises UserError where it lacks frames: FFmpeg does not tell of a full disk."""
        self._writer.release()
        try:
            readable = VideoReader(self._temporary).num_frames
        except UserError:
            readable = 0
        try:
            if readable != self._num_frames:
                raise UserError(
                    f"{self.path}: {self._num_frames} frames were written, but {readable} can be read back; make room "
                    "there, or leave drawings out"
                )
            self._temporary.replace(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: the video cannot be written ({error.strerror}); make room there") from None
        finally:
            self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that OpenCV and FFmpeg write about a broken file around the one error raised for it."""
    # FFmpeg's is read when it is first used.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(0)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)
