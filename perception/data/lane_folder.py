"""Images on disk with their lanes in packed arrays: what readers of label files, one an image, return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perception.data.images import image_size, locate_images, read_image
from perception.data.lane_store import pack_lanes, pack_names, unpack_name
from perception.data.sample import Lane, LaneSample, LaneTruth, ReadReport
from perception.errors import UserError

# Labels of a smaller image reach far below a larger one's; labels of the right one end at the last row or just below.
BELOW_IMAGE_TOLERANCE = 1.05


@dataclass(frozen=True)
class LabelledImage:
    name: str
    """Relative to the data set's folder."""
    where: str
    """The label file, or "file:line" of the list that names the image."""
    lanes: list[NDArray[np.float32]]
    """(K, 2) points each, from bottom to top."""


class LaneFolder:
    """A LaneDataset of image files."""

    def __init__(
        self,
        folder: Path,
        images: Sequence[LabelledImage],
        images_required: bool,
        absent_size: tuple[int, int],
        report: ReadReport,
        benchmark: str | None = None,
    ) -> None:
        """Raises UserError where an image is required and missing; else it is taken to be of `absent_size`."""
        self.report, self._benchmark = report, benchmark
        self._folder, self._absent_size = folder, absent_size
        self._names = pack_names([image.name for image in images])
        listed = [(image.name, image.where) for image in images]
        self._image_names = pack_names(locate_images(folder, listed, images_required, report))
        self.lanes = pack_lanes([image.lanes for image in images])
        report.images = len(images)
        report.count_lanes(self.lanes.lanes_of_images)

    def __len__(self) -> int:
        return len(self.lanes)

    def truth(self, index: int) -> LaneTruth:
        """Labels of one image, in the image's own size (from its header)."""
        path = self.image_path(index)
        return self._truth(index, *(self._absent_size if path is None else image_size(path)))

    def sample(self, index: int) -> LaneSample:
        path = self.image_path(index)
        if path is None:
            raise UserError(f"{self._folder / unpack_name(self._names, index)}: image is missing")
        image = read_image(path)
        return LaneSample(image, self._truth(index, image.shape[0], image.shape[1]))

    def _truth(self, index: int, height: int, width: int) -> LaneTruth:
        name, lanes = unpack_name(self._names, index), self.lanes.lanes(index)
        check_size(lanes, height, f"{self._folder / name}: its lanes")
        return LaneTruth(name, height, width, lanes, benchmark=self._benchmark)

    def image_path(self, index: int) -> Path | None:
        """None where the image is absent."""
        name = unpack_name(self._image_names, index)
        return self._folder / name if name else None


def check_size(lanes: Sequence[Lane], height: int, whose: str) -> None:
    """Raise UserError, which begins with `whose`, where lanes are those of a larger image than `height` pixels."""
    lowest = max((float(lane[0, 1]) for lane in lanes), default=0.0)
    if lowest > BELOW_IMAGE_TOLERANCE * height:
        raise UserError(
            f"{whose} reach down to y = {lowest:g}, the image is {height} pixels high; "
            "use images and labels of one size"
        )
