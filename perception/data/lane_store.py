"""Lanes of many images in a few flat arrays.

A list of small arrays would be copied page by page into every loader process as
reference counts are touched; flat arrays stay shared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import Lane


@dataclass(frozen=True)
class LaneStore:
    """N points of L lanes of M images."""

    points: NDArray[np.float32]
    """(N, 2)."""
    lane_starts: NDArray[np.int64]
    """(L + 1,) index of each lane's first point."""
    image_starts: NDArray[np.int64]
    """(M + 1,) index of each image's first lane."""

    def __len__(self) -> int:
        return len(self.image_starts) - 1

    @property
    def lanes_of_images(self) -> NDArray[np.int64]:
        """(M,) number of lanes of each image."""
        return np.diff(self.image_starts)

    def lanes(self, image: int) -> tuple[Lane, ...]:
        """Lanes of one image as (K, 2) float64 arrays of their own."""
        first, last = self.image_starts[image], self.image_starts[image + 1]
        return tuple(
            self.points[self.lane_starts[lane] : self.lane_starts[lane + 1]].astype(np.float64)
            for lane in range(first, last)
        )


def pack_lanes(images: Iterable[Sequence[NDArray[np.float32]]]) -> LaneStore:
    """Pack, for each image, its lanes of shape (K, 2); of images that are read one by one none stays beside."""
    points, lane_lengths, image_lengths = bytearray(), array("q"), array("q")
    for lanes in images:
        image_lengths.append(len(lanes))
        for lane in lanes:
            lane_lengths.append(len(lane))
            points += lane.tobytes()
    return LaneStore(
        points=np.frombuffer(points, dtype=np.float32).reshape(-1, 2),
        lane_starts=_starts(lane_lengths),
        image_starts=_starts(image_lengths),
    )


def pack_names(names: Sequence[str]) -> NDArray[np.bytes_]:
    """(M,) fixed-width UTF-8; read one back with `unpack_name`."""
    return np.array([name.encode() for name in names], dtype=np.bytes_)


def unpack_name(names: NDArray[np.bytes_], index: int) -> str:
    return bytes(names[index]).decode()


def _starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])
