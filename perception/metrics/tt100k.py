"""Precision and recall at one score, as Tsinghua-Tencent 100K counts them.

Source: Zhu et al., "Traffic-Sign Detection and Classification in the Wild", CVPR 2016, and its evaluator: pairs of one
class and image with IoU above .5 are taken by falling IoU, whatever their scores; sizes are half-open ranges of the
longer side, of truths and of detections without a match. What it calls accuracy is precision.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perception.metrics.average_precision import BoxTable, overlaps

SIDES = {"0-32": (0, 32), "32-96": (32, 96), "96-400": (96, 400)}
"""Longer side in original pixels, from and below. The figures without a range are of 0 to 400."""
_IOU = 0.5


def tt100k_rates(
    detections: BoxTable,
    detection_labels: NDArray[np.int64],
    truths: BoxTable,
    truth_labels: NDArray[np.int64],
    ignored: BoxTable,
    score_threshold: float,
) -> dict[str, float]:
    """tt100k_accuracy and tt100k_recall, the same and truths with _side/RANGE; absent where nothing is counted.

    Detections from `score_threshold` on count, but one without a match that lies in an ignored region does not.
    """
    assert detections.scores is not None
    sure = detections.scores >= score_threshold
    detections, detection_labels = detections.select(sure), detection_labels[sure]
    match = np.full(len(truths), -1)
    counted = np.ones(len(detections), dtype=bool)
    for image in np.unique(detections.images).tolist():
        found, signs = detections.rows_of(image), truths.rows_of(image)
        ious = overlaps(truths.boxes[signs], detections.boxes[found])
        ious[truth_labels[signs, None] != detection_labels[found]] = 0.0
        taken = np.zeros(found.stop - found.start, dtype=bool)
        for pair in np.argsort(-ious, axis=None, kind="stable").tolist():
            sign, detection = divmod(pair, len(taken))
            if ious[sign, detection] <= _IOU:
                break
            if match[signs.start + sign] < 0 and not taken[detection]:
                match[signs.start + sign] = found.start + detection
                taken[detection] = True
        shares = overlaps(detections.boxes[found], ignored.boxes[ignored.rows_of(image)], of_first=True)
        counted[found] = taken | ~(shares > _IOU).any(axis=1)
    truth_sides, detection_sides = _longer_sides(truths), _longer_sides(detections)
    unmatched = counted.copy()
    unmatched[match[match >= 0]] = False
    figures: dict[str, float] = {}
    for name, (low, high) in {"": (0, 400), **SIDES}.items():
        suffix = f"_side/{name}" if name else ""
        inside = (truth_sides >= low) & (truth_sides < high)
        num_right = int((match[inside] >= 0).sum())
        num_false = int((unmatched & (detection_sides >= low) & (detection_sides < high)).sum())
        if suffix:
            figures[f"truths{suffix}"] = int(inside.sum())
        if inside.any():
            figures[f"tt100k_recall{suffix}"] = num_right / int(inside.sum())
        if num_right + num_false:
            figures[f"tt100k_accuracy{suffix}"] = num_right / (num_right + num_false)
    return figures


def _longer_sides(table: BoxTable) -> NDArray[np.float64]:
    return np.asarray((table.boxes[:, 2:] - table.boxes[:, :2]).max(axis=1, initial=0.0), dtype=np.float64)
