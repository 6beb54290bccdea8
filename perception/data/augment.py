"""Augmentation of road images with their lanes.

An image's draws come from (seed, epoch, index) alone, so neither ranks nor workers change them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perception.augment_config import LaneAugmentConfig
from perception.data.sample import Lane

Image = NDArray[np.uint8]


class LaneAugmenter:
    """Builds its transforms once; `__call__` takes and returns input pixels."""

    def __init__(self, config: LaneAugmentConfig, seed: int) -> None:
        # Imported here: it takes half a second, and evaluation needs none.
        import albumentations

        self.seed = seed
        shift = config.shift_fraction
        transforms = [
            albumentations.HorizontalFlip(p=config.flip_probability),
            albumentations.Affine(
                translate_percent={"x": (-shift, shift), "y": (-shift, shift)},
                scale=config.scale_range,
                rotate=(-config.rotate_degrees, config.rotate_degrees),
                p=config.affine_probability,
            ),
            albumentations.RandomBrightnessContrast(
                brightness_limit=0.15, contrast_limit=0, p=config.brightness_probability
            ),
            albumentations.HueSaturationValue(
                hue_shift_limit=10, sat_shift_limit=10, val_shift_limit=0, p=config.hue_probability
            ),
            albumentations.OneOf(
                [albumentations.MotionBlur(blur_limit=(3, 5)), albumentations.MedianBlur(blur_limit=(3, 5))],
                p=config.blur_probability,
            ),
            albumentations.ChannelShuffle(p=config.channel_shuffle_probability),
        ]
        # remove_invisible=False: a lane that leaves the image is cut by the encoder, not lost here.
        keypoints = albumentations.KeypointParams(format="xy", label_fields=["lane_ids"], remove_invisible=False)
        self.compose = albumentations.Compose(transforms, keypoint_params=keypoints)

    def __call__(self, image: Image, lanes: Sequence[Lane], epoch: int, index: int) -> tuple[Image, tuple[Lane, ...]]:
        """An image (H, W, 3) and lanes (K, 2) → both transformed, the lanes sorted left to right at the bottom edge.

        Every lane comes back, partly or wholly outside of the image as may be: the encoder cuts and
        counts. One that the rotation turns over keeps only the points that still rise, at least one.
        """
        self.compose.set_random_seed(draw_seed(self.seed, epoch, index))
        lane_ids = np.repeat(np.arange(len(lanes)), [len(lane) for lane in lanes])
        points = np.concatenate(lanes) if len(lanes) else np.zeros((0, 2))
        result = self.compose(image=image, keypoints=points, lane_ids=lane_ids)
        moved = np.asarray(result["keypoints"], dtype=np.float64).reshape(-1, 2)
        if not np.array_equal(np.asarray(result["lane_ids"], dtype=np.int64).reshape(-1), lane_ids):
            raise RuntimeError("albumentations dropped or reordered points of lanes")
        turned = [rising(moved[lane_ids == lane]) for lane in range(len(lanes))]
        return result["image"], tuple(sorted(turned, key=lambda lane: bottom_x(lane, image.shape[0])))


def draw_seed(seed: int, epoch: int, index: int) -> int:
    """A 32-bit seed that differs between any two samples, epochs or runs but for chance."""
    digest = hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def rising(points: NDArray[np.float64], least_rise_pixels: float = 0.05) -> Lane:
    """Keep the points (K, 2) that lie above all before them, so that y falls strictly."""
    lowest = np.minimum.accumulate(points[:, 1])
    keep = np.concatenate([[True], points[1:, 1] < lowest[:-1] - least_rise_pixels])
    return np.asarray(points[keep])


def bottom_x(lane: Lane, height: int) -> float:
    """x where the lane's lowest part, made straight, crosses the bottom edge."""
    low, high = lane[0], lane[min(len(lane) - 1, len(lane) // 4 + 1)]
    if len(lane) < 2:
        return float(low[0])
    return float(low[0] + (height - low[1]) * (high[0] - low[0]) / (high[1] - low[1]))
