"""One object that maps between original pixels and network input, both ways.

Every reader, augmentation, encoder and decoder uses it, and it is stored in the
checkpoint, so that a model can never be used with the crop of another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """Crop the top of a source image, then resize what is left to the network input.

    A side at least 1.8 times too long is halved first, as often as that holds: by whole pixels, so where it does not
    divide evenly a pixel or a few more are cut from the top or from the right.

    Points are (x, y) floats with pixel centres at whole numbers, as lane labels
    have them; the half-pixel terms below are those of cv2.resize.
    """

    source_height: int
    source_width: int
    crop_top: int
    input_height: int
    input_width: int

    def __post_init__(self) -> None:
        if self.input_height <= 0 or self.input_width <= 0 or self.input_height % 32 or self.input_width % 32:
            raise UserError(
                f"input size {self.input_height}x{self.input_width}: height and width must be multiples of 32"
            )
        if self.source_height <= 0 or self.source_width <= 0:
            raise UserError(f"image size {self.source_height}x{self.source_width}: height and width must be above 0")
        if not 0 <= self.crop_top < self.source_height:
            raise UserError(f"crop_top = {self.crop_top} leaves nothing of an image {self.source_height} pixels high")

    @property
    def halvings(self) -> tuple[int, int]:
        """How often height and width are halved."""
        return (
            _halvings(self.source_height - self.crop_top, self.input_height),
            _halvings(self.source_width, self.input_width),
        )

    @property
    def kept_top(self) -> int:
        """First row that is used; down to the last one."""
        height = self.source_height - self.crop_top
        return self.source_height - (height >> self.halvings[0] << self.halvings[0])

    @property
    def kept_width(self) -> int:
        """Columns that are used, from the left."""
        return self.source_width >> self.halvings[1] << self.halvings[1]

    @property
    def scale_x(self) -> float:
        return self.input_width / self.kept_width

    @property
    def scale_y(self) -> float:
        return self.input_height / (self.source_height - self.kept_top)

    def image_to_input(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(source_height, source_width, 3) uint8 → (input_height, input_width, 3) uint8."""
        if image.shape[:2] != (self.source_height, self.source_width):
            raise ValueError(f"image is {image.shape[:2]}, geometry is for {(self.source_height, self.source_width)}")
        resized = image[self.kept_top :, : self.kept_width]
        halvings_y, halvings_x = self.halvings
        # At exactly half a side linear interpolation is the mean of two pixels; at a third it would skip one, and just
        # above a half nearly so at some places. Means over areas of any size (INTER_AREA) take OpenCV two to eight
        # times as long, and lanes are found no better.
        for done in range(max(self.halvings)):
            height, width = resized.shape[:2]
            resized = _resize(resized, height >> (done < halvings_y), width >> (done < halvings_x))
        if resized.shape[:2] != (self.input_height, self.input_width):
            resized = _resize(resized, self.input_height, self.input_width)
        return np.ascontiguousarray(resized)

    def points_to_input(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """(K, 2) original pixels → (K, 2) input pixels."""
        x = (points[:, 0] + 0.5) * self.scale_x - 0.5
        y = (points[:, 1] - self.kept_top + 0.5) * self.scale_y - 0.5
        return np.stack([x, y], axis=1)

    def points_to_source(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """(K, 2) input pixels → (K, 2) original pixels; the inverse of `points_to_input`."""
        x = (points[:, 0] + 0.5) / self.scale_x - 0.5
        y = (points[:, 1] + 0.5) / self.scale_y - 0.5 + self.kept_top
        return np.stack([x, y], axis=1)


def _halvings(length: int, wanted: int) -> int:
    """The fewest after which `length` is less than 1.8 times `wanted`."""
    return (5 * length // (9 * wanted)).bit_length()


def _resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
