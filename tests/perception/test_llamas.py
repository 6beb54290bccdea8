"""The LLAMAS reader: markers to lanes by the rules of the data set's own reader, and where that one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sign_files import write_image, write_text

from perception.data.lane_folder import LaneFolder
from perception.data.llamas import is_llamas, read_llamas
from perception.errors import MissingListError, UserError

DRIVE = "images-2014-12-22"


def marker(x1: float, y1: float, x2: float, y2: float, z: float | None = 10.0) -> dict[str, Any]:
    """From (x1, y1) below to (x2, y2) above; numbers as texts, as in many of the files."""
    world = {} if z is None else {"world_start": {"x": "0", "y": "0", "z": str(z)}, "world_end": {"z": "1"}}
    return {"pixel_start": {"x": str(x1), "y": str(y1)}, "pixel_end": {"x": x2, "y": y2}, **world}


def lane(lane_id: str, *markers: dict[str, Any]) -> dict[str, Any]:
    return {"lane_id": lane_id, "markers": list(markers)}


def straight(lane_id: str, x: float) -> dict[str, Any]:
    """Two markers on the line that falls to x at the bottom row, 716."""
    return lane(lane_id, marker(x + 16, 700, x + 116, 600, 5), marker(x + 216, 500, x + 316, 400, 20))


def write(folder: Path, labels: dict[str, Any], part: str = "train") -> None:
    for name, raw in labels.items():
        text = raw if isinstance(raw, str) else json.dumps(raw)
        write_text(folder / f"labels/{part}/{DRIVE}/{name}.json", text)


def open_lanes(folder: Path, *lanes: Any, **options: Any) -> LaneFolder:
    write(folder, {"1.5": {"image_name": "1.5", "projection_matrix": [], "lanes": list(lanes)}})
    return read_llamas(folder, images_required=False, **options)


def points(dataset: LaneFolder) -> list[list[list[float]]]:
    return [lane.tolist() for lane in dataset.truth(0).lanes]


def test_markers_are_joined_and_continued_to_the_bottom(tmp_path: Path) -> None:
    dataset = open_lanes(tmp_path, straight("r0", 700))
    assert points(dataset) == [[[700, 716], [716, 700], [816, 600], [916, 500], [1016, 400]]]
    truth = dataset.truth(0)
    assert truth.name == f"color_images/train/{DRIVE}/1.5_color_rect.png"
    assert (truth.height, truth.width) == (717, 1276)
    assert dict(dataset.report.anomalies) == {}


@pytest.mark.parametrize(
    ("near", "first"),
    [
        (marker(40, 600, 90, 550), [0, 640]),
        (marker(1250, 600, 1200, 550), [1276, 626]),
        (marker(100, 716, 150, 650), [100, 716]),
    ],
)
def test_what_leaves_at_the_side_ends_there(tmp_path: Path, near: dict[str, Any], first: list[float]) -> None:
    dataset = open_lanes(tmp_path, lane("l0", near, marker(400, 400, 420, 380, 50)))
    assert points(dataset)[0][0] == first


def test_the_nearest_marker_is_continued_not_the_first(tmp_path: Path) -> None:
    far, near = marker(316, 400, 416, 300, 30), marker(116, 600, 216, 500, 3)
    assert points(open_lanes(tmp_path, lane("l0", far, near)))[0][:2] == [[0, 716], [116, 600]]
    far, near = marker(316, 400, 416, 300, None), marker(116, 600, 216, 500, None)
    assert points(open_lanes(tmp_path, lane("l0", far, near)))[0][:2] == [[0, 716], [116, 600]]


def test_where_nothing_can_be_continued_the_lane_ends(tmp_path: Path) -> None:
    upright, flat = marker(300, 600, 300, 500), marker(300, 400, 310, 400)
    dataset = open_lanes(tmp_path, lane("l0", upright, flat))
    assert points(dataset) == [[[300, 600], [300, 500], [300, 400]]]
    assert dataset.report.anomalies == {"no marker to continue to the bottom: lane ends at its lowest": 1}
    behind = [marker(300, 600, 310, 500, -2), marker(320, 400, 330, 300, 9)]
    assert points(open_lanes(tmp_path, lane("l0", *behind)))[0][0] == [300, 600]


def test_side_by_side_small_and_upside_down_markers(tmp_path: Path) -> None:
    parallel = [marker(90, 716, 100, 516, 1), marker(100, 716, 110, 516, 1)]
    small, upside_down = marker(130, 400, 131, 398), marker(140, 300, 160, 350)
    dataset = open_lanes(tmp_path, lane("l0", *parallel, small, upside_down, marker(150, 250, 155, 200, 90)))
    assert points(dataset)[0] == [[95, 716], [105, 516], [130, 400], [140, 300], [150, 250], [155, 200]]


def test_lanes_are_ordered_and_counted_anew(tmp_path: Path) -> None:
    ids = {"r3": 900, "l7": 100, "l0": 400, "r0": 600, "l3": 200, "r1": 800}
    lanes = [straight(lane_id, x) for lane_id, x in ids.items()]
    dataset = open_lanes(tmp_path, *lanes)
    assert [lane[0, 0] for lane in dataset.truth(0).lanes] == [200, 400, 600, 800]
    assert dataset.report.anomalies == {"lane beyond l1 and r1: left out": 2}
    everything = open_lanes(tmp_path, *lanes, all_lanes=True)
    assert [lane[0, 0] for lane in everything.truth(0).lanes] == [100, 200, 400, 600, 800, 900]
    assert everything.report.lanes == 6


def test_short_lanes_are_dropped(tmp_path: Path) -> None:
    outside = marker(9, 800, 9, 700)
    dataset = open_lanes(
        tmp_path,
        lane("l0", marker(300, 600, 310, 500)),
        lane("l1", marker(300, 600, 310, 500), marker(305, 619, 310, 600)),
        lane("l2", marker(300, 600, 310, 500), marker(305, 620, 310, 600)),
        lane("l3"),
        lane("r0", outside, marker(300, 600, 310, 500)),
    )
    assert len(dataset.truth(0).lanes) == 1
    assert dict(dataset.report.anomalies) == {
        "lane with fewer than two markers: dropped": 3,
        "lane lower than 20 pixels: dropped": 1,
        "marker outside the image: dropped": 1,
    }
    assert dataset.report.examples["lane lower than 20 pixels: dropped"].endswith("1.5.json: lanes[1]")


def test_an_id_that_stands_twice_is_one_lane(tmp_path: Path) -> None:
    lower, upper = straight("l0", 300)["markers"], [marker(640, 376, 660, 356), marker(700, 320, 710, 310)]
    dataset = open_lanes(tmp_path, lane("l0", *lower), lane("l0", *upper))
    assert len(dataset.truth(0).lanes) == 1
    assert dataset.report.anomalies == {"lane id stands twice: markers joined": 1}


def test_every_lane_keeps_the_contract(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = {}
    for number in range(60):
        ends = random.integers(0, 717, (4, 5, 4))
        lanes = [lane(f"l{i}", *(marker(*map(float, end)) for end in lane_ends)) for i, lane_ends in enumerate(ends)]
        labels[str(number)] = {"lanes": lanes}
    write(tmp_path, labels)
    dataset = read_llamas(tmp_path, images_required=False, all_lanes=True)
    assert len(dataset) == 60
    lanes_found = [lane for index in range(60) for lane in dataset.truth(index).lanes]
    assert len(lanes_found) > 200
    for found in lanes_found:
        assert len(found) >= 2
        assert (np.diff(found[:, 1]) < 0).all()
        assert (found[:, 0] >= 0).all()
        assert (found[:, 0] <= 1276).all()


def test_splits_folders_and_images(tmp_path: Path) -> None:
    label = {"lanes": [straight("l0", 200)]}
    write(tmp_path, {"1": label, "2": {"lanes": []}})
    write(tmp_path, {"3": label}, "valid")
    write_image(tmp_path / f"color_images/valid/{DRIVE}/3_color_rect.png", 717, 1276)
    assert is_llamas(tmp_path)
    assert len(read_llamas(tmp_path, images_required=False)) == 2
    validation = read_llamas(tmp_path, "validation")
    assert validation.sample(0).image.shape == (717, 1276, 3)
    named = read_llamas(tmp_path, list_name=f"labels/train/{DRIVE}", images_required=False)
    assert named.report.anomalies == {"image without lanes: kept": 1}
    with pytest.raises(MissingListError, match=r"labels/test: no such folder .*not published"):
        read_llamas(tmp_path, "test")
    with pytest.raises(UserError, match="list = mine: LLAMAS has folders of labels, such as labels/train"):
        read_llamas(tmp_path, list_name="mine")
    with pytest.raises(UserError, match=r"2 of 2 listed images are missing, first: color_images/train/"):
        read_llamas(tmp_path)
    (tmp_path / "labels/empty").mkdir()
    with pytest.raises(UserError, match=r"labels/empty: no \*\.json"):
        read_llamas(tmp_path, list_name="labels/empty")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", r"1\.json: LLAMAS label file is empty"),
        ('{"lanes": [', r"1\.json:1: LLAMAS label file is not JSON"),
        ({}, r"1\.json: field lanes is missing; found none"),
        ({"lanes": [{"markers": []}]}, r"1\.json: lanes\[0\]: field lane_id is missing"),
        ({"lanes": [lane("m1")]}, r'lanes\[0\]: field lane_id must be l or r and a number, such as "l0", got "m1"'),
        ({"lanes": [{"lane_id": "l0"}]}, r"lanes\[0\]: field markers is missing; found lane_id"),
        ({"lanes": [lane("l0", {"pixel_start": {"x": 1, "y": 2}})]}, r"markers\[0\]: field pixel_end is missing"),
        ({"lanes": [lane("l0", marker(1, 2, 3, float("nan")))]}, r"markers\[0\]: field pixel_end\.y must be a finite"),
        (
            {"lanes": [lane("l0", marker(1, 2, 3, 4, float("inf")))]},
            r"markers\[0\]: field world_start\.z must be a finite",
        ),
    ],
)
def test_a_wrong_label_is_an_error_with_its_place(tmp_path: Path, raw: Any, message: str) -> None:
    write(tmp_path, {"1": raw})
    with pytest.raises(UserError, match=message) as error:
        read_llamas(tmp_path, images_required=False)
    assert "\n" not in str(error.value)
