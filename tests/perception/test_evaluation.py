"""Evaluation over ranks: every sample counts once, every rank gets the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perception.config import RunConfig
from perception.data.lane_targets import LaneBatch
from perception.data.sample import LanePrediction, LaneSample, LaneTruth
from perception.distributed import SoloCommunicator
from perception.evaluation import autocast, evaluate
from perception.metrics.lane_benchmarks import BenchmarkMetric
from perception.model_config import LaneModelConfig
from perception.tasks import LaneTask

CPU = torch.device("cpu")
IMAGES = 7


class Roads:
    def __len__(self) -> int:
        return IMAGES

    def sample(self, index: int) -> LaneSample:
        y = np.arange(95.0, 40, -5)
        lanes = tuple(np.stack([np.full_like(y, x), y], axis=1) for x in range(20, 30 + 30 * (index % 3), 40))
        truth = LaneTruth(str(index), 96, 192, lanes, h_samples=tuple(range(40, 96, 5)))
        return LaneSample(np.zeros((96, 192, 3), np.uint8), truth)


class Knowing(LaneTask):
    """Predicts the first lane of every image rightly, and records what it saw."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__(RunConfig(task="lane", name="x", model=LaneModelConfig(input_height=64, input_width=160)))
        self.seen: list[str] = []
        self.fails_at = fails_at

    def predict(self, model: nn.Module, batch: LaneBatch) -> list[LanePrediction]:
        assert not model.training and not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") == isinstance(model, nn.Conv2d)
        self.seen += batch.names
        if self.fails_at in batch.names:
            raise ValueError("this image is broken")
        return [LanePrediction(truth.lanes[:1], (0.9,)) for truth in batch.truths]


class OfBenchmarks(Knowing):
    """The same by the metrics of the data sets that the images are of."""

    def metric(self) -> Any:
        return BenchmarkMetric()


class MixedRoads(Roads):
    """Images of LLAMAS, of OpenLane and of neither."""

    def sample(self, index: int) -> LaneSample:
        sample = super().sample(index)
        benchmark = ("llamas", "openlane", None)[index % 3]
        return replace(sample, truth=replace(sample.truth, benchmark=benchmark, h_samples=None))


class OneOf(SoloCommunicator):
    """A rank among several whose counts the test hands over."""

    def __init__(self, rank: int, size: int, others: Sequence[Any]) -> None:
        super().__init__(CPU)
        self.rank, self.size = rank, size
        self.others = list(others)
        self.given: torch.Tensor | None = None

    def allgather(self, value: torch.Tensor) -> list[torch.Tensor]:
        self.given = value
        rows = list(self.others)
        rows.insert(self.rank, value)
        return rows


def test_one_rank_sees_every_image_once() -> None:
    task = Knowing()
    figures = evaluate(task, nn.Linear(1, 1), Roads(), SoloCommunicator(CPU), 2, bf16=False)
    assert task.seen == [str(index) for index in range(IMAGES)]
    assert 0 < figures["culane_f1_50"] < 1


@pytest.mark.parametrize(("kind", "roads"), [(Knowing, Roads()), (OfBenchmarks, MixedRoads())])
def test_any_number_of_ranks_gives_the_figures_of_one(kind: type[Knowing], roads: Roads) -> None:
    alone = evaluate(kind(), nn.Linear(1, 1), roads, SoloCommunicator(CPU), 3, bf16=False)
    names = ["culane_f1_50", "tusimple_accuracy"] if kind is Knowing else ["llamas_f1_50", "openlane_f1_30"]
    assert all(0 < alone[name] <= 1 for name in names) and "curvelanes_f1_50" not in alone
    for size in (2, 3, 9):
        counts = []
        seen: list[str] = []
        for rank in range(size):
            task, own = kind(), OneOf(rank, size, [])
            evaluate(task, nn.Linear(1, 1), roads, own, 2, bf16=False)
            counts.append(own.given)
            seen += task.seen
        assert sorted(seen) == [str(index) for index in range(IMAGES)]
        for rank in (0, size - 1):
            others = counts[:rank] + counts[rank + 1 :]
            assert evaluate(kind(), nn.Linear(1, 1), roads, OneOf(rank, size, others), 2, bf16=False) == alone


@pytest.mark.parametrize("training", [False, True])
def test_the_models_mode_is_restored_even_after_a_failure(training: bool) -> None:
    model = nn.Linear(1, 1).train(training)
    evaluate(Knowing(), model, Roads(), SoloCommunicator(CPU), 2, bf16=False)
    assert model.training == training
    with pytest.raises(ValueError, match="broken"):
        evaluate(Knowing(fails_at="3"), model, Roads(), SoloCommunicator(CPU), 2, bf16=False)
    assert model.training == training


def test_bf16_where_it_is_asked_for() -> None:
    evaluate(Knowing(), nn.Conv2d(1, 1, 1), Roads(), SoloCommunicator(CPU), 4, bf16=True)
    with autocast(CPU, True):
        assert nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype == torch.bfloat16
    with autocast(CPU, False):
        assert nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype == torch.float32
