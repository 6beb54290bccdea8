"""Run an exported model with onnxruntime: no torch is needed, decoding is NumPy.

An exported file is one ONNX graph of tensors only, with the run's whole configuration in its metadata, so that a
model can never be used with the crop, the size or the classes of another one:

| metadata key       | value                                                        |
|--------------------|--------------------------------------------------------------|
| roadfuse.format    | version of this table, 1                                     |
| roadfuse.config    | the run's config.json                                        |
| roadfuse.classes   | JSON list of class names, empty for lanes                    |
| roadfuse.precision | fp32 or int8                                                 |
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perception.config import RunConfig, from_json
from perception.cores import available_cores
from perception.data.sample import LanePrediction
from perception.data.signs.sample import SignPrediction
from perception.errors import UserError
from perception.geometry import Geometry
from perception.lane_decode import LANE_OUTPUTS, decode_lanes, lane_geometry
from perception.model_config import LaneModelConfig

ONNX_FORMAT = 1
METADATA_PREFIX = "roadfuse."
INPUT_NAME = "images"
"""The network's one input: (B, H, W, 3) uint8 RGB."""

Prediction = LanePrediction | SignPrediction


class Predictor(Protocol):
    """A model that is ready to predict, from a run folder or from an exported file."""

    config: RunConfig
    classes: tuple[str, ...]
    """Names of sign classes by label; empty for lanes."""
    description: str
    """One line for people: what runs, where."""

    @property
    def fixed_batch(self) -> int | None:
        """The one batch size of the network, None where any will do."""

    def prepare(self, image: NDArray[np.uint8], name: str) -> Any:
        """An (H, W, 3) uint8 RGB image of any size → what `predict` takes."""

    def predict(self, prepared: Sequence[Any]) -> tuple[list[Prediction], float]:
        """A prediction an image, in its original pixels, and the seconds spent in the network alone."""


@dataclass(frozen=True)
class PreparedImage:
    """(input_height, input_width, 3) uint8 RGB, and the way back."""

    pixels: NDArray[np.uint8]
    geometry: Geometry


class OnnxModel:
    """A Predictor of an exported file."""

    def __init__(self, path: Path, num_threads: int = 0) -> None:
        """Raises UserError where `path` is no file that this project exported. `num_threads` 0: all cores."""
        runtime = require("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads or available_cores()
        options.log_severity_level = 3
        if not path.is_file():
            raise UserError(f"{path}: no such exported file")
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a kind for each stage, none of them public
            raise UserError(
                f"{path}: not a readable ONNX file ({str(error).splitlines()[0][:120]}); export it again"
            ) from None
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.config, self.classes, self.precision = _read_metadata(metadata, path)
        self._decoder = decoder_for(self.config)
        batch = self._session.get_inputs()[0].shape[0]
        self.fixed_batch = batch if isinstance(batch, int) else None
        self.description = (
            f"{path.name}: {self.config.name}, {self.precision}, onnxruntime {runtime.__version__} on "
            f"{options.intra_op_num_threads} threads"
        )

    def prepare(self, image: NDArray[np.uint8], name: str) -> PreparedImage:
        return self._decoder.prepare(image)

    def predict(self, prepared: Sequence[PreparedImage]) -> tuple[list[Prediction], float]:
        size = self.fixed_batch or max(1, len(prepared))
        predictions: list[Prediction] = []
        seconds = 0.0
        for first in range(0, len(prepared), size):
            part = prepared[first : first + size]
            images = np.stack([image.pixels for image in part])
            # A fixed batch is filled up; what comes out of the filling is left out below.
            images = np.concatenate([images, np.repeat(images[-1:], size - len(part), axis=0)])
            started = time.perf_counter()
            outputs = self.run(images)
            seconds += time.perf_counter() - started
            predictions += [
                self._decoder.decode([output[index] for output in outputs], image.geometry)
                for index, image in enumerate(part)
            ]
        return predictions, seconds

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """The network alone: (B, H, W, 3) uint8 RGB → its outputs in the decoder's order."""
        outputs: list[NDArray[np.float32]] = self._session.run(list(self._decoder.outputs), {INPUT_NAME: images})
        return outputs


class Decoder(Protocol):
    """What runs around an exported network, without torch."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the network's outputs, in the order that `decode` takes them."""

    def prepare(self, image: NDArray[np.uint8]) -> PreparedImage: ...

    def decode(self, outputs: Sequence[NDArray[np.float32]], geometry: Geometry) -> Prediction:
        """Outputs of one image, without the batch dimension."""


class LaneDecoder:
    outputs = LANE_OUTPUTS

    def __init__(self, model: LaneModelConfig) -> None:
        self.model = model

    def prepare(self, image: NDArray[np.uint8]) -> PreparedImage:
        geometry = lane_geometry(self.model, *image.shape[:2])
        return PreparedImage(geometry.image_to_input(image), geometry)

    def decode(self, outputs: Sequence[NDArray[np.float32]], geometry: Geometry) -> LanePrediction:
        logits, xs, start, length = outputs
        return decode_lanes(logits, xs, start, length, geometry, self.model)


def decoder_for(config: RunConfig) -> Decoder:
    """The decoder of the task; UserError where it has none."""
    if isinstance(config.model, LaneModelConfig):
        return LaneDecoder(config.model)
    raise UserError(f"{config.name}: a {config.task} model cannot be exported; predict from its run folder")


def require(module: str) -> Any:
    """Import a package of the extra "export"; UserError that names the extra where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f'{module} cannot be imported ({error}): install the extra "export", e.g. pip install -e ".[export]"'
        ) from None


def metadata_of(config_json: str, classes: Sequence[str], precision: str) -> dict[str, str]:
    """What an exported file says of itself; `_read_metadata` reads it."""
    values = {
        "format": str(ONNX_FORMAT),
        "config": config_json,
        "classes": json.dumps(list(classes)),
        "precision": precision,
    }
    return {METADATA_PREFIX + name: value for name, value in values.items()}


def _read_metadata(metadata: dict[str, str], path: Path) -> tuple[RunConfig, tuple[str, ...], str]:
    found = {name: metadata.get(METADATA_PREFIX + name) for name in ("format", "config", "classes", "precision")}
    if found["format"] is None:
        raise UserError(f"{path}: an ONNX file, but not one that `python -m pipelines export` wrote")
    if found["format"] != str(ONNX_FORMAT):
        raise UserError(f"{path}: export format {found['format']}, this version reads {ONNX_FORMAT}: export it again")
    config, classes, precision = found["config"], found["classes"], found["precision"]
    if config is None or classes is None or precision is None:
        raise UserError(f"{path}: its metadata are incomplete: export it again")
    return from_json(config, str(path)), tuple(json.loads(classes)), precision
