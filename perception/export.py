"""A trained model to one ONNX file, checked before it is written: the same lanes or signs as torch's, as good in int8.

The graph takes (B, H, W, 3) uint8 RGB at input size and gives tensors; thresholding, suppression and the way back to
original pixels stay outside (perception.lane_decode, perception.sign_decode_numpy): they are a few loops over few
candidates, and a graph without them runs anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from perception.config import to_json
from perception.data.sources import FIRST_TRAINING_SCENE
from perception.errors import UserError
from perception.export_checks import Checks as Checks
from perception.export_checks import check_files, parts, scenes_for
from perception.lane_decode import LANE_OUTPUTS
from perception.model_card import model_card
from perception.models.lane import LaneModel
from perception.models.sign import SignModel
from perception.onnx_model import INPUT_NAME, OnnxModel, decoder_for, metadata_of, require
from perception.provenance import card_path, export_record, record_path
from perception.quantise import quantise
from perception.run_folder import write_atomic, write_json
from perception.run_model import TrainedModel
from perception.sign_decode_numpy import SIGN_OUTPUTS
from perception.tiling import SIZE_MULTIPLE

OPSET = 18
_FIRST_CALIBRATION_SCENE = 2 * FIRST_TRAINING_SCENE
"""Scenes that are neither trained on nor evaluated."""


@dataclass(frozen=True)
class ExportOptions:
    batch: int | None = 1
    """Images that the network takes at once; None: any number."""
    size: tuple[int, int] | None = None
    """Of signs, height and width of the input, multiples of 32; None: any. Lanes have the one of their model."""
    int8: bool = False
    num_calibration_scenes: int = 100
    num_check_scenes: int = 200
    num_threads: int = 0
    """Of onnxruntime in the checks; 0: all cores."""

    @property
    def precision(self) -> str:
        return "int8" if self.int8 else "fp32"


def export_model(trained: TrainedModel, out: Path, options: ExportOptions, say: Callable[[str], None]) -> Checks:
    """Write `out`, its model card and its record (see perception.provenance); all three, or nothing.

    Raises UserError where a package is missing or a check fails.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package)
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        fp32, int8 = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        say(f"exporting {trained.config.name} at step {trained.step} ({trained.checkpoint})")
        export_graph(trained, fp32, options.batch, options.size)
        num_convolutions = 0
        if options.int8:
            say(f"calibrating int8 on {options.num_calibration_scenes} generated scenes")
            num_convolutions = quantise(fp32, int8, _calibration_batches(trained, options))
            _set_metadata(int8, trained, "int8")
        say(f"checking on {options.num_check_scenes} generated scenes")
        checks = check_files(trained, fp32, int8 if options.int8 else None, options, num_convolutions)
        for line in checks.lines():
            say(f"  {line}")
        failure = checks.failure()
        if failure is not None:
            raise UserError(f"{out}: not written: {failure}")
        for note in checks.notes():
            say(f"  note: {note}")
        chosen = int8 if options.int8 else fp32
        record = export_record(trained, chosen, out.name, options, checks)
        exported = OnnxModel(chosen)
        record["export"]["input_size"] = exported.fixed_size
        write_atomic(card_path(out), model_card(trained, exported, record, checks))
        write_json(record_path(out), record)
        _move(chosen, out)
    return checks


def export_graph(trained: TrainedModel, path: Path, batch: int | None, size: tuple[int, int] | None = None) -> None:
    """Write the fp32 graph to `path`; `batch` None leaves the number of images open.

    `size` is the height and width of a sign model's input, None leaves them open; a lane model has its own.
    """
    onnx = require("onnx")
    network, outputs = _network(trained)
    model = trained.config.model
    is_open = size is None and isinstance(trained.model, SignModel)
    if isinstance(trained.model, LaneModel):
        size = model.input_height, model.input_width
    # Two images where the number is open, and other than equal sides: examples are else taken for constants.
    height, width = size or (3 * SIZE_MULTIPLE, 4 * SIZE_MULTIPLE)
    example = torch.zeros((batch or 2, height, width, 3), dtype=torch.uint8)
    dynamic: dict[int, Any] = {} if batch else {0: torch.export.Dim("batch", min=1)}
    if is_open:
        dynamic[1] = SIZE_MULTIPLE * torch.export.Dim("rows", min=1)
        dynamic[2] = SIZE_MULTIPLE * torch.export.Dim("columns", min=1)
    with _quiet():
        # Strict: else the number of images becomes a constant wherever the network asks a tensor for its len().
        program = torch.export.export(network, (example,), dynamic_shapes=(dynamic,) if dynamic else None, strict=True)
        torch.onnx.export(
            program,
            (),
            str(path),
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT_NAME],
            output_names=list(outputs),
            external_data=False,
            verbose=False,
        )
    shape = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim
    for axis, what in ((0, "number of images"), (1, "height"), (2, "width")):
        if axis in dynamic and not shape[axis].dim_param:
            raise RuntimeError(
                f"the graph takes a {what} of {shape[axis].dim_value} only: a part of the network fixes it"
            )
    _set_metadata(path, trained, "fp32")


class _LaneNetwork(nn.Module):
    """The outputs that decoding needs; the finer angle maps, for which there is no use, fall out of the graph."""

    def __init__(self, model: LaneModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = self.model(images)
        return output.logits, output.xs, output.start, output.length


class _SignNetwork(nn.Module):
    """The three outputs, all fp32."""

    def __init__(self, model: SignModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = self.model(images)
        return output.objectness, output.classes.float(), output.offsets


def _network(trained: TrainedModel) -> tuple[nn.Module, tuple[str, ...]]:
    """The module to export and its outputs' names; UserError for a model that cannot be exported."""
    if isinstance(trained.model, LaneModel):
        return _LaneNetwork(trained.model).eval(), LANE_OUTPUTS
    if isinstance(trained.model, SignModel):
        return _SignNetwork(trained.model).eval(), SIGN_OUTPUTS
    raise UserError(f"{trained.config.name}: a {trained.config.task} model cannot be exported; use its run folder")


def _calibration_batches(trained: TrainedModel, options: ExportOptions) -> Iterator[NDArray[np.uint8]]:
    scenes = scenes_for(trained, options, _FIRST_CALIBRATION_SCENE, options.num_calibration_scenes)
    decoder = decoder_for(trained.config, options.size)
    size = options.batch or 1
    for indices in parts(len(scenes), size):
        # Scenes of one size: so are their inputs.
        inputs = [pixels for index in indices for pixels in decoder.prepare(scenes.sample(index).image).inputs]
        for chosen in parts(len(inputs), size):
            images = np.stack([inputs[number] for number in chosen])
            yield np.concatenate([images, np.repeat(images[-1:], size - len(images), axis=0)])


def _set_metadata(path: Path, trained: TrainedModel, precision: str) -> None:
    onnx = require("onnx")
    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, metadata_of(to_json(trained.config), trained.classes, precision))
    model.producer_name = "roadfuse"
    # Where each node came from in Python, with the paths of this machine: of no use in the car.
    for node in model.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def _move(source: Path, target: Path) -> None:
    """Across file systems too, and as a whole or not at all."""
    temporary = target.with_name(f".{target.name}.new")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); make room or give another --out") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of its own deprecations and of packages that are not there: nothing a user can act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels: list[Any] = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
