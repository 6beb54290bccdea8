"""The CULane lane metric: F1 over lanes matched by IoU of curves 30 pixels wide on 590 x 1640.

Source: Pan et al., "Spatial As Deep: Spatial CNN for Traffic Scene Understanding", AAAI 2018, and
its evaluator, with which counts agree exactly. mF1 is the mean F1 over IoU .50:.05:.95.

Other benchmarks count alike and draw otherwise: their `IouRules` are in perception/metrics/lane_benchmarks.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from perception.data.sample import LanePrediction, LaneTruth
from perception.metrics.lane_raster import draw_vertices, lane_vertices, mask_ious

IOU_PERCENTS = tuple(range(50, 100, 5))
"""Of mF1."""
NO_LANE_CATEGORIES = frozenset({"cross"})
"""Categories whose images have no labelled lanes: only false positives are reported for them."""

Curve = Callable[[NDArray[np.float64]], NDArray[np.int32] | None]
"""(K, 2) points of a lane on the canvas → (M, 2) whole pixels that the drawn line joins; a line of fewer than two
pixels matches nothing. None: what a file holds there is no lane, and is not counted."""


@dataclass(frozen=True)
class IouRules:
    """How one benchmark draws lanes and when it takes two for the same."""

    name: str
    """The figures' names begin with it."""
    canvas_height: int
    canvas_width: int
    lane_width_pixels: int
    draw_truth: Curve = lane_vertices
    draw_prediction: Curve = lane_vertices
    iou_percent: int = 50
    """A pair is a true positive where its IoU is strictly above."""
    pixel_centre: float = 0.5
    """Where in a pixel its whole coordinate lies, when lanes are scaled to the canvas."""


CULANE = IouRules("culane", canvas_height=590, canvas_width=1640, lane_width_pixels=30)


class CulaneMetric:
    """Additive counts over images, in all and by category.

    `counts()` keys: truths, predictions, images and tp_50 … tp_95, each also as key/category.
    """

    def __init__(self, scale_to_canvas: bool = True, rules: IouRules = CULANE) -> None:
        """With `scale_to_canvas`, lanes of an image of another size are scaled to the canvas of the rules, so that a
        lane is always as wide relative to its image; without it they are drawn as they are, on a canvas of
        the image's size.
        """
        self._scale_to_canvas, self._rules = scale_to_canvas, rules
        self._percents = sorted({rules.iou_percent, *IOU_PERCENTS})
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

        The name and the IoU are those of the rules. An F1 of no lanes at all, neither labelled nor predicted, is 0.
        """
        percent, name = self._rules.iou_percent, self._rules.name
        hits = self._counts[f"tp_{percent}"]
        results: dict[str, float] = {
            f"{name}_f1_{percent}": self._f1(percent, ""),
            f"{name}_f1_75": self._f1(75, ""),
            f"{name}_mf1": sum(self._f1(each, "") for each in IOU_PERCENTS) / len(IOU_PERCENTS),
            "tp": hits,
            "fp": self._counts["predictions"] - hits,
            "fn": self._counts["truths"] - hits,
        }
        for category in sorted(key.partition("/")[2] for key in self._counts if key.startswith("images/")):
            if category in NO_LANE_CATEGORIES:
                found = self._counts[f"tp_{percent}/{category}"]
                results[f"fp/{category}"] = self._counts[f"predictions/{category}"] - found
            else:
                results[f"{name}_f1_{percent}/{category}"] = self._f1(percent, f"/{category}")
        return results

    def _matches(self, prediction: LanePrediction, truth: LaneTruth) -> dict[str, int]:
        rules, truths, predicted = self._rules, truth.lanes, prediction.lanes
        height, width = truth.height, truth.width
        if self._scale_to_canvas and (height, width) != (rules.canvas_height, rules.canvas_width):
            truths, predicted = (_scaled(lanes, height, width, rules) for lanes in (truths, predicted))
            height, width = rules.canvas_height, rules.canvas_width
        masks, found_masks = (
            [
                draw_vertices(vertices, height, width, rules.lane_width_pixels)
                for vertices in map(draw, lanes)
                if vertices is not None
            ]
            for draw, lanes in ((rules.draw_truth, truths), (rules.draw_prediction, predicted))
        )
        matched = matched_ious(mask_ious(masks, found_masks))
        hits = {f"tp_{percent}": int((matched > percent / 100).sum()) for percent in self._percents}
        return {"images": 1, "truths": len(masks), "predictions": len(found_masks), **hits}

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


def _scaled(
    lanes: Sequence[NDArray[np.float64]], height: int, width: int, rules: IouRules
) -> tuple[NDArray[np.float64], ...]:
    """By default pixel centres are whole numbers, as in perception.geometry."""
    scale, centre = np.array([rules.canvas_width / width, rules.canvas_height / height]), rules.pixel_centre
    return tuple((lane + centre) * scale - centre for lane in lanes)
