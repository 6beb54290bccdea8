"""A task binds model, targets, loss, decoding and metric of one problem; the training loop is blind to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from perception.config import RunConfig
from perception.data import lane_targets
from perception.data.augment import LaneAugmenter
from perception.data.lane_targets import LaneBatch, LaneExample, SampleKey
from perception.data.sample import Lane, LanePrediction, LaneSample, LaneTruth
from perception.errors import UserError, nearest
from perception.geometry import Geometry
from perception.losses import Losses, lane_losses
from perception.model_config import LaneModelConfig
from perception.models.lane import ANGLE_STRIDES, LaneModel, LaneOutput

BatchType = TypeVar("BatchType", bound="Batch")


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

    def counts(self) -> dict[str, float]: ...

    def merge(self, counts: Mapping[str, float]) -> None: ...

    def compute(self) -> dict[str, float]: ...


class Task(Protocol):
    """What the training loop asks of a problem. It never looks inside samples, examples, batches or predictions."""

    config: RunConfig
    primary_metric: str
    """Name in `metric().compute()` by which checkpoints are compared; more is better."""

    def build_model(self) -> nn.Module: ...

    def prepare(self, sample: Any, key: SampleKey, train: bool) -> Any:
        """A sample to an example at input size; augmented if `train`, by draws from the run's seed and `key`."""

    def collate(self, examples: Sequence[Any]) -> Any: ...

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Terms averaged over the batch's images, so that ranks may be weighted by their number of images."""

    def predict(self, model: nn.Module, batch: Any) -> list[Any]:
        """A prediction an image, in original pixels."""

    def metric(self) -> Metric: ...


def task_for(config: RunConfig) -> Task:
    """The task that `config.task` names; UserError if there is none."""
    if config.task != "lane":
        raise UserError(f'task = "{config.task}" is unknown{nearest(config.task, ["lane"])}')
    return LaneTask(config)


class LaneTask:
    """Lane detection: LaneSample → LaneExample → LaneBatch → LanePrediction."""

    primary_metric = "culane_f1_50"

    def __init__(self, config: RunConfig) -> None:
        if not isinstance(config.model, LaneModelConfig):
            raise UserError(f"task = {config.task}: the lane task needs a lane model's settings")
        self.config = config
        self.model_config = config.model
        self.augmenter = LaneAugmenter(config.augment, config.train.seed) if config.augment.enabled else None

    def build_model(self) -> LaneModel:
        return LaneModel(self.model_config)

    def geometry(self, truth: LaneTruth) -> Geometry:
        model = self.model_config
        return Geometry(
            source_height=truth.height,
            source_width=truth.width,
            crop_top=int(truth.height * model.crop_top_fraction),
            input_height=model.input_height,
            input_width=model.input_width,
        )

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
        scores = output.logits.float().sigmoid().cpu().numpy()
        xs = output.xs.float().cpu().numpy()
        # Bounded before it is cast: an untrained network's extents may be any size.
        limit = 2 * self.model_config.num_rows
        start = output.start.float().clamp(-limit, limit).round().int().cpu().numpy()
        length = output.length.float().clamp(-limit, limit).round().int().cpu().numpy()
        return [
            self._decode_image(scores[i], xs[i], start[i], length[i], geometry) for i, geometry in enumerate(geometries)
        ]

    def _decode_image(
        self,
        scores: NDArray[np.float32],
        xs: NDArray[np.float32],
        start: NDArray[np.int32],
        length: NDArray[np.int32],
        geometry: Geometry,
    ) -> LanePrediction:
        model = self.model_config
        confident = np.flatnonzero(scores >= model.score_threshold)
        order = confident[np.argsort(-scores[confident], kind="stable")]
        nearest_allowed = model.nms_distance_pixels * geometry.input_width / 800
        kept: list[int] = []
        for candidate in order:
            if all(lane_distance(xs, start, length, candidate, other) >= nearest_allowed for other in kept):
                kept.append(int(candidate))
        lanes: list[Lane] = []
        lane_scores: list[float] = []
        for index in kept:
            lane = lane_targets.decode_lane(
                xs[index], int(start[index]), int(length[index]), geometry, model.extend_to_bottom
            )
            if lane is not None and len(lanes) < model.max_lanes:
                lanes.append(lane)
                lane_scores.append(float(scores[index]))
        return LanePrediction(tuple(lanes), tuple(lane_scores))

    def metric(self) -> LaneMetric:
        return LaneMetric()


class LaneMetric:
    """CULane's and TuSimple's metrics of the same predictions, as one."""

    def __init__(self) -> None:
        # Imported here: training and export need no rasteriser.
        from perception.metrics.culane import CulaneMetric
        from perception.metrics.tusimple import TusimpleMetric

        self._parts: dict[str, Metric] = {"culane": CulaneMetric(), "tusimple": TusimpleMetric()}

    def update(self, predictions: Sequence[LanePrediction], truths: Sequence[LaneTruth]) -> None:
        for part in self._parts.values():
            part.update(predictions, truths)

    def counts(self) -> dict[str, float]:
        """Each part's counts, by `part:key`."""
        return {f"{name}:{key}": value for name, part in self._parts.items() for key, value in part.counts().items()}

    def merge(self, counts: Mapping[str, float]) -> None:
        for name, part in self._parts.items():
            prefix = f"{name}:"
            part.merge({key.removeprefix(prefix): value for key, value in counts.items() if key.startswith(prefix)})

    def compute(self) -> dict[str, float]:
        """culane_f1_50, culane_f1_75, culane_mf1, tusimple_accuracy, tusimple_fp, tusimple_fn and more of the two."""
        return {name: value for part in self._parts.values() for name, value in part.compute().items()}


def lane_distance(
    xs: NDArray[np.float32], start: NDArray[np.int32], length: NDArray[np.int32], a: int, b: int
) -> float:
    """Mean |dx| of proposals a and b over the rows that both have, inf where they share none."""
    first = max(start[a], start[b], 0)
    end = min(start[a] + length[a], start[b] + length[b], xs.shape[1])
    if end <= first:
        return float("inf")
    return float(np.abs(xs[a, first:end] - xs[b, first:end]).mean())
