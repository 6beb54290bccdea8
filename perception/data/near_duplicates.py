"""Frames hardly different from the one before, as a standing car films them: left out of training on request.

CLRerNet's authors drop the frames of CULane that differ from the one before by less than 15 grey levels, in the mean
over all pixels and channels (Honda and Uchida, "CLRerNet: Improving Confidence of Lane Detection with LaneIoU", WACV
2024, and their code). Here grey thumbnails are compared, whose differences are some 14 % smaller (median of 14 pairs
of real frames): 13 is about their 15. Night frames are dark and differ little: a high threshold drops most of them.

The frame before is the one before in the data set's order, dropped or not; the first is always kept. Differences are
measured once and kept in the cache folder, a file for each so many frames, whose name tells the images' paths, sizes
and times of change. The threshold is no part of it, and neither is the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.lane_store import LaneStore
from perception.data.sample import LaneDataset, LaneSample, LaneTruth, ReadReport
from perception.errors import UserError

BLOCK_FRAMES = 500
_ROWS, _COLUMNS = 32, 80
_VERSION = 1
"""Of the way in which differences are measured: another one has other files."""


class Frames(LaneDataset, Protocol):
    """A lane data set of image files in the order in which they were filmed."""

    @property
    def lanes(self) -> LaneStore: ...

    def image_path(self, index: int) -> Path | None: ...


class KeptFrames:
    """A LaneDataset of some frames of another."""

    def __init__(self, frames: Frames, kept: NDArray[np.int64], report: ReadReport) -> None:
        self._frames, self._kept, self.report = frames, kept, report

    def __len__(self) -> int:
        return len(self._kept)

    def truth(self, index: int) -> LaneTruth:
        return self._frames.truth(int(self._kept[index]))

    def sample(self, index: int) -> LaneSample:
        return self._frames.sample(int(self._kept[index]))


def differences_folder(cache: Path) -> Path:
    return cache / f"frame-differences-v{_VERSION}"


def measure_differences(
    frames: Frames, folder: Path, share: tuple[int, int], progress: Callable[[int, int], None]
) -> None:
    """Measure what is not in the folder yet; `share` = (rank, size) on this host takes every size-th block.

    `progress(done, total)` is called after each of this rank's blocks. Raises UserError where an image is broken or the
    folder cannot be written.
    """
    mine = range(0, len(frames), BLOCK_FRAMES)[share[0] :: share[1]]
    missing = [start for start in mine if _read(_block_file(frames, folder, start)) is None]
    for done, start in enumerate(missing, 1):
        _measure(frames, folder, start)
        progress(done, len(missing))


def without_near_duplicates(frames: Frames, folder: Path, threshold: float) -> KeptFrames:
    """The frames that differ from the one before by `threshold` grey levels or more; how many do not is noted.

    Differences that are not in the folder are measured first.
    """
    blocks = []
    for start in range(0, len(frames), BLOCK_FRAMES):
        block = _read(_block_file(frames, folder, start))
        blocks.append(_measure(frames, folder, start) if block is None else block)
    differences = np.concatenate([np.empty(0), *blocks])
    kept, dropped = (np.flatnonzero(which) for which in (differences >= threshold, differences < threshold))
    read = frames.report
    report = ReadReport(len(kept), 0, 0, Counter(read.anomalies), dict(read.examples))
    report.count_lanes(frames.lanes.lanes_of_images[kept])
    if len(dropped):
        anomaly = f"frame that differs from the one before by less than {threshold:g} grey levels: dropped"
        report.note(anomaly, frames.truth(int(dropped[0])).name, len(dropped))
    return KeptFrames(frames, kept, report)


def _measure(frames: Frames, folder: Path, start: int) -> NDArray[np.float64]:
    """Differences of a block's frames from the ones before, infinite for the data set's first; they are stored too."""
    path = _block_file(frames, folder, start)
    end = min(start + BLOCK_FRAMES, len(frames))
    differences = np.full(end - start, np.inf)
    before = _thumbnail(frames, start - 1) if start else None
    for index in range(start, end):
        current = _thumbnail(frames, index)
        if before is not None:
            differences[index - start] = np.abs(current - before).mean()
        before = current
    content = io.BytesIO()
    np.save(content, differences)
    # Random: containers on two hosts that share the folder may have the same process ids.
    temporary = path.with_name(f".{os.urandom(8).hex()}-{path.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.getvalue())
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: differences of frames cannot be written ({error.strerror}): free some space or set "
            "data.cache_folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return differences


def _thumbnail(frames: Frames, index: int) -> NDArray[np.int16]:
    grey = cv2.cvtColor(frames.sample(index).image, cv2.COLOR_RGB2GRAY)
    return np.asarray(cv2.resize(grey, (_COLUMNS, _ROWS), interpolation=cv2.INTER_AREA), dtype=np.int16)


def _block_file(frames: Frames, folder: Path, start: int) -> Path:
    digest = hashlib.sha256()
    for index in range(max(start - 1, 0), min(start + BLOCK_FRAMES, len(frames))):
        path = frames.image_path(index)
        try:
            status = path.stat() if path is not None else None
        except OSError as error:
            raise UserError(f"{path}: image cannot be read ({error.strerror})") from None
        stamp = (str(path), status.st_size, status.st_mtime_ns) if status else ()
        # The data set's first frame has none before it.
        digest.update(repr((start > 0, *stamp)).encode())
    return folder / f"{digest.hexdigest()[:32]}.npy"


def _read(path: Path) -> NDArray[np.float64] | None:
    """None where the file is missing, or damaged: it is then measured anew."""
    try:
        differences = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return np.asarray(differences, dtype=np.float64) if differences.ndim == 1 and len(differences) else None
