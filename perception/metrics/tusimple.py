"""The TuSimple lane metric: accuracy, false positives and false negatives of x at given rows.

Source: the evaluator of the TuSimple lane challenge (2017), bit-compatible by default:

- a point is right within 20 / cos(angle of the labelled lane) pixels; no point counts as right
  where the label has none; accuracy of a lane = right rows / all rows
- a labelled lane is found if some prediction has accuracy >= .85; several may share one, so that
  an image's FP can be negative
- beyond four labelled lanes the worst is forgiven, and denominators stay at four
- an image with a run time above 200 ms, or more than two lanes too many, gets (0, 0, 1)
- accuracy, FP and FN are means over images

Strict mode: lanes without a single point are dropped first, labelled or predicted (0313 pads its labels with
them, which gives perfect predictions accuracy .983), and an image with neither has accuracy 1.

tusimple_f1 = 2 P R / (P + R) of P = 1 - FP and R = 1 - FN. The evaluator has no F1; some papers use
another recall, so compare only figures of one definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import LanePrediction, LaneTruth

CANVAS_HEIGHT, CANVAS_WIDTH = 720, 1280
NO_POINT = -2.0
_PIXEL_THRESHOLD = 20.0
_FOUND_ACCURACY = 0.85
_MISSING_X = -100.0
_MOST_RUN_TIME_MILLISECONDS = 200.0
_MOST_EXTRA_LANES = 2
_MOST_LANES_COUNTED = 4
_ROW_STEP, _FIRST_ROW, _LAST_ROW = 10, 160, 710


class TusimpleMetric:
    """Additive sums over images, in all and by category.

    `counts()` keys: images (whole), accuracy, fp, fn (sums of ratios), each also as key/category.
    """

    def __init__(self, strict: bool = False, scale_to_canvas: bool = True) -> None:
        """With `scale_to_canvas`, lanes of an image of another size are scaled to 720 x 1280, for which the
        20 pixels are meant; without it they are compared as they are.
        """
        self._strict = strict
        self._scale_to_canvas = scale_to_canvas
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, float] = {}

    def update(self, predictions: Sequence[LanePrediction], truths: Sequence[LaneTruth]) -> None:
        """Compare at the truth's h_samples, or else at `default_rows`.

        x at a row is interpolated linearly between a lane's points; no point outside them. Lanes
        come from a data set here, which drops labelled lanes without a point: strict in effect.
        """
        for prediction, truth in zip(predictions, truths, strict=True):
            scale_x = scale_y = 1.0
            if self._scale_to_canvas:
                scale_x, scale_y = CANVAS_WIDTH / truth.width, CANVAS_HEIGHT / truth.height
            if truth.h_samples is not None:
                rows = np.array(truth.h_samples, dtype=np.float64)
            else:
                rows = default_rows(truth)
            self.update_rows(
                x_at_rows(prediction.lanes, rows, scale_x),
                x_at_rows(truth.lanes, rows, scale_x),
                rows * scale_y,
                category=truth.category,
            )

    def update_rows(
        self,
        predicted: NDArray[np.float64],
        labelled: NDArray[np.float64],
        rows: NDArray[np.float64],
        run_time_milliseconds: float = 0.0,
        category: str | None = None,
    ) -> None:
        """Count one image as its files have it: (P, R) and (G, R) x, negative for no point, at (R,) rows."""
        if self._strict:
            labelled, predicted = (lanes[(lanes >= 0).any(axis=1)] for lanes in (labelled, predicted))
        accuracy, fp, fn = image_scores(predicted, labelled, rows, run_time_milliseconds)
        if self._strict and not len(labelled) and not len(predicted):
            accuracy = 1.0
        for suffix in ("", f"/{category}") if category else ("",):
            self._counts[f"images{suffix}"] += 1
            for key, value in (("accuracy", accuracy), ("fp", fp), ("fn", fn)):
                self._sums[key + suffix] = self._sums.get(key + suffix, 0.0) + value

    def counts(self) -> dict[str, float]:
        return {**self._counts, **self._sums}

    def merge(self, counts: Mapping[str, float]) -> None:
        """Add another metric's `counts()`."""
        for key, value in counts.items():
            if key.startswith("images"):
                self._counts[key] += int(value)
            else:
                self._sums[key] = self._sums.get(key, 0.0) + value

    def compute(self) -> dict[str, float]:
        """tusimple_accuracy, tusimple_fp, tusimple_fn, tusimple_f1; the same with /category. 0 without images."""
        results: dict[str, float] = {}
        for suffix in ("", *sorted(key.removeprefix("images") for key in self._counts if "/" in key)):
            images = max(self._counts[f"images{suffix}"], 1)
            accuracy, fp, fn = (self._sums.get(key + suffix, 0.0) / images for key in ("accuracy", "fp", "fn"))
            # The evaluator's FN passes 1 where more than five lanes are labelled and none is found.
            precision, recall = (1 - fp, max(0.0, 1 - fn)) if self._counts["images"] else (0.0, 0.0)
            results[f"tusimple_accuracy{suffix}"] = accuracy
            results[f"tusimple_fp{suffix}"] = fp
            results[f"tusimple_fn{suffix}"] = fn
            results[f"tusimple_f1{suffix}"] = 2 * precision * recall / max(precision + recall, 1e-12)
        return results


def image_scores(
    predicted: NDArray[np.float64],
    labelled: NDArray[np.float64],
    rows: NDArray[np.float64],
    run_time_milliseconds: float = 0.0,
) -> tuple[float, float, float]:
    """(accuracy, FP, FN) of one image, as the official evaluator gives them.

    predicted (P, R) and labelled (G, R) are x at (R,) rows, negative for no point.
    """
    num_predicted, num_labelled = len(predicted), len(labelled)
    if run_time_milliseconds > _MOST_RUN_TIME_MILLISECONDS or num_predicted > num_labelled + _MOST_EXTRA_LANES:
        return 0.0, 0.0, 1.0
    thresholds = np.array([_PIXEL_THRESHOLD / np.cos(_angle(lane, rows)) for lane in labelled])
    distances = np.abs(_without_negatives(labelled)[:, None] - _without_negatives(predicted)[None])
    accuracies = (distances < thresholds[:, None, None]).mean(axis=2)
    best = accuracies.max(axis=1) if num_predicted else np.zeros(num_labelled)
    found = int((best >= _FOUND_ACCURACY).sum())
    missed, total = num_labelled - found, float(best.sum())
    if num_labelled > _MOST_LANES_COUNTED:
        missed = max(missed - 1, 0)
        total -= float(best.min())
    counted = max(min(num_labelled, _MOST_LANES_COUNTED), 1)
    return total / counted, (num_predicted - found) / max(num_predicted, 1), missed / counted


def x_at_rows(
    lanes: Sequence[NDArray[np.float64]], rows: NDArray[np.float64], scale_x: float = 1.0
) -> NDArray[np.float64]:
    """(L, R) x of lanes (K, 2), sorted bottom to top, at (R,) rows: linear between points, -2 outside them.

    `scale_x` maps the result to another width. A negative x stays one, which counts as no point.
    """
    sampled = np.full((len(lanes), len(rows)), NO_POINT)
    for lane, x in zip(lanes, sampled, strict=True):
        if len(lane):
            inside = (rows >= lane[-1, 1]) & (rows <= lane[0, 1])
            x[inside] = np.interp(rows[inside], lane[::-1, 1], lane[::-1, 0]) * scale_x
    return sampled


def default_rows(truth: LaneTruth) -> NDArray[np.float64]:
    """Rows for a format without h_samples, in the truth's pixels: every 10 at a height of 720.

    They run from the highest labelled point down to 710; from 160 where no lane is labelled.
    """
    scale = truth.height / CANVAS_HEIGHT
    highest = min((float(lane[-1, 1]) / scale for lane in truth.lanes if len(lane)), default=float(_FIRST_ROW))
    first = int(np.clip(np.ceil(highest / _ROW_STEP) * _ROW_STEP, 0, _LAST_ROW))
    return np.arange(first, _LAST_ROW + 1, _ROW_STEP, dtype=np.float64) * scale


def _angle(x: NDArray[np.float64], rows: NDArray[np.float64]) -> float:
    """Angle from the vertical of the least-squares line through a lane's points; 0 for fewer than two."""
    valid = x >= 0
    if valid.sum() < 2:
        return 0.0
    offsets = rows[valid] - rows[valid].mean()
    slope = (offsets @ (x[valid] - x[valid].mean())) / (offsets @ offsets)
    return float(np.arctan(slope))


def _without_negatives(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(x >= 0, x, _MISSING_X)
