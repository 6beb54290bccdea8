"""Rare classes more often: how often, in which order, and that neither ranks nor a pause change it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.data.lane_targets import SampleKey
from perception.data.sample import ReadReport
from perception.data.signs.sample import SignSample, SignTruth
from perception.data.signs.sampling import repeat_factors
from perception.data.stream import SampleStream, micro_batches, step_positions, times_in_epoch

SETTINGS = settings(deadline=None, max_examples=60)
frequency_lists = st.lists(st.floats(0.2, 9.0), min_size=1, max_size=60)


class Labelled:
    """Images that hold signs of the given labels."""

    def __init__(self, labels: list[list[int]], num_classes: int) -> None:
        self.classes = tuple(str(number) for number in range(num_classes))
        self.report = ReadReport()
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def truth(self, index: int) -> SignTruth:
        labels = np.array(self._labels[index], np.int64)
        return SignTruth(str(index), 10, 10, np.zeros((len(labels), 4)), labels, np.zeros((0, 4)))

    def sample(self, index: int) -> SignSample:
        raise AssertionError("no image is needed")


def test_repeat_factors_by_hand() -> None:
    """Class 0 is in half of 20 images, class 1 in one, class 2 in none; 9 images have no sign."""
    samples = Labelled([[0, 0]] * 9 + [[0, 1, 1]] + [[]] * 10, 3)
    factors = repeat_factors(samples, 0.2)
    np.testing.assert_allclose(factors, [1.0] * 9 + [2.0] + [1.0] * 10)
    assert (repeat_factors(samples, 0.05) == 1).all() and (repeat_factors(Labelled([[]], 3), 0.5) == 1).all()


@SETTINGS
@given(frequencies=frequency_lists, seed=st.integers(0, 1000))
def test_every_epoch_has_one_length_and_frequencies_are_kept_on_average(frequencies: list[float], seed: int) -> None:
    wanted = np.array(frequencies)
    wanted *= max(1, round(wanted.sum())) / wanted.sum()
    times = np.array([times_in_epoch(seed, epoch, wanted) for epoch in range(200)])
    assert (times.sum(axis=1) == round(wanted.sum())).all()
    assert (np.abs(times - wanted) < 1 + 1e-9).all()
    np.testing.assert_allclose(times.mean(axis=0), wanted, atol=0.2)


@SETTINGS
@given(frequencies=frequency_lists, position=st.integers(0, 500))
def test_the_stream_is_a_function_of_seed_and_position(frequencies: list[float], position: int) -> None:
    weights = np.array(frequencies)
    whole = SampleStream(7, len(weights), weights).keys(0, position + 40)
    assert SampleStream(7, len(weights), weights).keys(position, 40) == whole[position:]
    length = SampleStream(7, len(weights), weights).epoch_length
    assert [key.epoch for key in whole] == [number // length for number in range(len(whole))]
    # No two samples of a run have the same draws.
    assert len(set(whole)) == len(whole)
    held: dict[tuple[int, int], list[int]] = {}
    for key in whole[: len(whole) // length * length]:
        held.setdefault((key.epoch, key.index), []).append(key.repeat)
    assert all(sorted(repeats) == list(range(len(repeats))) for repeats in held.values())


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_share_one_order(size: int) -> None:
    weights = np.array([1.0, 3.5, 1.2, 1.0, 2.0])
    expected = SampleStream(3, 5, weights).keys(0, 96)
    taken = []
    for position, count in step_positions(96, 8, size, 0):
        keys = SampleStream(3, 5, weights).keys(position, count)
        for rank in range(size):
            taken += [key for start, end in micro_batches(count, rank, size, 1) for key in keys[start:end]]
    assert taken == expected


def test_equal_frequencies_hold_each_sample_once() -> None:
    keys = SampleStream(0, 9, np.ones(9)).keys(0, 18)
    assert Counter((key.epoch, key.index) for key in keys) == Counter((e, i) for e in (0, 1) for i in range(9))
    assert SampleStream(0, 9).keys(0, 18) == [SampleKey(key.epoch, key.index) for key in keys]
