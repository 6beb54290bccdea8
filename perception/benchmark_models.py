"""What `bench allreduce` trains: real models with their real losses on random targets, and models that stress a part.

The images are noise, so no data set is read and the input costs nothing; what is learnt does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from perception.config import RunConfig
from perception.data.lane_targets import LaneBatch, SampleKey
from perception.data.sample import Lane, LaneSample, LaneTruth
from perception.errors import UserError, nearest
from perception.model_config import SignModelConfig
from perception.models.resnet import ResNet, normalise
from perception.models.sign import SignModel
from perception.sign_losses import sign_losses
from perception.sign_targets import SignTargets, pad_targets
from perception.tasks import LaneTask

NUM_BATCHES = 4
"""Batches of each rank, taken in turn."""
NUM_CLASSES = 1000
NUM_SIGNS = 6
"""Signs in an image."""
MANY_SMALL_PARAMETERS, MANY_SMALL_ELEMENTS = 1000, 256

RESNETS: dict[str, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]] = {
    "resnet-12m": ((64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet-50m": ((128, 256, 512, 1024), (2, 2, 3, 2)),
    "resnet-150m": ((224, 448, 896, 1792), (2, 2, 3, 2)),
}
"""Widths and blocks of classifiers of about 12, 50 and 150 million parameters."""


@dataclass(frozen=True)
class Workload:
    """A model, the mean loss of a batch, and one rank's batches."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batches: tuple[Any, ...]


def build_workload(
    name: str, config: RunConfig | None, image_size: tuple[int, int], batch_size: int, rank: int, seed: int
) -> Workload:
    """Build a model by name; equal weights on every rank for a seed, and batches that depend on the rank too.

    With `config` it is that detector, with its own input size, whatever the name. Raises UserError for an unknown name.
    """
    torch.manual_seed(seed)
    random = np.random.default_rng([seed, rank])
    if config is not None and isinstance(config.model, SignModelConfig):
        return _sign_workload(config.model, batch_size, random)
    if config is not None:
        task = LaneTask(config)
        batches = tuple(_lane_batch(task, batch_size, random) for _ in range(NUM_BATCHES))
        return Workload(task.build_model().train(), lambda model, batch: task.loss(model, batch).total, batches)
    if name == "many-small":
        rows = tuple(
            torch.from_numpy(random.normal(size=(batch_size, MANY_SMALL_ELEMENTS))).float() for _ in range(NUM_BATCHES)
        )
        return Workload(ManySmall().train(), lambda model, batch: model(batch).square().mean(), rows)
    if name in RESNETS:
        labelled = tuple(_labelled_images(image_size, batch_size, random) for _ in range(NUM_BATCHES))
        return Workload(Classifier(*RESNETS[name]).train(), _class_loss, labelled)
    raise UserError(f'model "{name}" is unknown{nearest(name, ["many-small", *RESNETS])}')


class Classifier(nn.Module):
    """ResNet with mean pooling and one linear layer: uint8 (B, H, W, 3) → (B, NUM_CLASSES) logits."""

    def __init__(self, widths: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.backbone = ResNet(widths, blocks)
        self.classify = nn.Linear(widths[-1], NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.backbone(normalise(images))[-1].mean((2, 3)))
        return logits


class ManySmall(nn.Module):
    """A chain of elementwise layers with 256 weights each: little to compute, many gradients to keep account of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(MANY_SMALL_ELEMENTS) * 1e-2) for _ in range(MANY_SMALL_PARAMETERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            x = torch.addcmul(x, x, weight)
        return x


def _class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images).float(), labels)


def _noise(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint8]:
    return random.integers(0, 256, shape, dtype=np.uint8)


def _labelled_images(
    image_size: tuple[int, int], batch_size: int, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    images = torch.from_numpy(_noise((batch_size, *image_size, 3), random))
    return images, torch.from_numpy(random.integers(0, NUM_CLASSES, batch_size))


def _lane_batch(task: LaneTask, batch_size: int, random: np.random.Generator) -> LaneBatch:
    return task.collate(
        [task.prepare(_lane_sample(task, random), SampleKey(0, index), train=False) for index in range(batch_size)]
    )


def _lane_sample(task: LaneTask, random: np.random.Generator) -> LaneSample:
    """Noise with four lanes that meet near the horizon, as on a road."""
    height, width = task.config.model.input_height, task.config.model.input_width
    vanishing_x = width * random.uniform(0.4, 0.6)
    y = np.linspace(height - 1, 0.4 * height, 30)
    down = (y - y[-1]) / (y[0] - y[-1])
    lanes: list[Lane] = []
    for bottom in (0.1, 0.35, 0.65, 0.9):
        bottom_x = width * (bottom + random.uniform(-0.08, 0.08))
        bend = width * random.uniform(-0.05, 0.05)
        lanes.append(np.stack([vanishing_x + (bottom_x - vanishing_x) * down + bend * down * (1 - down), y], axis=1))
    return LaneSample(_noise((height, width, 3), random), LaneTruth("noise", height, width, tuple(lanes)))


def _sign_workload(config: SignModelConfig, batch_size: int, random: np.random.Generator) -> Workload:
    def loss(model: nn.Module, batch: tuple[Tensor, SignTargets]) -> Tensor:
        images, targets = batch
        return sign_losses(model(images), targets, config).total

    batches = tuple(_sign_batch(config, batch_size, random) for _ in range(NUM_BATCHES))
    return Workload(SignModel(config).train(), loss, batches)


def _sign_batch(config: SignModelConfig, batch_size: int, random: np.random.Generator) -> tuple[Tensor, SignTargets]:
    """Noise with six boxes of 16 to 56 pixels in each image."""
    height, width = config.input_height, config.input_width
    boxes, labels = [], []
    for _ in range(batch_size):
        corners = random.uniform(0, (width - 60, height - 60), (NUM_SIGNS, 2))
        sizes = random.uniform(16, 56, (NUM_SIGNS, 2))
        boxes.append(torch.from_numpy(np.concatenate([corners, corners + sizes], axis=1)).float())
        labels.append(torch.from_numpy(random.integers(0, config.num_classes, NUM_SIGNS)))
    targets = pad_targets(boxes, labels, [torch.zeros(0, 4)] * batch_size, height, width)
    return torch.from_numpy(_noise((batch_size, height, width, 3), random)), targets
