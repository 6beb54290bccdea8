"""Points of one labelled lane in the form that everything after a reader takes: bottom to top, y falling strictly.

| points                                     | rule                                                                  |
|--------------------------------------------|-----------------------------------------------------------------------|
| not finite, beyond any image               | dropped                                                               |
| the same as the one before                 | dropped                                                               |
| from top to bottom                         | reversed                                                              |
| y neither falls nor rises all along        | ordered by y where that makes the line shorter: they were unordered;  |
|                                            | else they trace a bend, and the longest run whose y falls is kept     |
| fewer than two left                        | no lane                                                               |

Each is counted in the report with the first place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import ReadReport
from perception.data.signs.fields import LARGEST_NUMBER


def repair_points(
    points: NDArray[np.float32], where: str, report: ReadReport, in_sequence: bool = False
) -> NDArray[np.float32] | None:
    """(K, 2) points by the table above; None where no lane is left.

    `in_sequence`: the format lists points along the lane, so they are never ordered anew.
    """
    finite = np.isfinite(points).all(axis=1)
    if not finite.all():
        report.note("point that is not finite: dropped", where, int((~finite).sum()))
        points = points[finite]
    near = (np.abs(points) <= LARGEST_NUMBER).all(axis=1)
    if not near.all():
        report.note("point beyond any image: dropped", where, int((~near).sum()))
        points = points[near]
    if len(points) > 1:
        distinct = np.concatenate([[True], (np.diff(points, axis=0) != 0).any(axis=1)])
        if not distinct.all():
            report.note("consecutive duplicate point: dropped", where, int((~distinct).sum()))
            points = points[distinct]
    if len(points) > 1:
        points = _falling(points, where, report, in_sequence)
    if len(points) < 2:
        report.note("lane with fewer than two points: dropped", where)
        return None
    return points


def _falling(points: NDArray[np.float32], where: str, report: ReadReport, in_sequence: bool) -> NDArray[np.float32]:
    rises = np.diff(points[:, 1]) > 0
    if rises.any() and not rises.all() and not in_sequence:
        in_order = points[np.argsort(-points[:, 1], kind="stable")]
        if _length(in_order) < 0.999 * _length(points):
            report.note("points in no order: ordered by y", where)
            points = in_order
    if points[-1, 1] > points[0, 1]:
        report.note("points from top to bottom: reversed", where)
        points = points[::-1]
    kept = longest_falling(points[:, 1])
    if len(kept) != len(points):
        report.note("point whose y does not fall: dropped", where, len(points) - len(kept))
    return points[kept]


def longest_falling(y: NDArray[np.float32]) -> list[int]:
    """Indices of the longest strictly falling subsequence of (K,) y, K >= 1."""
    length, previous = np.ones(len(y), dtype=int), np.full(len(y), -1)
    for i in range(1, len(y)):
        above = np.flatnonzero(y[:i] > y[i])
        if len(above):
            previous[i] = above[np.argmax(length[above])]
            length[i] = length[previous[i]] + 1
    chain = [int(np.argmax(length))]
    while previous[chain[-1]] >= 0:
        chain.append(int(previous[chain[-1]]))
    return chain[::-1]


def _length(points: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(np.diff(points.astype(np.float64), axis=0), axis=1).sum())
