"""The TT100K reader: splits by folder and list, classes that are really there, bad entries named by their key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sign_files import class_counts, names, signs, write_image, write_text

from perception.data.signs.dataset import SignFolder
from perception.data.signs.tt100k import is_tt100k, read_tt100k
from perception.errors import MissingListError, UserError

TYPES = ["pl80", "pn", "ph4.5", "i5"]


def sign(category: str = "pn", *sides: float, **fields: Any) -> dict[str, Any]:
    bbox = dict(zip(("xmin", "ymin", "xmax", "ymax"), sides or (1343.2, 911.2, 1396.0, 964.0), strict=True))
    return {"category": category, "bbox": bbox, "ellipse_org": [[1, 2], [3, 4]], **fields}


def entry(key: str, objects: Any, place: str = "train", **fields: Any) -> dict[str, Any]:
    named = {"path": f"{place}/{key}.jpg", "id": int(key) if key.isdecimal() else key}
    return {**named, "objects": objects, **fields}


def write(folder: Path, imgs: dict[str, Any], name: str = "annotations.json", **fields: Any) -> None:
    write_text(folder / name, json.dumps({"types": TYPES, "imgs": imgs, **fields}))


def open_one(folder: Path, image: Any, **fields: Any) -> SignFolder:
    write(folder, {"2468": image}, **fields)
    return read_tt100k(folder, "all-train", images_required=False)


def test_boxes_are_half_open_floats_and_classes_those_that_are_used(tmp_path: Path) -> None:
    objects = [sign(), sign("ph4.5", 10, 20, 30.5, 44)]
    dataset = open_one(tmp_path, entry("2468", objects))
    assert is_tt100k(tmp_path)
    assert dataset.classes == ("pn", "ph4.5")
    assert signs(dataset) == [("pn", [1343.2, 911.2, 1396.0, 964.0]), ("ph4.5", [10, 20, 30.5, 44])]
    assert (dataset.truth(0).height, dataset.truth(0).width) == (2048, 2048)
    assert dataset.report.anomalies == {
        "type that no object has: no class": 2,
        "image is not there: labels kept": 1,
    }


def test_images_without_signs_are_kept_and_classes_do_not_depend_on_the_split(tmp_path: Path) -> None:
    imgs = {
        "1": entry("1", []),
        "2": entry("2", [sign("i5")], "test"),
        "3.5": entry("3.5", [sign("pl80")], "other"),
        "4": {"path": "test/4.jpg", "id": 4},
    }
    write(tmp_path, imgs)
    parts = {split: read_tt100k(tmp_path, split, images_required=False) for split in ("all-train", "test", "other")}
    assert {split: names(part) for split, part in parts.items()} == {
        "all-train": ["train/1.jpg"],
        "test": ["test/2.jpg", "test/4.jpg"],
        "other": ["other/3.5.jpg"],
    }
    assert {part.classes for part in parts.values()} == {("pl80", "i5")}
    assert class_counts(parts["other"]) == {"pl80": 1}
    assert parts["test"].report.anomalies["image without the field objects: kept without signs"] == 1


def test_every_training_image_is_in_one_part_and_stays_there(tmp_path: Path) -> None:
    imgs = {str(number): entry(str(number), [sign()]) for number in range(400)}
    write(tmp_path, imgs)
    train, validation = (
        set(names(read_tt100k(tmp_path, split, images_required=False))) for split in ("train", "validation")
    )
    assert not train & validation
    assert len(train | validation) == 400
    assert 30 <= len(validation) <= 70
    write(tmp_path, {key: image for key, image in imgs.items() if int(key) % 3})
    fewer = set(names(read_tt100k(tmp_path, "validation", images_required=False)))
    assert fewer == {name for name in validation if int(Path(name).stem) % 3}


def test_a_list_of_ids_with_dots(tmp_path: Path) -> None:
    write(tmp_path, {key: entry(key, [sign()]) for key in ("7", "24.68", "straße")}, "annotations_all.json")
    write_text(tmp_path / "train/ids.txt", "straße\r\n24.68\n\n24.68\n")
    for name in ("straße", "24.68"):
        write_image(tmp_path / f"train/{name}.jpg", 64, 64)
    dataset = read_tt100k(tmp_path, list_name="train/ids.txt")
    assert names(dataset) == ["train/straße.jpg", "train/24.68.jpg"]
    assert dataset.report.anomalies["image listed twice: kept once"] == 1
    assert dataset.report.examples["image listed twice: kept once"].endswith("ids.txt:4")
    assert dataset.sample(1).image.shape == (64, 64, 3)
    write_text(tmp_path / "train/ids.txt", "7\n8\n")
    with pytest.raises(UserError, match=r'ids\.txt:2: id "8" is not among the 3 images'):
        read_tt100k(tmp_path, list_name="train/ids.txt")
    write_text(tmp_path / "train/ids.txt", "\n")
    with pytest.raises(UserError, match=r"ids\.txt: TT100K id list names no image"):
        read_tt100k(tmp_path, list_name="train/ids.txt")


def test_anomalies_are_counted_with_their_first_place(tmp_path: Path) -> None:
    objects = [
        sign("pn", -15, 20, 30, 40),
        sign("pn", 2040, 5, 2057, 15),
        sign("pn", 3, 3, 3, 9),
        sign("pn", 9, 9, 4, 4),
    ]
    twice = {"path": "train/2468.jpg", "id": 2468, "objects": []}
    write(tmp_path, {"2468": entry("2468", objects, id=17), "5": twice})
    write_image(tmp_path / "train/2468.png", 2048, 2048)
    write_image(tmp_path / "train/9.jpg")
    dataset = read_tt100k(tmp_path, "all-train")
    assert [box for _, box in signs(dataset)] == [[0, 20, 30, 40], [2040, 5, 2048, 15], [4, 4, 9, 9]]
    assert dict(dataset.report.anomalies) == {
        "image id differs from its key: the key counts": 2,
        "image listed twice: first kept": 1,
        "type that no object has: no class": 3,
        "image without labels: left out": 1,
        "image .jpg found as .png: used": 1,
        "box leaves the image: clipped": 2,
        "box without area: dropped": 1,
        "box with corners swapped: put in order": 1,
    }
    assert dataset.report.examples["box leaves the image: clipped"].endswith("annotations.json: imgs[2468].objects[0]")


def test_a_key_that_stands_twice_in_the_file_is_told(tmp_path: Path) -> None:
    image = json.dumps(entry("1", []))
    write_text(tmp_path / "annotations.json", f'{{"imgs": {{"1": {image}, "1": {image}}}, "types": ["pn"]}}')
    dataset = read_tt100k(tmp_path, "all-train", images_required=False)
    assert dataset.report.anomalies["JSON key stands twice in an object: the last counts"] == 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ([], r"imgs\[2468\]: must be a JSON object, got a list"),
        ({"id": 1, "objects": []}, r"imgs\[2468\]: field path is missing; found id, objects"),
        (entry("2468", [], path=3), r"imgs\[2468\]: field path must be a text, got 3"),
        (entry("2468", [], path="../x.jpg"), r"imgs\[2468\]: field path must name an image inside"),
        (entry("2468", [], path="\ud800.jpg"), r"imgs\[2468\]: field path holds half a character"),
        (entry("2468", {}), r"imgs\[2468\]: field objects must be a list, got an object"),
        (entry("2468", [3]), r"imgs\[2468\]\.objects\[0\]: must be a JSON object, got 3"),
        (entry("2468", [sign(), sign("pn5")]), r'imgs\[2468\]\.objects\[1\]: category "pn5" .*did you mean "pn"'),
        (entry("2468", [{"category": "pn"}]), r"imgs\[2468\]\.objects\[0\]: field bbox is missing; found category"),
        (
            entry("2468", [sign(bbox=[1, 2, 3, 4])]),
            r"imgs\[2468\]\.objects\[0\]\.bbox: must be a JSON object, got a list",
        ),
        (entry("2468", [sign(bbox={"xmin": 1})]), r"objects\[0\]\.bbox: field ymin is missing; found xmin"),
        (
            entry("2468", [sign("pn", 1, float("nan"), 3, 4)]),
            r"objects\[0\]: field bbox\.ymin must be a finite number, got NaN",
        ),
        (entry("2468", [sign("pn", 1, 2, 1e300, 4)]), r"objects\[0\]: field bbox\.xmax = 1e\+300 is beyond any image"),
        (
            entry("2468", [sign("pn", 1, 2, True, 4)]),
            r"objects\[0\]: field bbox\.xmax must be a finite number, got true",
        ),
        (
            entry("2468", [sign("pn", 1, 2, 10**400, 4)]),
            r"objects\[0\]: field bbox\.xmax must be a finite number, got 1000",
        ),
    ],
)
def test_a_wrong_entry_is_an_error_with_its_key(tmp_path: Path, image: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"annotations\.json: .*{message}") as error:
        open_one(tmp_path, image)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"imgs": {"1": {"path"', r"annotations\.json:1: .*is not JSON .*is it whole"),
        ('{"types": []}', r"annotations\.json: field imgs is missing; found types"),
        ('{"imgs": {}}', r"annotations\.json: field types is missing"),
        ('{"types": [], "imgs": {}}', r"annotations\.json: field imgs holds no image"),
        ('{"types": "pn", "imgs": {}}', r"annotations\.json: field types must be a list, got \"pn\""),
        ('{"types": [1], "imgs": {}}', r"annotations\.json: field types\[0\] must be a text, got 1"),
        (' "imgs" ', r"annotations\.json: must be a JSON object"),
        ('{"imgs":' + "[" * 100_000, r"annotations\.json: .*nested too deep"),
        ('{"imgs": ' + "1" * 5000 + "}", r"annotations\.json: .*thousands of digits"),
        (b'{"imgs": "\xff"}', r"annotations\.json:1: .*not UTF-8"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, text: str | bytes, message: str) -> None:
    write_text(tmp_path / "annotations.json", text)
    with pytest.raises(UserError, match=message) as error:
        read_tt100k(tmp_path)
    assert "\n" not in str(error.value)


def test_other_folders_and_absent_splits(tmp_path: Path) -> None:
    write_text(tmp_path / "annotations.json", '{"images": [], "annotations": [], "categories": []}')
    assert not is_tt100k(tmp_path)
    with pytest.raises(UserError, match=r"no annotations_all\.json or annotations\.json with the field imgs"):
        read_tt100k(tmp_path)
    write(tmp_path, {"1": entry("1", [], "test")})
    with pytest.raises(MissingListError, match=r"no image for validation \(its path would start with train/\)"):
        read_tt100k(tmp_path, "validation")
    with pytest.raises(UserError, match=r"imgs\[1\]: 1 of 1 listed images are missing, first: test/1\.jpg"):
        read_tt100k(tmp_path, "test")
