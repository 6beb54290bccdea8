"""A task binds model, targets, loss, decoding and metric of one problem; the training loop is blind to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from perception.augment_config import LaneAugmentConfig
from perception.config import RunConfig
from perception.data import lane_targets
from perception.data.augment import LaneAugmenter
from perception.data.lane_targets import LaneBatch, LaneExample, SampleKey
from perception.data.mixture import MixedLanes
from perception.data.sample import LaneDataset, LanePrediction, LaneSample, LaneTruth, ReadReport
from perception.data.signs.classes import GTSDB_CLASSES
from perception.errors import UserError, nearest
from perception.geometry import Geometry
from perception.lane_decode import decode_lanes, lane_geometry
from perception.losses import Losses, lane_losses
from perception.model_config import LaneModelConfig, SignModelConfig
from perception.models.lane import ANGLE_STRIDES, LaneModel, LaneOutput
from perception.sign_task import SignTask

BatchType = TypeVar("BatchType", bound="Batch")

_LEFT_OUT = "lanes_beyond_max_lanes"


class Batch(Protocol):
    """Examples put together; its length is the number of images."""

    def __len__(self) -> int: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def truths(self) -> tuple[Any, ...]: ...

    def to(self: BatchType, device: torch.device) -> BatchType: ...


class Metric(Protocol):
    """Additive counts: ranks update their own, merge each other's counts, then compute."""

    def update(self, predictions: Sequence[Any], truths: Sequence[Any]) -> None: ...

    def counts(self) -> Any:
        """What the metric has seen, to be pickled and merged elsewhere."""

    def merge(self, counts: Any) -> None: ...

    def compute(self) -> dict[str, float]: ...


class Task(Protocol):
    """What the training loop asks of a problem. It never looks inside samples, examples, batches or predictions."""

    config: RunConfig
    primary_metric: str
    """Name in `metric().compute()` by which checkpoints are compared; more is better."""

    def build_model(self) -> nn.Module: ...

    def frequencies(self, samples: Any) -> NDArray[np.float64] | None:
        """(num_samples,) times that an epoch of training holds each sample on average; None: once each."""

    def objects(self, report: ReadReport) -> str:
        """What a data set holds, for people: "507 lanes"."""

    def describe(self, truth: Any) -> str:
        """An image's labels in a line, by which data sets are told apart."""

    def prepare(self, sample: Any, key: SampleKey, train: bool) -> Any:
        """A sample to an example at input size; augmented if `train`, by draws from the run's seed and `key`."""

    def collate(self, examples: Sequence[Any]) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Terms averaged over the batch's images, so that ranks may be weighted by their number of images."""

    def predict(self, model: nn.Module, batch: Any) -> list[Any]:
        """A prediction an image, in original pixels."""

    def metric(self) -> Metric: ...


def task_for(config: RunConfig, train: Any = None) -> Task:
    """The task that `config.task` names, to be trained on the data set `train`; UserError if there is none.

    Without data, as for a trained model, the sign task's classes are those of `config`, or the generated scenes'.
    """
    if config.task == "lane":
        return LaneTask(config)
    if config.task == "sign":
        model = config.model
        named = model.class_names if isinstance(model, SignModelConfig) else ()
        return SignTask(config, train.classes if train is not None else named or GTSDB_CLASSES, train)
    raise UserError(f'task = "{config.task}" is unknown{nearest(config.task, ["lane", "sign"])}')


class LaneTask:
    """Lane detection: LaneSample → LaneExample → LaneBatch → LanePrediction."""

    primary_metric = "culane_f1_50"

    def __init__(self, config: RunConfig) -> None:
        if not isinstance(config.model, LaneModelConfig) or not isinstance(config.augment, LaneAugmentConfig):
            raise UserError(f"task = {config.task}: the lane task needs a lane model's and augmentation's settings")
        self.config = config
        self.model_config = config.model
        self.augmenter = LaneAugmenter(config.augment, config.train.seed) if config.augment.enabled else None

    def build_model(self) -> LaneModel:
        return LaneModel(self.model_config)

    def frequencies(self, samples: LaneDataset) -> NDArray[np.float64] | None:
        return samples.frequencies if isinstance(samples, MixedLanes) else None

    def objects(self, report: ReadReport) -> str:
        most = self.model_config.max_lanes
        fuller = {lanes: images for lanes, images in report.lane_counts.items() if lanes > most}
        if not fuller:
            return f"{report.lanes} lanes"
        images, surplus = sum(fuller.values()), sum((lanes - most) * images for lanes, images in fuller.items())
        return (
            f"{report.lanes} lanes, {surplus} of them beyond model.max_lanes = {most} in {images} images: raise it, or "
            "predictions will leave as many out"
        )

    def describe(self, truth: LaneTruth) -> str:
        points = sum(len(lane) for lane in truth.lanes)
        return f"{truth.name} {truth.height}x{truth.width} {len(truth.lanes)} {points}"

    def geometry(self, truth: LaneTruth) -> Geometry:
        return lane_geometry(self.model_config, truth.height, truth.width)

    def prepare(self, sample: LaneSample, key: SampleKey, train: bool) -> LaneExample:
        geometry = self.geometry(sample.truth)
        image = geometry.image_to_input(sample.image)
        lanes: Sequence[NDArray[np.float64]] = [geometry.points_to_input(lane) for lane in sample.truth.lanes]
        if train and self.augmenter is not None:
            image, lanes = self.augmenter(image, lanes, key.epoch, key.index)
        targets = lane_targets.encode_lanes(
            lanes, geometry.input_height, geometry.input_width, self.model_config.num_rows, ANGLE_STRIDES
        )
        return LaneExample(image, targets, sample.truth, geometry)

    def collate(self, examples: Sequence[LaneExample]) -> LaneBatch:
        return lane_targets.collate(examples)

    def loss(self, model: nn.Module, batch: LaneBatch) -> Losses:
        output: LaneOutput = model(batch.images)
        return lane_losses(output, batch, self.model_config)

    @torch.no_grad()
    def predict(self, model: nn.Module, batch: LaneBatch) -> list[LanePrediction]:
        output: LaneOutput = model(batch.images)
        return self.decode(output, batch.geometries)

    def decode(self, output: LaneOutput, geometries: Sequence[Geometry]) -> list[LanePrediction]:
        """Threshold, suppress near-duplicates, keep the best `max_lanes`; lanes in original pixels."""
        tensors = (output.logits, output.xs, output.start, output.length)
        logits, xs, start, length = (tensor.float().cpu().numpy() for tensor in tensors)
        return [
            decode_lanes(logits[index], xs[index], start[index], length[index], geometry, self.model_config)
            for index, geometry in enumerate(geometries)
        ]

    def metric(self) -> LaneMetric:
        return LaneMetric()


class LaneMetric:
    """CULane's and TuSimple's metrics of the same predictions, as one, and for images of LLAMAS, CurveLanes and
    OpenLane their own; also how many lanes were found beyond `model.max_lanes`, where there are such.
    """

    def __init__(self) -> None:
        # Imported here: training and export need no rasteriser.
        from perception.metrics.culane import CulaneMetric
        from perception.metrics.lane_benchmarks import BenchmarkMetric
        from perception.metrics.tusimple import TusimpleMetric

        self._parts: dict[str, Metric] = {
            "culane": CulaneMetric(),
            "tusimple": TusimpleMetric(),
            "benchmark": BenchmarkMetric(),
        }
        self._num_left_out = 0

    def update(self, predictions: Sequence[LanePrediction], truths: Sequence[LaneTruth]) -> None:
        for part in self._parts.values():
            part.update(predictions, truths)
        self._num_left_out += sum(prediction.num_left_out for prediction in predictions)

    def counts(self) -> dict[str, float]:
        """Each part's counts, by `part:key`."""
        counts = {f"{name}:{key}": value for name, part in self._parts.items() for key, value in part.counts().items()}
        return counts | {_LEFT_OUT: self._num_left_out}

    def merge(self, counts: Mapping[str, float]) -> None:
        for name, part in self._parts.items():
            prefix = f"{name}:"
            part.merge({key.removeprefix(prefix): value for key, value in counts.items() if key.startswith(prefix)})
        self._num_left_out += int(counts[_LEFT_OUT])

    def compute(self) -> dict[str, float]:
        """culane_f1_50, culane_f1_75, culane_mf1, tusimple_accuracy, tusimple_fp, tusimple_fn and more of the two;
        llamas_f1_50, curvelanes_f1_50, openlane_f1_30 and so on where there are such images.
        """
        figures = {name: value for part in self._parts.values() for name, value in part.compute().items()}
        return figures | ({_LEFT_OUT: self._num_left_out} if self._num_left_out else {})
