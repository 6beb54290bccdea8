"""The reader of BDD100K's lanes: both schemas, curves, masks, edges that are joined, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from sign_files import write_image, write_text

from perception.data.bdd100k_lanes import read_bdd100k_lanes
from perception.data.lane_folder import LaneFolder
from perception.data.open import detect_format
from perception.errors import MissingListError, UserError

OUTLINES = "labels/lane/polygons/lane_train.json"


def label(
    points: list[list[float]], category: str = "single white", types: str = "", closed: bool = False, **attributes: str
) -> dict[str, Any]:
    outline = {"vertices": points, "types": types or "L" * len(points), "closed": closed}
    stated = {"laneDirection": "parallel", "laneStyle": "solid", **attributes}
    return {"category": category, "attributes": stated, "poly2d": [outline]}


def read(folder: Path, labels: list[dict[str, Any]] | None, **options: Any) -> LaneFolder:
    write_text(folder / OUTLINES, json.dumps([{"name": "a.jpg", "labels": labels}]))
    return read_bdd100k_lanes(folder, images_required=False, **options)


def lanes(dataset: LaneFolder) -> list[list[list[float]]]:
    return [lane.tolist() for lane in dataset.truth(0).lanes]


def straight(x: float, top: float = 300) -> list[list[float]]:
    return [[x, 700.0], [x, top]]


def test_both_schemas_and_what_is_no_lane(tmp_path: Path) -> None:
    older = label(straight(100), "lane", laneType="double yellow")
    labels = [
        older,
        label(straight(400)),
        label(straight(700), laneDirection="vertical"),
        label(straight(800), "crosswalk"),
        label(straight(900), "road curb"),
        label(straight(1000), closed=True),
        {"category": "car", "box2d": {"x1": 1}},
    ]
    dataset = read(tmp_path, labels)
    assert detect_format(tmp_path) == "bdd100k_lanes"
    assert lanes(dataset) == [straight(100), straight(400)]
    assert dict(dataset.report.anomalies) == {
        "marking across the road: left out": 2,
        "road curb: left out": 1,
        "closed outline: left out": 1,
        "label of another category: left out": 1,
    }
    assert lanes(read(tmp_path, labels, curbs=True)) == [straight(100), straight(400), straight(900)]
    assert lanes(read(tmp_path, None)) == []


def test_a_curve_passes_through_its_ends_and_its_middle(tmp_path: Path) -> None:
    corners = [[100, 700], [120, 600], [200, 500], [300, 400]]
    (lane,) = lanes(read(tmp_path, [label(corners, types="LCCC")]))
    assert lane[0] == corners[0] and lane[-1] == corners[-1] and len(lane) == 17
    # Of a cubic Bezier curve at one half: an eighth of the ends, three eighths of the control points.
    assert np.allclose(lane[8], np.array([1, 3, 3, 1]) @ np.array(corners) / 8, atol=1e-3)


def test_two_edges_of_one_marking_are_one_lane(tmp_path: Path) -> None:
    labels = [
        label(straight(100)),
        label(straight(110, 310)),
        label(straight(160)),
        label(straight(105), laneStyle="dashed"),
    ]
    dataset = read(tmp_path, labels)
    found = lanes(dataset)
    assert len(found) == 3 and found[0] == [[105, 700], [105, 310]]
    assert dict(dataset.report.anomalies) == {"two edges of one marking: joined": 1}


def test_edges_that_share_few_rows_stay_two_lanes(tmp_path: Path) -> None:
    assert len(lanes(read(tmp_path, [label([[100, 700], [100, 500]]), label([[105, 520], [105, 300]])]))) == 2


def test_masks(tmp_path: Path) -> None:
    mask = np.full((720, 1280), 255, np.uint8)
    cv2.line(mask, (100, 700), (300, 300), 6, 3)  # single white, solid, parallel
    cv2.line(mask, (600, 650), (900, 650), 6 | 32, 3)  # across the road
    cv2.line(mask, (1000, 700), (1000, 300), 4, 3)  # curb
    cv2.line(mask, (700, 700), (700, 697), 7 | 16, 3)  # a speck
    path = tmp_path / "labels/lane/masks/train/a.png"
    path.parent.mkdir(parents=True)
    assert cv2.imwrite(str(path), mask)
    write_image(tmp_path / "images/100k/train/a.jpg", 720, 1280)
    dataset = read_bdd100k_lanes(tmp_path)
    (lane,) = dataset.truth(0).lanes
    expected = 100 + (700 - lane[:, 1]) / 2
    # The pen's ends are round, so that the outermost rows are short.
    assert np.abs(lane[1:-1, 0] - expected[1:-1]).max() <= 0.75 and np.abs(lane[:, 0] - expected).max() < 1.5
    assert abs(lane[0, 1] - 700) <= 2 and abs(lane[-1, 1] - 300) <= 2
    assert dataset.truth(0).name == "images/100k/train/a.jpg"
    assert dict(dataset.report.anomalies) == {
        "marking across the road: left out": 1,
        "road curb: left out": 1,
        "mark lower than 10 pixels: dropped": 1,
    }


@pytest.mark.parametrize(
    ("types", "message"),
    [("LL", "an L or C for each of 4"), ("LCCX", "an L or C for each of 4"), ("LLCC", "a curve is three C")],
)
def test_wrong_types_are_named(tmp_path: Path, types: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"a\.jpg labels\[0\]\.poly2d\[0\]: .*{message}"):
        read(tmp_path, [label([[1, 9], [2, 8], [3, 7], [4, 6]], types=types)])


def test_missing_parts(tmp_path: Path) -> None:
    read(tmp_path, [label(straight(1))])
    with pytest.raises(MissingListError, match="not published"):
        read_bdd100k_lanes(tmp_path, "test")
    with pytest.raises(UserError, match="image"):
        read_bdd100k_lanes(tmp_path)
    assert len(read_bdd100k_lanes(tmp_path, list_name=OUTLINES, images_required=False)) == 1
