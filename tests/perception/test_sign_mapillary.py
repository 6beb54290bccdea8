"""The MTSD reader: what is ignored, the seam of panoramas, lists of keys, bad annotations named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sign_files import class_counts, ignored, names, signs, write_image, write_text

from perception.data.signs.dataset import SignFolder
from perception.data.signs.mapillary import is_mapillary, read_mapillary
from perception.errors import MissingListError, UserError

KEEP_RIGHT = "regulatory--keep-right--g1"
YIELD = "regulatory--yield--g1"


def sign(label: str = KEEP_RIGHT, *sides: float, **properties: Any) -> dict[str, Any]:
    bbox = dict(zip(("xmin", "ymin", "xmax", "ymax"), sides or (10.5, 20, 30.25, 44), strict=True))
    return {"key": "k", "label": label, "bbox": bbox, "properties": {"occluded": False, **properties}}


def annotation(objects: list[Any], height: int = 60, width: int = 80, **fields: Any) -> dict[str, Any]:
    return {"width": width, "height": height, "ispano": False, "objects": objects, **fields}


def write(folder: Path, annotations: dict[str, Any], split: str = "train") -> None:
    for key, raw in annotations.items():
        write_text(folder / f"annotations/{key}.json", json.dumps(raw))
    write_text(folder / f"splits/{split}.txt", "\n".join(annotations) + "\n")


def open_one(folder: Path, raw: Any, **options: Any) -> SignFolder:
    write(folder, {"key-1": raw})
    return read_mapillary(folder, images_required=False, **options)


def test_signs_and_ignored_regions(tmp_path: Path) -> None:
    objects = [
        sign(),
        sign("other-sign", 1, 1, 5, 5),
        sign(YIELD, 2, 2, 6, 6, ambiguous=True),
        sign(YIELD, 3, 3, 7, 7, dummy=True),
        sign("warning--ice--g1", 4, 4, 8, 8, exterior=True),
        sign(YIELD, 5, 5, 9, 9, occluded=True, included=True, **{"out-of-frame": True}),
    ]
    dataset = open_one(tmp_path, annotation(objects))
    assert dataset.classes == (KEEP_RIGHT, YIELD)
    assert signs(dataset) == [(KEEP_RIGHT, [10.5, 20, 30.25, 44]), (YIELD, [5, 5, 9, 9])]
    assert ignored(dataset) == [[1, 1, 5, 5], [2, 2, 6, 6], [3, 3, 7, 7], [4, 4, 8, 8]]
    assert dataset.report.signs == 2
    assert (dataset.truth(0).height, dataset.truth(0).width) == (60, 80)


@pytest.mark.parametrize(
    ("xmin", "xmax", "kept", "rest"),
    [(70, 4, [70, 5, 80, 15], [0, 5, 4, 15]), (76, 9, [0, 5, 9, 15], [76, 5, 80, 15])],
)
def test_a_sign_across_the_seam_is_one_sign(
    tmp_path: Path, xmin: float, xmax: float, kept: list[float], rest: list[float]
) -> None:
    crossing = sign(YIELD, xmin, 5, xmax, 15)
    crossing["bbox"]["cross_boundary"] = {"left": {}, "right": {}}
    dataset = open_one(tmp_path, annotation([crossing], ispano=True))
    assert signs(dataset) == [(YIELD, kept)]
    assert ignored(dataset) == [rest]
    assert class_counts(dataset) == {YIELD: 1}
    seam = "sign across a panorama's seam: larger half kept, the other ignored"
    assert dataset.report.anomalies[seam] == 1
    assert dataset.report.examples[seam].endswith("key-1.json: objects[0]")


def test_a_seam_at_the_border_and_an_ignored_sign_across_it(tmp_path: Path) -> None:
    objects = [sign(YIELD, 70, 5, 0, 15), sign("other-sign", 70, 30, 5, 40)]
    dataset = open_one(tmp_path, annotation(objects, ispano=True))
    assert signs(dataset) == [(YIELD, [70, 5, 80, 15])]
    assert ignored(dataset) == [[70, 30, 80, 40], [0, 30, 5, 40]]


def test_without_a_panorama_swapped_corners_are_put_in_order(tmp_path: Path) -> None:
    dataset = open_one(tmp_path, annotation([sign(YIELD, 70, 5, 4, 15)]))
    assert signs(dataset) == [(YIELD, [4, 5, 70, 15])]
    assert dataset.report.anomalies["box with corners swapped: put in order"] == 1


def test_splits_images_and_classes_of_all_lists(tmp_path: Path) -> None:
    write(tmp_path, {"a": annotation([sign(YIELD)]), "b": annotation([])})
    write(tmp_path, {"größe": annotation([sign(KEEP_RIGHT)])}, "val")
    write_text(tmp_path / "splits/test.txt", "t\n")
    write_image(tmp_path / "images/train/a.jpg")
    write_image(tmp_path / "images/b.jpg")
    write_image(tmp_path / "mtsd_v2_fully_annotated_images.val/images/größe.jpg")
    assert is_mapillary(tmp_path)
    train, validation = read_mapillary(tmp_path), read_mapillary(tmp_path, "validation")
    assert names(train) == ["images/train/a.jpg", "images/b.jpg"]
    assert train.classes == validation.classes == (KEEP_RIGHT, YIELD)
    assert signs(train, 1) == []
    assert validation.sample(0).truth.name == "mtsd_v2_fully_annotated_images.val/images/größe.jpg"
    with pytest.raises(MissingListError, match="test labels are not published"):
        read_mapillary(tmp_path, "test")


def test_the_release_may_lie_one_folder_deeper_and_a_list_may_be_named(tmp_path: Path) -> None:
    root = tmp_path / "mtsd_v2_fully_annotated"
    write(root, {"a": annotation([sign()]), "b": annotation([sign(YIELD)])})
    write_text(tmp_path / "mine.txt", "b\nb\n")
    write_image(root / "images/b.png")
    dataset = read_mapillary(tmp_path, list_name="mine.txt")
    assert names(dataset) == ["mtsd_v2_fully_annotated/images/b.png"]
    assert dataset.classes == (KEEP_RIGHT, YIELD)
    assert dict(dataset.report.anomalies) == {"image listed twice: kept once": 1}
    with pytest.raises(MissingListError, match=r"splits/val\.txt: no such list"):
        read_mapillary(tmp_path, "validation")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], r"key-1\.json: must be a JSON object, got a list"),
        ({"width": 8, "height": 6}, r"key-1\.json: field objects is missing; found height, width"),
        (annotation([], width=0), r"key-1\.json: field width must be a whole number from 1, got 0"),
        (annotation([], height=None), r"key-1\.json: field height must be a finite number, got null"),
        (annotation([], ispano="no"), r"key-1\.json: field ispano must be true or false, got \"no\""),
        (annotation([sign(ambiguous=2)]), r"objects\[0\]: field ambiguous must be true or false, got 2"),
        (annotation([sign(""), sign()]), r"objects\[0\]: field label must be a text, got \"\""),
        (annotation([{"label": "x"}]), r"objects\[0\]: field bbox is missing; found label"),
        (annotation([sign(YIELD, 1, 2, 3, float("inf"))]), r"field bbox\.ymax must be a finite number, got Infinity"),
        (annotation([sign(YIELD, 1, 2, 3, -1e9)]), r"field bbox\.ymax = -1000000000\.0 is beyond any image"),
    ],
)
def test_a_wrong_annotation_is_an_error_with_its_file(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_one(tmp_path, raw)
    assert "\n" not in str(error.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folders annotations/ and splits/"):
        read_mapillary(tmp_path)
    write(tmp_path, {"a": annotation([sign()])})
    with pytest.raises(UserError, match=r"train\.txt:1: 1 of 1 listed images are missing, first: images/a\.jpg"):
        read_mapillary(tmp_path)
    write_text(tmp_path / "splits/train.txt", "a\nb\n")
    with pytest.raises(
        UserError, match=r"train\.txt:2: 1 of 2 annotation files are missing, first: annotations/b\.json"
    ):
        read_mapillary(tmp_path, images_required=False)
    write_text(tmp_path / "annotations/b.json", "")
    with pytest.raises(UserError, match=r"b\.json: MTSD annotation is empty"):
        read_mapillary(tmp_path, images_required=False)
    write_text(tmp_path / "annotations/b.json", '{"width": 3,\n"hei')
    with pytest.raises(UserError, match=r"b\.json:2: MTSD annotation is not JSON"):
        read_mapillary(tmp_path, images_required=False)
