"""What a lane data set yields, whatever format it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Lane = NDArray[np.float64]
"""(K, 2) float64 points (x, y) in original pixels, K >= 2, sorted bottom to top (y falls strictly)."""


@dataclass(frozen=True)
class LaneTruth:
    """Labels of one image, enough to compute every lane metric."""

    name: str
    height: int
    width: int
    lanes: tuple[Lane, ...]
    h_samples: tuple[int, ...] | None = None
    """TuSimple's rows in original pixels; None where the format has none."""
    category: str | None = None
    """Name of the split or condition that metrics are also given for ("night", "curve", ...)."""
    benchmark: str | None = None
    """One of `perception.metrics.lane_benchmarks.BENCHMARKS`, whose metric is also given for the image."""


@dataclass(frozen=True)
class LaneSample:
    """An image as uint8 (height, width, 3) RGB with its labels."""

    image: NDArray[np.uint8]
    truth: LaneTruth


@dataclass(frozen=True)
class LanePrediction:
    """Lanes found in one image, in original pixels, the most certain first."""

    lanes: tuple[Lane, ...]
    scores: tuple[float, ...]
    num_left_out: int = field(default=0, kw_only=True)
    """Lanes that were found beyond the model's `max_lanes`."""


@dataclass
class ReadReport:
    """What a reader repaired, kept or dropped, counted by a stated rule and printed."""

    images: int = 0
    lanes: int = 0
    signs: int = 0
    anomalies: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """First "file:line" for each anomaly."""
    lane_counts: Counter[int] = field(default_factory=Counter)
    """A number of lanes → images that have it."""

    def count_lanes(self, lanes_of_images: Iterable[int]) -> None:
        """Set `lanes` and `lane_counts` from the number of lanes of each image."""
        self.lane_counts = Counter(int(count) for count in lanes_of_images)
        self.lanes = sum(count * images for count, images in self.lane_counts.items())

    def note(self, anomaly: str, where: str, count: int = 1) -> None:
        self.anomalies[anomaly] += count
        self.examples.setdefault(anomaly, where)

    def lines(self) -> list[str]:
        """A printable line for each anomaly."""
        return [
            f"{count} x {anomaly} (first: {self.examples[anomaly]})"
            for anomaly, count in sorted(self.anomalies.items())
        ]


class LaneDataset(Protocol):
    """A random-access set of labelled images. `truth` never decodes the image."""

    report: ReadReport

    def __len__(self) -> int: ...

    def truth(self, index: int) -> LaneTruth: ...

    def sample(self, index: int) -> LaneSample: ...
