"""Average precision of sign detections: COCO's, by class, super-class, size and regardless of class.

Sources: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, and its evaluator, with which the figures
agree to 1e-9; Houben et al., "Detection of Traffic Signs in Real-World Images: The German Traffic Sign Detection
Benchmark", IJCNN 2013. Where these leave a choice:

- sizes are half-open bins of the truth's area (COCO counts an area of exactly 32^2 as small and as medium)
- a class, super-class or size without truths is left out of every mean and has no figure of its own; a mean over
  nothing is 0, and `truths` beside it says so
- ignored regions belong to no class: they excuse detections of each
- equal scores rank by the images' names, then in the order in which an image's prediction lists them
- GTSDB's figure counts a second detection of one sign as false, and one of a sign of another super-class too
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perception.data.signs.classes import GTSDB_SUPERCLASSES
from perception.data.signs.sample import SignPrediction, SignTruth
from perception.errors import UserError
from perception.metrics.average_precision import (
    ANY_AREA,
    COCO_IOU_THRESHOLDS,
    BoxTable,
    area_under_curve,
    coco_average_precision,
)
from perception.metrics.tt100k import tt100k_rates

UNSCORED_SUPERCLASS = "other"
"""GTSDB's competition scores the other three."""
SIZE_BINS = {"under-16": (0, 16), "16-32": (16, 32), "32-96": (32, 96), "over-96": (96, None)}
"""Name → root of the area, from and below, in original pixels."""

_GTSDB_IOU = 0.6
_AT_50, _AT_75 = 0, 5
_IGNORED = -1
# The evaluator's ranges include both ends, so the upper one is the last number below it.
_AREA_RANGES = (
    ANY_AREA,
    *(
        (float(low) ** 2, ANY_AREA[1] if high is None else float(np.nextafter(float(high) ** 2, 0)))
        for low, high in SIZE_BINS.values()
    ),
)


def superclasses_of(classes: Iterable[str]) -> dict[str, str]:
    """Class → super-class where all of `classes` are GTSDB's, or its super-classes themselves; else nothing."""
    known = {**GTSDB_SUPERCLASSES, **{group: group for group in GTSDB_SUPERCLASSES.values()}}
    names = tuple(classes)
    return {name: known[name] for name in names} if known.keys() >= set(names) else {}


@dataclass(frozen=True, eq=False)
class SignCounts:
    """What a metric has seen, to be sent to another rank."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    """I images."""
    num_detections: NDArray[np.int64]
    """(I,) rows of `detections` that are each image's."""
    num_truths: NDArray[np.int64]
    detections: NDArray[np.float64]
    """(D, 6) x1, y1, x2, y2, label, score."""
    truths: NDArray[np.float64]
    """(G, 5) x1, y1, x2, y2, label; -1 for an ignored region."""


class SignMetric:
    """Collects boxes by image name. An image that comes twice, as padding does, counts once."""

    def __init__(self, classes: tuple[str, ...], superclasses: Mapping[str, str]) -> None:
        """`superclasses` names the super-class of some or all `classes`; one of none is in no super-class's figure."""
        self._classes = classes
        self._superclasses = dict(superclasses)
        self._images: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def update(self, predictions: Sequence[SignPrediction], truths: Sequence[SignTruth]) -> None:
        """Raises UserError for a score or box that is no number, a label without class, a box inside out."""
        for prediction, truth in zip(predictions, truths, strict=True):
            scores = np.asarray(prediction.scores, dtype=np.float64)
            if not np.isfinite(scores).all():
                raise UserError(f"{truth.name}: a predicted score is {scores[~np.isfinite(scores)][0]}, not a number")
            labelled = _rows(truth.name, "labelled", truth.boxes, truth.labels, len(self._classes))
            predicted = _rows(truth.name, "predicted", prediction.boxes, prediction.labels, len(self._classes))
            regions = np.full(len(truth.ignored), _IGNORED)
            ignored = np.column_stack([np.asarray(truth.ignored, dtype=np.float64).reshape(-1, 4), regions])
            self._add(truth.name, np.column_stack([predicted, scores]), np.concatenate([labelled, ignored]))

    def counts(self) -> SignCounts:
        """48 bytes a detection and 40 a truth, in arrays."""
        detections = [detections for detections, _ in self._images.values()]
        truths = [truths for _, truths in self._images.values()]
        return SignCounts(
            self._classes,
            tuple(self._images),
            np.array([len(rows) for rows in detections], dtype=np.int64),
            np.array([len(rows) for rows in truths], dtype=np.int64),
            np.concatenate([np.zeros((0, 6)), *detections]),
            np.concatenate([np.zeros((0, 5)), *truths]),
        )

    def merge(self, counts: SignCounts) -> None:
        """Add another metric's `counts()`. Raises UserError if that was of other classes."""
        if counts.classes != self._classes:
            raise UserError(
                f"sign metrics of {len(counts.classes)} and {len(self._classes)} classes cannot be added up"
            )
        if counts.names:  # np.split makes one piece of nothing.
            detections = np.split(counts.detections, np.cumsum(counts.num_detections)[:-1])
            truths = np.split(counts.truths, np.cumsum(counts.num_truths)[:-1])
            for name, image_detections, image_truths in zip(counts.names, detections, truths, strict=True):
                self._add(name, image_detections, image_truths)

    def compute(self) -> dict[str, float]:
        """Figures by name; FIGURE is ap (mean over IoU .50:.05:.95), ap50 or ap75.

        - images, truths, ignored, detections: what was counted
        - ap, ap50, ap75: mean over classes
        - ap50_class_agnostic: all signs as one class
        - ap50_superclass, gtsdb_auc: mean over super-classes but "other"; absent where no class has one
        - ap, ap50, truths with _class/NAME, _superclass/NAME (also gtsdb_auc), _size/BIN, the last as mean over
          classes; ap50_class_agnostic_size/BIN. `truths…` is there for every name, the others where it is not 0.
        """
        boxes = self._boxes()
        figures: dict[str, float] = {
            "images": len(self._images),
            "truths": len(boxes.truths),
            "ignored": len(boxes.ignored),
            "detections": len(boxes.detections),
        }
        figures |= self._class_figures(boxes) | _class_agnostic_figures(boxes) | self._superclass_figures(boxes)
        return figures

    def tt100k(self, score_threshold: float) -> dict[str, float]:
        """Precision and recall at one score as TT100K counts them: see tt100k_rates."""
        boxes = self._boxes()
        return tt100k_rates(
            boxes.detections,
            boxes.detection_labels,
            boxes.truths,
            boxes.truth_labels,
            boxes.ignored,
            score_threshold,
        )

    def _boxes(self) -> _Boxes:
        """In the order of the images' names."""
        names = sorted(self._images)
        numbered = [self._images[name] for name in names]
        detections = np.concatenate([np.zeros((0, 6)), *(rows for rows, _ in numbered)])
        truths = np.concatenate([np.zeros((0, 5)), *(rows for _, rows in numbered)])
        detection_images = np.repeat(np.arange(len(names)), [len(rows) for rows, _ in numbered])
        truth_images = np.repeat(np.arange(len(names)), [len(rows) for _, rows in numbered])
        counted = truths[:, 4] != _IGNORED
        return _Boxes(
            BoxTable(detection_images, detections[:, :4], detections[:, 5]),
            detections[:, 4].astype(np.int64),
            BoxTable(truth_images[counted], truths[counted, :4]),
            truths[counted, 4].astype(np.int64),
            BoxTable(truth_images[~counted], truths[~counted, :4]),
        )

    def _add(self, name: str, detections: NDArray[np.float64], truths: NDArray[np.float64]) -> None:
        if name in self._images:
            earlier, earlier_truths = self._images[name]
            if not np.array_equal(earlier_truths, truths):
                raise UserError(f"{name}: stands for two images with different labels; names must be unique")
            # Rounding may differ with the batch: which is kept must not depend on which came first.
            detections = min(earlier, detections, key=lambda rows: rows.tobytes())
        self._images[name] = detections, truths

    def _class_figures(self, boxes: _Boxes) -> dict[str, float]:
        num_truths = np.bincount(boxes.truth_labels, minlength=len(self._classes))
        # (classes, IoU thresholds, areas)
        values = np.full((len(self._classes), len(COCO_IOU_THRESHOLDS), len(_AREA_RANGES)), np.nan)
        for label in np.flatnonzero(num_truths).tolist():
            values[label] = coco_average_precision(*boxes.of(np.array([label])), COCO_IOU_THRESHOLDS, _AREA_RANGES)
        figures: dict[str, float] = {
            "ap": _mean(values[:, :, 0]),
            "ap50": _mean(values[:, _AT_50, 0]),
            "ap75": _mean(values[:, _AT_75, 0]),
        }
        for number, name in enumerate(SIZE_BINS, start=1):
            of_bin = values[:, :, number]
            figures |= _named("size", name, of_bin, boxes.truths_in(_AREA_RANGES[number]))
        for label, name in enumerate(self._classes):
            figures |= _named("class", name, values[label, :, :1].T, int(num_truths[label]))
        return figures

    def _superclass_figures(self, boxes: _Boxes) -> dict[str, float]:
        labels_of: dict[str, list[int]] = {}
        for label, name in enumerate(self._classes):
            if name in self._superclasses:
                labels_of.setdefault(self._superclasses[name], []).append(label)
        figures: dict[str, float] = {}
        scored_ap50, scored_auc = [], []
        for group, labels in labels_of.items():
            of_group = boxes.of(np.array(labels))
            values = coco_average_precision(*of_group)
            num_truths = len(of_group[1])
            figures |= _named("superclass", group, values.T, num_truths)
            auc = area_under_curve(*of_group, _GTSDB_IOU)
            if num_truths:
                figures[f"gtsdb_auc_superclass/{group}"] = auc
            if group != UNSCORED_SUPERCLASS:
                scored_ap50.append(values[_AT_50, 0])
                scored_auc.append(auc)
        if scored_ap50:
            means = {"ap50_superclass": _mean(np.array(scored_ap50)), "gtsdb_auc": _mean(np.array(scored_auc))}
            figures = means | figures
        return figures


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Everything counted."""

    detections: BoxTable
    detection_labels: NDArray[np.int64]
    truths: BoxTable
    truth_labels: NDArray[np.int64]
    ignored: BoxTable

    def of(self, labels: NDArray[np.int64]) -> tuple[BoxTable, BoxTable, BoxTable]:
        """Detections and truths of some classes, and what is ignored."""
        return (
            self.detections.select(np.isin(self.detection_labels, labels)),
            self.truths.select(np.isin(self.truth_labels, labels)),
            self.ignored,
        )

    def truths_in(self, area_range: tuple[float, float]) -> int:
        areas = self.truths.areas()
        return int(((areas >= area_range[0]) & (areas <= area_range[1])).sum())


def _class_agnostic_figures(boxes: _Boxes) -> dict[str, float]:
    values = coco_average_precision(
        boxes.detections, boxes.truths, boxes.ignored, COCO_IOU_THRESHOLDS[:1], _AREA_RANGES
    )[0]
    figures = {"ap50_class_agnostic": _mean(values[:1])}
    for name, value in zip(SIZE_BINS, values[1:], strict=True):
        if not np.isnan(value):
            figures[f"ap50_class_agnostic_size/{name}"] = float(value)
    return figures


def _named(grouping: str, name: str, values: NDArray[np.float64], num_truths: int) -> dict[str, float]:
    """Figures of (members, IoU thresholds) values under one name."""
    figures: dict[str, float] = {f"truths_{grouping}/{name}": num_truths}
    if num_truths:
        figures[f"ap_{grouping}/{name}"] = _mean(values)
        figures[f"ap50_{grouping}/{name}"] = _mean(values[:, _AT_50])
    return figures


def _mean(values: NDArray[np.float64]) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else 0.0


def _rows(
    image: str, what: str, boxes: NDArray[np.float64], labels: NDArray[np.int64], num_classes: int
) -> NDArray[np.float64]:
    """(N, 5) boxes and labels, checked."""
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    labels = np.asarray(labels)
    if not np.isfinite(boxes).all():
        raise UserError(f"{image}: a {what} box has a coordinate that is not finite")
    if (boxes[:, 2:] < boxes[:, :2]).any():
        raise UserError(f"{image}: a {what} box ends before it begins; boxes are x1, y1, x2, y2")
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{image}: a {what} label is {wrong}, there are {num_classes} classes; use one list of classes")
    return np.column_stack([boxes, labels])
