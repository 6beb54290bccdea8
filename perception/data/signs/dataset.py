"""Images on disk with the boxes of their signs in packed arrays, and the builder that every reader fills.

Packed: a million Python objects would be copied, page by page, into each loader process as their reference counts
change; flat arrays stay shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perception.data.images import image_size, read_image
from perception.data.sample import ReadReport
from perception.data.signs.sample import SignSample, SignTruth
from perception.errors import UserError, nearest

IGNORED = -1
"""Label of a region to be ignored."""


class SignFolder:
    """A SignDataset of image files."""

    def __init__(
        self,
        folder: Path,
        classes: tuple[str, ...],
        names: Sequence[str],
        sizes: NDArray[np.int32],
        starts: NDArray[np.int64],
        boxes: NDArray[np.float64],
        labels: NDArray[np.int64],
        report: ReadReport,
    ) -> None:
        """Names relative to `folder`; sizes (I, 2) height, width; boxes starts[i] .. starts[i + 1] are image i's."""
        self.folder, self.classes, self.report = folder, classes, report
        # One text and offsets, for the same reason as the boxes.
        self._names = np.frombuffer("".join(names).encode(), dtype=np.uint8)
        self._name_starts = np.concatenate([[0], np.cumsum([len(name.encode()) for name in names])]).astype(np.int64)
        self._sizes, self._starts, self._boxes, self._labels = sizes, starts, boxes, labels

    def __len__(self) -> int:
        return len(self._sizes)

    def name(self, index: int) -> str:
        start, end = self._name_starts[index : index + 2]
        return bytes(self._names[start:end]).decode()

    def truth(self, index: int) -> SignTruth:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self._starts[index : index + 2]
        boxes, labels = self._boxes[start:end], self._labels[start:end]
        height, width = (int(length) for length in self._sizes[index])
        counted = labels != IGNORED
        return SignTruth(self.name(index), height, width, boxes[counted], labels[counted], boxes[~counted])

    def sample(self, index: int) -> SignSample:
        truth = self.truth(index)
        image = read_image(self.folder / truth.name)
        if image.shape[:2] != (truth.height, truth.width):
            raise UserError(
                f"{self.folder / truth.name}: image is {image.shape[1]}x{image.shape[0]}, its labels are for "
                f"{truth.width}x{truth.height}; take images and labels of the same release"
            )
        return SignSample(image, truth)


class SignFolderBuilder:
    """Takes images and their boxes in turn; repairs boxes by stated rules and counts what it did."""

    def __init__(self, folder: Path, classes: tuple[str, ...]) -> None:
        self.folder, self.classes = folder, classes
        self.report = ReadReport()
        self._label_of = {name: label for label, name in enumerate(classes)}
        self._names: list[str] = []
        self._sizes: list[tuple[int, int]] = []
        self._starts: list[int] = [0]
        self._boxes: list[tuple[float, float, float, float]] = []
        self._labels: list[int] = []

    def add_image(self, name: str, where: str, size: tuple[int, int] | None = None) -> None:
        """Begin an image, `name` relative to the folder; `where` is the "file:line" that lists it.

        `size` (height, width) where the labels tell it, else it is read from the file's header.
        """
        self._sizes.append(size if size is not None else image_size(self.folder / name))
        self._names.append(name)
        self._starts.append(len(self._boxes))
        self.report.images += 1

    def add_box(
        self, class_name: str, box: tuple[float, float, float, float], where: str, ignored: bool = False
    ) -> None:
        """A sign of the image begun last, half-open x1, y1, x2, y2 in pixels.

        Raises UserError for a class that is not among `classes`.
        """
        height, width = self._sizes[-1]
        repaired = repair_box(box, height, width, where, self.report)
        if repaired is None:
            return
        if not ignored and class_name not in self._label_of:
            raise UserError(f'{where}: class "{class_name}" is unknown{nearest(class_name, self._label_of)}')
        if repaired in self._boxes[self._starts[-2] :]:
            self.report.note("box stands twice in an image: kept twice", where)
        self._boxes.append(repaired)
        self._labels.append(IGNORED if ignored else self._label_of[class_name])
        self._starts[-1] = len(self._boxes)
        self.report.signs += not ignored

    def finish(self) -> SignFolder:
        return SignFolder(
            self.folder,
            self.classes,
            self._names,
            np.array(self._sizes, dtype=np.int32).reshape(-1, 2),
            np.array(self._starts, dtype=np.int64),
            np.array(self._boxes, dtype=np.float64).reshape(-1, 4),
            np.array(self._labels, dtype=np.int64),
            self.report,
        )


def repair_box(
    box: tuple[float, float, float, float], height: int, width: int, where: str, report: ReadReport
) -> tuple[float, float, float, float] | None:
    """The box with its corners in order and inside the image, in float64; None where nothing is left of it.

    Each repair and each box dropped is counted in `report`. Raises UserError for a coordinate that is not finite.
    """
    if not all(math.isfinite(value) for value in box):
        raise UserError(f"{where}: box {box} has a coordinate that is not finite; mend or delete the line")
    x1, y1, x2, y2 = box
    if x2 < x1 or y2 < y1:
        report.note("box with corners swapped: put in order", where)
        x1, x2, y1, y2 = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
    if x2 == x1 or y2 == y1:
        report.note("box without area: dropped", where)
        return None
    clipped = (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
    if clipped[0] >= clipped[2] or clipped[1] >= clipped[3]:
        report.note("box outside the image: dropped", where)
        return None
    if clipped != (x1, y1, x2, y2):
        report.note("box leaves the image: clipped", where)
    return clipped
