"""The GTSDB reader: published boxes and split, real scenes, and every bad line named by file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from sign_files import names, signs, write_image, write_text

from perception.data.signs.dataset import SignFolder
from perception.data.signs.gtsdb import is_gtsdb, read_gtsdb
from perception.data.signs.open import open_sign_dataset
from perception.errors import UserError

REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "gtsdb"
LINE = "00001.ppm;10;20;30;40;14\n"


def read(folder: Path, text: str | bytes, part: str = "all") -> SignFolder:
    write_text(folder / "gt.txt", text)
    return read_gtsdb(folder, part, images_required=False)


def test_corners_are_inclusive_and_one_based(tmp_path: Path) -> None:
    write_image(tmp_path / "00001.ppm", 60, 80)
    write_text(tmp_path / "gt.txt", LINE)
    assert is_gtsdb(tmp_path)
    assert signs(read_gtsdb(tmp_path)) == [("stop", [9, 19, 30, 40])]
    assert signs(read_gtsdb(tmp_path, corners="half-open")) == [("stop", [10, 20, 30, 40])]
    assert read_gtsdb(tmp_path).report.lines() == []
    with pytest.raises(UserError, match=r'corners = "inclusiv" is unknown; did you mean "inclusive"\?'):
        read_gtsdb(tmp_path, corners="inclusiv")


def test_the_size_of_a_portable_pixmap_comes_from_its_header(tmp_path: Path) -> None:
    write_text(tmp_path / "00001.ppm", b"P6\n# by hand\n1360 # width\n800\n255\n")
    dataset = read(tmp_path, LINE)
    assert (dataset.truth(0).height, dataset.truth(0).width) == (800, 1360)


def test_parts_are_cut_by_number_and_hold_images_without_signs(tmp_path: Path) -> None:
    for number in (0, 1, 7, 8, 599, 600, 608):
        write_image(tmp_path / "images" / f"{number:05d}.png")
    write_text(tmp_path / "gt.txt", LINE + "00608.ppm;1;1;9;9;0\n")
    parts = {part: names(read_gtsdb(tmp_path, part)) for part in ("train", "validation", "test", "all-train", "all")}
    numbers = {part: [int(Path(name).stem) for name in found] for part, found in parts.items()}
    assert numbers == {
        "train": [1, 7, 599],
        "validation": [0, 8],
        "test": [600, 608],
        "all-train": [0, 1, 7, 8, 599],
        "all": [0, 1, 7, 8, 599, 600, 608],
    }
    assert names(open_sign_dataset(tmp_path, list_name="all-train")) == parts["all-train"]
    assert names(open_sign_dataset(tmp_path, list_name="test")) == parts["test"]
    report = read_gtsdb(tmp_path, "all").report
    assert report.lines() == [f"2 x image .ppm found as .png: used (first: {tmp_path / 'gt.txt'}:1)"]
    with pytest.raises(UserError, match=r'split = "trian" is unknown; did you mean "train"\?'):
        read_gtsdb(tmp_path, list_name="trian")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("00001.ppm;10;20;30;40", r"gt\.txt:2: 5 fields, 6 are wanted: image;left;top;right;bottom;class, got '00001"),
        ("00001.ppm;10;20;30;40;14;", r"gt\.txt:2: 7 fields"),
        ("00001.ppm;10;20;3", r"gt\.txt:2: 4 fields"),
        ("00001.ppm;10;;30;40;14", r'gt\.txt:2: field top must be a finite number, got ""'),
        ("00001.ppm;nan;20;30;40;14", r'gt\.txt:2: field left must be a finite number, got "nan"'),
        ("00001.ppm;10;20;1e999;40;14", r'gt\.txt:2: field right must be a finite number, got "1e999"'),
        ("00001.ppm;10;20;30;99999999999;14", r'gt\.txt:2: field bottom = "99999999999" is beyond any image'),
        ("00001.ppm;10;20;30;40;43", r"gt\.txt:2: field class = 43 is unknown; allowed: 0 to 42"),
        ("00001.ppm;10;20;30;40;-1", r'gt\.txt:2: field class must be a whole number from 0, got "-1"'),
        ("00001.ppm;10;20;30;40;1.5", r'gt\.txt:2: field class must be a whole number from 0, got "1.5"'),
        ("street.ppm;10;20;30;40;1", r"gt\.txt:2: field image = 'street\.ppm' must be a number"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, f"{LINE}{line}\n")


def test_a_file_that_is_no_label_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gt\.txt: GTSDB label file is empty"):
        read(tmp_path, "")
    with pytest.raises(UserError, match=r"gt\.txt:2: GTSDB label file is not UTF-8"):
        read(tmp_path, LINE.encode() + b"\xff\xfe")
    (tmp_path / "gt.txt").unlink()
    with pytest.raises(UserError, match=r"gt\.txt: GTSDB label file cannot be read"):
        read_gtsdb(tmp_path)


def test_oddities_are_counted_with_their_first_place(tmp_path: Path) -> None:
    write_image(tmp_path / "00001.ppm", 60, 80)
    write_image(tmp_path / "overview.png")
    text = "\ufeff" + LINE + "\n" + LINE + "00001.ppm;30;40;10;20;1\n00001.ppm;0;5;90;9;1\n00001.ppm;200;5;290;9;1\n"
    dataset = read(tmp_path, text)
    assert [box for _, box in signs(dataset)] == [[9, 19, 30, 40]] * 3 + [[0, 4, 80, 9]]
    first = {what: place.removeprefix(str(tmp_path)) for what, place in dataset.report.examples.items()}
    assert first == {
        "byte order mark: skipped": "/gt.txt:1",
        "blank line: skipped": "/gt.txt:2",
        "image whose name is no number: left out": "/overview.png",
        "box stands twice in an image: kept twice": "/gt.txt:3",
        "box with corners swapped: put in order": "/gt.txt:4",
        "corner at 0 where one-based-inclusive counts from 1: are these corners 0-based?": "/gt.txt:5",
        "box leaves the image: clipped": "/gt.txt:5",
        "box outside the image: dropped": "/gt.txt:6",
    }


def test_missing_images_are_refused_where_they_are_required(tmp_path: Path) -> None:
    write_text(tmp_path / "gt.txt", LINE + "00601.ppm;10;20;30;40;14\n")
    write_image(tmp_path / "00001.jpg", 60, 80)
    assert names(read_gtsdb(tmp_path, "train")) == ["00001.jpg"]
    with pytest.raises(UserError, match=r"gt\.txt:2: 1 of 1 images are missing, first: 00601\.ppm; put"):
        read_gtsdb(tmp_path, "test")
    with pytest.raises(UserError, match=r"no image of the part validation"):
        read_gtsdb(tmp_path, "validation")


@pytest.mark.skipif(not REAL.is_dir(), reason="real GTSDB scenes are not at hand")
def test_real_scenes_as_published() -> None:
    parts = {part: read_gtsdb(REAL, part) for part in ("all-train", "train", "validation", "test")}
    counts = {part: (len(dataset), dataset.report.signs) for part, dataset in parts.items()}
    assert counts == {"all-train": (400, 613), "train": (351, 534), "validation": (49, 79), "test": (165, 203)}
    assert sorted(names(parts["train"]) + names(parts["validation"])) == names(parts["all-train"])
    assert parts["all-train"].report.anomalies["box stands twice in an image: kept twice"] == 1
    assert not any("leaves" in what or "corner at 0" in what for what in parts["all-train"].report.anomalies)
    sample = parts["test"].sample(0)
    assert sample.image.shape == (800, 1360, 3)
    boxes = [box for index in range(165) for _, box in signs(parts["test"], index)]
    assert all(min(x2 - x1, y2 - y1) >= 16 and max(x2 - x1, y2 - y1) <= 129 for x1, y1, x2, y2 in boxes)


@pytest.mark.skipif(not REAL.is_dir(), reason="real GTSDB scenes are not at hand")
def test_super_classes_of_the_real_scenes() -> None:
    dataset = open_sign_dataset(REAL, split="test", class_map="gtsdb-superclasses")
    assert set(dataset.classes) == {"prohibitory", "danger", "mandatory", "other"}
    assert dataset.report.signs == 203
