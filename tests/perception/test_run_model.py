"""A trained model is loaded from its run folder as it was evaluated, and predicts as the task does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from perception.checkpoint import load_checkpoint, save_checkpoint
from perception.config import to_json
from perception.data.generated import render_scene
from perception.data.lane_targets import SampleKey
from perception.errors import UserError
from perception.run_model import RunModel, load_trained
from tests.exported_models import CONFIG, make_run


def test_the_averaged_weights_of_the_best_checkpoint_are_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    content = load_checkpoint(run / "checkpoints/step-00000007.pt")
    del content["format"]
    worse = {name: tensor + 1 for name, tensor in content["averaged_model"].items()}
    save_checkpoint(run / "checkpoints", 9, 90, {**content, "averaged_model": worse}, 0.1)
    trained = load_trained(run)
    assert (trained.step, trained.samples, trained.metric, trained.model.training) == (7, 70, 0.25, False)
    for name, tensor in trained.model.state_dict().items():
        torch.testing.assert_close(tensor, content["averaged_model"][name])
    # Unless one is named.
    assert load_trained(run / "checkpoints/step-00000009.pt").metric == 0.1


def test_predicts_as_the_task_does_and_tells_the_networks_time(tmp_path: Path) -> None:
    trained = load_trained(make_run(tmp_path / "run"))
    predictor = RunModel(trained, device="cpu")
    samples = [render_scene(0, index, 128, 320) for index in range(3)]
    prepared = [predictor.prepare(sample.image, "a") for sample in samples]
    predictions, seconds = predictor.predict(prepared)
    task = trained.task
    batch = task.collate([task.prepare(sample, SampleKey(0, 0), train=False) for sample in samples])
    expected = task.predict(trained.model, batch)
    assert seconds > 0 and sum(len(prediction.lanes) for prediction in expected) > 0
    for mine, theirs in zip(predictions, expected, strict=True):
        for lane, other in zip(mine.lanes, theirs.lanes, strict=True):
            np.testing.assert_allclose(lane, other, atol=1e-3)


def damaged_run(folder: Path, kind: str) -> Path:
    run = make_run(folder)
    file = run / "checkpoints/step-00000007.pt"
    if kind == "none":
        file.with_suffix(".json").unlink()
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "another model":
        content = {"config": to_json(CONFIG), "averaged_model": {"x": torch.zeros(1)}, "step": 7, "samples": 70}
        save_checkpoint(run / "checkpoints", 7, 70, content, None)
    elif kind == "another version":
        torch.save({"format": 99}, file)
        file.with_suffix(".json").write_text(json.dumps({"step": 7, "samples": 70, "metric": None, "sha256": None}))
    elif kind == "no training":
        save_checkpoint(run / "checkpoints", 7, 70, {"x": 1}, None)
    return run


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "no checkpoint in"),
        ("truncated", "is damaged or truncated"),
        ("another model", "its weights do not fit the model of its own configuration"),
        ("another version", "checkpoint format 99, this version reads"),
        ("no training", "not a checkpoint of a training run: averaged_model, config, samples, step missing"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_one_line(kind: str, message: str, tmp_path: Path) -> None:
    run = damaged_run(tmp_path / "run", kind)
    with pytest.raises(UserError) as error:
        load_trained(run)
    assert message in str(error.value) and "\n" not in str(error.value)
