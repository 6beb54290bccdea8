"""The CULane lane metric: F1 over lanes matched by IoU of curves 30 pixels wide on 590 x 1640.

Source: Pan et al., "Spatial As Deep: Spatial CNN for Traffic Scene Understanding", AAAI 2018, and
its evaluator, with which counts agree exactly. mF1 is the mean F1 over IoU .50:.05:.95.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from perception.data.sample import LanePrediction, LaneTruth
from perception.metrics.lane_raster import lane_ious

CANVAS_HEIGHT, CANVAS_WIDTH = 590, 1640
LANE_WIDTH_PIXELS = 30
IOU_PERCENTS = tuple(range(50, 100, 5))
NO_LANE_CATEGORIES = frozenset({"cross"})
"""Categories whose images have no labelled lanes: only false positives are reported for them."""


class CulaneMetric:
    """Additive counts over images, in all and by category.

    `counts()` keys: truths, predictions, images and tp_50 … tp_95, each also as key/category.
    """

    def __init__(self, scale_to_canvas: bool = True) -> None:
        """With `scale_to_canvas`, lanes of an image of another size are scaled to 590 x 1640, so that a lane
        is always as wide relative to its image; without it they are drawn as they are, on a canvas of
        the image's size.
        """
        self._scale_to_canvas = scale_to_canvas
        self._counts: Counter[str] = Counter()

    def update(self, predictions: Sequence[LanePrediction], truths: Sequence[LaneTruth]) -> None:
        """Count images; lanes may have any number of points, as files do: a lane of one matches nothing."""
        for prediction, truth in zip(predictions, truths, strict=True):
            self._add(self._matches(prediction, truth), truth.category)

    def counts(self) -> dict[str, float]:
        """Whole numbers that add up over ranks and runs."""
        return dict(self._counts)

    def merge(self, counts: Mapping[str, float]) -> None:
        """Add another metric's `counts()`."""
        for key, value in counts.items():
            self._counts[key] += int(value)

    def compute(self) -> dict[str, float]:
        """culane_f1_50, culane_f1_75, culane_mf1, tp, fp, fn (at IoU .5); culane_f1_50/category, fp/cross.

        An F1 of no lanes at all, neither labelled nor predicted, is 0.
        """
        results: dict[str, float] = {
            "culane_f1_50": self._f1(50, ""),
            "culane_f1_75": self._f1(75, ""),
            "culane_mf1": sum(self._f1(percent, "") for percent in IOU_PERCENTS) / len(IOU_PERCENTS),
            "tp": self._counts["tp_50"],
            "fp": self._counts["predictions"] - self._counts["tp_50"],
            "fn": self._counts["truths"] - self._counts["tp_50"],
        }
        for category in sorted(key.partition("/")[2] for key in self._counts if key.startswith("images/")):
            if category in NO_LANE_CATEGORIES:
                results[f"fp/{category}"] = self._counts[f"predictions/{category}"] - self._counts[f"tp_50/{category}"]
            else:
                results[f"culane_f1_50/{category}"] = self._f1(50, f"/{category}")
        return results

    def _matches(self, prediction: LanePrediction, truth: LaneTruth) -> dict[str, int]:
        truths, predicted = truth.lanes, prediction.lanes
        height, width = truth.height, truth.width
        if self._scale_to_canvas and (height, width) != (CANVAS_HEIGHT, CANVAS_WIDTH):
            truths, predicted = (_scaled(lanes, height, width) for lanes in (truths, predicted))
            height, width = CANVAS_HEIGHT, CANVAS_WIDTH
        matched = matched_ious(lane_ious(truths, predicted, height, width, LANE_WIDTH_PIXELS))
        hits = {f"tp_{percent}": int((matched > percent / 100).sum()) for percent in IOU_PERCENTS}
        return {"images": 1, "truths": len(truths), "predictions": len(predicted), **hits}

    def _add(self, counts: Mapping[str, int], category: str | None) -> None:
        for key, value in counts.items():
            self._counts[key] += value
            if category:
                self._counts[f"{key}/{category}"] += value

    def _f1(self, percent: int, suffix: str) -> float:
        lanes = self._counts[f"truths{suffix}"] + self._counts[f"predictions{suffix}"]
        return 2 * self._counts[f"tp_{percent}{suffix}"] / lanes if lanes else 0.0


def matched_ious(ious: NDArray[np.float64]) -> NDArray[np.float64]:
    """IoU of each pair in the one-to-one assignment with the largest sum; ious is (truths, predictions).

    A pair counts as true positive where its IoU is strictly above the threshold.
    """
    rows, columns = linear_sum_assignment(ious, maximize=True)
    return np.asarray(ious[rows, columns], dtype=np.float64)


def _scaled(lanes: Sequence[NDArray[np.float64]], height: int, width: int) -> tuple[NDArray[np.float64], ...]:
    """Pixel centres are whole numbers, as in perception.geometry."""
    scale = np.array([CANVAS_WIDTH / width, CANVAS_HEIGHT / height])
    return tuple((lane + 0.5) * scale - 0.5 for lane in lanes)
