"""Sign detection as a task: SignSample → SignExample → SignBatch → SignPrediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from perception.augment_config import SignAugmentConfig
from perception.config import RunConfig
from perception.data.lane_targets import SampleKey
from perception.data.sample import ReadReport
from perception.data.signs.augment import SignAugmenter
from perception.data.signs.batch import (
    SignBatch,
    SignExample,
    WholeImage,
    WholeImageBatch,
    collate_crops,
    collate_images,
)
from perception.data.signs.classes import GTSDB_MIRRORED
from perception.data.signs.sample import SignDataset, SignPrediction, SignSample, SignTruth
from perception.data.signs.sampling import repeat_factors
from perception.errors import UserError
from perception.losses import Losses
from perception.model_config import SignModelConfig
from perception.models.sign import SignModel
from perception.sign_inference import find_signs
from perception.sign_losses import sign_losses


def with_classes(config: RunConfig, classes: tuple[str, ...]) -> RunConfig:
    """`config` with the classes of its data set; UserError where it is of other classes already."""
    model = config.model
    if not isinstance(model, SignModelConfig):
        raise UserError(f"task = {config.task}: the sign task needs a sign model's settings")
    if model.class_names:
        check_same_classes(model.class_names, classes, f"model.class_names of {config.name}", config.data.source)
    elif model.num_classes not in (0, len(classes)):
        raise UserError(
            f"model.num_classes = {model.num_classes}, but {config.data.source} has {len(classes)} classes; "
            "0 takes as many as there are"
        )
    return replace(config, model=replace(model, num_classes=len(classes), class_names=classes))


def check_same_classes(a: Sequence[str], b: Sequence[str], name_of_a: str, name_of_b: str) -> None:
    """Raise UserError that names the first class which two lists have not in common, or not at one place."""
    if tuple(a) == tuple(b):
        return
    for first, second, where, other in ((a, b, name_of_a, name_of_b), (b, a, name_of_b, name_of_a)):
        extra = [name for name in first if name not in second]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise UserError(
                f'class "{extra[0]}"{more} of {where} is not among the classes of {other}; see data.class_map'
            )
    place = next(index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    raise UserError(f'class {place} is "{a[place]}" of {name_of_a}, but "{b[place]}" of {name_of_b}')


class SignTask:
    """Trains on crops at about the images' own scale, predicts on whole images."""

    primary_metric = "ap50"

    def __init__(self, config: RunConfig, classes: tuple[str, ...], train: SignDataset | None = None) -> None:
        """`train` gives mosaics their other images; without it there are no mosaics."""
        self.config = with_classes(config, classes)
        if not isinstance(self.config.model, SignModelConfig) or not isinstance(config.augment, SignAugmentConfig):
            raise UserError(f"task = {config.task}: the sign task needs a sign model's and augmentation's settings")
        self.classes = classes
        self.model_config: SignModelConfig = self.config.model
        self.augment_config: SignAugmentConfig = config.augment
        self.train = train

    @cached_property
    def augmenter(self) -> SignAugmenter:
        """Made by the first crop: prediction needs none."""
        return SignAugmenter(
            self.augment_config,
            self.model_config.input_height,
            self.model_config.input_width,
            self.classes,
            GTSDB_MIRRORED,
            self.config.train.seed,
        )

    def build_model(self) -> SignModel:
        return SignModel(self.model_config)

    def frequencies(self, samples: SignDataset) -> NDArray[np.float64] | None:
        threshold = self.augment_config.repeat_threshold
        return repeat_factors(samples, threshold) if threshold else None

    def objects(self, report: ReadReport) -> str:
        return f"{report.signs} signs of {len(self.classes)} classes"

    def describe(self, truth: SignTruth) -> str:
        rows = [
            f"{' '.join(f'{edge:.3f}' for edge in box)} {label}"
            for boxes, labels in ((truth.boxes, truth.labels), (truth.ignored, [-1] * len(truth.ignored)))
            for box, label in zip(boxes.tolist(), labels, strict=True)
        ]
        return f"{truth.name} {truth.height}x{truth.width} {'; '.join(rows)}"

    def prepare(self, sample: SignSample, key: SampleKey, train: bool) -> SignExample | WholeImage:
        """A crop of input size to train on; to predict on, the image as it is."""
        if not train:
            return WholeImage(sample.image, sample.truth)
        if self.train is None:
            return self.augmenter(sample, key)
        return self.augmenter(sample, key, len(self.train), self.train.sample)

    def collate(self, examples: Sequence[Any]) -> SignBatch | WholeImageBatch:
        return collate_crops(examples) if isinstance(examples[0], SignExample) else collate_images(examples)

    def loss(self, model: nn.Module, batch: SignBatch) -> Losses:
        return sign_losses(model(batch.images), batch.targets, self.model_config)

    def predict(self, model: nn.Module, batch: WholeImageBatch) -> list[SignPrediction]:
        return [find_signs(model, image, self.model_config) for image in batch.images]

    def metric(self) -> Any:
        # Imported here: training and export need no evaluator.
        from perception.metrics.sign import SignMetric, superclasses_of

        return SignMetric(self.classes, superclasses_of(self.classes))
