"""Average precision of one group of boxes: COCO's by faster-coco-eval, and the plain area under the curve.

faster-coco-eval gives COCO's figures to the last bits, in a tenth of the time of pycocotools. Its inputs are built
in memory here, one group of boxes (a class, a super-class, all signs) at a time, so that pairs of image and class
with nothing in them cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray

MAX_DETECTIONS = 100
"""Of an image and group, the surest that COCO looks at."""
COCO_IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
ANY_AREA = (0.0, 1e10)

_CATEGORY = 1


@dataclass(frozen=True, eq=False)
class BoxTable:
    """Boxes of one group over all images, those of an image in one run, images ascending."""

    images: NDArray[np.int64]
    """(N,) image of each box, 0 or more."""
    boxes: NDArray[np.float64]
    """(N, 4) half-open x1, y1, x2, y2."""
    scores: NDArray[np.float64] | None = None
    """(N,) of detections."""

    def __len__(self) -> int:
        return len(self.images)

    def select(self, wanted: NDArray[np.bool_]) -> BoxTable:
        return BoxTable(self.images[wanted], self.boxes[wanted], None if self.scores is None else self.scores[wanted])

    def rows_of(self, image: int) -> slice:
        start, stop = np.searchsorted(self.images, [image, image + 1]).tolist()
        return slice(start, stop)

    def areas(self) -> NDArray[np.float64]:
        sides = self.boxes[:, 2:] - self.boxes[:, :2]
        return np.asarray(sides[:, 0] * sides[:, 1], dtype=np.float64)


def coco_average_precision(
    detections: BoxTable,
    truths: BoxTable,
    ignored: BoxTable,
    iou_thresholds: NDArray[np.float64] = COCO_IOU_THRESHOLDS,
    area_ranges: tuple[tuple[float, float], ...] = (ANY_AREA,),
) -> NDArray[np.float64]:
    """(thresholds, ranges) COCO's AP, the mean of 101 precisions; NaN where a range has no truth.

    `area_ranges` are inclusive at both ends, as COCO's. `ignored` are regions (COCO's crowds): a detection that lies
    in one by the IoU threshold's share of its own area, and matches no truth, does not count. Equal scores rank in
    the order given.
    """
    areas = truths.areas()
    present = [bool(((areas >= low) & (areas <= high)).any()) for low, high in area_ranges]
    result = np.full((len(iou_thresholds), len(area_ranges)), np.nan)
    result[:, present] = 0.0
    if not len(detections) or not any(present):
        return result  # pycocotools stops here with an error, or answers -1.
    seen = np.isin(ignored.images, detections.images)
    evaluation = COCOeval_faster(
        _coco([*_annotations(truths, first_id=1), *_annotations(ignored.select(seen), len(truths) + 1, is_crowd=1)]),
        _coco(_annotations(detections, first_id=1)),
        "bbox",
    )
    parameters = evaluation.params
    parameters.imgIds = np.unique(np.concatenate([detections.images, truths.images])).tolist()
    parameters.maxDets = [MAX_DETECTIONS]
    parameters.iouThrs = iou_thresholds
    parameters.areaRng = [list(area_range) for area_range in area_ranges]
    parameters.areaRngLbl = [str(area_range) for area_range in area_ranges]
    evaluation.evaluate()
    # (thresholds, recalls, categories, ranges, limits of detections), -1 where there is no truth.
    precision = np.asarray(evaluation.eval["precision"])[:, :, 0, :, 0]
    result[:, present] = precision.mean(axis=1)[:, present]
    return result


def area_under_curve(detections: BoxTable, truths: BoxTable, ignored: BoxTable, iou_threshold: float) -> float:
    """Area under precision over recall, a step a distinct score; NaN without truths.

    From the surest on, a detection takes the free truth that it overlaps most, by `iou_threshold` or more; a second
    one of the same truth is false. Detections of one score enter together, so that their order changes nothing but
    which of two in the same image takes a truth. Ignored regions as in `coco_average_precision`.
    """
    if not len(truths):
        return float("nan")
    scores = detections.scores
    if scores is None or not len(detections):
        return 0.0
    right = np.zeros(len(detections), dtype=bool)
    counted = np.ones(len(detections), dtype=bool)
    for image in np.unique(detections.images).tolist():
        found = detections.rows_of(image)
        rows = found.start + np.argsort(-scores[found], kind="stable")
        boxes = detections.boxes[rows]
        ious = overlaps(boxes, truths.boxes[truths.rows_of(image)])
        shares = overlaps(boxes, ignored.boxes[ignored.rows_of(image)], of_first=True)
        for place in np.flatnonzero((ious >= iou_threshold).any(axis=1)):
            best = int(ious[place].argmax())
            if ious[place, best] >= iou_threshold:
                right[rows[place]] = True
                ious[:, best] = 0.0
        counted[rows] = right[rows] | ~(shares >= iou_threshold).any(axis=1)
    scores, right = scores[counted], right[counted]
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.flatnonzero(np.diff(scores[order], append=-np.inf) != 0)
    num_right = np.cumsum(right[order])[last_of_score]
    precision = num_right / (last_of_score + 1)
    return float((np.diff(num_right, prepend=0) * precision).sum() / len(truths))


def overlaps(first: NDArray[np.float64], second: NDArray[np.float64], of_first: bool = False) -> NDArray[np.float64]:
    """(F, S) IoU, or the intersection's share of each box of `first`; 0 where there is no area."""
    sides = np.minimum(first[:, None, 2:], second[None, :, 2:]) - np.maximum(first[:, None, :2], second[None, :, :2])
    intersections = sides.clip(0).prod(axis=2)
    first_areas, second_areas = ((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second))
    areas = first_areas[:, None] + (0.0 if of_first else second_areas[None] - intersections)
    return np.asarray(
        np.divide(intersections, areas, out=np.zeros_like(intersections), where=areas > 0), dtype=np.float64
    )


def _annotations(table: BoxTable, first_id: int, is_crowd: int = 0) -> list[dict[str, Any]]:
    """Ids must start at 1: the evaluator takes a match with annotation 0 for none."""
    boxes = np.concatenate([table.boxes[:, :2], table.boxes[:, 2:] - table.boxes[:, :2]], axis=1)
    scores = np.zeros(len(table)) if table.scores is None else table.scores
    columns = (table.images.tolist(), boxes.tolist(), table.areas().tolist(), scores.tolist())
    return [
        {
            "id": number,
            "image_id": image,
            "category_id": _CATEGORY,
            "bbox": box,
            "area": area,
            "score": score,
            "iscrowd": is_crowd,
        }
        for number, (image, box, area, score) in enumerate(zip(*columns, strict=True), start=first_id)
    ]


def _coco(annotations: list[dict[str, Any]]) -> COCO:
    coco = COCO()
    images = {annotation["image_id"] for annotation in annotations}
    coco.dataset = {
        "images": [{"id": image} for image in images],
        "annotations": annotations,
        "categories": [{"id": _CATEGORY}],
    }
    coco.createIndex()
    return coco
