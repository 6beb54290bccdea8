"""Generated scenes with signs, packed in chunks in a cache folder as those with lanes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perception.data.generated import SIGN_RENDERER_VERSION, render_sign_scene
from perception.data.packed import Arrays, Chunks, starts_of, write_chunks
from perception.data.sample import ReadReport
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.signs.sample import SignSample, SignTruth


class PackedSignScenes:
    """Scenes first_index .. first_index + count - 1 of a seed, as a SignDataset. Prepare them first."""

    classes: tuple[str, ...] = GTSDB_CLASSES

    def __init__(self, folder: Path, first_index: int, count: int) -> None:
        """Raises UserError where a chunk is missing or unreadable."""
        self._chunks = Chunks(folder, first_index, count)
        self.report = ReadReport(images=count, signs=self._chunks.total("box_starts"))

    def __reduce__(self) -> tuple[type[PackedSignScenes], tuple[Path, int, int]]:
        """A loader process maps the files itself; pickled maps would carry all images with them."""
        return PackedSignScenes, (self._chunks.folder, self._chunks.first_index, self._chunks.count)

    def __len__(self) -> int:
        return self._chunks.count

    def truth(self, index: int) -> SignTruth:
        arrays, offset = self._chunks.labels(index)
        boxes, ignored = _span(arrays["box_starts"], offset), _span(arrays["ignored_starts"], offset)
        height, width = (int(value) for value in arrays["size"])
        return SignTruth(
            name=str(arrays["names"][offset]),
            height=height,
            width=width,
            boxes=np.array(arrays["boxes"][boxes], dtype=np.float64),
            labels=np.array(arrays["labels"][boxes], dtype=np.int64),
            ignored=np.array(arrays["ignored"][ignored], dtype=np.float64),
            category=str(arrays["categories"][offset]) or None,
        )

    def sample(self, index: int) -> SignSample:
        return SignSample(self._chunks.image(index), self.truth(index))


def sign_scenes_folder(cache: Path, seed: int, height: int, width: int) -> Path:
    """The folder of all chunks of a seed and size for this version of the renderer."""
    return cache / f"sign-scenes-v{SIGN_RENDERER_VERSION}-seed{seed}-{height}x{width}"


def prepare_sign_chunks(
    folder: Path,
    seed: int,
    height: int,
    width: int,
    first_index: int,
    count: int,
    share: tuple[int, int],
    progress: Callable[[int, int], None],
) -> None:
    """Render the chunks of sign scenes that are missing or damaged; see perception.data.packed.write_chunks."""

    def render(index: int) -> tuple[NDArray[np.uint8], SignTruth]:
        sample = render_sign_scene(seed, index, height, width)
        return sample.image, sample.truth

    write_chunks(folder, first_index, count, share, progress, render, _pack_signs)


def _pack_signs(truths: Sequence[SignTruth]) -> Arrays:
    return {
        "size": np.array([truths[0].height, truths[0].width]),
        "names": np.array([truth.name for truth in truths]),
        "categories": np.array([truth.category or "" for truth in truths]),
        "box_starts": starts_of([len(truth.boxes) for truth in truths]),
        "boxes": np.concatenate([truth.boxes for truth in truths]),
        "labels": np.concatenate([truth.labels for truth in truths]),
        "ignored_starts": starts_of([len(truth.ignored) for truth in truths]),
        "ignored": np.concatenate([truth.ignored for truth in truths]),
    }


def _span(starts: NDArray[np.generic], index: int) -> slice:
    return slice(int(starts[index]), int(starts[index + 1]))
