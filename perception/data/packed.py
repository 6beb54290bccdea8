"""Generated scenes packed in chunks in a cache folder: rendered once, read by every rank and run.

A chunk is two files, images (JPEG, one flat array, memory-mapped) and labels. Both are
written to a temporary name and renamed, labels last; the labels hold the images' checksum, so that
a chunk is known to be whole before it is used. The folder's name holds all that the content depends on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.generated import RENDERER_VERSION, render_scene
from perception.data.sample import LaneSample, LaneTruth, ReadReport
from perception.errors import UserError

CHUNK_SCENES = 100
_JPEG_QUALITY = 95


class PackedScenes:
    """Scenes first_index .. first_index + count - 1 of a seed, as a LaneDataset. Prepare them first."""

    def __init__(self, folder: Path, first_index: int, count: int) -> None:
        """Raises UserError where a chunk is missing or unreadable."""
        self.report = ReadReport(images=count)
        self._folder = folder
        self._first = first_index
        self._count = count
        self._images: list[NDArray[np.uint8]] = []
        self._labels: list[dict[str, NDArray[np.generic]]] = []
        for chunk in _chunks(first_index, count):
            try:
                images, labels = _open_chunk(folder, chunk)
            except Exception as error:  # a damaged file raises many kinds
                raise UserError(
                    f"{folder}: generated scenes of part {chunk} cannot be read ({error}): run again to render them"
                ) from None
            self._images.append(images)
            self._labels.append(labels)
        for index in range(count):
            part, offset = self._place(index)
            starts = self._labels[part]["lane_starts"]
            self.report.lanes += int(starts[offset + 1]) - int(starts[offset])

    def __reduce__(self) -> tuple[type[PackedScenes], tuple[Path, int, int]]:
        """A loader process maps the files itself; pickled maps would carry all images with them."""
        return PackedScenes, (self._folder, self._first, self._count)

    def __len__(self) -> int:
        return self._count

    def truth(self, index: int) -> LaneTruth:
        chunk, offset = self._place(index)
        labels = self._labels[chunk]
        lanes = []
        for lane in range(int(labels["lane_starts"][offset]), int(labels["lane_starts"][offset + 1])):
            start, end = labels["point_starts"][lane], labels["point_starts"][lane + 1]
            lanes.append(np.asarray(labels["points"][int(start) : int(end)], dtype=np.float64))
        height, width = (int(value) for value in labels["size"])
        return LaneTruth(
            name=str(labels["names"][offset]),
            height=height,
            width=width,
            lanes=tuple(lanes),
            h_samples=tuple(int(row) for row in labels["h_samples"]),
            category=str(labels["categories"][offset]) or None,
        )

    def sample(self, index: int) -> LaneSample:
        chunk, offset = self._place(index)
        starts = self._labels[chunk]["image_starts"]
        data = np.asarray(self._images[chunk][int(starts[offset]) : int(starts[offset + 1])])
        image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
        if image is None:
            raise UserError(
                f"{self._folder}: generated scene {index} cannot be decoded: delete this folder and run again"
            )
        return LaneSample(np.asarray(image, dtype=np.uint8), self.truth(index))

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        first_chunk = self._first // CHUNK_SCENES
        absolute = self._first + index
        return absolute // CHUNK_SCENES - first_chunk, absolute % CHUNK_SCENES


def scenes_folder(cache: Path, seed: int, height: int, width: int) -> Path:
    """The folder of all chunks of a seed and size for this version of the renderer."""
    return cache / f"scenes-v{RENDERER_VERSION}-seed{seed}-{height}x{width}"


def prepare_chunks(
    folder: Path,
    seed: int,
    height: int,
    width: int,
    first_index: int,
    count: int,
    share: tuple[int, int],
    progress: Callable[[int, int], None],
) -> None:
    """Render the chunks that are missing or damaged; `share` = (rank, size) on this host takes every size-th.

    `progress(done, total)` is called after each of this rank's chunks. Raises UserError where
    the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Shared out by number, not among the missing ones: another rank may have rendered some by now.
        mine = _chunks(first_index, count)[share[0] :: share[1]]
        missing = [chunk for chunk in mine if not _complete(folder, chunk)]
        for done, chunk in enumerate(missing, 1):
            _render_chunk(folder, chunk, seed, height, width)
            progress(done, len(missing))
    except OSError as error:
        raise UserError(
            f"{folder}: generated scenes cannot be written ({error.strerror or error}): free some space or set "
            "data.cache_folder"
        ) from error


def _render_chunk(folder: Path, chunk: int, seed: int, height: int, width: int) -> None:
    samples = [render_scene(seed, chunk * CHUNK_SCENES + offset, height, width) for offset in range(CHUNK_SCENES)]
    encoded = []
    for sample in samples:
        done, data = cv2.imencode(
            ".jpg", cv2.cvtColor(sample.image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY]
        )
        if not done:
            raise OSError(f"JPEG encoder failed on {sample.truth.name}")
        encoded.append(np.asarray(data, dtype=np.uint8).reshape(-1))
    lanes = [lane for sample in samples for lane in sample.truth.lanes]
    images, labels = _paths(folder, chunk)
    pixels = np.concatenate(encoded)
    _write_atomic(images, lambda path: np.save(path, pixels))
    _write_atomic(
        labels,
        lambda path: np.savez(
            path,
            size=np.array([height, width]),
            names=np.array([sample.truth.name for sample in samples]),
            categories=np.array([sample.truth.category or "" for sample in samples]),
            h_samples=np.array(samples[0].truth.h_samples or ()),
            images_crc32=np.array(zlib.crc32(pixels.data)),
            image_starts=_starts([len(data) for data in encoded]),
            lane_starts=_starts([len(sample.truth.lanes) for sample in samples]),
            point_starts=_starts([len(lane) for lane in lanes]),
            points=np.concatenate(lanes) if lanes else np.zeros((0, 2)),
        ),
    )


def _write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    # numpy appends its suffix, so the temporary name must end in it too. Random: containers on two
    # hosts that share the folder may have the same process ids.
    temporary = path.with_name(f".{os.urandom(8).hex()}-{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _complete(folder: Path, chunk: int) -> bool:
    try:
        images, labels = _open_chunk(folder, chunk)
        return zlib.crc32(np.ascontiguousarray(images).data) == int(labels["images_crc32"])
    except Exception:  # missing, or damaged, which raises many kinds
        return False


def _open_chunk(folder: Path, chunk: int) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.generic]]]:
    """A chunk's images, mapped, and its labels, read."""
    images_path, labels_path = _paths(folder, chunk)
    # Opened here: numpy leaves a damaged file open.
    with labels_path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        labels = {name: file[name] for name in file.files}
    images = np.load(images_path, mmap_mode="r", allow_pickle=False)
    if len(images) != int(labels["image_starts"][-1]):
        raise ValueError("images and labels do not fit")
    return images, labels


def _chunks(first_index: int, count: int) -> range:
    return range(first_index // CHUNK_SCENES, (first_index + count - 1) // CHUNK_SCENES + 1)


def _paths(folder: Path, chunk: int) -> tuple[Path, Path]:
    return folder / f"chunk-{chunk:06d}.images.npy", folder / f"chunk-{chunk:06d}.labels.npz"


def _starts(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)
