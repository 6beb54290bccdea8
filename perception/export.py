"""A trained model to one ONNX file, checked before it is written: the same lanes as torch's, the same F1 in int8.

The graph takes (B, H, W, 3) uint8 RGB at input size and gives tensors; thresholding, suppression and the way back to
original pixels stay outside (perception.lane_decode), since they are a few loops over forty proposals.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from perception.config import RunConfig, to_json
from perception.data.generated import GeneratedScenes
from perception.data.sample import Lane, LaneDataset, LanePrediction
from perception.data.sources import FIRST_TRAINING_SCENE, SCENES_SEED
from perception.errors import UserError
from perception.lane_decode import LANE_OUTPUTS
from perception.model_card import model_card
from perception.models.lane import LaneModel
from perception.onnx_model import INPUT_NAME, OnnxModel, Predictor, decoder_for, metadata_of, require
from perception.provenance import card_path, export_record, record_path
from perception.quantise import quantise
from perception.run_folder import write_atomic, write_json
from perception.run_model import RunModel, TrainedModel

OPSET = 18
LARGEST_POINT_DIFFERENCE_PIXELS = 0.5
LARGEST_F1_DIFFERENCE = 0.01
_FIRST_CALIBRATION_SCENE = 2 * FIRST_TRAINING_SCENE
"""Scenes that are neither trained on nor evaluated."""


@dataclass(frozen=True)
class ExportOptions:
    batch: int | None = 1
    """Images that the network takes at once; None: any number."""
    int8: bool = False
    num_calibration_scenes: int = 100
    num_check_scenes: int = 200
    num_threads: int = 0
    """Of onnxruntime in the checks; 0: all cores."""

    @property
    def precision(self) -> str:
        return "int8" if self.int8 else "fp32"


@dataclass(frozen=True)
class Checks:
    """What was compared on generated scenes before the file was written; metrics by the task's primary one."""

    num_scenes: int
    metric: str
    num_objects: int
    """Lanes that torch finds in them."""
    point_difference_pixels: float
    """Largest |dx| between a lane's points by torch and by the fp32 file, in original pixels."""
    metric_torch: float
    metric_fp32: float
    metric_int8: float | None = None
    num_int8_convolutions: int = 0

    def lines(self) -> list[str]:
        """For people, each with the limit beside the figure."""
        lines = [
            f"{self.num_scenes} generated scenes, {self.num_objects} lanes found by torch",
            f"largest distance of lane points, fp32 file to torch: {self.point_difference_pixels:.4f} px "
            f"(at most {LARGEST_POINT_DIFFERENCE_PIXELS})",
            f"{self.metric}: torch {self.metric_torch:.4f}, fp32 file {self.metric_fp32:.4f}",
        ]
        if self.metric_int8 is not None:
            lines.append(
                f"{self.metric}: int8 file {self.metric_int8:.4f}, fp32 file {self.metric_fp32:.4f} "
                f"(at most {LARGEST_F1_DIFFERENCE} apart); {self.num_int8_convolutions} convolutions in int8"
            )
        return lines

    def notes(self) -> list[str]:
        """Why a check that passed may say little."""
        notes = []
        if not self.num_objects:
            notes.append("torch finds nothing in the check scenes: the comparison of points says nothing")
        if self.metric_int8 is not None and self.metric_fp32 < 0.5:
            notes.append(f"{self.metric} is only {self.metric_fp32:.2f} on generated scenes: int8 may lose elsewhere")
        return notes

    def failure(self) -> str | None:
        """What is wrong with the exported file, None where it may be written."""
        if self.point_difference_pixels > LARGEST_POINT_DIFFERENCE_PIXELS:
            return (
                f"lane points of the fp32 file are up to {self.point_difference_pixels:.3f} px from torch's, more than "
                f"{LARGEST_POINT_DIFFERENCE_PIXELS}"
            )
        if self.metric_int8 is not None and abs(self.metric_int8 - self.metric_fp32) > LARGEST_F1_DIFFERENCE:
            return (
                f"{self.metric} is {self.metric_int8:.4f} in int8, {self.metric_fp32:.4f} in fp32: more than "
                f"{LARGEST_F1_DIFFERENCE} apart; take more --calibration-scenes, or export without --int8"
            )
        return None


def export_model(trained: TrainedModel, out: Path, options: ExportOptions, say: Callable[[str], None]) -> Checks:
    """Write `out`, its model card and its record (see perception.provenance); all three, or nothing.

    Raises UserError where a package is missing or a check fails.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package)
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        fp32, int8 = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        say(f"exporting {trained.config.name} at step {trained.step} ({trained.checkpoint})")
        export_graph(trained, fp32, options.batch)
        num_convolutions = 0
        if options.int8:
            say(f"calibrating int8 on {options.num_calibration_scenes} generated scenes")
            num_convolutions = quantise(fp32, int8, _calibration_batches(trained.config, options))
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
        write_atomic(card_path(out), model_card(trained, OnnxModel(chosen), record, checks))
        write_json(record_path(out), record)
        _move(chosen, out)
    return checks


def export_graph(trained: TrainedModel, path: Path, batch: int | None) -> None:
    """Write the fp32 graph to `path`; `batch` None leaves the number of images open."""
    onnx = require("onnx")
    network, outputs = _network(trained)
    model = trained.config.model
    # Two images where the number is open: an example of one would be taken for a constant.
    example = torch.zeros((batch or 2, model.input_height, model.input_width, 3), dtype=torch.uint8)
    dynamic = None if batch else ({0: torch.export.Dim("batch", min=1)},)
    with _quiet():
        # Strict: else the number of images becomes a constant wherever the network asks a tensor for its len().
        program = torch.export.export(network, (example,), dynamic_shapes=dynamic, strict=True)
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
    found = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim[0]
    if batch is None and not found.dim_param:
        raise RuntimeError(f"the graph takes {found.dim_value} images only: a part of the network fixes their number")
    _set_metadata(path, trained, "fp32")


def check_files(
    trained: TrainedModel, fp32: Path, int8: Path | None, options: ExportOptions, num_int8_convolutions: int = 0
) -> Checks:
    """Torch, the fp32 and the int8 file on the same scenes, never seen in training or calibration."""
    scenes = _scenes(trained.config, 0, options.num_check_scenes)
    # On the CPU as the files are: a GPU's shorter mantissas in convolutions are not what is compared.
    reference = RunModel(trained, device="cpu")
    files = [OnnxModel(path, options.num_threads) for path in (fp32, int8) if path is not None]
    predictors: list[Predictor] = [reference, *files]
    metrics = [trained.task.metric() for _ in predictors]
    largest, found = 0.0, 0
    for indices in _parts(len(scenes), options.batch or 8):
        samples = [scenes.sample(index) for index in indices]
        truths = [sample.truth for sample in samples]
        names = [truth.name for truth in truths]
        predicted = []
        for predictor in predictors:
            prepared = [predictor.prepare(s.image, name) for s, name in zip(samples, names, strict=True)]
            predicted.append(predictor.predict(prepared)[0])
        for metric, predictions in zip(metrics, predicted, strict=True):
            metric.update(predictions, truths)
        for mine, other in zip(predicted[0], predicted[1], strict=True):
            assert isinstance(mine, LanePrediction) and isinstance(other, LanePrediction)
            found += len(mine.lanes)
            largest = max(largest, lane_difference_pixels(mine.lanes, other.lanes))
    values = [metric.compute()[trained.task.primary_metric] for metric in metrics]
    return Checks(
        num_scenes=len(scenes),
        metric=trained.task.primary_metric,
        num_objects=found,
        point_difference_pixels=largest,
        metric_torch=values[0],
        metric_fp32=values[1],
        metric_int8=values[2] if int8 is not None else None,
        num_int8_convolutions=num_int8_convolutions,
    )


def lane_difference_pixels(lanes: Sequence[Lane], others: Sequence[Lane]) -> float:
    """Largest |dx| at the rows that paired lanes share; inf where lanes are missing or end more than a row apart.

    A row more or less at an end is no difference: extents are rounded to whole rows.
    """
    if len(lanes) != len(others):
        return float("inf")
    left = list(others)
    largest = 0.0
    for lane in lanes:
        distances = [_rows_apart(lane, other) for other in left]
        nearest = int(np.argmin(distances))
        largest = max(largest, distances[nearest])
        left.pop(nearest)
    return largest


def _rows_apart(lane: Lane, other: Lane) -> float:
    _, mine, theirs = np.intersect1d(lane[:, 1], other[:, 1], return_indices=True)
    if len(mine) < max(len(lane), len(other)) - 2:
        return float("inf")
    return float(np.abs(lane[mine, 0] - other[theirs, 0]).max(initial=0.0))


class _LaneNetwork(nn.Module):
    """The outputs that decoding needs; the finer angle maps, for which there is no use, fall out of the graph."""

    def __init__(self, model: LaneModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = self.model(images)
        return output.logits, output.xs, output.start, output.length


def _network(trained: TrainedModel) -> tuple[nn.Module, tuple[str, ...]]:
    """The module to export and its outputs' names; UserError for a model that cannot be exported."""
    if isinstance(trained.model, LaneModel):
        return _LaneNetwork(trained.model).eval(), LANE_OUTPUTS
    raise UserError(f"{trained.config.name}: a {trained.config.task} model cannot be exported; use its run folder")


def _scenes(config: RunConfig, first: int, count: int) -> LaneDataset:
    return GeneratedScenes(SCENES_SEED, first, count, config.data.scene_height, config.data.scene_width)


def _calibration_batches(config: RunConfig, options: ExportOptions) -> Iterator[NDArray[np.uint8]]:
    scenes, decoder = _scenes(config, _FIRST_CALIBRATION_SCENE, options.num_calibration_scenes), decoder_for(config)
    size = options.batch or 1
    for indices in _parts(len(scenes), size):
        images = np.stack([decoder.prepare(scenes.sample(index).image).pixels for index in indices])
        yield np.concatenate([images, np.repeat(images[-1:], size - len(images), axis=0)])


def _parts(count: int, size: int) -> Iterator[range]:
    """0 .. count - 1 in parts of `size`, the last one shorter."""
    return (range(first, min(first + size, count)) for first in range(0, count, size))


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
