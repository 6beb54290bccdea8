"""Crops of street images to train on: at about their own scale, mirrored, put together, recoloured.

An image's draws come from (seed, epoch, index, repeat) alone, so neither ranks nor workers change them.
Boxes are moved here, in float64; albumentations changes pixels only. It would raise on edges at 1 + 1e-8 and on
boxes without area, and lose labels and boxes of different length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.augment_config import SignAugmentConfig
from perception.data.lane_targets import SampleKey
from perception.data.signs.batch import SignExample
from perception.data.signs.sample import Boxes, Labels, SignSample
from perception.tiling import PADDING

Image = NDArray[np.uint8]
NOT_MIRRORED = -1
MOSAIC_SPLIT_RANGE = (0.3, 0.7)
"""Where in the crop the four images of a mosaic meet, as shares of its height and width."""


@dataclass(frozen=True, eq=False)
class Crop:
    """A part of an image with what lies in it, in pixels of the part."""

    image: Image
    boxes: Boxes
    labels: Labels
    ignored: Boxes
    num_left_out: int


class SignAugmenter:
    """Builds its transforms once; `__call__` takes a sample and returns a crop of `height` x `width`."""

    def __init__(
        self,
        config: SignAugmentConfig,
        height: int,
        width: int,
        classes: Sequence[str],
        mirrored: Mapping[str, str],
        seed: int,
    ) -> None:
        """`mirrored`: a class → what it is in a mirror; a crop that shows a class that is not in it is not flipped."""
        # Imported here: it takes half a second, and evaluation needs none.
        import albumentations

        self.config, self.height, self.width, self.seed = config, height, width, seed
        number = {name: label for label, name in enumerate(classes)}
        self.mirror = np.array([number.get(mirrored.get(name, ""), NOT_MIRRORED) for name in classes], dtype=np.int64)
        self.colours = albumentations.Compose(
            [
                albumentations.RandomBrightnessContrast(
                    brightness_limit=0.25, contrast_limit=0.25, p=config.brightness_probability
                ),
                # Little: colour tells classes apart.
                albumentations.HueSaturationValue(
                    hue_shift_limit=6, sat_shift_limit=25, val_shift_limit=0, p=config.hue_probability
                ),
                albumentations.OneOf(
                    [albumentations.MotionBlur(blur_limit=(3, 5)), albumentations.GaussianBlur(blur_limit=(3, 5))],
                    p=config.blur_probability,
                ),
            ]
        )

    def __call__(
        self,
        sample: SignSample,
        key: SampleKey,
        num_samples: int = 0,
        sample_of: Callable[[int], SignSample] | None = None,
    ) -> SignExample:
        """`sample_of(index)` gives the other images of mosaics, of `num_samples`; without it there are none."""
        random = np.random.default_rng([self.seed, key.epoch, key.index, key.repeat])
        config = self.config
        if not config.enabled:
            crop = self.cut(sample, self.height, self.width, random)
            return SignExample(crop.image, crop.boxes, crop.labels, crop.ignored, sample.truth, crop.num_left_out)
        others: list[SignSample] = []
        if sample_of is not None and num_samples > 0 and random.random() < config.mosaic_probability:
            others = [sample_of(int(index)) for index in random.integers(num_samples, size=3)]
            crop = self.mosaic([sample, *others], random)
        else:
            crop = self.cut(sample, self.height, self.width, random)
        self.colours.set_random_seed(int(random.integers(1 << 32)))
        image = np.ascontiguousarray(self.colours(image=crop.image)["image"])
        names = tuple(other.truth.name for other in others)
        return SignExample(image, crop.boxes, crop.labels, crop.ignored, sample.truth, crop.num_left_out, names)

    def cut(self, sample: SignSample, height: int, width: int, random: np.random.Generator) -> Crop:
        """A crop of `height` x `width`, rescaled and perhaps mirrored; padded where the image is too small for it."""
        config, truth = self.config, sample.truth
        zoom = math.exp(random.uniform(*np.log(config.scale_range))) if config.enabled else 1.0
        window_height, window_width = max(1, round(height / zoom)), max(1, round(width / zoom))
        wanted: NDArray[np.float64] | None = None
        if len(truth.boxes) and random.random() < config.around_sign_probability:
            wanted = truth.boxes[random.integers(len(truth.boxes))]
        left, top = (
            _place(window, length, span, random)
            for window, length, span in (
                (window_width, truth.width, None if wanted is None else (wanted[0], wanted[2])),
                (window_height, truth.height, None if wanted is None else (wanted[1], wanted[3])),
            )
        )
        image = _resized(_window(sample.image, top, left, window_height, window_width), height, width)
        scale = np.array([width / window_width, height / window_height] * 2)
        origin = np.array([left, top] * 2, dtype=np.float64)
        crop = self.settle(image, (truth.boxes - origin) * scale, truth.labels, (truth.ignored - origin) * scale)
        if config.enabled and random.random() < config.flip_probability:
            return self.flipped(crop)
        return crop

    def settle(self, image: Image, boxes: Boxes, labels: Labels, ignored: Boxes) -> Crop:
        """Clip boxes, in pixels of `image`, to it. Of a sign that is then hidden or small the rest is ignored."""
        clipped = _clipped(boxes, *image.shape[:2])
        sides = clipped[:, 2:] - clipped[:, :2]
        inside = (sides > 0).all(axis=1)
        # Of a sign that lies in the image as a whole a rounding error may be cut off.
        share = min(self.config.min_visibility, 0.999)
        visible = sides.prod(axis=1) >= share * (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
        taught = inside & visible & (sides.min(axis=1) >= self.config.min_side_pixels)
        regions = _clipped(ignored, *image.shape[:2])
        regions = regions[(regions[:, 2:] > regions[:, :2]).all(axis=1)]
        left_out = clipped[inside & ~taught]
        return Crop(image, clipped[taught], labels[taught], np.concatenate([regions, left_out]), len(left_out))

    def flipped(self, crop: Crop) -> Crop:
        """The mirror image with the classes that its signs then have; the crop itself where a sign has none."""
        labels = self.mirror[crop.labels]
        if (labels == NOT_MIRRORED).any():
            return crop
        width = crop.image.shape[1]
        image = np.ascontiguousarray(crop.image[:, ::-1])
        return Crop(image, _mirrored(crop.boxes, width), labels, _mirrored(crop.ignored, width), crop.num_left_out)

    def mosaic(self, samples: Sequence[SignSample], random: np.random.Generator) -> Crop:
        """Crops of four samples around a point, the first at the upper left."""
        x, y = (round(length * random.uniform(*MOSAIC_SPLIT_RANGE)) for length in (self.width, self.height))
        image = np.empty((self.height, self.width, 3), np.uint8)
        parts, corners = [], []
        for number, sample in enumerate(samples):
            left, right = ((0, x), (x, self.width))[number % 2]
            top, bottom = ((0, y), (y, self.height))[number // 2]
            part = self.cut(sample, bottom - top, right - left, random)
            image[top:bottom, left:right] = part.image
            parts.append(part)
            corners.append(np.array([left, top] * 2, dtype=np.float64))
        return Crop(
            image,
            np.concatenate([part.boxes + corner for part, corner in zip(parts, corners, strict=True)]),
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.ignored + corner for part, corner in zip(parts, corners, strict=True)]),
            sum(part.num_left_out for part in parts),
        )


def _place(window: int, length: int, span: tuple[float, float] | None, random: np.random.Generator) -> int:
    """Where a window begins along a side of an image: inside it, or around it where the window is larger.

    With `span`, (start, end) of a sign, it holds the sign, or lies within it where the sign is larger.
    """
    low, high = sorted((0, length - window))
    if span is not None:
        first, last = sorted((math.ceil(span[1]) - window, math.floor(span[0])))
        low, high = max(low, first), min(high, last)
    return int(random.integers(low, high + 1))


def _window(image: Image, top: int, left: int, height: int, width: int) -> Image:
    """Part of an image, a view; a copy with PADDING where the part leaves the image."""
    inside = image[max(top, 0) : top + height, max(left, 0) : left + width]
    if inside.shape[:2] == (height, width):
        return inside
    out = np.full((height, width, 3), PADDING, np.uint8)
    first_row, first_column = max(-top, 0), max(-left, 0)
    out[first_row : first_row + inside.shape[0], first_column : first_column + inside.shape[1]] = inside
    return out


def _resized(image: Image, height: int, width: int) -> Image:
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    smaller = height < image.shape[0]
    method = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, (width, height), interpolation=method), dtype=np.uint8)


def _clipped(boxes: Boxes, height: int, width: int) -> Boxes:
    return boxes.clip(0.0, np.array([width, height] * 2, dtype=np.float64))


def _mirrored(boxes: Boxes, width: int) -> Boxes:
    return np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1)
