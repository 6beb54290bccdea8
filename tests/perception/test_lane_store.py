"""Lanes in flat arrays: what goes in comes out, and nothing of it stays beside."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perception.data.lane_store import pack_lanes


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6))
def test_lanes_come_out_as_they_went_in(lengths: list[list[int]]) -> None:
    chance = np.random.default_rng(0)
    images = [[chance.normal(size=(length, 2)).astype(np.float32) for length in image] for image in lengths]
    store = pack_lanes(iter(images))
    assert len(store) == len(images)
    for number, image in enumerate(images):
        lanes = store.lanes(number)
        assert len(lanes) == len(image)
        for lane, given_lane in zip(lanes, image, strict=True):
            assert lane.dtype == np.float64
            np.testing.assert_array_equal(lane, given_lane)


def test_images_that_are_read_one_by_one_are_not_kept() -> None:
    alive: list[weakref.ref[NDArray[np.float32]]] = []

    def images() -> Iterator[list[NDArray[np.float32]]]:
        for _ in range(5):
            # The one before may still be held, by the loop; none before that.
            assert all(reference() is None for reference in alive[:-1])
            lane = np.zeros((3, 2), np.float32)
            alive.append(weakref.ref(lane))
            lanes = [lane]
            del lane
            yield lanes
            del lanes

    assert len(pack_lanes(images())) == 5
