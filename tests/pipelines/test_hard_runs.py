"""Trainings on hardly any data: fewer images than ranks, a rank with nothing to evaluate, nothing but errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from perception.checkpoint import load_checkpoint
from tests.pipelines import training_runs as runs

LANE = {**runs.TINY, "data.format": "culane", "train.num_samples": 8}
SIGN = {
    "model.backbone_widths": [8, 16, 24, 32],
    "model.input_height": 96,
    "model.input_width": 96,
    "model.neck_channels": 16,
    "train.batch_size_per_rank": 1,
    "train.log_every_steps": 1,
    "train.num_threads_per_rank": 1,
    "train.num_samples": 8,
}
ENGINE = ["--engine", "torch"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def write_road(folder: Path, lanes: str, num_training: int = 2) -> Path:
    """CULane's layout with one image to evaluate."""
    (folder / "list").mkdir(parents=True)
    (folder / "v").mkdir()
    training = [f"/v/{number}.png" for number in range(num_training)]
    (folder / "list" / "train_gt.txt").write_text("\n".join(training))
    (folder / "list" / "val_gt.txt").write_text("/v/a.png\n")
    for name in (*training, "/v/a.png"):
        cv2.imwrite(str(folder / name[1:]), np.full((128, 320, 3), 90, np.uint8))
        (folder / name[1:]).with_suffix(".lines.txt").write_text(lanes)
    return folder


def write_street(folder: Path) -> Path:
    """GTSDB's layout with two images to train on, one of them without a sign, and one to evaluate."""
    folder.mkdir()
    for number in (1, 2, 8, 700):
        cv2.imwrite(str(folder / f"{number:05}.png"), np.full((120, 160, 3), 90, np.uint8))
    (folder / "gt.txt").write_text("".join(f"{number:05}.ppm;20;20;60;60;14\n" for number in (1, 8, 700)))
    return folder


def finite_metrics(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses and all(math.isfinite(loss) for loss in losses)
    return dict(runs.result(out)["metrics"])


@pytest.mark.slow
def test_more_ranks_than_images_are_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    data, out = write_road(tmp_path / "road", "60 120 80 90 100 50\n", num_training=1), tmp_path / "run"
    words = ["--data", str(data), "--out", str(out), "--ranks", "2", *ENGINE]
    done = runs.run(runs.command("train", "lane-small", *words, settings=LANE), cache)
    assert done.returncode == 2
    assert done.stderr == f"error: {data}: 1 training images for 2 ranks: start at most one rank per image\n"
    assert not (out / "config.json").exists()


@pytest.mark.slow
def test_a_rank_without_lanes_to_evaluate(tmp_path: Path, cache: Path) -> None:
    """Two ranks, one image to evaluate: the second has none. No image has a lane: every normaliser would be 0."""
    out = tmp_path / "run"
    words = ["--data", str(write_road(tmp_path / "road", "")), "--out", str(out), "--ranks", "2", *ENGINE]
    done = runs.run(runs.command("train", "lane-small", *words, settings=LANE), cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "culane_f1_50" in finite_metrics(out) and runs.result(out)["samples"] == 8


@pytest.mark.slow
def test_a_rank_without_signs_to_evaluate(tmp_path: Path, cache: Path) -> None:
    """And of the images that they train on one has none."""
    out = tmp_path / "run"
    words = ["--data", str(write_street(tmp_path / "street")), "--out", str(out), "--ranks", "2", *ENGINE]
    done = runs.run(runs.command("train", "sign", *words, settings=SIGN), cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ap50_class_agnostic" in finite_metrics(out)


@pytest.mark.slow
def test_more_ranks_than_a_global_batch_are_refused_in_one_line(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    settings = {**LANE, "train.global_batch": 1}
    words = ["--data", str(write_road(tmp_path / "road", "")), "--out", str(out), "--ranks", "2", *ENGINE]
    done = runs.run(runs.command("train", "lane-small", *words, settings=settings), cache)
    assert done.returncode == 2
    assert done.stderr == "error: train.global_batch = 1 cannot be shared by 2 ranks: start fewer\n"


@pytest.mark.slow
def test_an_evaluation_on_the_way_changes_nothing_in_the_training(tmp_path: Path, cache: Path) -> None:
    """Losses of 0 after a validation, or other ones: the model's mode, averages and draws are as they were."""
    losses = {}
    for name, every in (("never", 0), ("often", 2)):
        out = tmp_path / name
        done = runs.train(out, cache, train__num_samples=8, train__evaluate_every_steps=every)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[name] = [record["loss"] for record in runs.metrics(out)]
        evaluated = [line for line in (out / "metrics.jsonl").read_text().splitlines() if "validation/" in line]
        assert len(evaluated) >= (2 if every else 0)
    assert losses["often"] == losses["never"] and all(losses["never"])
    digests = {name: runs.result(tmp_path / name)["checkpoint"]["weights_sha256"] for name in losses}
    assert digests["often"] == digests["never"]


@pytest.mark.slow
def test_no_average_of_a_run_that_diverged_holds_nan(tmp_path: Path, cache: Path) -> None:
    """One NaN in a running average would stay for ever: steps that are not finite are skipped as a whole."""
    out = tmp_path / "run"
    settings = {"optim__lr": 1e18, "optim__clip_norm": 0.0, "train__max_nonfinite_steps": 2}
    done = runs.train(out, cache, train__num_samples=200, train__checkpoint_every_steps=1, **settings)
    assert done.returncode == 1 and runs.result(out)["status"] == "diverged", done.stdout + done.stderr
    for path in sorted((out / "checkpoints").glob("step-*.pt")):
        content = load_checkpoint(path)
        assert all(tensor.isfinite().all() for tensor in content["averaged_model"].values()), path
