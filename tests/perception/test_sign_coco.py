"""COCO: read as its ids say, written so that it reads back to the last bit, bad entries named."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sign_files import ignored, names, signs, write_image, write_text

from perception.data.signs.coco import is_coco, read_coco
from perception.data.signs.coco_writer import write_coco
from perception.data.signs.dataset import SignFolder, SignFolderBuilder
from perception.data.signs.open import open_sign_dataset
from perception.errors import MissingListError, UserError

IMAGES = [
    {"id": 900, "file_name": "b.png", "width": 80, "height": 60},
    {"id": 17, "file_name": "a.png", "width": 80, "height": 60},
]
CATEGORIES = [{"id": 90, "name": "stop"}, {"id": 3, "name": "yield"}]
ANNOTATION = {"id": 1, "image_id": 17, "category_id": 3, "bbox": [10, 20.5, 30, 4], "iscrowd": 0}


def document(**fields: Any) -> dict[str, Any]:
    return {"images": IMAGES, "categories": CATEGORIES, "annotations": [ANNOTATION], **fields}


def annotation(**fields: Any) -> dict[str, Any]:
    return document(annotations=[ANNOTATION, {**ANNOTATION, "id": 2, **fields}])


def read(folder: Path, content: Any, images_required: bool = False) -> SignFolder:
    write_text(folder / "labels.json", content if isinstance(content, (str, bytes)) else json.dumps(content))
    return read_coco(folder, list_name="labels.json", images_required=images_required)


def test_ids_with_gaps_in_any_order(tmp_path: Path) -> None:
    crowd = {**ANNOTATION, "id": 900100581904, "image_id": 900, "category_id": 90, "bbox": [1, 2, 3, 4], "iscrowd": 1}
    dataset = read(tmp_path, document(annotations=[crowd, ANNOTATION]))
    assert dataset.classes == ("stop", "yield") and names(dataset) == ["b.png", "a.png"]
    assert signs(dataset, 1) == [("yield", [10, 20.5, 40, 24.5])]
    assert signs(dataset, 0) == [] and ignored(dataset, 0) == [[1, 2, 4, 6]]
    assert dataset.report.anomalies == {"iscrowd: ignored region": 1, "image is not there: labels kept": 2}


def test_texts_are_ids_too_and_sizes_come_from_images_where_the_file_has_none(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "größe.png", 33, 44)
    images = [{"id": "x", "file_name": "größe.png"}]
    dataset = read(tmp_path, document(images=images, annotations=[{**ANNOTATION, "image_id": "x"}]), True)
    assert (dataset.truth(0).name, dataset.truth(0).height, dataset.truth(0).width) == ("images/größe.png", 33, 44)
    assert dataset.sample(0).image.shape == (33, 44, 3)


@pytest.mark.parametrize(
    ("labels", "images"),
    [
        ("annotations/instances_{}2017.json", "{}2017"),
        ("annotations/instances_{}.json", "images"),
        ("annotations/{}.json", "images/{}"),
        ("{}/_annotations.coco.json", "{}"),
        ("instances_{}.json", "."),
    ],
)
def test_layouts(tmp_path: Path, labels: str, images: str) -> None:
    for split, number in (("train", 1), ("val", 2)):
        write_image(tmp_path / images.format(split) / f"{number}.png")
        entry = {**IMAGES[0], "file_name": f"{number}.png"}
        write_text(tmp_path / labels.format(split), json.dumps(document(images=[entry], annotations=[])))
    write_text(tmp_path / "annotations" / "captions_train2017.json", "{}")
    assert is_coco(tmp_path)
    assert [Path(names(open_sign_dataset(tmp_path, split=split))[0]).name for split in ("train", "validation")] == [
        "1.png",
        "2.png",
    ]
    assert open_sign_dataset(tmp_path).report.lines() == []
    with pytest.raises(MissingListError, match=r"no annotation file is for test; there is "):
        open_sign_dataset(tmp_path, split="test")


def test_one_file_without_a_part_in_its_name_is_for_training(tmp_path: Path) -> None:
    read(tmp_path, document())
    assert len(read_coco(tmp_path, "train", images_required=False)) == 2
    with pytest.raises(MissingListError):
        read_coco(tmp_path, "validation", images_required=False)
    write_text(tmp_path / "more.json", json.dumps(document()))
    with pytest.raises(UserError, match=r"several annotation files are for train: labels\.json, more\.json"):
        read_coco(tmp_path, "train")


def test_oddities_are_counted_with_their_place(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "b.jpg")
    write_image(tmp_path / "c.png")
    odd = [
        ANNOTATION,
        {**ANNOTATION, "image_id": 5},
        {**ANNOTATION, "id": 3, "bbox": [-3, 5, 10, 10]},
        {**ANNOTATION, "id": 4, "bbox": [30, 30, -10, -10]},
        {**ANNOTATION, "id": 5, "bbox": [30, 30, 0, 10]},
    ]
    categories = [*CATEGORIES, {"id": 4, "name": "stop"}]
    dataset = read(tmp_path, document(annotations=odd, categories=categories), True)
    assert dataset.classes == ("stop", "yield")
    first = {what: place.removeprefix(str(tmp_path)) for what, place in dataset.report.examples.items()}
    assert first == {
        "two categories of one name: one class": "/labels.json: categories[2]",
        "annotation id stands twice: both kept": "/labels.json: annotations[1]",
        "annotation of an image that is not listed: dropped": "/labels.json: annotations[1]",
        "image .png found as .jpg: used": "/labels.json: images[0]",
        "box leaves the image: clipped": "/labels.json: annotations[2]",
        "box with corners swapped: put in order": "/labels.json: annotations[3]",
        "box without area: dropped": "/labels.json: annotations[4]",
        "image without labels: left out": "/c.png",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"labels\.json: COCO annotation file is empty"),
        (json.dumps(document())[:-30], r"labels\.json:1: COCO annotation file is not JSON"),
        ("[" * 100_000, r"labels\.json: COCO annotation file is no usable JSON"),
        (b"\xff\xfe", r"labels\.json:1: COCO annotation file is not UTF-8"),
        ([], r"labels\.json: must be a JSON object, got a list"),
        ({"images": IMAGES}, r"labels\.json: field categories is missing; found images"),
        (document(images={}), r"labels\.json: field images must be a list, got an object"),
        (document(images=[]), r"labels\.json: no image in field images"),
        (document(categories=[]), r"labels\.json: no class in field categories"),
        (document(categories=[{"id": 1}]), r"labels\.json: categories\[0\]: field name is missing; found id"),
        (document(categories=CATEGORIES * 2), r"categories\[2\]: field id = 90 stands twice"),
        (document(images=IMAGES * 2), r"images\[2\]: field id = 900 stands in images\[0\] too"),
        (document(images=[*IMAGES, {**IMAGES[0], "id": 1}]), r"images\[2\]: image b\.png is listed a second time"),
        (
            document(images=[{**IMAGES[0], "id": 1.5}]),
            r"images\[0\]: field id must be a whole number or a text",
        ),
        (
            document(images=[{**IMAGES[0], "width": 0}]),
            r"images\[0\]: field width must be a whole number from 1",
        ),
        (
            document(images=[{**IMAGES[0], "height": "x"}]),
            r"images\[0\]: field height must be a finite number",
        ),
        (
            document(images=[{**IMAGES[0], "file_name": "../b.png"}]),
            r"images\[0\]: field file_name must name an",
        ),
        (document(images=[{**IMAGES[0], "file_name": "b" * 300}]), r"images\[0\]: field file_name must name an"),
        (annotation(category_id=-1), r"annotations\[1\]: field category_id = -1 is none of the file's categories"),
        (annotation(iscrowd=2), r"annotations\[1\]: field iscrowd must be 0 or 1, got 2"),
        (annotation(bbox=[1, 2, 3]), r"annotations\[1\]: field bbox must be \[x, y, width, height\], got a list"),
        (annotation(bbox=None), r"annotations\[1\]: field bbox must be \[x, y, width, height\], got null"),
        (
            annotation(bbox=[1, 2, float("nan"), 4]),
            r"annotations\[1\]: field bbox\[2\] must be a finite number",
        ),
        (annotation(bbox=[1, True, 3, 4]), r"annotations\[1\]: field bbox\[1\] must be a finite number, got true"),
        (annotation(bbox=[1, 2, 10**400, 4]), r"annotations\[1\]: field bbox\[2\] must be a finite number"),
        (annotation(bbox=[1, 2, 1e30, 4]), r"annotations\[1\]: field bbox\[2\] = 1e\+30 is beyond any image"),
        (document(annotations=[7]), r"annotations\[0\]: must be a JSON object, got 7"),
    ],
)
def test_a_wrong_entry_is_named_with_its_field(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, content)


def test_missing_images_are_refused_where_they_are_required(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"labels\.json: images\[0\]: 1 of 2 listed images are missing, first: b\.png"):
        read(tmp_path, document(), images_required=True)


SIDE = st.floats(0, 2000, allow_subnormal=False)
BOX = st.tuples(SIDE, SIDE, SIDE, SIDE)
CLASS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    classes=st.lists(CLASS, min_size=1, max_size=4, unique=True),
    images=st.lists(st.lists(st.tuples(BOX, st.integers(0, 3), st.booleans()), max_size=5), min_size=1, max_size=4),
)
def test_what_is_written_reads_back_to_the_last_bit(
    classes: list[str], images: list[list[tuple[tuple[float, float, float, float], int, bool]]]
) -> None:
    builder = SignFolderBuilder(Path(), tuple(classes))
    for index, boxes in enumerate(images):
        builder.add_image(f"part/é{index}.png", "here", (1500, 1000 + index))
        for box, label, is_ignored in boxes:
            builder.add_box(classes[label % len(classes)], box, "here", is_ignored)
    dataset = builder.finish()
    with tempfile.TemporaryDirectory() as folder:
        write_coco(dataset, Path(folder) / "labels.json")
        again = read_coco(Path(folder), list_name="labels.json", images_required=False)
        raw = json.loads((Path(folder) / "labels.json").read_text())
    assert again.classes == dataset.classes and len(again) == len(dataset)
    for index in range(len(dataset)):
        ours, theirs = dataset.truth(index), again.truth(index)
        assert (ours.name, ours.height, ours.width) == (theirs.name, theirs.height, theirs.width)
        np.testing.assert_array_equal(ours.boxes, theirs.boxes, strict=True)
        np.testing.assert_array_equal(ours.labels, theirs.labels, strict=True)
        np.testing.assert_array_equal(ours.ignored, theirs.ignored, strict=True)
    for part in ("images", "annotations", "categories"):
        assert [entry["id"] for entry in raw[part]] == list(range(1, len(raw[part]) + 1))


def test_a_width_that_does_not_give_the_corner_back_still_does(tmp_path: Path) -> None:
    x1, x2 = 2.0**-53, 1 + 2.0**-52
    assert all(x1 + width != x2 for width in (x2 - x1, np.nextafter(x2 - x1, 0), np.nextafter(x2 - x1, 2)))
    builder = SignFolderBuilder(tmp_path, ("stop",))
    builder.add_image("a.png", "here", (60, 80))
    builder.add_box("stop", (x1, 5, x2, 6), "here")
    write_coco(builder.finish(), tmp_path / "out.json")
    assert signs(read_coco(tmp_path, list_name="out.json", images_required=False)) == [("stop", [x1, 5, x2, 6])]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    dataset = read(tmp_path, document())
    with pytest.raises(UserError, match=r"cannot be written"):
        write_coco(dataset, tmp_path / "none" / "out.json")
    (tmp_path / "out.json").write_text("old")
    write_coco(dataset, tmp_path / "out.json")
    assert len(json.loads((tmp_path / "out.json").read_text())["annotations"]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.json", "out.json"]


@pytest.mark.slow
def test_many_boxes_load_in_seconds_into_flat_arrays(tmp_path: Path) -> None:
    images = [{"id": i, "file_name": f"{i}.png", "width": 1280, "height": 720} for i in range(10_000)]
    boxes = (
        f'{{"id":{i + 1},"image_id":{i % 10_000},"category_id":3,"bbox":[{i % 1000}.25,{i // 10_000},20.5,30]}}'
        for i in range(400_000)
    )
    (tmp_path / "labels.json").write_text(
        f'{{"images":{json.dumps(images)},"categories":{json.dumps(CATEGORIES)},"annotations":[{",".join(boxes)}]}}'
    )
    start = time.process_time()
    dataset = read_coco(tmp_path, list_name="labels.json", images_required=False)
    assert dataset.report.signs == 400_000 and len(dataset.truth(5).boxes) == 40
    assert time.process_time() - start < 30
    arrays = [value for value in vars(dataset).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 42 * 400_000
