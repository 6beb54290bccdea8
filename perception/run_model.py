"""A trained model from its run folder, to predict or to export: the averaged weights, as they are evaluated."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from perception.checkpoint import best_checkpoint, load_checkpoint
from perception.config import RunConfig, from_json
from perception.data.lane_targets import SampleKey
from perception.data.sample import LaneSample, LaneTruth
from perception.data.signs.sample import SignSample, SignTruth
from perception.errors import UserError
from perception.onnx_model import Prediction
from perception.run_folder import RunFolder
from perception.tasks import Task, task_for


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint of a run with its model in evaluation mode."""

    run: RunFolder
    config: RunConfig
    task: Task
    model: nn.Module
    checkpoint: Path
    checkpoint_sha256: str
    step: int
    samples: int
    metric: float | None
    """The task's primary metric at this step, where it was evaluated."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of sign classes by label; empty for lanes."""
        return tuple(getattr(self.task, "classes", ()))


def load_trained(path: Path) -> TrainedModel:
    """`path` is a run folder, whose best checkpoint is taken, or a checkpoint in one.

    Raises UserError where there is none, where its hash differs from its record, and where it is of another model.
    """
    if path.is_dir():
        run = RunFolder(path)
        best = best_checkpoint(run.checkpoints)
        if best is None:
            raise UserError(f"{path}: no checkpoint in {run.checkpoints}; give a run folder of `train`")
        file = best.path
    elif path.is_file():
        run, file = RunFolder(path.parent.parent), path
    else:
        raise UserError(f"{path}: no such run folder, checkpoint or exported file")
    sha256 = _checked_sha256(file)
    content = load_checkpoint(file)
    missing = {"config", "averaged_model", "step", "samples"} - content.keys()
    if missing:
        raise UserError(f"{file}: not a checkpoint of a training run: {', '.join(sorted(missing))} missing")
    config = from_json(content["config"], str(file))
    task = task_for(config)
    model = task.build_model()
    try:
        model.load_state_dict(content["averaged_model"])
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"{file}: its weights do not fit the model of its own configuration: {first[:120]}") from None
    record = _record(file)
    return TrainedModel(
        run=run,
        config=config,
        task=task,
        model=model.eval(),
        checkpoint=file,
        checkpoint_sha256=sha256,
        step=int(content["step"]),
        samples=int(content["samples"]),
        metric=record.get("metric"),
    )


class RunModel:
    """A Predictor of a trained model, by torch; obeys any task."""

    fixed_batch = None

    def __init__(self, trained: TrainedModel, num_threads: int = 0, device: str = "auto") -> None:
        """`num_threads` 0: torch's own choice; `device` cpu, cuda or auto: the GPU if there is one."""
        if num_threads:
            torch.set_num_threads(num_threads)
        self.config, self.classes, self._task = trained.config, trained.classes, trained.task
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._model = copy.deepcopy(trained.model).to(self._device)
        self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._network_seconds = 0.0
        # Around the forward pass, wherever the task calls it: all other time of `predict` is decoding.
        self._model.register_forward_pre_hook(self._enter)
        self._model.register_forward_hook(self._leave)
        where = f"{torch.get_num_threads()} threads" if self._device.type == "cpu" else str(self._device)
        self.description = f"{trained.checkpoint}: {self.config.name}, fp32, torch {torch.__version__} on {where}"

    def prepare(self, image: NDArray[np.uint8], name: str) -> Any:
        return self._task.prepare(_unlabelled(self.config.task, image, name), SampleKey(0, 0), train=False)

    def predict(self, prepared: Sequence[Any]) -> tuple[list[Prediction], float]:
        self._network_seconds = 0.0
        with torch.inference_mode():
            batch = self._task.collate(prepared).to(self._device)
            predictions = self._task.predict(self._model, batch)
        return predictions, self._network_seconds

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._wait()
        self._network_seconds -= time.perf_counter()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._wait()
        self._network_seconds += time.perf_counter()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _unlabelled(task: str, image: NDArray[np.uint8], name: str) -> Any:
    height, width = image.shape[:2]
    if task == "lane":
        return LaneSample(image, LaneTruth(name, height, width, ()))
    no_boxes = np.zeros((0, 4))
    return SignSample(image, SignTruth(name, height, width, no_boxes, np.zeros(0, np.int64), no_boxes))


def _record(checkpoint: Path) -> dict[str, Any]:
    """The JSON beside a checkpoint; empty where there is none."""
    try:
        raw = json.loads(checkpoint.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _checked_sha256(checkpoint: Path) -> str:
    try:
        with checkpoint.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{checkpoint}: checkpoint cannot be read ({error.strerror})") from None
    recorded = _record(checkpoint).get("sha256")
    if recorded is not None and recorded != found:
        raise UserError(
            f"{checkpoint}: is damaged or truncated (its sha256 differs from its record); name another checkpoint"
        )
    return found
