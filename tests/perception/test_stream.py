"""Which rank trains on what: everything once, whatever the number of ranks, from any point on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.data.lane_targets import SampleKey
from perception.data.stream import SampleStream, epoch_order, micro_batches, split_evenly, step_positions
from perception.errors import UserError

SETTINGS = settings(deadline=None, max_examples=80)
grids = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 400),
        "size": st.integers(1, 17),
        "batch": st.integers(1, 6),
        "accumulation": st.integers(1, 5),
    }
)


def walk(num_samples: int, size: int, batch: int, accumulation: int, position: int = 0) -> list[list[list[list[int]]]]:
    """Positions by step, rank and micro-batch."""
    return [
        [
            [list(range(first + a, first + b)) for a, b in micro_batches(count, rank, size, accumulation)]
            for rank in range(size)
        ]
        for first, count in step_positions(num_samples, batch * size * accumulation, size, position)
    ]


def flat(steps: list[list[list[list[int]]]]) -> list[int]:
    return [position for step in steps for rank in step for micro in rank for position in micro]


@SETTINGS
@given(grids)
def test_each_position_is_trained_on_once_and_in_order(grid: dict[str, int]) -> None:
    positions = flat(walk(**grid))
    assert positions == list(range(len(positions)))
    left = grid["num_samples"] - len(positions)
    assert 0 <= left < grid["size"]


@SETTINGS
@given(grids)
def test_ranks_have_equally_many_full_micro_batches(grid: dict[str, int]) -> None:
    """Synchronised batch norm needs as many forward passes on each rank, none of them empty."""
    for step in walk(**grid):
        assert len({len(rank) for rank in step}) == 1
        assert 1 <= len(step[0]) <= grid["accumulation"]
        shares = [sum(map(len, rank)) for rank in step]
        assert max(shares) - min(shares) <= 1
        for rank in step:
            sizes = [len(micro) for micro in rank]
            assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
            # A short last batch that cannot be cut evenly: two images where a micro-batch has one.
            assert max(sizes) <= max(grid["batch"], 2)
            assert max(sizes) <= grid["batch"] or step == walk(**grid)[-1]


@SETTINGS
@given(grids)
def test_full_steps_have_full_batches(grid: dict[str, int]) -> None:
    for step in walk(**grid)[:-1]:
        assert {len(micro) for rank in step for micro in rank} == {grid["batch"]}
        assert {len(rank) for rank in step} == {grid["accumulation"]}


@SETTINGS
@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_order_does_not_depend_on_ranks_and_accumulation(
    images: int, num_samples: int, size: int, accumulation: int, seed: int
) -> None:
    def keys(size: int, accumulation: int) -> list[SampleKey]:
        stream = SampleStream(seed, images)
        return [
            key
            for first, count in step_positions(num_samples, 2 * size * accumulation, size, 0)
            for rank in range(size)
            for a, b in micro_batches(count, rank, size, accumulation)
            for key in stream.keys(first, count)[a:b]
        ]

    alone, many = keys(1, 1), keys(size, accumulation)
    assert many == alone[: len(many)] and len(alone) - len(many) < size


@SETTINGS
@given(grids, st.data())
def test_resume_at_any_step_boundary_leaves_the_same_rest(grid: dict[str, int], data: st.DataObject) -> None:
    steps = walk(**grid)
    boundary = data.draw(st.integers(0, len(steps)))
    done = len(flat(steps[:boundary]))
    assert walk(**grid, position=done) == steps[boundary:]
    images = data.draw(st.integers(1, 50))
    whole = SampleStream(5, images).keys(0, grid["num_samples"])
    assert SampleStream(5, images).keys(done, grid["num_samples"] - done) == whole[done:]


@SETTINGS
@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 200))
def test_an_epoch_is_a_permutation_drawn_from_seed_and_epoch(seed: int, epoch: int, images: int) -> None:
    keys = SampleStream(seed, images).keys(epoch * images, images)
    assert {key.epoch for key in keys} == {epoch}
    assert sorted(key.index for key in keys) == list(range(images))
    np.testing.assert_array_equal([key.index for key in keys], epoch_order(seed, epoch, images))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    recorded = epoch_order(0, 0, 10).tolist()
    assert recorded == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1], "resumed runs rely on the order staying as it is"


def test_keys_in_any_order_of_asking() -> None:
    stream, fresh = SampleStream(1, 7), SampleStream(1, 7)
    late = stream.keys(30, 9)
    assert stream.keys(3, 20) == fresh.keys(3, 20) and stream.keys(30, 9) == late
    assert stream.keys(3, 0) == []


@given(st.integers(0, 500), st.integers(1, 40))
def test_split_evenly(count: int, parts: int) -> None:
    bounds = split_evenly(count, parts)
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])] and bounds[-1][1] == count
    sizes = [end - start for start, end in bounds]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match="training set is empty"):
        SampleStream(0, 0)
    with pytest.raises(ValueError, match="3 samples cannot be shared by 4 ranks"):
        micro_batches(3, 0, 4, 1)
    assert list(step_positions(3, 8, 4, 0)) == []
