"""Run an exported model with onnxruntime: no torch is needed, decoding is NumPy.

An exported file is one ONNX graph of tensors only, with the run's whole configuration in its metadata, so that a
model can never be used with the crop, the size or the classes of another one:

| metadata key       | value                                                        |
|--------------------|--------------------------------------------------------------|
| roadfuse.format    | version of this table, 1                                     |
| roadfuse.config    | the run's config.json                                        |
| roadfuse.classes   | JSON list of class names, empty for lanes                    |
| roadfuse.precision | fp32 or int8                                                 |

The number of images at once, and of a sign model height and width too, may be open: the input's own shape tells.
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
from perception.model_config import LaneModelConfig, SignModelConfig
from perception.sign_decode_numpy import SIGN_OUTPUTS, Tiles, decode_image, lay_out

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


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """What the network takes of one image, and the way back."""

    inputs: tuple[NDArray[np.uint8], ...]
    """(height, width, 3) uint8 RGB each: of lanes the resized image, of signs its tiles."""
    layout: Geometry | Tiles


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
        batch, height, width = self._session.get_inputs()[0].shape[:3]
        self.fixed_batch = batch if isinstance(batch, int) else None
        self.fixed_size = (height, width) if isinstance(height, int) and isinstance(width, int) else None
        """Height and width of the input; None where any multiples of 32 will do."""
        self._decoder = decoder_for(self.config, self.fixed_size)
        outputs = [output.name for output in self._session.get_outputs()]
        if not set(self._decoder.outputs) <= set(outputs):
            raise UserError(
                f"{path}: its outputs are {', '.join(outputs)}, those of a {self.config.task} model "
                f"{', '.join(self._decoder.outputs)}: export it again"
            )
        self.description = (
            f"{path.name}: {self.config.name}, {self.precision}, onnxruntime {runtime.__version__} on "
            f"{options.intra_op_num_threads} threads"
        )

    def prepare(self, image: NDArray[np.uint8], name: str) -> PreparedImage:
        return self._decoder.prepare(image)

    def predict(self, prepared: Sequence[PreparedImage]) -> tuple[list[Prediction], float]:
        most = self.fixed_batch or max(1, len(prepared))
        # Inputs of one size go through the network together, whichever images they are of.
        by_size: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for number, image in enumerate(prepared):
            for part, pixels in enumerate(image.inputs):
                by_size.setdefault(pixels.shape, []).append((number, part))
        found: dict[tuple[int, int], list[NDArray[np.float32]]] = {}
        seconds = 0.0
        for places in by_size.values():
            for first in range(0, len(places), most):
                chosen = places[first : first + most]
                images = np.stack([prepared[number].inputs[part] for number, part in chosen])
                # A fixed batch is filled up; what comes out of the filling is left out below.
                missing = (self.fixed_batch or len(chosen)) - len(chosen)
                if missing:
                    images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
                started = time.perf_counter()
                outputs = self.run(images)
                seconds += time.perf_counter() - started
                for row, place in enumerate(chosen):
                    found[place] = [output[row] for output in outputs]
        predictions = [
            self._decoder.decode([found[number, part] for part in range(len(image.inputs))], image.layout)
            for number, image in enumerate(prepared)
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

    def decode(self, outputs: Sequence[Sequence[NDArray[np.float32]]], layout: Geometry | Tiles) -> Prediction:
        """Outputs for each input of one image, without the batch dimension."""


class LaneDecoder:
    outputs = LANE_OUTPUTS

    def __init__(self, model: LaneModelConfig) -> None:
        self.model = model

    def prepare(self, image: NDArray[np.uint8]) -> PreparedImage:
        geometry = lane_geometry(self.model, *image.shape[:2])
        return PreparedImage((geometry.image_to_input(image),), geometry)

    def decode(self, outputs: Sequence[Sequence[NDArray[np.float32]]], layout: Geometry | Tiles) -> LanePrediction:
        assert isinstance(layout, Geometry)
        ((logits, xs, start, length),) = outputs
        return decode_lanes(logits, xs, start, length, layout, self.model)


class SignDecoder:
    outputs = SIGN_OUTPUTS

    def __init__(self, model: SignModelConfig, fixed_size: tuple[int, int] | None) -> None:
        """`fixed_size`: height and width that the network takes, None for any."""
        self.model, self.fixed_size = model, fixed_size

    def prepare(self, image: NDArray[np.uint8]) -> PreparedImage:
        height, width = image.shape[:2]
        tiles = lay_out(height, width, self.model, self.fixed_size)
        return PreparedImage(tuple(tiles.inputs(image)), tiles)

    def decode(self, outputs: Sequence[Sequence[NDArray[np.float32]]], layout: Geometry | Tiles) -> SignPrediction:
        assert isinstance(layout, Tiles)
        return decode_image(outputs, layout, self.model)


def decoder_for(config: RunConfig, fixed_size: tuple[int, int] | None = None) -> Decoder:
    """The decoder of the task, for a network of this input size; of lanes the configuration tells it."""
    if isinstance(config.model, SignModelConfig):
        return SignDecoder(config.model, fixed_size)
    return LaneDecoder(config.model)


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
