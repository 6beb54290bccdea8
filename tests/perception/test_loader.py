"""Batches: the same whoever loads them, drawn from seed, epoch and index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from perception.config import DataConfig, RunConfig, TrainConfig
from perception.data.generated import GeneratedScenes
from perception.data.lane_targets import LaneBatch, SampleKey
from perception.data.loader import evaluation_batches, training_batches
from perception.data.stream import SampleStream
from perception.errors import UserError
from perception.model_config import LaneModelConfig
from perception.tasks import LaneTask

CONFIG = RunConfig(
    task="lane",
    name="tiny",
    model=LaneModelConfig(input_height=64, input_width=160),
    train=TrainConfig(num_samples=23, batch_size_per_rank=2, accumulation=2, seed=5),
)
IMAGES = 7


class KeysTask:
    """Batches are the keys themselves, so that whole runs are walked in no time."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def frequencies(self, samples: Numbers) -> None:
        return None

    def prepare(self, sample: int, key: SampleKey, train: bool) -> tuple[int, SampleKey, bool]:
        return sample, key, train

    def collate(self, examples: Sequence[tuple[int, SampleKey, bool]]) -> list[tuple[int, SampleKey, bool]]:
        return list(examples)


class Numbers:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int) -> int:
        return 100 + index


def scenes() -> GeneratedScenes:
    return GeneratedScenes(0, 0, IMAGES, 64, 160)


def lane_batches(config: RunConfig, rank: int = 0, size: int = 1, position: int = 0) -> list[LaneBatch]:
    return list(training_batches(scenes(), LaneTask(config), rank, size, position, pin_memory=False))


def assert_same(left: list[LaneBatch], right: list[LaneBatch]) -> None:
    assert [batch.names for batch in left] == [batch.names for batch in right]
    for a, b in zip(left, right, strict=True):
        for name in ("images", "xs", "valid", "start", "length", "present", "angles"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
        assert a.geometries == b.geometries
        for truth, other in zip(a.truths, b.truths, strict=True):
            for lane, other_lane in zip(truth.lanes, other.lanes, strict=True):
                np.testing.assert_array_equal(lane, other_lane)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_the_stream_in_order(size: int) -> None:
    task = KeysTask(CONFIG)
    by_rank = [list(training_batches(Numbers(IMAGES), task, rank, size, 0, False)) for rank in range(size)]
    assert len({len(batches) for batches in by_rank}) == 1
    taken = []
    for step in range(0, len(by_rank[0]), 2):
        for batches in by_rank:
            taken += [example for micro in batches[step : step + 2] for example in micro]
    expected = SampleStream(5, IMAGES).keys(0, len(taken))
    assert [key for _, key, _ in taken] == expected and 23 - len(taken) < size
    assert all(sample == 100 + key.index and train for sample, key, train in taken)


def test_a_given_global_batch_is_kept_by_ranks_that_cannot_share_it_equally() -> None:
    task = KeysTask(replace(CONFIG, train=replace(CONFIG.train, global_batch=8)))
    by_rank = [list(training_batches(Numbers(IMAGES), task, rank, 3, 0, False)) for rank in range(3)]
    first_step = [key for batches in by_rank for micro in batches[:2] for _, key, _ in micro]
    assert first_step == SampleStream(5, IMAGES).keys(0, 8)
    assert [[len(micro) for micro in batches[:2]] for batches in by_rank] == [[2, 1], [2, 1], [1, 1]]


def test_a_resumed_run_goes_on_with_the_same_batches() -> None:
    task = KeysTask(CONFIG)
    whole = list(training_batches(Numbers(IMAGES), task, 1, 2, 0, False))
    assert list(training_batches(Numbers(IMAGES), task, 1, 2, 16, False)) == whole[4:]
    assert list(training_batches(Numbers(IMAGES), task, 1, 2, 23, False)) == []


def test_an_empty_training_set_is_told() -> None:
    with pytest.raises(UserError, match="training set is empty"):
        training_batches(Numbers(0), KeysTask(CONFIG), 0, 1, 0, False)


@pytest.mark.parametrize(("count", "size", "batch"), [(7, 1, 3), (7, 2, 3), (7, 3, 2), (2, 4, 2), (0, 2, 2)])
def test_evaluation_takes_each_sample_once_over_all_ranks(count: int, size: int, batch: int) -> None:
    seen: list[int] = []
    for rank in range(size):
        batches = list(evaluation_batches(Numbers(count), KeysTask(CONFIG), rank, size, batch))
        assert all(1 <= len(examples) <= batch for examples in batches)
        assert not any(train for examples in batches for _, _, train in examples)
        seen += [key.index for examples in batches for _, key, _ in examples]
    assert sorted(seen) == list(range(count))


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    """Two ranks with another batch size get the pictures that one rank got; another seed gets others."""
    alone = lane_batches(CONFIG)
    other = replace(CONFIG, train=replace(CONFIG.train, batch_size_per_rank=3, accumulation=1))
    torch.manual_seed(99)
    np.random.seed(99)
    # One step of 6: the first rank's 3, then the second's.
    pairs = zip(lane_batches(other, 0, 2), lane_batches(other, 1, 2), strict=True)
    mixed = [image for pair in pairs for batch in pair for image in batch.images]
    expected = [image for batch in alone for image in batch.images]
    assert 23 - len(mixed) < 2
    for image, wanted in zip(mixed, expected, strict=False):
        assert torch.equal(image, wanted)
    reseeded = lane_batches(replace(CONFIG, train=replace(CONFIG.train, seed=6)))
    keys = SampleStream(5, IMAGES).keys(0, 23)
    first = dict(zip(keys, expected, strict=True))
    again = zip(SampleStream(6, IMAGES).keys(0, 23), (i for b in reseeded for i in b.images), strict=True)
    shared = [torch.equal(first[key], image) for key, image in again if key in first]
    assert len(shared) > 10 and not all(shared)
    epochs = [torch.equal(first[SampleKey(0, index)], first[SampleKey(1, index)]) for index in range(IMAGES)]
    assert not all(epochs)


@pytest.mark.parametrize("evaluating", [False, True])
def test_loading_takes_no_random_number_from_torch(evaluating: bool) -> None:
    """A resumed run sets torch's random state first, and opens the loader afterwards."""
    before = torch.get_rng_state()
    if evaluating:
        list(evaluation_batches(Numbers(4), KeysTask(CONFIG), 0, 1, 2))
    else:
        list(training_batches(Numbers(4), KeysTask(CONFIG), 0, 1, 0, False))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_worker_processes_give_the_same_batches_as_none() -> None:
    workers = replace(CONFIG, data=DataConfig(workers_per_rank=2))
    assert_same(lane_batches(workers), lane_batches(CONFIG))
    assert_same(lane_batches(workers, 1, 2, 16), lane_batches(CONFIG, 1, 2, 16))
    pair = [list(evaluation_batches(scenes(), LaneTask(config), 1, 2, 2)) for config in (workers, CONFIG)]
    assert_same(*pair)
