"""What a sign data set yields, whatever format it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import ReadReport

Boxes = NDArray[np.float64]
"""(M, 4) half-open x1, y1, x2, y2 in original pixels, 0-based, x2 > x1 and y2 > y1."""
Labels = NDArray[np.int64]
"""(M,) class, an index into the data set's `classes`."""


@dataclass(frozen=True, eq=False)
class SignTruth:
    """Labels of one image, enough to compute every metric. All boxes lie inside the image."""

    name: str
    """Unique in its data set."""
    height: int
    width: int
    boxes: Boxes
    labels: Labels
    ignored: Boxes
    """(R, 4) regions where a detection is neither right nor wrong, and which teach nothing."""
    category: str | None = None


@dataclass(frozen=True, eq=False)
class SignSample:
    """An image as uint8 (height, width, 3) RGB with its labels."""

    image: NDArray[np.uint8]
    truth: SignTruth


@dataclass(frozen=True, eq=False)
class SignPrediction:
    """Signs found in one image, in original pixels, the surest first."""

    boxes: Boxes
    scores: NDArray[np.float64]
    labels: Labels


class SignDataset(Protocol):
    """A random-access set of labelled images. `truth` never decodes the image."""

    classes: tuple[str, ...]
    report: ReadReport

    def __len__(self) -> int: ...

    def truth(self, index: int) -> SignTruth: ...

    def sample(self, index: int) -> SignSample: ...
