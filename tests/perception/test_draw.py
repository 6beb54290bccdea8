"""Pictures: lines where the lanes are, in their colours, written whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from perception.augment_config import SignAugmentConfig
from perception.config import RunConfig
from perception.data.lane_targets import LaneBatch
from perception.data.sample import Lane, LanePrediction, LaneSample, LaneTruth, ReadReport
from perception.data.signs.batch import WholeImageBatch
from perception.data.signs.sample import SignPrediction, SignSample, SignTruth
from perception.draw import (
    IGNORED_COLOUR,
    LABEL_COLOUR,
    PREDICTION_COLOUR,
    draw_contact_sheet,
    draw_lanes,
    draw_signs,
    legend,
    tile,
    write_image,
)
from perception.errors import UserError
from perception.model_config import LaneModelConfig
from perception.sign_task import SignTask
from perception.tasks import LaneTask
from tests.perception.sign_cases import TINY

HEIGHT, WIDTH = 160, 320
LABEL = np.array([[80.0, 150.0], [80.0, 60.0]])
FOUND = np.array([[240.0, 150.0], [240.0, 60.0]])


class Fixed(LaneTask):
    """Predicts one known lane everywhere."""

    def predict(self, model: nn.Module, batch: LaneBatch) -> list[LanePrediction]:
        assert not model.training and len(batch) == 1
        return [LanePrediction((FOUND,), (0.9,))]


class Roads:
    """Grey images, each brighter than the one before, with a lane at the left."""

    def __init__(self, count: int, lanes: tuple[Lane, ...] = (LABEL,), heights: tuple[int, ...] = (HEIGHT,)) -> None:
        self.report = ReadReport()
        self.count, self.lanes, self.heights = count, lanes, heights
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def truth(self, index: int) -> LaneTruth:
        return LaneTruth(str(index), self.heights[index % len(self.heights)], WIDTH, self.lanes)

    def sample(self, index: int) -> LaneSample:
        self.asked.append(index)
        truth = self.truth(index)
        return LaneSample(np.full((truth.height, WIDTH, 3), 60, np.uint8), truth)


def task() -> Fixed:
    return Fixed(RunConfig(task="lane", name="x", model=LaneModelConfig(input_height=64, input_width=160)))


def is_colour(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return np.asarray((np.abs(image.astype(int) - colour) < 40).all(axis=2))


def read(path: Path) -> np.ndarray:
    image = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
    assert image is not None
    return np.asarray(image)


def test_the_contact_sheet_shows_labels_and_predictions_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "validation.png"
    draw_contact_sheet(path, task(), nn.Linear(1, 1), Roads(2), columns=1)
    sheet = read(path)
    # Two pictures of 640 x 320 below a legend of 28 rows, 4 pixels of ground around each.
    assert sheet.shape == (28 + 2 * 324 + 4, 648, 3)
    for top in (28 + 4, 28 + 4 + 324):
        picture = sheet[top : top + 320, 4:644]
        for colour, x in [(LABEL_COLOUR, 160.5), (PREDICTION_COLOUR, 480.5)]:
            rows, columns = np.nonzero(is_colour(picture, colour))
            assert abs(columns.mean() - x) < 1 and columns.max() - columns.min() < 8
            assert abs(rows.min() - 120) < 6 and abs(rows.max() - 300) < 6
    shown = sheet[:28]
    assert is_colour(shown, LABEL_COLOUR).any() and is_colour(shown, PREDICTION_COLOUR).any()
    assert list(tmp_path.iterdir()) == [path]


def test_a_sheet_without_labels_shows_the_prediction_alone(tmp_path: Path) -> None:
    draw_contact_sheet(tmp_path / "a.png", task(), nn.Linear(1, 1), Roads(1, lanes=()))
    picture = read(tmp_path / "a.png")[28:]
    assert not is_colour(picture, LABEL_COLOUR).any() and is_colour(picture, PREDICTION_COLOUR).any()


@pytest.mark.parametrize(
    ("images", "count", "expected"),
    [(1, 24, [0]), (3, 24, [0, 1, 2]), (100, 3, [0, 50, 99]), (101, 5, [0, 25, 50, 75, 100]), (10, 1, [0])],
)
def test_samples_are_spread_over_the_data(images: int, count: int, expected: list[int], tmp_path: Path) -> None:
    roads = Roads(images)
    draw_contact_sheet(tmp_path / "a.jpg", task(), nn.Linear(1, 1), roads, count=count)
    assert [abs(a - b) <= 1 for a, b in zip(roads.asked, expected, strict=True)] == [True] * len(expected)


def test_images_of_several_heights_fit_one_sheet(tmp_path: Path) -> None:
    draw_contact_sheet(tmp_path / "a.png", task(), nn.Linear(1, 1), Roads(2, heights=(160, 240)), columns=2)
    assert read(tmp_path / "a.png").shape == (28 + 4 + 480 + 4, 4 + 2 * 644, 3)


def test_lines_are_drawn_at_fractions_of_a_pixel_and_far_outside() -> None:
    image = np.zeros((40, 40, 3), np.uint8)
    draw_lanes(image, [np.array([[10.25, 39.0], [10.25, 0.0]])], (0, 0, 200), 1)
    columns = (image[20, :, 2].astype(float) * np.arange(40)).sum() / image[20, :, 2].sum()
    assert abs(columns - 10.25) < 0.3 and not image[:, :, :2].any()
    draw_lanes(image, [np.array([[1e12, 1e12], [-1e12, -1e12]])], (9, 9, 9), 1)


def test_tiles_and_legend_have_their_sizes() -> None:
    images = [np.full((10, 20, 3), 50 * number, np.uint8) for number in range(1, 4)]
    sheet = tile(images, columns=2, gap=2)
    assert sheet.shape == (2 * 12 + 2, 2 * 22 + 2, 3)
    assert (sheet[2:12, 24:44] == 100).all() and (sheet[14:24, 2:22] == 150).all() and (sheet[14:24, 24:44] == 24).all()
    assert legend(300, [("label", LABEL_COLOUR)]).shape == (28, 300, 3)


@pytest.mark.parametrize("name", ["a.xyz", "a", "a."])
def test_an_unknown_picture_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be encoded; use \.png or \.jpg"):
        write_image(tmp_path / name, np.zeros((4, 4, 3), np.uint8))


def test_a_picture_that_cannot_be_written_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), dtype=np.uint8)
    with pytest.raises(UserError, match=r"a\.png: cannot be written \(No space left on device\)"):
        write_image(small_disk / "a.png", noise)
    assert list(small_disk.iterdir()) == []
    with pytest.raises(UserError, match=r"a\.png: cannot be written"):
        write_image(tmp_path / "none" / "a.png", np.zeros((4, 4, 3), np.uint8))


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    draw_contact_sheet(tmp_path / "a.png", task(), nn.Linear(1, 1), Roads(1))
    assert torch.is_grad_enabled()


# --- Signs ---


class KnownSigns(SignTask):
    """Finds one sign surely and one hardly, whatever it sees."""

    def predict(self, model: nn.Module, batch: WholeImageBatch) -> list[SignPrediction]:
        boxes = np.array([[200.0, 60, 240, 100], [20, 20, 40, 40]])
        return [SignPrediction(boxes, np.array([0.9, 0.1]), np.array([1, 0]))]


class Streets:
    """Grey, with a sign at the left and an ignored region at the bottom right."""

    classes = ("stop", "give-way")

    def __init__(self) -> None:
        self.report = ReadReport()

    def __len__(self) -> int:
        return 1

    def truth(self, index: int) -> SignTruth:
        box, region = np.array([[80.0, 60, 120, 100]]), np.array([[280.0, 120, 310, 150]])
        return SignTruth("a", HEIGHT, WIDTH, box, np.array([0]), region)

    def sample(self, index: int) -> SignSample:
        return SignSample(np.full((HEIGHT, WIDTH, 3), 60, np.uint8), self.truth(index))


def test_signs_are_drawn_where_they_are_with_their_names(tmp_path: Path) -> None:
    config = RunConfig("sign", "x", augment=SignAugmentConfig(), model=replace(TINY, num_classes=0))
    draw_contact_sheet(tmp_path / "a.png", KnownSigns(config, Streets.classes), nn.Linear(1, 1), Streets())
    # Twice the size of the image, below the legend and the gap.
    picture = read(tmp_path / "a.png")[28 + 4 : 28 + 4 + 320, 4:644]
    for colour, (x1, y1, x2, y2) in [(LABEL_COLOUR, (160, 120, 240, 200)), (IGNORED_COLOUR, (560, 240, 620, 300))]:
        rows, columns = np.nonzero(is_colour(picture, colour))
        assert max(abs(columns.min() - x1), abs(rows.min() - y1), abs(columns.max() - x2), abs(rows.max() - y2)) <= 3
    rows, columns = np.nonzero(is_colour(picture, PREDICTION_COLOUR))
    assert abs(columns.min() - 400) <= 2 and abs(rows.max() - 200) <= 2, "only the sure one"
    assert 100 < rows.min() < 118, "its name stands above it"


@pytest.mark.parametrize("box", [[0.0, 0, 10, 10], [290.0, 150, 320, 160], [-1e12, -1e12, 1e12, 1e12]])
def test_names_stay_inside_the_picture(box: list[float]) -> None:
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    draw_signs(image, np.array([box]), ["end-of-no-overtaking-by-trucks 0.99"], (0, 0, 255), 1)
    rows, columns = np.nonzero(image[:, :, 2])
    assert len(rows) > 100 and columns.max() - columns.min() > 150
