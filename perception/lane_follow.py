"""Lanes followed from frame to frame of a video: each keeps its number, and trembles less.

A light filter, not a model of motion: lanes of a frame are matched one to one with those followed so far by their mean
distance, and matched ones are averaged with their past. A lane that is missed for a few frames gets its number back;
nothing is shown that the frame at hand does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import Lane, LanePrediction

_NUM_ROWS = 64
_LEAST_SHARED_ROWS = 4
_FAR = 1e9

Row = NDArray[np.float64]
"""(_NUM_ROWS,) x in pixels at rows from the image's top to its bottom, NaN where the lane is not."""


@dataclass(frozen=True)
class FollowedPrediction(LanePrediction):
    """Lanes of a frame with the numbers by which they are followed."""

    identities: tuple[int, ...]
    """One a lane, from 1 in order of appearance; never used twice."""


@dataclass
class _Followed:
    identity: int
    x: Row
    num_missed: int = 0


class LaneFollower:
    """Takes the predictions of one video in turn. Frames must be of one size."""

    def __init__(
        self, weight_of_new: float = 0.5, largest_distance_fraction: float = 0.04, most_missed_frames: int = 8
    ) -> None:
        """A lane takes `weight_of_new` of what a frame says and keeps the rest; it is another one if it is further than
        `largest_distance_fraction` of the image's width away on average; it is forgotten after `most_missed_frames`.
        """
        self._weight = weight_of_new
        self._largest = largest_distance_fraction
        self._most_missed = most_missed_frames
        self._followed: list[_Followed] = []
        self._next = 1

    def update(self, prediction: LanePrediction, height: int, width: int) -> FollowedPrediction:
        """The same lanes, nearer to where they were, with their numbers."""
        rows = np.linspace(0, height - 1, _NUM_ROWS)
        found = [_at_rows(lane, rows) for lane in prediction.lanes]
        partners = self._match(found, self._largest * width)
        kept, lanes, identities = [], [], []
        for lane, x, partner in zip(prediction.lanes, found, partners, strict=True):
            if partner is None:
                partner = _Followed(self._next, x)
                self._next += 1
            else:
                both = ~np.isnan(partner.x) & ~np.isnan(x)
                smooth = np.where(both, self._weight * x + (1 - self._weight) * partner.x, x)
                lane = _moved(lane, rows, smooth - x)
                partner.x, partner.num_missed = smooth, 0
            kept.append(partner)
            lanes.append(lane)
            identities.append(partner.identity)
        missed = [followed for followed in self._followed if all(followed is not other for other in kept)]
        for followed in missed:
            followed.num_missed += 1
        self._followed = kept + [followed for followed in missed if followed.num_missed <= self._most_missed]
        return FollowedPrediction(tuple(lanes), prediction.scores, tuple(identities))

    def _match(self, found: Sequence[Row], largest: float) -> list[_Followed | None]:
        """For each lane of the frame the one it goes on with, by the least sum of distances."""
        # Imported here: it takes a while, and pictures without a history need none.
        from scipy.optimize import linear_sum_assignment

        distances = np.array([[_distance(x, other.x) for other in self._followed] for x in found])
        distances = distances.reshape(len(found), len(self._followed))
        # A pair too far apart costs as much as two lanes without partner: it is never made for the sake of others.
        lanes, others = linear_sum_assignment(np.minimum(distances, largest))
        partners: list[_Followed | None] = [None] * len(found)
        for lane, other in zip(lanes, others, strict=True):
            if distances[lane, other] < largest:
                partners[lane] = self._followed[other]
        return partners


def _at_rows(lane: Lane, rows: Row) -> Row:
    x: Row = np.interp(rows, lane[::-1, 1], lane[::-1, 0], left=np.nan, right=np.nan)
    return x


def _distance(x: Row, other: Row) -> float:
    """Mean |dx| over the rows that both have."""
    difference = np.abs(x - other)
    shared = ~np.isnan(difference)
    return float(difference[shared].mean()) if shared.sum() >= _LEAST_SHARED_ROWS else _FAR


def _moved(lane: Lane, rows: Row, shift: Row) -> Lane:
    """The lane's own points, moved sideways by `shift` between the rows where it is known."""
    known = ~np.isnan(shift)
    moved = lane.copy()
    moved[:, 0] += np.interp(lane[:, 1], rows[known], shift[known])
    return moved
