"""LAMB and hard scenes in whole runs: the same on one rank and on two, shared or not, stopped and resumed."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines import training_runs as runs

SETTINGS: dict[str, Any] = {
    **runs.TINY,
    "data.num_train_scenes": 20,
    "data.hard_scene_weight": 1.0,
    # Small, so that rounding does not grow: see test_training.test_two_ranks_equal_one.
    "optim.name": "lamb",
    "optim.lr": 1e-4,
    "optim.lr_scaling": "none",
    # More than three epochs of 30, and no whole number of steps in one.
    "train.num_samples": 110,
    "train.global_batch": 8,
    "train.batch_size_per_rank": 8,
    "train.checkpoint_every_steps": 3,
    "train.precision": "fp32",
    "train.sync_batch_norm": True,
}


def argv(out: Path, ranks: int, **changed: Any) -> list[str]:
    settings = {**SETTINGS, **{name.replace("__", "."): value for name, value in changed.items()}}
    return runs.command("train", "lane-small", "--out", str(out), "--ranks", str(ranks), settings=settings)


def checkpoint(out: Path) -> dict[str, Any]:
    return dict(torch.load(out / runs.result(out)["checkpoint"]["path"], weights_only=True))


@pytest.mark.slow
def test_whole_runs(tmp_path: Path) -> None:
    one, shared, alone, cut = (tmp_path / name for name in ("one", "shared", "alone", "cut"))
    for words in (
        argv(one, 1),
        argv(shared, 2, distributed__shared_update="on"),
        argv(alone, 2, distributed__shared_update="off"),
    ):
        done = runs.run(words, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "epoch 3: loss " in done.stdout and "data.hard_scene_weight = 1" in done.stdout

    # Other scenes would have losses that are far apart; and so the order is the same on one rank and on two.
    records = [runs.metrics(out) for out in (one, shared)]
    assert len(records[0]) == len(records[1]) == 14
    for a, b in zip(*records, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    states = [checkpoint(out)["hard_scenes"] for out in (one, shared)]
    np.testing.assert_allclose(states[0]["losses"].numpy(), states[1]["losses"].numpy(), rtol=1e-3)
    assert bool(torch.isfinite(states[0]["losses"]).all())
    assert states[0]["epoch_losses"][1].tolist() == states[1]["epoch_losses"][1].tolist() == [1.0] * 20 + [0.0] * 10

    # To the bit: with one owner of each parameter and without, and whenever a run was stopped.
    digest = runs.result(shared)["checkpoint"]["weights_sha256"]
    assert runs.result(alone)["checkpoint"]["weights_sha256"] == digest
    step = random.Random(0).randrange(6, 12)
    code, output = runs.start_and_signal(
        argv(cut, 2, distributed__shared_update="on"), tmp_path, cut, step, signal.SIGKILL, whole_session=False
    )
    assert code == -signal.SIGKILL, output
    for setting, expected in (("optim.name=adamw", "optim.name = lamb"), ("data.hard_scene_weight=0", "weight = 1.0")):
        refused = runs.run(
            runs.command("train", "--resume", "--ranks", "1", "--out", str(cut), "--set", setting), tmp_path
        )
        assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1, refused.stderr
        assert f"{expected}; resume with the run's own config.json" in refused.stderr
    resumed = runs.run(runs.command("train", "--resume", "--out", str(cut)), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    assert runs.result(cut)["checkpoint"]["weights_sha256"] == digest
    assert [record["loss"] for record in runs.metrics(cut)] == [record["loss"] for record in runs.metrics(shared)]
