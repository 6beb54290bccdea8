"""Generated scenes packed in chunks in a cache folder: rendered once, read by every rank and run.

`Chunks` and `write_chunks` know nothing of labels; lanes are packed here, signs in perception/data/signs/packed.py.

A chunk is two files, images (JPEG, one flat array, memory-mapped) and labels. Both are
written to a temporary name and renamed, labels last; the labels hold the images' checksum, so that
a chunk is known to be whole before it is used. The folder's name holds all that the content depends on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.generated import DEFAULT_STYLE, render_scene
from perception.data.sample import LaneSample, LaneTruth, ReadReport
from perception.errors import UserError

CHUNK_SCENES = 100
_JPEG_QUALITY = 95


Truth = TypeVar("Truth")
Arrays = Mapping[str, NDArray[np.generic]]


class Chunks:
    """Images and label arrays of scenes first_index .. first_index + count - 1 in a folder of chunks."""

    def __init__(self, folder: Path, first_index: int, count: int) -> None:
        """Raises UserError where a chunk is missing or unreadable."""
        self.folder, self.first_index, self.count = folder, first_index, count
        self._images: list[NDArray[np.uint8]] = []
        self._labels: list[Arrays] = []
        for chunk in _chunks(first_index, count):
            try:
                images, labels = _open_chunk(folder, chunk)
            except Exception as error:  # a damaged file raises many kinds
                raise UserError(
                    f"{folder}: generated scenes of part {chunk} cannot be read ({error}): run again to render them"
                ) from None
            self._images.append(images)
            self._labels.append(labels)

    def labels(self, index: int) -> tuple[Arrays, int]:
        """The arrays that hold a scene's labels, and the scene's place in them."""
        chunk, offset = self._place(index)
        return self._labels[chunk], offset

    def counts(self, starts: str) -> list[int]:
        """How many labels each scene has, by the name of their array of starts."""
        spans = (self.labels(index) for index in range(self.count))
        return [int(arrays[starts][offset + 1]) - int(arrays[starts][offset]) for arrays, offset in spans]

    def total(self, starts: str) -> int:
        """How many labels the scenes have together."""
        return sum(self.counts(starts))

    def image(self, index: int) -> NDArray[np.uint8]:
        chunk, offset = self._place(index)
        starts = self._labels[chunk]["image_starts"]
        data = np.asarray(self._images[chunk][int(starts[offset]) : int(starts[offset + 1])])
        image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
        if image is None:
            raise UserError(
                f"{self.folder}: generated scene {index} cannot be decoded: delete this folder and run again"
            )
        return np.asarray(image, dtype=np.uint8)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        first_chunk = self.first_index // CHUNK_SCENES
        absolute = self.first_index + index
        return absolute // CHUNK_SCENES - first_chunk, absolute % CHUNK_SCENES


class PackedScenes:
    """Scenes first_index .. first_index + count - 1 of a seed, as a LaneDataset. Prepare them first."""

    def __init__(self, folder: Path, first_index: int, count: int) -> None:
        """Raises UserError where a chunk is missing or unreadable."""
        self._chunks = Chunks(folder, first_index, count)
        self.report = ReadReport(images=count)
        self.report.count_lanes(self._chunks.counts("lane_starts"))

    def __reduce__(self) -> tuple[type[PackedScenes], tuple[Path, int, int]]:
        """A loader process maps the files itself; pickled maps would carry all images with them."""
        return PackedScenes, (self._chunks.folder, self._chunks.first_index, self._chunks.count)

    def __len__(self) -> int:
        return self._chunks.count

    def truth(self, index: int) -> LaneTruth:
        labels, offset = self._chunks.labels(index)
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
        return LaneSample(self._chunks.image(index), self.truth(index))


def scenes_folder(cache: Path, seed: int, height: int, width: int, style: str = DEFAULT_STYLE) -> Path:
    """The folder of all chunks of a seed, size and style of scenes."""
    return cache / f"scenes-{style}-seed{seed}-{height}x{width}"


def prepare_chunks(
    folder: Path,
    seed: int,
    height: int,
    width: int,
    first_index: int,
    count: int,
    share: tuple[int, int],
    progress: Callable[[int, int], None],
    style: str = DEFAULT_STYLE,
) -> None:
    """Render the chunks of lane scenes that are missing or damaged, as `write_chunks` does."""

    def render(index: int) -> tuple[NDArray[np.uint8], LaneTruth]:
        sample = render_scene(seed, index, height, width, style)
        return sample.image, sample.truth

    write_chunks(folder, first_index, count, share, progress, render, _pack_lanes)


def write_chunks(
    folder: Path,
    first_index: int,
    count: int,
    share: tuple[int, int],
    progress: Callable[[int, int], None],
    render: Callable[[int], tuple[NDArray[np.uint8], Truth]],
    pack: Callable[[Sequence[Truth]], Arrays],
) -> None:
    """Render the chunks that are missing or damaged; `share` = (rank, size) on this host takes every size-th.

    `render(index)` gives a scene's RGB image and labels, `pack` the arrays that hold the labels of a chunk's scenes.
    `progress(done, total)` is called after each of this rank's chunks. Raises UserError where
    the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Shared out by number, not among the missing ones: another rank may have rendered some by now.
        mine = _chunks(first_index, count)[share[0] :: share[1]]
        missing = [chunk for chunk in mine if not _complete(folder, chunk)]
        for done, chunk in enumerate(missing, 1):
            _write_chunk(folder, chunk, render, pack)
            progress(done, len(missing))
    except OSError as error:
        raise UserError(
            f"{folder}: generated scenes cannot be written ({error.strerror or error}): free some space or set "
            "data.cache_folder"
        ) from error


def _write_chunk(
    folder: Path,
    chunk: int,
    render: Callable[[int], tuple[NDArray[np.uint8], Truth]],
    pack: Callable[[Sequence[Truth]], Arrays],
) -> None:
    encoded, truths = [], []
    for index in range(chunk * CHUNK_SCENES, (chunk + 1) * CHUNK_SCENES):
        image, truth = render(index)
        done, data = cv2.imencode(
            ".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY]
        )
        if not done:
            raise OSError(f"JPEG encoder failed on scene {index}")
        encoded.append(np.asarray(data, dtype=np.uint8).reshape(-1))
        truths.append(truth)
    images, labels = _paths(folder, chunk)
    pixels = np.concatenate(encoded)
    arrays = {
        **pack(truths),
        "images_crc32": np.array(zlib.crc32(pixels.data)),
        "image_starts": starts_of([len(data) for data in encoded]),
    }
    _write_atomic(images, lambda path: np.save(path, pixels))
    _write_atomic(labels, lambda path: np.savez(path, allow_pickle=False, **arrays))


def _pack_lanes(truths: Sequence[LaneTruth]) -> Arrays:
    lanes = [lane for truth in truths for lane in truth.lanes]
    return {
        "size": np.array([truths[0].height, truths[0].width]),
        "names": np.array([truth.name for truth in truths]),
        "categories": np.array([truth.category or "" for truth in truths]),
        "h_samples": np.array(truths[0].h_samples or ()),
        "lane_starts": starts_of([len(truth.lanes) for truth in truths]),
        "point_starts": starts_of([len(lane) for lane in lanes]),
        "points": np.concatenate(lanes) if lanes else np.zeros((0, 2)),
    }


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


def _open_chunk(folder: Path, chunk: int) -> tuple[NDArray[np.uint8], Arrays]:
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


def starts_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Where each of some runs begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)
