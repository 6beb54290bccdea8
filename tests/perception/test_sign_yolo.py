"""YOLO text labels: every layout, negatives, outlines, and bad lines named by file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest
from sign_files import names, signs, write_image, write_text

from perception.data.signs.dataset import SignFolder
from perception.data.signs.open import open_sign_dataset
from perception.data.signs.yolo import is_yolo, read_yolo
from perception.errors import MissingListError, UserError

DATA = "train: images/train\nval: images/val\nnc: 2\nnames: [stop, yield]\n"
LINE = "1 0.5 0.5 0.25 0.1\n"
"""In an image of 80x60: 30, 27 to 50, 33."""


def one_image(folder: Path, labels: str | bytes | None = LINE) -> SignFolder:
    """classes.txt, images/a.png, labels/a.txt."""
    write_text(folder / "classes.txt", "stop\nyield\n")
    write_image(folder / "images" / "a.png", 60, 80)
    if labels is not None:
        write_text(folder / "labels" / "a.txt", labels)
    return read_yolo(folder)


def test_boxes_are_shares_of_the_images_size(tmp_path: Path) -> None:
    dataset = one_image(tmp_path)
    assert is_yolo(tmp_path) and names(dataset) == ["images/a.png"]
    assert dataset.classes == ("stop", "yield")
    assert signs(dataset) == [("yield", pytest.approx([30, 27, 50, 33], abs=1e-9))]
    assert dataset.report.lines() == []


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (DATA, ("images/train", "images/val")),
        ("path: .\n" + DATA, ("images/train", "images/val")),
        (
            "train: ../train/images\nval: ../valid/images\nnames: {0: stop, 1: yield}\n",
            ("train/images", "valid/images"),
        ),
        ("path: /data/elsewhere\n" + DATA, ("images/train", "images/val")),
        ("train: [images/train]\nvalid: images/val\nnames:\n  - stop\n  - yield\n", ("images/train", "images/val")),
        ("", ("images/train", "images/val")),
        ("", ("train/images", "valid/images")),
    ],
)
def test_layouts(tmp_path: Path, data: str, places: tuple[str, str]) -> None:
    write_text(tmp_path / ("data.yaml" if data else "classes.txt"), data or "stop\nyield\n")
    for place in places:
        write_image(tmp_path / place / "größe 1.jpg")
        write_text(tmp_path / place.replace("images", "labels") / "größe 1.txt", LINE)
    for split, place in zip(("train", "validation"), places, strict=True):
        dataset = open_sign_dataset(tmp_path, split=split)
        assert names(dataset) == [f"{place}/größe 1.jpg"] and len(signs(dataset)) == 1
        assert dataset.sample(0).image.shape == (60, 80, 3)
    with pytest.raises(MissingListError, match=r"for test"):
        open_sign_dataset(tmp_path, split="test")


def test_a_list_of_images_keeps_its_order_and_counts_an_image_once(tmp_path: Path) -> None:
    write_text(tmp_path / "data.yaml", "train: train.txt\nnames: [stop, yield]\n")
    for name in ("a", "b", "c"):
        write_image(tmp_path / "images" / f"{name}.png")
        write_text(tmp_path / "labels" / f"{name}.txt", LINE)
    write_text(tmp_path / "train.txt", "./images/c.png\nimages/a.png\n./images/c.png\n")
    dataset = read_yolo(tmp_path)
    assert names(dataset) == ["images/c.png", "images/a.png"]
    assert dataset.report.lines() == [f"1 x image listed twice: kept once (first: {tmp_path / 'train.txt'}:3)"]
    write_text(tmp_path / "other.txt", "images/b.png\nimages/d.png\n")
    with pytest.raises(UserError, match=r"other\.txt:2: image images/d\.png is missing, and 1 of 2 in all"):
        read_yolo(tmp_path, list_name="other.txt")
    assert len(read_yolo(tmp_path, list_name="images")) == 3
    write_text(tmp_path / "other.txt", "images/" + "d" * 300)
    with pytest.raises(UserError, match=r"other\.txt:1: image images/d+ is missing"):
        read_yolo(tmp_path, list_name="other.txt")


def test_an_image_with_an_empty_or_without_a_label_file_has_no_signs(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "b.png")
    write_text(tmp_path / "labels" / "c.txt", LINE)
    write_text(tmp_path / "labels" / "classes.txt", "stop\n")
    dataset = one_image(tmp_path, "")
    assert [signs(dataset, index) for index in range(2)] == [[], []]
    assert dataset.report.examples == {
        "image without label file: an image without signs": str(tmp_path / "images" / "b.png"),
        "label file without image: left out": str(tmp_path / "labels" / "c.txt"),
    }


def test_labels_at_the_wrong_place_are_no_negatives(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"labels/a\.txt: label file is missing, as of all 1 images"):
        one_image(tmp_path, None)


def test_labels_beside_images_and_two_images_of_one_label_file(tmp_path: Path) -> None:
    write_text(tmp_path / "obj.names", "stop\nyield\n")
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "a.jpg")
    write_text(tmp_path / "a.txt", LINE)
    dataset = read_yolo(tmp_path)
    assert names(dataset) == ["a.jpg", "a.png"] and len(signs(dataset, 0)) == len(signs(dataset, 1)) == 1
    assert dataset.report.anomalies == {"two images of one label file: both kept": 1}


def test_oddities_are_counted_with_their_line(tmp_path: Path) -> None:
    text = "\ufeff0 0.1 0.1 0.2 0.2 0.15 0.3\n\n0 0.95 0.5 0.25 0.1\n0 0.5 0.5 0 0.1\n0 0.5 0.5 -0.25 0.1\n"
    dataset = one_image(tmp_path, text)
    assert signs(dataset)[0] == ("stop", pytest.approx([8, 6, 16, 18]))
    first = {what: place.rpartition(":")[2] for what, place in dataset.report.examples.items()}
    assert first == {
        "byte order mark: skipped": "1",
        "outline: the box around it": "1",
        "blank line: skipped": "2",
        "box leaves the image: clipped": "3",
        "box without area: dropped": "4",
        "box with corners swapped: put in order": "5",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 0.2", r"a\.txt:2: 4 values, 5 are wanted: class cx cy width height, got '0 0\.5 0\.5 0\.2'"),
        ("0 0.5 0.5 0.2 0.2 0.98", r"a\.txt:2: 6 values"),
        ("0 0.5 0.5 0.2 0.2 0.3 0.3 0.4", r"a\.txt:2: 8 values"),
        ("2 0.5 0.5 0.2 0.2", r"a\.txt:2: field class = 2 is unknown; there are 2 classes, from 0"),
        ("-1 0.5 0.5 0.2 0.2", r"a\.txt:2: field class must be a whole number from 0"),
        ("stop 0.5 0.5 0.2 0.2", r'a\.txt:2: field class must be a finite number, got "stop"'),
        ("0 0.5 nan 0.2 0.2", r'a\.txt:2: field column 3 must be a finite number, got "nan"'),
        ("0 40 30 20 6", r"a\.txt:2: field column 2 = 40 must be a share of the image's size, 0 to 1"),
        ("0 0.5 0.5 0.2 1e300", r'a\.txt:2: field column 5 = "1e300" is beyond any image'),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        one_image(tmp_path, f"{LINE}{line}\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("names: [stop, yield", r"data\.yaml:\d+: not YAML"),
        ("- names", r"data\.yaml: must hold the fields names, train and val, got a list"),
        ("names: 3\n", r"data\.yaml: field names must list the classes, got \"3\""),
        ("names: []\n", r"data\.yaml: field names must list the classes"),
        ("names: {1: stop, 2: yield}\n", r"data\.yaml: field names must number the classes from 0 without gaps"),
        ("names: [stop, [no]]\n", r"data\.yaml: field names\[1\] must be a text, got a list"),
        ("nc: 2001-01-01\nnames: [stop]\n", r'data\.yaml: field nc must be a finite number, got "2001-01-01"'),
        ("names: !!python/name:os.system\n", r"data\.yaml: field names must list the classes, got \"\""),
        ("names: [stop, stop]\n", r'data\.yaml: class "stop" stands twice, as 0 and 1'),
        ("nc: 3\nnames: [stop, yield]\n", r"data\.yaml: field nc = 3, but names has 2 classes"),
        ("train: nowhere\nnames: [stop, yield]\n", r'data\.yaml: field train = "nowhere" does not exist'),
        ("train: 7\nnames: [stop, yield]\n", r'data\.yaml: field train = "7" does not exist'),
        ("names: [stop, yield]\n", r"data\.yaml: no field train in it"),
        ("train: empty\nnames: [stop, yield]\n", r"empty: no image in this folder"),
        ("names: " + "[" * 1200, r"data\.yaml.*YAML"),
    ],
)
def test_a_wrong_data_file_is_named_with_its_field(tmp_path: Path, data: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    write_text(tmp_path / "data.yaml", data)
    with pytest.raises(UserError, match=message):
        read_yolo(tmp_path)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("", r"classes\.txt: no class in it"),
        ("stop\n\nyield\n", r"classes\.txt: class 1 has no name"),
        ("stop\nyield\nstop\n", r'classes\.txt: class "stop" stands twice, as 0 and 2'),
        (b"\xff", r"classes\.txt:1: list of classes is not UTF-8"),
        (None, r"neither data\.yaml nor classes\.txt in it"),
    ],
)
def test_a_wrong_list_of_classes_is_named(tmp_path: Path, classes: str | bytes | None, message: str) -> None:
    if classes is not None:
        write_text(tmp_path / "classes.txt", classes)
    with pytest.raises(UserError, match=message):
        read_yolo(tmp_path)
