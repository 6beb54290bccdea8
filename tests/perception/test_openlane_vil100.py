"""Readers of OpenLane and VIL-100: layouts, lists, categories, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sign_files import write_image, write_text

from perception.data.open import detect_format, open_lane_dataset
from perception.data.openlane import read_openlane
from perception.data.vil100 import read_vil100
from perception.errors import MissingListError, UserError

POINTS = [[10.5, 59.0], [20.0, 50.0], [31.0, 41.0]]


def openlane(folder: Path, lines: list[dict[str, Any]], name: str = "s/1", part: str = "training") -> None:
    raw = {"file_path": f"{part}/{name}.jpg", "lane_lines": lines, "intrinsic": [[1]], "extrinsic": [[1]]}
    write_text(folder / f"lane3d_1000/{part}/{name}.json", json.dumps(raw))


def line(points: list[list[float]], category: int = 2) -> dict[str, Any]:
    return {"category": category, "uv": [list(axis) for axis in zip(*points, strict=True)], "xyz": [[1], [2], [3]]}


def test_openlane_lanes_and_curbs(tmp_path: Path) -> None:
    openlane(tmp_path, [line(POINTS), line(POINTS[::-1], 20), line(POINTS, 99)])
    openlane(tmp_path, [], "s/2")
    write_image(tmp_path / "images/training/s/1.jpg")
    write_image(tmp_path / "images/training/s/2.jpg", 30, 40)
    assert detect_format(tmp_path) == "openlane"
    dataset = open_lane_dataset(tmp_path)
    truths = [dataset.truth(index) for index in range(len(dataset))]
    assert [truth.name for truth in truths] == ["images/training/s/1.jpg", "images/training/s/2.jpg"]
    assert [lane.tolist() for lane in truths[0].lanes] == [POINTS] * 3
    assert (truths[1].height, truths[1].width, truths[1].lanes) == (30, 40, ())
    assert dict(dataset.report.anomalies) == {
        "points from top to bottom: reversed": 1,
        "unknown category 99: kept": 1,
        "image without lanes: kept": 1,
    }
    assert len(read_openlane(tmp_path, curbs=False).truth(0).lanes) == 2


def test_openlane_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(MissingListError, match=r"lane3d_\*/validation"):
        read_openlane(tmp_path, "validation")
    openlane(tmp_path, [{"category": 1, "uv": [[1, 2], [3]]}])
    with pytest.raises(UserError, match=r"1\.json: lane_lines\[0\]: field uv has 2 u and 1 v"):
        read_openlane(tmp_path, images_required=False)
    openlane(tmp_path, [line(POINTS)])
    with pytest.raises(UserError, match="image"):
        read_openlane(tmp_path)
    assert read_openlane(tmp_path, images_required=False).truth(0).height == 1280
    (tmp_path / "lane3d_300/training").mkdir(parents=True)
    with pytest.raises(UserError, match=r"several folders of labels: lane3d_1000/training, lane3d_300/training"):
        read_openlane(tmp_path, images_required=False)
    assert len(read_openlane(tmp_path, list_name="lane3d_1000/training", images_required=False)) == 1


def vil100(folder: Path, lanes: list[list[list[float]]], name: str = "v/00003") -> None:
    annotations = {"lane": [{"id": i, "lane_id": i, "attribute": 1, "points": lane} for i, lane in enumerate(lanes)]}
    raw = {"info": {"height": 60, "width": 80, "image_path": f"{name}.jpg"}, "annotations": annotations}
    write_text(folder / f"Json/{name}.jpg.json", json.dumps(raw))
    write_image(folder / f"JPEGImages/{name}.jpg")


def test_vil100_frames_of_a_list(tmp_path: Path) -> None:
    vil100(tmp_path, [POINTS, POINTS[::-1], [POINTS[0], POINTS[0], POINTS[1]]])
    vil100(tmp_path, [], "v/00006")
    vil100(tmp_path, [POINTS], "w/00000")
    write_text(tmp_path / "data/train.txt", "/JPEGImages/v/00003.jpg /x.png 1 1\n/JPEGImages/v/00006.jpg\n\n")
    write_text(tmp_path / "data/test.txt", "/JPEGImages/w/00000.jpg\n/JPEGImages/w/00000.jpg \n")
    assert detect_format(tmp_path) == "vil100"
    dataset = open_lane_dataset(tmp_path)
    assert [dataset.truth(index).name for index in (0, 1)] == ["JPEGImages/v/00003.jpg", "JPEGImages/v/00006.jpg"]
    assert [lane.tolist() for lane in dataset.truth(0).lanes] == [POINTS, POINTS, POINTS[:2]]
    assert dict(dataset.report.anomalies) == {
        "points from top to bottom: reversed": 1,
        "consecutive duplicate point: dropped": 1,
        "image without lanes: kept": 1,
    }
    assert len(read_vil100(tmp_path, "test")) == 1
    with pytest.raises(MissingListError, match="no validation list of its own"):
        read_vil100(tmp_path, "validation")


def test_vil100_names_what_is_wrong(tmp_path: Path) -> None:
    vil100(tmp_path, [POINTS])
    write_text(tmp_path / "data/train.txt", "/JPEGImages/v/00003.jpg\n/JPEGImages/v/00009.jpg\n")
    with pytest.raises(UserError, match=r"1 of 2 label files are missing, first: Json/v/00009\.jpg\.json"):
        read_vil100(tmp_path)
    write_text(tmp_path / "data/train.txt", "/frames/v/00003.jpg\n")
    with pytest.raises(UserError, match=r"train\.txt:1: .* is not in JPEGImages/"):
        read_vil100(tmp_path)
    write_text(tmp_path / "data/train.txt", "/JPEGImages/v/00003.jpg\n")
    vil100(tmp_path, [[[1, 2, 3], [4, 5, 6]]])
    with pytest.raises(UserError, match=r"lane\[0\]\.points\[0\]: must be a pair"):
        read_vil100(tmp_path)
    # Labels of a larger video than the image is.
    vil100(tmp_path, [[[5, 900], [6, 800]]])
    with pytest.raises(UserError, match="use images and labels of one size"):
        read_vil100(tmp_path).truth(0)
