"""Hard scenes more often: how often, by which losses, and that neither ranks nor a pause change the order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perception.config import DataConfig, RunConfig, TrainConfig, override, validate
from perception.data.lane_targets import SampleKey
from perception.data.loader import samples_ahead, training_batches
from perception.data.stream import SampleStream, micro_batches, step_positions
from perception.distributed import SoloCommunicator
from perception.errors import UserError
from perception.hard_scenes import HardScenes, hard_frequencies, hard_scenes
from pipelines.configs import named_config

SETTINGS = settings(deadline=None, max_examples=40)
Loss = Callable[[SampleKey], float]
SEED = 3


class Meeting:
    """Adds up what the ranks, threads here, bring to it."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.brought: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.barrier.wait() == 0:
            self.brought = []
        self.barrier.wait()
        self.brought.append(tensor)
        self.barrier.wait()
        return torch.stack(self.brought).sum(0)


class ThreadRank:
    """What HardScenes asks of a communicator."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.is_first, self.device = meeting, rank == 0, torch.device("cpu")

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.meeting.add(tensor.clone())


class Run:
    """Walks the stream as the training loop does, on several ranks, with made-up losses."""

    def __init__(self, weight: float, num_scenes: int, frequencies: NDArray[np.float64] | None = None) -> None:
        self.weight, self.num_scenes = weight, num_scenes
        self.frequencies = np.ones(num_scenes) if frequencies is None else frequencies

    def go(
        self, loss: Loss, start: int, end: int, batch: int, size: int = 1, state: Any = None, accumulation: int = 1
    ) -> tuple[list[SampleKey], dict[str, torch.Tensor]]:
        """Keys trained on from `start` to `end`, and the state then."""
        meeting = Meeting(size)
        keys: list[list[SampleKey]] = []
        states: list[dict[str, torch.Tensor]] = []

        def rank(number: int) -> None:
            scenes = HardScenes(self.weight, SEED, self.frequencies, ThreadRank(meeting, number))  # type: ignore[arg-type]
            if state is not None:
                scenes.load(state, start)
            stream = SampleStream(SEED, self.num_scenes, scenes)
            for position, count in step_positions(end, batch, size, start):
                all_keys = stream.keys(position, count)
                if number == 0:
                    keys.append(all_keys)
                for first, last in micro_batches(count, number, size, accumulation):
                    losses = torch.tensor([loss(key) for key in all_keys[first:last]])
                    scenes.record(position + first, losses)
                scenes.after_step(position + count)
            gathered = scenes.state()
            if number == 0:
                states.append(gathered)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [key for step in keys for key in step], states[0]


def loss_of(key: SampleKey) -> float:
    """Hard in another way in each epoch and repetition; some have no finite loss."""
    value = float(np.random.default_rng([key.epoch, key.index, key.repeat]).gamma(2.0))
    return float("nan") if value < 0.1 else value


def epochs_of(keys: Sequence[SampleKey], num_epochs: int) -> list[Counter[int]]:
    return [Counter(key.index for key in keys if key.epoch == epoch) for epoch in range(num_epochs)]


@SETTINGS
@given(st.data(), st.integers(1, 60), st.floats(0.01, 20.0))
def test_frequencies_rise_with_the_loss_and_add_up_to_the_same(data: st.DataObject, count: int, weight: float) -> None:
    values = data.draw(st.lists(st.one_of(st.floats(0, 1e30), st.just(np.nan), st.just(np.inf)), min_size=count))
    losses = np.array(values, dtype=np.float32)
    plain = np.array(data.draw(st.lists(st.floats(0.2, 9.0), min_size=len(losses), max_size=len(losses))))
    wanted = hard_frequencies(losses, plain, weight)
    assert wanted.sum() == pytest.approx(plain.sum() * (1 + weight / 2))
    factors = wanted / plain
    assert (factors >= 1).all() and (factors <= 1 + weight + 1e-9).all()
    known = np.isfinite(losses)
    np.testing.assert_allclose(factors[~known], 1 + weight / 2)
    easiest_first = np.argsort(losses[known], kind="stable")
    assert (np.diff(factors[known][easiest_first]) > 0).all()


def test_by_hand() -> None:
    """Four scenes at weight 2: the hardest nearly three times as often as the easiest, all together twice four."""
    losses = np.array([0.3, 9.0, 0.1, 0.2], dtype=np.float32)
    np.testing.assert_allclose(hard_frequencies(losses, np.ones(4), 2.0), [2.25, 2.75, 1.25, 1.75])


@SETTINGS
@given(num_scenes=st.integers(8, 50), weight=st.sampled_from([0.01, 0.3, 1.0, 3.0]), batch=st.integers(1, 8))
def test_every_epoch_has_one_length_and_every_scene_at_least_once(num_scenes: int, weight: float, batch: int) -> None:
    length = HardScenes(weight, SEED, np.ones(num_scenes), SoloCommunicator()).epoch_length
    assert num_scenes < length <= num_scenes * (1 + weight / 2) + 1
    keys, _ = Run(weight, num_scenes).go(loss_of, 0, 5 * length, batch)
    assert [key.epoch for key in keys] == [number // length for number in range(5 * length)]
    for times in epochs_of(keys, 5):
        assert set(times) == set(range(num_scenes))
        # What is rounded up to whole samples in an epoch is shared by all.
        assert max(times.values()) <= np.ceil((1 + weight) * (1 + 1 / num_scenes))
    assert len(set(keys)) == len(keys), "no two samples of a run have the same draws"


def test_hard_scenes_are_seen_more_often_two_epochs_later_and_no_longer_once_they_are_easy() -> None:
    hard = set(range(10))

    def loss(key: SampleKey) -> float:
        return 5.0 + key.index if key.index in hard and key.epoch < 6 else 1.0 + key.index / 100

    keys, _ = Run(3.0, 40).go(loss, 0, 12 * 100, 8)
    held = [sum(times[index] for index in hard) for times in epochs_of(keys, 12)]
    # All alike, each 2.5 times on average; the hardest quarter 3.6 times, the last quarter 1.4 times.
    assert all(20 <= count <= 30 for count in held[:2])
    assert all(count > 33 for count in held[2:8])
    assert all(count < 22 for count in held[8:])


def test_losses_of_a_scene_that_an_epoch_holds_more_than_once_are_averaged() -> None:
    _, state = Run(2.0, 4).go(lambda key: 1.0 + key.index + key.repeat, 0, 8, 2)
    keys = SampleStream(SEED, 4, HardScenes(2.0, SEED, np.ones(4), SoloCommunicator())).keys(0, 8)
    times = Counter(key.index for key in keys)
    expected = [1.0 + index + (times[index] - 1) / 2 for index in range(4)]
    np.testing.assert_allclose(state["losses"][1].numpy(), expected)


@settings(SETTINGS, max_examples=15)
@given(st.data(), st.integers(12, 40), st.integers(1, 12))
def test_neither_ranks_nor_pauses_change_the_order(data: st.DataObject, num_scenes: int, batch: int) -> None:
    """Paused at any step boundary and taken up by another number of ranks: the same keys and the same state."""
    run = Run(data.draw(st.sampled_from([0.5, 2.0])), num_scenes)
    end = 7 * num_scenes // batch * batch
    whole, last = run.go(loss_of, 0, end, batch)
    first_size, second_size = data.draw(st.integers(1, min(3, batch))), data.draw(st.integers(1, min(3, batch)))
    boundary = data.draw(st.integers(0, end // batch)) * batch
    before, state = run.go(loss_of, 0, boundary, batch, first_size, accumulation=data.draw(st.integers(1, 2)))
    after, found = run.go(loss_of, boundary, end, batch, second_size, state)
    assert before + after == whole
    for name, tensor in last.items():
        assert torch.equal(found[name].nan_to_num(-1.0), tensor.nan_to_num(-1.0)), name


def test_a_data_sets_own_frequencies_are_multiplied() -> None:
    run = Run(1.0, 3, np.array([1.0, 4.0, 1.0]))
    keys, _ = run.go(lambda key: float(key.index), 0, 900, 3)
    times = Counter(key.index for key in keys if key.epoch >= 2)
    factors = hard_frequencies(np.array([0.0, 1.0, 2.0], np.float32), np.array([1.0, 4.0, 1.0]), 1.0)
    np.testing.assert_allclose([times[i] / 98 for i in range(3)], factors, atol=0.1)


def test_a_scene_without_a_finite_loss_keeps_its_former_one_and_is_counted() -> None:
    scenes = HardScenes(2.0, SEED, np.ones(2), SoloCommunicator())
    for epoch in range(2):
        keys = SampleStream(SEED, 2, scenes).keys(4 * epoch, 4)
        scenes.record(4 * epoch, torch.tensor([5.0 if key.index else float("inf") if epoch else 1.0 for key in keys]))
        said = scenes.after_step(4 * epoch + 4)
    assert said is not None and said.startswith("epoch 2: loss 3.000, of the hardest 10% of scenes 5.000")
    assert said.endswith("; 1 scenes were without a finite loss")
    assert scenes.state()["losses"][1].tolist() == [1.0, 5.0]


def test_an_epoch_whose_losses_are_not_known_yet_is_never_made_up() -> None:
    scenes = HardScenes(1.0, SEED, np.ones(4), SoloCommunicator())
    stream = SampleStream(SEED, 4, scenes)
    assert len(stream.keys(6, 6)) == 6
    with pytest.raises(RuntimeError, match="epoch 2 is asked for in epoch 0"):
        stream.keys(12, 1)


# Settings


def tiny(weight: float, batch: int, workers: int = 0) -> RunConfig:
    return RunConfig(
        "lane",
        "tiny",
        data=DataConfig(hard_scene_weight=weight, workers_per_rank=workers),
        train=TrainConfig(num_samples=150, batch_size_per_rank=batch, accumulation=2, seed=SEED),
    )


def test_off_by_default_and_one_line_for_what_cannot_be() -> None:
    config = tiny(0.0, 2)
    assert config.data == DataConfig() and hard_scenes(config, 4, None, SoloCommunicator()) is None
    config = tiny(1.0, 2, workers=1)
    # A step has two micro-batches; four more of the worker are two more steps.
    assert samples_ahead(config, size=3) == 3 * 12
    assert hard_scenes(config, 8, None, SoloCommunicator()) is not None
    with pytest.raises(UserError, match=r"hard_scene_weight = 1: .* may take 12 samples, an epoch has 11: lower"):
        hard_scenes(config, 7, None, SoloCommunicator())
    with pytest.raises(UserError, match=r"data\.hard_scene_weight = -1\.0: must not be negative"):
        validate(tiny(-1.0, 2))
    with pytest.raises(UserError, match=r"data\.hard_scene_weight = 1e\+300: must be from 0 to 100"):
        validate(tiny(1e300, 2))
    with pytest.raises(UserError, match=r"data\.hard_scene_weight = 1\.0: for lanes only"):
        override(named_config("sign"), ["data.hard_scene_weight=1"])
    with pytest.raises(UserError, match="this task tells no loss an image"):
        HardScenes(1.0, SEED, np.ones(4), SoloCommunicator()).record(0, None)


def test_state_of_other_data_is_refused() -> None:
    _, state = Run(1.0, 6).go(loss_of, 0, 4, 2)
    with pytest.raises(UserError, match="does not hold the losses of these 8 scenes"):
        HardScenes(1.0, SEED, np.ones(8), SoloCommunicator()).load(state, 4)


class Numbers:
    def __len__(self) -> int:
        return 8

    def sample(self, index: int) -> int:
        return index


class KeysTask:
    """Batches are the keys themselves."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def frequencies(self, samples: Numbers) -> None:
        raise AssertionError("they are given")

    def prepare(self, sample: int, key: SampleKey, train: bool) -> SampleKey:
        return key

    def collate(self, examples: Sequence[SampleKey]) -> list[SampleKey]:
        return list(examples)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_workers_prepare_ahead_does_not_change_the_order(workers: int) -> None:
    """In the shortest epoch that is allowed with a worker."""
    config = tiny(1.0, 2, workers)
    whole, _ = Run(1.0, 8).go(loss_of, 0, 150, 4)
    scenes = hard_scenes(config, 8, None, SoloCommunicator())
    assert scenes is not None and scenes.epoch_length == samples_ahead(tiny(1.0, 2, workers=1), 1)
    taken: list[SampleKey] = []
    for batch in training_batches(Numbers(), KeysTask(config), 0, 1, 0, pin_memory=False, frequencies=scenes):
        scenes.record(len(taken), torch.tensor([loss_of(key) for key in batch]))
        taken += batch
        if len(taken) % 4 == 0 or len(taken) == 150:
            scenes.after_step(len(taken))
    assert taken == whole


def test_losses_of_images_are_those_of_the_batch() -> None:
    """Each alone as in its batch, and their mean is the loss that is trained."""
    from perception.losses import lane_losses
    from tests.perception.test_losses import CONFIG, make_batch, make_output, straight

    batch = make_batch([[straight(40.0), straight(90.0, 0.4)], [], [straight(70.0, -0.5)]])
    output = make_output(3, requires_grad=True)
    losses = lane_losses(output, batch, CONFIG)
    assert losses.of_images is not None and losses.of_images.shape == (3,) and not losses.of_images.requires_grad
    torch.testing.assert_close(losses.of_images.mean(), losses.total.detach())
    alone = lane_losses(
        type(output)(*(part[:1] for part in output[:4]), tuple(a[:1] for a in output[4])),
        make_batch([[straight(40.0), straight(90.0, 0.4)]]),
        CONFIG,
    )
    torch.testing.assert_close(alone.total.detach(), losses.of_images[0])
