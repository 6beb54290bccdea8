"""The lane metrics of LLAMAS, CurveLanes and OpenLane (2D): CULane's counting, each with its own drawing.

|            | canvas      | width | IoU | labelled lanes                  | predicted lanes                       |
|------------|-------------|-------|-----|---------------------------------|---------------------------------------|
| LLAMAS     | 717 x 1276  | 30    | .5  | a point a row, from row 300 on  | cubic spline, cut into 50 points      |
| CurveLanes | 224 x 224   | 5     | .5  | natural spline, a point a pixel | the same                              |
| OpenLane   | 1280 x 1920 | 30    | .3  | as CULane's, ordered by y       | the same                              |

Sources: the evaluators that the data sets' authors published, in karstenBehrendt/unsupervised_llamas, of Huawei Noah's
Ark Lab for CurveLanes, and in OpenDriveLab/OpenLane (lane2d). What they pass over in silence or stop at:

| in a file                               | LLAMAS                   | CurveLanes               | OpenLane             |
|-----------------------------------------|--------------------------|--------------------------|----------------------|
| lane without a point                    | not counted              | not counted              | not counted          |
| lane of one point                       | not counted              | counted, matches nothing | not counted          |
| label of fewer than two rows below 299  | not counted (tool stops) |                          |                      |
| point twice in a row                    | one dropped (tool stops) | one dropped (tool stops) | lane matches nothing |
| categories of lanes                     |                          |                          | all alike (tool: -k) |

Ours differs so: between two painted markers LLAMAS's tool cuts a labelled x to whole pixels and rounds it elsewhere;
here all are rounded. Predictions are drawn as they are, above row 300 too, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import splev, splprep

from perception.data.sample import LanePrediction, LaneTruth
from perception.metrics.culane import CulaneMetric, IouRules
from perception.metrics.lane_raster import lane_vertices, natural_cubics, whole_pixels

_LLAMAS_FIRST_ROW, _LLAMAS_LAST_ROW = 300, 716
_LLAMAS_POINTS = 50


def llamas_truth(lane: NDArray[np.float64]) -> NDArray[np.int32] | None:
    """A labelled lane, (K, 2), bottom to top: its x at every row of the image from 300 on, rounded; none below 0."""
    if len(lane) < 2:
        return None
    first, last = max(_LLAMAS_FIRST_ROW, np.ceil(lane[-1, 1])), min(_LLAMAS_LAST_ROW, np.floor(lane[0, 1]))
    rows = np.arange(first, last + 1)
    x = np.rint(np.interp(rows, lane[::-1, 1], lane[::-1, 0]))
    points = np.stack([x, rows], axis=1)[x >= 0]
    return whole_pixels(points) if len(points) >= 2 else None


def llamas_prediction(lane: NDArray[np.float64]) -> NDArray[np.int32] | None:
    """A predicted lane, in either order: an interpolating cubic spline through it at 50 equal steps, cut to pixels."""
    points = _without_repeats(lane)
    if len(lane) < 2:
        return None
    if len(points) < 2:
        return np.empty((0, 2), np.int32)
    spline, _ = splprep(points.T, s=0, k=min(3, len(points) - 1))
    return whole_pixels(np.trunc(np.stack(splev(np.linspace(0.0, 1.0, _LLAMAS_POINTS), spline), axis=1)))


def curvelanes_lane(lane: NDArray[np.float64]) -> NDArray[np.int32] | None:
    """A lane on the canvas of 224 x 224: a natural cubic spline at every pixel of chord length, cut to pixels."""
    if not len(lane):
        return None
    points = _without_repeats(lane)
    if len(points) < 2:
        return np.empty((0, 2), np.int32)
    steps = np.diff(points, axis=0)
    chords = np.sqrt((steps**2).sum(axis=1))
    linear, quadratic, cubic = natural_cubics(points, steps, chords)
    counts = np.ceil(chords).astype(np.int64)
    segment = np.repeat(np.arange(len(chords)), counts)
    t = (np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.float64)[:, None]
    curve = points[segment] + linear[segment] * t + quadratic[segment] * t * t + cubic[segment] * t * t * t
    return whole_pixels(np.trunc(np.concatenate([curve, points[-1:]])))


def openlane_lane(lane: NDArray[np.float64]) -> NDArray[np.int32] | None:
    """As CULane draws it, its points ordered from top to bottom."""
    return lane_vertices(lane[np.argsort(lane[:, 1], kind="stable")]) if len(lane) >= 2 else None


BENCHMARKS: dict[str, IouRules] = {
    "llamas": IouRules("llamas", 717, 1276, 30, llamas_truth, llamas_prediction),
    "curvelanes": IouRules("curvelanes", 224, 224, 5, curvelanes_lane, curvelanes_lane, pixel_centre=0.0),
    "openlane": IouRules("openlane", 1280, 1920, 30, openlane_lane, openlane_lane, iou_percent=30),
}
"""`LaneTruth.benchmark` → the rules by which such images are also scored."""


class BenchmarkMetric:
    """The metric of each benchmark over those of the images that are its own; no figure where there are none."""

    def __init__(self) -> None:
        self._metrics = {name: CulaneMetric(rules=rules) for name, rules in BENCHMARKS.items()}

    def update(self, predictions: Sequence[LanePrediction], truths: Sequence[LaneTruth]) -> None:
        for prediction, truth in zip(predictions, truths, strict=True):
            if truth.benchmark is not None:
                self._metrics[truth.benchmark].update([prediction], [truth])

    def counts(self) -> dict[str, float]:
        """Each metric's counts, by `benchmark:key`."""
        return {
            f"{name}:{key}": value for name, metric in self._metrics.items() for key, value in metric.counts().items()
        }

    def merge(self, counts: Mapping[str, float]) -> None:
        for key, value in counts.items():
            name, _, inner = key.partition(":")
            self._metrics[name].merge({inner: value})

    def compute(self) -> dict[str, float]:
        """llamas_f1_50, llamas_f1_75, llamas_mf1, openlane_f1_30 and so on; the first also as name/category."""
        return {
            key: value
            for name, metric in self._metrics.items()
            if metric.counts()
            for key, value in metric.compute().items()
            if key.startswith(f"{name}_")
        }


def _without_repeats(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without a point that equals the one before: no curve can be led through both."""
    if len(points) < 2:
        return points
    differs = np.concatenate([[True], (np.diff(points, axis=0) != 0).any(axis=1)])
    return np.asarray(points[differs], dtype=np.float64)
