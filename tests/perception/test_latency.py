"""The time a trained network takes for one image: what is timed, and that nothing else notices."""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from perception import latency
from perception.latency import LEAST_RUNS, latency_seconds
from perception.model_config import LaneModelConfig, SignModelConfig
from perception.models.lane import LaneModel
from perception.models.sign import SignModel
from tests.pipelines import training_runs as runs

CPU = torch.device("cpu")
NARROW = {"backbone_widths": (8, 16, 24, 32), "backbone_blocks": (1, 1, 1, 1)}


@pytest.fixture
def shortly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tenth of the time, and on one thread."""
    monkeypatch.setattr(latency, "WARM_UP_SECONDS", 0.03)
    monkeypatch.setattr(latency, "MEASURED_SECONDS", 0.07)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sleeping(nn.Module):
    """Takes a stated time, the first calls longer, and notes how it was called."""

    def __init__(self, seconds: float, first_seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.first_seconds = seconds, first_seconds
        self.calls: list[tuple[object, ...]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.calls.append((tuple(images.shape), images.dtype, self.training, torch.is_grad_enabled()))
        time.sleep(self.seconds if len(self.calls) > 1 else self.seconds + self.first_seconds)
        return images


@pytest.mark.usefixtures("shortly")
def test_the_median_of_whole_runs_on_one_image_is_told_and_the_first_ones_are_not() -> None:
    network = Sleeping(0.002, first_seconds=0.1)
    found = latency_seconds(network, 64, 96, CPU, bf16=False)
    assert 0.002 <= found < 0.02
    assert set(network.calls) == {((1, 64, 96, 3), torch.uint8, False, False)}
    assert network.training


@pytest.mark.usefixtures("shortly")
def test_a_slow_network_is_run_a_few_times_only() -> None:
    network = Sleeping(0.04).eval()
    assert latency_seconds(network, 32, 32, CPU, bf16=False) >= 0.04
    assert len(network.calls) == 1 + LEAST_RUNS and not network.training


@pytest.mark.usefixtures("shortly")
@pytest.mark.parametrize(("task", "bf16"), [("lane", False), ("lane", True), ("sign", False)])
def test_weights_generators_and_modes_stay_as_they_are(task: str, bf16: bool) -> None:
    network = LaneModel(LaneModelConfig(**NARROW)) if task == "lane" else SignModel(SignModelConfig(**NARROW))
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state()), torch.get_num_threads()
    assert latency_seconds(network, 32, 32, CPU, bf16) > 0
    after = network.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(module.training for module in network.modules())
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2:] == (pickle.dumps(np.random.get_state()), torch.get_num_threads())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_a_training_tells_it_and_is_the_same_to_the_bit_without(tmp_path: Path, cache: Path) -> None:
    settings = {**runs.TINY, "train.num_samples": 13, "train.evaluate_every_steps": 3}
    words = ["train", "lane-small", "--ranks", "1", "--out"]
    done = runs.run(runs.command(*words, str(tmp_path / "with"), settings=settings), cache)
    assert done.returncode == 0, done.stderr
    argv = runs.command(*words, str(tmp_path / "without"), settings=settings)
    script = (
        "import sys, perception.training_run as run; run.latency_seconds = lambda *_: None; "
        "from pipelines.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = runs.run([sys.executable, "-c", script, *argv[3:]], cache)
    assert done.returncode == 0, done.stderr
    told, untold = runs.result(tmp_path / "with"), runs.result(tmp_path / "without")
    assert 0 < told["model"]["latency_seconds"] < 1 and untold["model"]["latency_seconds"] is None
    assert told["model"]["num_parameters"] == untold["model"]["num_parameters"]
    assert told["checkpoint"]["weights_sha256"] == untold["checkpoint"]["weights_sha256"]
    assert told["metrics"] == untold["metrics"]


@pytest.mark.slow
def test_ranks_that_end_at_their_target_have_it_too(tmp_path: Path, cache: Path) -> None:
    target = {"train.target_metric": "tusimple_accuracy", "train.target_value": 0.0}
    settings = {**runs.TINY, "train.num_samples": 40, "train.evaluate_every_steps": 4, **target}
    argv = runs.command("train", "lane-small", "--out", str(tmp_path / "run"), "--ranks", "2", settings=settings)
    done = runs.run(argv, cache)
    assert done.returncode == 0, done.stderr
    result = runs.result(tmp_path / "run")
    assert result["status"] == "target_reached" and 0 < result["model"]["latency_seconds"] < 1
