"""Images on disk with the boxes of their signs in packed arrays, and the builder that every reader fills.

Packed: a million Python objects would be copied, page by page, into each loader process as their reference counts
change; flat arrays stay shared.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perception.data.images import image_size, read_image
from perception.data.sample import ReadReport
from perception.data.signs.corners import half_open
from perception.data.signs.sample import SignSample, SignTruth
from perception.errors import UserError, nearest

IGNORED = -1
"""Label of a region to be ignored."""
DROPPED = -2
"""Label, in `SignFolder.relabelled` only, of a box that is taken out."""
MAX_IMAGE_SIDE = 1 << 20
SWAPPED = "box with corners swapped: put in order"


class SignFolder:
    """A SignDataset of image files."""

    def __init__(
        self,
        folder: Path,
        classes: tuple[str, ...],
        names: Iterable[str],
        sizes: NDArray[np.int32],
        starts: NDArray[np.int64],
        boxes: NDArray[np.float64],
        labels: NDArray[np.int64],
        report: ReadReport,
    ) -> None:
        """Names relative to `folder`; sizes (I, 2) height, width; boxes starts[i] .. starts[i + 1] are image i's."""
        self.folder, self.classes, self.report = folder, classes, report
        # One text and offsets, for the same reason as the boxes.
        encoded = [os.fsencode(name) for name in names]
        self._names = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._name_starts = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._sizes, self._starts, self._boxes, self._labels = sizes, starts, boxes, labels

    def __len__(self) -> int:
        return len(self._sizes)

    def name(self, index: int) -> str:
        start, end = self._name_starts[index : index + 2]
        return os.fsdecode(bytes(self._names[start:end]))

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

    def relabelled(self, classes: tuple[str, ...], label_of: NDArray[np.int64]) -> SignFolder:
        """The same images with other `classes`; `label_of` (C,) is each class's new label, IGNORED or DROPPED.

        Boxes that become ignored or are dropped are noted in the report.
        """
        labels = np.where(self._labels == IGNORED, IGNORED, label_of[self._labels])
        for label, what in ((IGNORED, "ignored"), (DROPPED, "dropped")):
            changed = np.flatnonzero((labels == label) & (self._labels != label))
            if len(changed):
                image = int(np.searchsorted(self._starts, changed[0], side="right")) - 1
                self.report.note(f"sign of a class that the class map says is {what}", self.name(image), len(changed))
        kept = labels != DROPPED
        starts = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)[self._starts]
        self.report.signs = int((labels >= 0).sum())
        names = (self.name(index) for index in range(len(self)))
        return SignFolder(
            self.folder, classes, names, self._sizes, starts, self._boxes[kept], labels[kept], self.report
        )


class SignFolderBuilder:
    """Takes images and their boxes in turn; repairs boxes by stated rules and counts what it did."""

    def __init__(self, folder: Path, classes: tuple[str, ...]) -> None:
        self.folder, self.classes = folder, classes
        self.report = ReadReport()
        self._label_of = {name: label for label, name in enumerate(classes)}
        self._names: dict[str, None] = {}
        # Flat from the start: a million boxes as tuples would need four times the memory.
        self._sizes, self._starts = array("i"), array("q", [0])
        self._boxes, self._labels = array("d"), array("q")
        self._boxes_of_image: set[tuple[float, float, float, float]] = set()

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the image begun last."""
        return self._sizes[-2], self._sizes[-1]

    def add_image(self, name: str, where: str, size: tuple[int, int] | None = None) -> None:
        """Begin an image, `name` relative to the folder; `where` is the "file:line" that lists it.

        `size` (height, width) where the labels tell it, else it is read from the file's header. Raises UserError
        for a name that is there already and a size that no image has.
        """
        if name in self._names:
            raise UserError(f"{where}: image {name} is listed a second time; put all its boxes under one entry")
        height, width = size if size is not None else image_size(self.folder / name)
        if not (0 < height <= MAX_IMAGE_SIDE and 0 < width <= MAX_IMAGE_SIDE):
            raise UserError(f"{where}: image {name} is said to be {width}x{height}; give its size in pixels")
        self._names[name] = None
        self._sizes.extend((height, width))
        self._starts.append(len(self._labels))
        self._boxes_of_image.clear()
        self.report.images += 1

    def add_box(
        self, class_name: str, box: tuple[float, float, float, float], where: str, ignored: bool = False
    ) -> None:
        """A sign of the image begun last, half-open x1, y1, x2, y2 in pixels.

        Raises UserError for a class that is not among `classes`.
        """
        label = IGNORED if ignored else self._label_of.get(class_name)
        if label is None:
            raise UserError(f'{where}: class "{class_name}" is unknown{nearest(class_name, self._label_of)}')
        height, width = self.size
        repaired = repair_box(box, height, width, where, self.report)
        if repaired is None:
            return
        if repaired in self._boxes_of_image:
            self.report.note("box stands twice in an image: kept twice", where)
        self._boxes_of_image.add(repaired)
        self._boxes.extend(repaired)
        self._labels.append(label)
        self._starts[-1] = len(self._labels)
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


def box_from_corners(
    corners: tuple[float, float, float, float], convention: str, where: str, report: ReadReport
) -> tuple[float, float, float, float]:
    """Corners by one of the conventions of `corners.py`, in order, half-open and 0-based."""
    x1, y1, x2, y2 = corners
    if x2 < x1 or y2 < y1:
        # Before the shift, which belongs to the first or the last pixel.
        report.note(SWAPPED, where)
        x1, x2, y1, y2 = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
    if convention.startswith("one-based") and 0 in (x1, y1):
        report.note(f"corner at 0 where {convention} counts from 1: are these corners 0-based?", where)
    return half_open((x1, y1, x2, y2), convention)


def repair_box(
    box: tuple[float, float, float, float], height: int, width: int, where: str, report: ReadReport
) -> tuple[float, float, float, float] | None:
    """The box with its corners in order and inside the image, in float64; None where nothing is left of it.

    Each repair and each box dropped is counted in `report`. Raises UserError for a coordinate that is not finite.
    """
    if not all(map(math.isfinite, box)):
        raise UserError(f"{where}: box {box} has a coordinate that is not finite; mend or delete the line")
    x1, y1, x2, y2 = box
    if x2 < x1 or y2 < y1:
        report.note(SWAPPED, where)
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
