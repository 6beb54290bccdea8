"""The CurveLanes reader: texts as numbers, points in any order, lists, images of several sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sign_files import write_image, write_text

from perception.data.curvelanes import is_curvelanes, read_curvelanes
from perception.data.lane_folder import LaneFolder
from perception.errors import MissingListError, UserError

LANE = [[10.5, 59], [20, 50], [31, 41]]


def line(points: list[Any]) -> list[dict[str, str]]:
    return [{"x": str(x), "y": str(y)} for x, y in points]


def write(folder: Path, labels: dict[str, Any], part: str = "train") -> None:
    for stem, raw in labels.items():
        write_text(folder / part / f"labels/{stem}.lines.json", json.dumps(raw))


def open_one(folder: Path, raw: Any) -> LaneFolder:
    write(folder, {"a": raw})
    return read_curvelanes(folder, images_required=False)


def names(dataset: LaneFolder) -> list[str]:
    return [dataset.truth(index).name for index in range(len(dataset))]


def test_lanes_in_either_order_and_in_none(tmp_path: Path) -> None:
    lines = [
        line(LANE),
        line(LANE[::-1]),
        line([LANE[1], LANE[2], LANE[0]]),
        [{"x": 5, "y": 9.5}, {"x": "-7e0", "y": 2}],
    ]
    dataset = open_one(tmp_path, {"Lines": lines})
    assert is_curvelanes(tmp_path)
    truth = dataset.truth(0)
    assert [lane.tolist() for lane in truth.lanes] == [LANE, LANE, LANE, [[5, 9.5], [-7, 2]]]
    assert (truth.name, truth.height, truth.width, truth.h_samples) == ("train/images/a.jpg", 1440, 2560, None)
    assert dict(dataset.report.anomalies) == {
        "points from top to bottom: reversed": 1,
        "points in no order: ordered by y": 1,
    }
    assert dataset.report.examples["points in no order: ordered by y"].endswith("a.lines.json: Lines[2]")
    assert (dataset.report.images, dataset.report.lanes) == (1, 4)


def test_images_of_several_sizes_without_lanes_and_without_labels(tmp_path: Path) -> None:
    write(tmp_path, {"a": {"Lines": [line(LANE), line(LANE[:1])]}, "größe.b": {"Lines": []}})
    write_image(tmp_path / "train/images/a.jpg", 60, 80)
    write_image(tmp_path / "train/images/größe.b.png", 36, 64)
    write_image(tmp_path / "train/images/c.jpg")
    dataset = read_curvelanes(tmp_path)
    assert names(dataset) == ["train/images/a.jpg", "train/images/größe.b.jpg"]
    assert dict(dataset.report.anomalies) == {
        "lane with fewer than two points: dropped": 1,
        "image without lanes: kept": 1,
        "image without labels: left out": 1,
        "image .jpg found as .png: used": 1,
    }
    sample = dataset.sample(1)
    assert sample.image.shape == (36, 64, 3)
    assert (sample.truth.height, dataset.truth(0).width) == (36, 80)


def test_lists_and_splits(tmp_path: Path) -> None:
    write(tmp_path, {stem: {"Lines": []} for stem in "abc"})
    write(tmp_path, {"v": {"Lines": [line(LANE)]}}, "valid")
    write_text(tmp_path / "train/train.txt", "images/b.jpg\r\n/images/a.jpg\nimages/b.jpg\n\n")
    train = read_curvelanes(tmp_path, images_required=False)
    assert names(train) == ["train/images/b.jpg", "train/images/a.jpg"]
    assert train.report.anomalies["image listed twice: kept once"] == 1
    assert names(read_curvelanes(tmp_path, "validation", images_required=False)) == ["valid/images/v.jpg"]
    assert names(read_curvelanes(tmp_path, list_name="validation", images_required=False)) == ["valid/images/v.jpg"]
    write_text(tmp_path / "mine.txt", "train/images/c.jpg\n")
    assert names(read_curvelanes(tmp_path, list_name="mine.txt", images_required=False)) == ["train/images/c.jpg"]
    with pytest.raises(MissingListError, match="test labels are not published"):
        read_curvelanes(tmp_path, "test")
    with pytest.raises(UserError, match=r"2 of 2 listed images are missing, first: train/images/b\.jpg"):
        read_curvelanes(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], r"a\.lines\.json: must be a JSON object, got a list"),
        ({"lines": []}, r"a\.lines\.json: field Lines is missing; found lines"),
        ({"Lines": {}}, r"a\.lines\.json: field Lines must be a list"),
        ({"Lines": [3]}, r"a\.lines\.json: Lines\[0\]: field Lines must be a list, got 3"),
        ({"Lines": [[], [[1, 2]]]}, r"a\.lines\.json: Lines\[1\]\[0\]: must be a JSON object, got a list"),
        ({"Lines": [[{"x": "1"}]]}, r"Lines\[0\]\[0\]: field y is missing; found x"),
        ({"Lines": [[{"x": "1,5", "y": "2"}]]}, r'Lines\[0\]\[0\]: field x must be a finite number, got "1,5"'),
        ({"Lines": [[{"x": "nan", "y": "2"}]]}, r"Lines\[0\]\[0\]: field x must be a finite number"),
        ({"Lines": [[{"x": "1", "y": "1e300"}]]}, r"Lines\[0\]\[0\]: field y = .* is beyond any image"),
    ],
)
def test_a_wrong_label_is_an_error_with_its_place(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_one(tmp_path, raw)
    assert "\n" not in str(error.value)


def test_missing_labels_and_wrong_lists_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingListError, match=r"no train/train\.txt and no train/labels/\*\.lines\.json"):
        read_curvelanes(tmp_path)
    write_text(tmp_path / "train/train.txt", "images/a.jpg\n")
    with pytest.raises(UserError, match=r"1 of 1 label files are missing, first: train/labels/a\.lines\.json"):
        read_curvelanes(tmp_path)
    write_text(tmp_path / "train/train.txt", "images/a.jpg\nb.jpg\n")
    with pytest.raises(UserError, match=r"train\.txt:2: b\.jpg is not in a folder images/"):
        read_curvelanes(tmp_path)
    with pytest.raises(UserError, match=r"mine\.txt: CurveLanes list cannot be read"):
        read_curvelanes(tmp_path, list_name="mine.txt")


def test_labels_of_another_size_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"a": {"Lines": [line(LANE)]}})
    write_image(tmp_path / "train/images/a.jpg", 30, 40)
    dataset = read_curvelanes(tmp_path)
    for read in (dataset.truth, dataset.sample):
        with pytest.raises(UserError, match=r"a\.jpg: its lanes reach down to y = 59, the image is 30 pixels high"):
            read(0)
