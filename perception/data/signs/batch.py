"""Sign images put together: crops of one size to train on, whole images of any size to predict on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from perception.data.signs.sample import Boxes, Labels, SignTruth
from perception.sign_targets import SignTargets, pad_targets


@dataclass(frozen=True, eq=False)
class SignExample:
    """A crop to train on. Boxes are in input pixels and inside the crop."""

    image: NDArray[np.uint8]
    """(H, W, 3) RGB at input size."""
    boxes: Boxes
    labels: Labels
    ignored: Boxes
    truth: SignTruth
    """Labels of the image that the crop is from, the first of a mosaic's."""
    num_left_out: int = 0
    """Signs that are in the crop in part, or too small, and became ignored regions."""
    others: tuple[str, ...] = ()
    """Names of a mosaic's other images."""


@dataclass(frozen=True, eq=False)
class SignBatch:
    """B crops and their targets."""

    images: torch.Tensor
    """(B, H, W, 3) uint8 RGB."""
    targets: SignTargets
    truths: tuple[SignTruth, ...]
    names: tuple[str, ...]
    """Of every image that a part of is in the crops: a mosaic shows four."""
    num_left_out: int

    def __len__(self) -> int:
        return len(self.truths)

    def to(self, device: torch.device) -> SignBatch:
        images = self.images.to(device, non_blocking=True)
        return replace(self, images=images, targets=self.targets.to(device))

    def pin_memory(self) -> SignBatch:
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


@dataclass(frozen=True, eq=False)
class WholeImage:
    """An image to predict on, at its own size."""

    image: NDArray[np.uint8]
    truth: SignTruth


@dataclass(frozen=True, eq=False)
class WholeImageBatch:
    """Images (H, W, 3) uint8 RGB, each of its own size."""

    images: tuple[torch.Tensor, ...]
    truths: tuple[SignTruth, ...]

    def __len__(self) -> int:
        return len(self.truths)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(truth.name for truth in self.truths)

    def to(self, device: torch.device) -> WholeImageBatch:
        return WholeImageBatch(tuple(image.to(device) for image in self.images), self.truths)


def collate_crops(examples: Sequence[SignExample]) -> SignBatch:
    """Examples of one size → batch. Raises ValueError where labels and boxes do not go together."""
    height, width = examples[0].image.shape[:2]
    targets = pad_targets(
        [torch.from_numpy(example.boxes) for example in examples],
        [torch.from_numpy(example.labels) for example in examples],
        [torch.from_numpy(example.ignored) for example in examples],
        height,
        width,
    )
    images = torch.from_numpy(np.stack([example.image for example in examples]))
    truths = tuple(example.truth for example in examples)
    names = tuple(name for example in examples for name in (example.truth.name, *example.others))
    return SignBatch(images, targets, truths, names, sum(example.num_left_out for example in examples))


def collate_images(examples: Sequence[WholeImage]) -> WholeImageBatch:
    # Read-only arrays are those of a cache: torch would warn of them.
    images = tuple(torch.from_numpy(np.require(e.image, requirements=["C", "W"])) for e in examples)
    return WholeImageBatch(images, tuple(example.truth for example in examples))
