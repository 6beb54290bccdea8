"""The BDD100K reader: both schemas, inclusive corners, categories and their old names, bad labels named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sign_files import class_counts, ignored, names, signs, write_image, write_text

from perception.data.signs.bdd100k import is_bdd100k, read_bdd100k
from perception.data.signs.dataset import SignFolder
from perception.errors import MissingListError, UserError

SIGN = "traffic sign"


def label(category: str = SIGN, *sides: float, **fields: Any) -> dict[str, Any]:
    box = dict(zip(("x1", "y1", "x2", "y2"), sides or (10.0, 20.0, 29.0, 39.5), strict=True))
    return {"id": "0", "category": category, "attributes": {"occluded": False}, "box2d": box, **fields}


def write(folder: Path, frames: Any, name: str = "labels/det_20/det_train.json") -> None:
    write_text(folder / name, json.dumps(frames))


def open_frames(folder: Path, frames: Any, **options: Any) -> SignFolder:
    write(folder, frames)
    return read_bdd100k(folder, images_required=False, **options)


def test_corners_are_inclusive_and_other_categories_are_left_out(tmp_path: Path) -> None:
    lane = {"category": "lane", "poly2d": [{"vertices": [[1, 2], [3, 4]]}]}
    frames = [{"name": "a-b.jpg", "labels": [label(), label("car"), lane]}]
    dataset = open_frames(tmp_path, frames)
    assert is_bdd100k(tmp_path)
    assert dataset.classes == (SIGN,)
    assert signs(dataset) == [(SIGN, [10, 20, 30, 40.5])]
    assert names(dataset) == ["images/100k/train/a-b.jpg"]
    assert (dataset.truth(0).height, dataset.truth(0).width) == (720, 1280)
    assert dataset.report.anomalies["label of another category: left out"] == 2
    assert signs(open_frames(tmp_path, frames, corners="half-open")) == [(SIGN, [10, 20, 29, 39.5])]


def test_old_names_are_read_as_new_ones(tmp_path: Path) -> None:
    old = [label(name, place, 1, place + 3, 4) for place, name in enumerate(("bike", "motor", "person", "rider"))]
    wanted = ("bicycle", "motorcycle", "pedestrian", "rider")
    dataset = open_frames(tmp_path, [{"name": "a.jpg", "labels": old}], categories=wanted)
    assert [name for name, _ in signs(dataset)] == list(wanted)
    assert dataset.report.anomalies['category "bike": read as "bicycle"'] == 1
    new = open_frames(tmp_path, [{"name": "a.jpg", "labels": [label("bicycle")]}], categories=wanted)
    assert class_counts(new) == {"bicycle": 1}


def test_absent_labels_crowds_and_labels_without_a_box(tmp_path: Path) -> None:
    flat = label()
    del flat["box2d"]
    frames = [
        {"name": "a.jpg"},
        {"name": "b.jpg", "labels": None},
        {"name": "c.jpg", "labels": []},
        {
            "name": "d.jpg",
            "labels": [flat, label(SIGN, 5, 5, 8, 8, attributes={"crowd": True}), label(attributes=None)],
        },
        {"name": "d.jpg", "labels": [label()]},
    ]
    dataset = open_frames(tmp_path, {"frames": frames, "config": {}})
    assert [signs(dataset, index) for index in range(3)] == [[], [], []]
    assert len(dataset) == 4
    assert ignored(dataset, 3) == [[5, 5, 9, 9]]
    assert signs(dataset, 3) == [(SIGN, [10, 20, 30, 40.5])]
    assert dict(dataset.report.anomalies) == {
        "image without the field labels: kept without signs": 2,
        "label without box2d: left out": 1,
        "image listed twice: first kept": 1,
        "image is not there: labels kept": 4,
    }
    assert dataset.report.examples["label without box2d: left out"].endswith("det_train.json: [3] d.jpg labels[0]")


def test_one_json_an_image(tmp_path: Path) -> None:
    for name, objects in (("b-2", []), ("a-1", [label(), label("drivable area")])):
        raw = {"name": name, "attributes": {}, "frames": [{"timestamp": 1000, "objects": objects}]}
        write(tmp_path, raw, f"labels/100k/val/{name}.json")
        write_image(tmp_path / f"images/100k/val/{name}.jpg", 720, 1280)
    assert is_bdd100k(tmp_path)
    dataset = read_bdd100k(tmp_path, "validation")
    assert names(dataset) == ["images/100k/val/a-1.jpg", "images/100k/val/b-2.jpg"]
    assert signs(dataset) == [(SIGN, [10, 20, 30, 40.5])]
    assert names(read_bdd100k(tmp_path, list_name="labels/100k/val")) == names(dataset)
    assert dataset.sample(1).image.shape == (720, 1280, 3)


def test_places_of_labels_and_images(tmp_path: Path) -> None:
    write(tmp_path, [{"name": "größe.jpg"}], "bdd100k/labels/bdd100k_labels_images_val.json")
    write_image(tmp_path / "bdd100k/images/100k/val/größe.png", 36, 64)
    write_image(tmp_path / "bdd100k/images/100k/val/unlabelled.jpg", 36, 64)
    dataset = read_bdd100k(tmp_path, "validation")
    assert names(dataset) == ["bdd100k/images/100k/val/größe.png"]
    assert (dataset.truth(0).height, dataset.truth(0).width) == (36, 64)
    assert dataset.report.anomalies["image without labels: left out"] == 1
    named = read_bdd100k(tmp_path, list_name="bdd100k/labels/bdd100k_labels_images_val.json")
    assert names(named) == names(dataset)
    with pytest.raises(MissingListError, match=r"no labels/det_20/det_train\.json nor .*; name the label file"):
        read_bdd100k(tmp_path)
    with pytest.raises(MissingListError, match="test labels are not published"):
        read_bdd100k(tmp_path, "test")


def test_boxes_are_repaired_in_the_image_that_is_there(tmp_path: Path) -> None:
    write_image(tmp_path / "images/100k/train/a.jpg", 36, 64)
    boxes = [
        label(SIGN, 50, 30, 63, 35),
        label(SIGN, 60, 30, 70, 35),
        label(SIGN, 9, 9, 5, 5),
        label(SIGN, 70, 1, 80, 9),
    ]
    write(tmp_path, [{"name": "a.jpg", "labels": boxes}])
    dataset = read_bdd100k(tmp_path)
    assert [box for _, box in signs(dataset)] == [[50, 30, 64, 36], [60, 30, 64, 36], [5, 5, 10, 10]]
    assert dict(dataset.report.anomalies) == {
        "box leaves the image: clipped": 1,
        "box with corners swapped: put in order": 1,
        "box outside the image: dropped": 1,
    }


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], r"det_train\.json: no image in these"),
        ("x", r"det_train\.json: field frames must be a list, got \"x\""),
        ({"a": 1}, r"det_train\.json: field frames must be a list, got an object"),
        ([[]], r"\[0\]: must be a JSON object, got a list"),
        ([{"labels": []}], r"\[0\]: field name is missing; found labels"),
        ([{"name": ""}], r"\[0\]: field name must be a text"),
        ([{"name": "../a.jpg"}], r"\[0\]: field name must name an image inside"),
        ([{"name": "a.jpg", "labels": {"x": 1}}], r"\[0\] a\.jpg: field labels must be a list, got an object"),
        ([{"name": "a.jpg", "labels": {}}], r"\[0\] a\.jpg: field labels must be a list, got an object"),
        ([{"name": "a.jpg", "labels": False}], r"\[0\] a\.jpg: field labels must be a list, got false"),
        ([{"name": "a.jpg", "labels": [label(attributes=[])]}], r"labels\[0\]\.attributes: must be a JSON object"),
        ([{"name": "a.jpg", "labels": [7]}], r"\[0\] a\.jpg labels\[0\]: must be a JSON object, got 7"),
        ([{"name": "a.jpg", "labels": [{"id": 1}]}], r"labels\[0\]: field category is missing; found none"),
        ([{"name": "a.jpg", "labels": [label(box2d=[1, 2, 3, 4])]}], r"labels\[0\]: must be a JSON object, got a list"),
        ([{"name": "a.jpg", "labels": [label(box2d={"x1": 1})]}], r"labels\[0\]: field y1 is missing; found x1"),
        (
            [{"name": "a.jpg", "labels": [label(SIGN, 1, 2, float("nan"), 4)]}],
            r"field box2d\.x2 must be a finite number",
        ),
        (
            [{"name": "a.jpg", "labels": [label(attributes={"crowd": 1})]}],
            r"field attributes\.crowd must be true or false",
        ),
    ],
)
def test_a_wrong_label_is_an_error_with_its_place(tmp_path: Path, frames: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_frames(tmp_path, frames)
    assert "\n" not in str(error.value)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    write_text(tmp_path / "labels/det_20/det_train.json", '[{"name": "a.jpg"},')
    with pytest.raises(UserError, match=r"det_train\.json:1: BDD100K label file is not JSON"):
        read_bdd100k(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"mine: no \*\.json in this folder"):
        read_bdd100k(tmp_path, list_name="mine")
    write(tmp_path, {"name": "a", "frames": [{}, {}]}, "mine/a.json")
    with pytest.raises(UserError, match=r"a\.json: field frames has 2 frames; detection labels have one an image"):
        read_bdd100k(tmp_path, list_name="mine")
    with pytest.raises(UserError, match=r"no\.json: BDD100K label file cannot be read"):
        read_bdd100k(tmp_path, list_name="no.json")
    write(tmp_path, [{"name": "a.jpg"}])
    with pytest.raises(UserError, match=r"det_train\.json: \[0\] a\.jpg: 1 of 1 listed images are missing, first: im"):
        read_bdd100k(tmp_path)
