"""Training signs from the command line, on a small folder in GTSDB's layout that the tests draw."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from perception.data.loader import training_batches
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.sources import open_sources
from perception.errors import UserError
from perception.sign_task import with_classes
from perception.tasks import task_for
from pipelines.__main__ import main
from pipelines.configs import named_config, with_options
from tests.pipelines import training_runs as runs

TINY = {
    "model.backbone_widths": [8, 16, 24, 32],
    "model.input_height": 96,
    "model.input_width": 96,
    "model.neck_channels": 16,
    "train.batch_size_per_rank": 2,
    "train.log_every_steps": 1,
    "train.num_threads_per_rank": 1,
}
EQUAL = {
    "train.num_samples": 78,
    "train.precision": "fp32",
    "train.sync_batch_norm": True,
    "optim.lr": 1e-4,
    "optim.lr_scaling": "none",
}
"""A small rate: assignment of points to signs is discrete, and a flipped decision would amplify a last bit."""
ENGINES = [
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
    ),
    "torch",
]


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of 120x160, two thirds of them without signs."""
    folder = tmp_path_factory.mktemp("streets")
    random = np.random.default_rng(0)
    lines = []
    for number in range(24):
        image = random.integers(60, 110, (120, 160, 3), dtype=np.uint8)
        for _ in range(number % 3 // 2 * 2):
            side, label = int(random.integers(14, 40)), int(random.integers(4))
            x, y = (int(random.integers(0, length - side)) for length in (160, 120))
            image[y : y + side, x : x + side] = (40 * label, 250 - 60 * label, 230)
            lines.append(f"{number:05}.ppm;{x + 1};{y + 1};{x + side};{y + side};{label + 11}\n")
        (folder / "images").mkdir(exist_ok=True)
        cv2.imwrite(str(folder / "images" / f"{number:05}.png"), image)
    (folder / "gt.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def train(out: Path, streets: Path, cache: Path, *words: str, **settings: Any) -> tuple[int, str]:
    chosen = {**TINY, **{name.replace("__", "."): value for name, value in settings.items()}}
    argv = runs.command("train", "sign", "--data", str(streets), "--out", str(out), *words, settings=chosen)
    done = runs.run(argv, cache)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_leaves_what_the_design_names(tmp_path: Path, streets: Path, cache: Path) -> None:
    out = tmp_path / "run"
    code, output = train(
        out, streets, cache, "--format", "gtsdb", train__num_samples=9, train__checkpoint_every_steps=3
    )
    assert code == 0, output
    assert "training: 21 images, 14 signs of 43 classes" in output
    assert "validation: 3 images, 2 signs of 43 classes" in output
    assert "note: 39 of 43 classes have no sign to train on: speed-limit-20, " in output
    result = runs.result(out)
    assert result["status"] == "finished" and result["samples"] == 9
    assert {"ap", "ap50", "ap50_class_agnostic", "ap50_superclass"} <= set(result["metrics"])
    config = json.loads((out / "config.json").read_text())
    assert config["model"]["num_classes"] == 43 and config["model"]["class_names"] == list(GTSDB_CLASSES)
    assert config["data"]["format"] == "gtsdb" and config["augment"]["repeat_threshold"] > 0
    picture = cv2.imread(str(out / "validation.png"))
    assert picture is not None and picture.shape[1] > 600
    assert "left_out" in runs.metrics(out)[0]
    again = tmp_path / "again"
    done = runs.run(runs.command("train", str(out / "config.json"), "--out", str(again)), cache)
    assert done.returncode == 0, done.stderr
    assert runs.result(again)["checkpoint"]["weights_sha256"] == result["checkpoint"]["weights_sha256"]


def test_batches_of_the_equality_test_hold_what_it_is_about(streets: Path) -> None:
    """Images without signs, and a rank whose whole batch has none while the other's has some."""
    settings = {**TINY, **EQUAL, "train.batch_size_per_rank": 2}
    assignments = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    config = with_options(named_config("sign"), str(streets), None, assignments)
    sources = open_sources(config.data, "sign")
    task = task_for(config, sources.train)
    has_signs = [
        [bool((batch.targets.labels >= 0).any()) for batch in training_batches(sources.train, task, rank, 2, 0, False)]
        for rank in (0, 1)
    ]
    assert sum(a != b for a, b in zip(*has_signs, strict=True)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_equal_one(tmp_path: Path, streets: Path, cache: Path, engine: str) -> None:
    """fp32, batch norm synchronised, the same global batch: losses to 1e-3 over 20 steps, two runs to the bit."""
    one = {**EQUAL, "train.batch_size_per_rank": 4}
    two = {**EQUAL, "train.batch_size_per_rank": 2}
    code, output = train(tmp_path / "one", streets, cache, **one)
    assert code == 0, output
    for number in (1, 2):
        code, output = train(tmp_path / f"two{number}", streets, cache, "--ranks", "2", "--engine", engine, **two)
        assert code == 0, output
    alone, shared, again = (runs.metrics(tmp_path / name) for name in ("one", "two1", "two2"))
    assert len(alone) == len(shared) == 20
    assert shared[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-4)
    for a, b in zip(alone, shared, strict=True):
        for term in ("loss", "box", "offset", "objectness", "class"):
            assert b[term] == pytest.approx(a[term], rel=1e-3)
        assert b["left_out"] == a["left_out"]
    assert [record["loss"] for record in shared] == [record["loss"] for record in again]


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit(tmp_path: Path, streets: Path, cache: Path) -> None:
    import signal

    settings = {**TINY, "train.num_samples": 60, "train.checkpoint_every_steps": 100}
    argv = runs.command("train", "sign", "--data", str(streets), "--out", str(tmp_path / "whole"), settings=settings)
    assert runs.run(argv, cache).returncode == 0
    out = tmp_path / "stopped"
    argv = runs.command("train", "sign", "--data", str(streets), "--out", str(out), settings=settings)
    code, output = runs.start_and_signal(argv, cache, out, 5, signal.SIGTERM, whole_session=False)
    assert code == 75, output
    assert runs.run(runs.command("train", "--resume", "--out", str(out)), cache).returncode == 0
    whole, resumed = (runs.result(tmp_path / name) for name in ("whole", "stopped"))
    assert resumed["checkpoint"]["weights_sha256"] == whole["checkpoint"]["weights_sha256"]
    assert resumed["metrics"] == whole["metrics"]


@pytest.mark.slow
def test_a_run_begins_with_anothers_weights_or_says_why_not(tmp_path: Path, streets: Path, cache: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(first, streets, cache, train__num_samples=4)[0] == 0
    code, output = train(second, streets, cache, train__num_samples=2, train__initial_checkpoint=str(first))
    assert code == 0 and f"begins with the weights of {first}" in output, output
    for settings, message in [
        ({"data__class_map": "gtsdb-superclasses"}, 'class "speed-limit-20" and 41 more of'),
        ({"model__neck_channels": 32}, "its weights do not fit this model's settings"),
        ({"train__initial_checkpoint": str(tmp_path / "none")}, "none: no such run folder"),
    ]:
        chosen = {"train__num_samples": 2, "train__initial_checkpoint": str(first), **settings}
        code, output = train(tmp_path / "refused", streets, cache, **chosen)
        assert code == 2 and message in output.strip().splitlines()[-1], output


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("gtsdbb", 'data.format = "gtsdbb" is unknown; did you mean "gtsdb"?'),
        ("culane", 'data.format = "culane" is unknown; allowed: auto, bdd100k, coco'),
    ],
)
def test_a_format_of_no_or_another_task_is_refused(format: str, message: str, tmp_path: Path, streets: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        main(["train", "sign", "--data", str(streets), "--out", str(tmp_path / "run"), "--format", format])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.format=coco", "no COCO annotation file"),
        ("data.train_list=trian", "trian"),
        ("data.class_map=none.toml", "none.toml"),
        ("model.num_classes=3", "model.num_classes = 3, but "),
        ('model.num_classes=2 model.class_names=["stop","yield"]', 'class "yield"'),
    ],
)
def test_what_does_not_fit_the_data_is_told_in_one_line(assignment: str, message: str, streets: Path) -> None:
    with pytest.raises(UserError) as caught:
        config = with_options(named_config("sign"), str(streets), None, [*assignment.split()])
        with_classes(config, open_sources(config.data, "sign").train.classes)
    assert message in str(caught.value) and "\n" not in str(caught.value)
