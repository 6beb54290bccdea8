"""PASCAL VOC: layouts, lists, corner conventions, and an XML parser that expands nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from sign_files import ignored, names, signs, write_image, write_text

from perception.data.signs.dataset import SignFolder
from perception.data.signs.open import open_sign_dataset
from perception.data.signs.voc import is_voc, read_voc
from perception.errors import MissingListError, UserError

REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "roadsign"
SIZE = "<size><width>80</width><height>60</height><depth>3</depth></size>\n"


def sign(
    name: str = "stop", box: tuple[object, ...] = (11, 21, 30, 40), difficult: str = "0", corners: str = "bndbox"
) -> str:
    sides = "".join(f"<{side}>{value}</{side}>" for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box))  # noqa: B905
    return f"<object><name>{name}</name><difficult>{difficult}</difficult>\n<{corners}>{sides}</{corners}></object>\n"


def xml(objects: str = "", file_name: str = "a.png", size: str = SIZE) -> str:
    return f"<annotation><filename>{file_name}</filename>\n{size}{objects}</annotation>"


def read(folder: Path, text: str | bytes, **options: str) -> SignFolder:
    write_text(folder / "annotations" / "a.xml", text)
    write_image(folder / "images" / "a.png", 60, 80)
    return read_voc(folder, **options)


def test_corners_are_inclusive_and_one_based_unless_told(tmp_path: Path) -> None:
    dataset = read(tmp_path, xml(sign()))
    assert is_voc(tmp_path) and names(dataset) == ["images/a.png"]
    assert signs(dataset) == [("stop", [10, 20, 30, 40])] and dataset.report.lines() == []
    assert signs(read_voc(tmp_path, corners="half-open")) == [("stop", [11, 21, 30, 40])]
    assert signs(open_sign_dataset(tmp_path, corners="inclusive")) == [("stop", [11, 21, 31, 41])]


def test_the_official_layout_with_its_lists(tmp_path: Path) -> None:
    for name in ("2007_1", "2007_2", "2007_3"):
        write_text(tmp_path / "Annotations" / f"{name}.xml", xml(sign(f"class-{name[-1]}"), f"{name}.jpg"))
        write_image(tmp_path / "JPEGImages" / f"{name}.jpg")
    write_text(tmp_path / "ImageSets" / "Main" / "train.txt", "2007_3\n2007_1\n")
    write_text(tmp_path / "ImageSets" / "Main" / "val.txt", "2007_2\n")
    train, validation = read_voc(tmp_path, "train"), read_voc(tmp_path, "validation")
    assert names(train) == ["JPEGImages/2007_3.jpg", "JPEGImages/2007_1.jpg"]
    assert names(validation) == ["JPEGImages/2007_2.jpg"]
    assert train.classes == validation.classes == ("class-1", "class-2", "class-3")
    with pytest.raises(MissingListError, match=r"no ImageSets/Main/test\.txt"):
        read_voc(tmp_path, "test")
    write_text(tmp_path / "mine.txt", "2007_2.jpg\n2007_4\n")
    with pytest.raises(UserError, match=r"mine\.txt:2: image 2007_4 has no XML file"):
        read_voc(tmp_path, list_name="mine.txt")


def test_without_lists_all_images_are_for_training(tmp_path: Path) -> None:
    assert len(read(tmp_path, xml(sign()))) == 1
    with pytest.raises(MissingListError):
        read_voc(tmp_path, "validation")


def test_difficult_objects_are_ignored_regions_and_images_without_objects_kept(tmp_path: Path) -> None:
    write_text(tmp_path / "annotations" / "b.xml", xml("", "b"))
    write_image(tmp_path / "images" / "b.jpg")
    dataset = read(tmp_path, xml(sign(difficult="1") + sign("größe", (1.5, 2, 3.25, 4))))
    assert dataset.classes == ("größe", "stop")
    assert ignored(dataset) == [[10, 20, 30, 40]] and signs(dataset) == [("größe", [0.5, 1, 3.25, 4])]
    assert (names(dataset)[1], signs(dataset, 1)) == ("images/b.jpg", [])
    assert dataset.report.lines() == [
        f"1 x difficult object: ignored region (first: {tmp_path / 'annotations' / 'a.xml'}:3)"
    ]


def test_oddities_are_counted_with_their_line(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "c.png")
    write_text(tmp_path / "annotations" / "c.xml", xml(sign(), "somewhere.png", ""))
    write_image(tmp_path / "images" / "d.png")
    dataset = read(tmp_path, xml(sign(box=(0, 5, 80, 60)) + sign() + sign(), "a.jpg"))
    first = {what: place.removeprefix(str(tmp_path / "annotations")) for what, place in dataset.report.examples.items()}
    assert first == {
        "image .jpg found as .png: used": "/a.xml",
        "corner at 0 where one-based-inclusive counts from 1: are these corners 0-based?": "/a.xml:3",
        "box leaves the image: clipped": "/a.xml:3",
        "box stands twice in an image: kept twice": "/a.xml:7",
        "filename is not there: the image of the XML file's name": "/c.xml",
        "no size in the XML file: the image's own": "/c.xml",
        "image without labels: left out": str(tmp_path / "images" / "d.png"),
    }


BOMB = '<!DOCTYPE a [<!ENTITY x "stop"><!ENTITY y "&x;&x;&x;&x;&x;&x;&x;&x;">]>\n' + xml(sign("&y;")).replace(
    "stop", "&y;"
)
OUTSIDE = '<!DOCTYPE a [\n<!ENTITY x SYSTEM "file:///etc/hostname">]>\n' + xml(sign("&x;"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.xml:1: VOC file is not XML \(no element found\)"),
        (xml(sign())[:-40], r"a\.xml:\d: VOC file is not XML"),
        (b"\x00\x01\x02", r"a\.xml:1: VOC file is not XML"),
        ('<?xml version="1.0" encoding="klingon"?>' + xml(), r"a\.xml:1: VOC file is not XML"),
        ("<html></html>", r"a\.xml:1: <annotation> is wanted, got <html>"),
        (BOMB, r"a\.xml:1: DOCTYPE is not allowed"),
        (OUTSIDE, r"a\.xml:1: DOCTYPE is not allowed"),
        (xml(sign("&x;")), r"a\.xml:3: VOC file is not XML \(undefined entity\)"),
        (xml(sign(corners="robndbox")), r"a\.xml:3: field bndbox of the object is missing"),
        (xml(sign(box=(1, 2, 3))), r"a\.xml:4: field ymax of <bndbox> is missing"),
        (xml(sign(box=(1, "", 3, 4))), r"a\.xml:4: field ymin of <bndbox> is empty"),
        (xml(sign(box=(1, "nan", 3, 4))), r'a\.xml:4: field bndbox\.ymin must be a finite number, got "nan"'),
        (xml(sign(box=(1, 2, "9" * 60, 4))), r"a\.xml:4: field bndbox\.xmax = .* is beyond any image"),
        (xml(sign("")), r"a\.xml:3: field name of <object> is empty"),
        (xml(sign(difficult="maybe")), r"a\.xml:3: field difficult must be 0 or 1, got 'maybe'"),
        (xml(sign(), size=SIZE.replace("80", "-80")), r"a\.xml: image images/a\.png is said to be -80x60"),
        (xml(sign(), size=SIZE.replace("80", "80.5")), r"a\.xml:2: field size must be whole pixels, got 80.5x60"),
        (xml(sign(), "../../a.png"), r"a\.xml:1: field filename must name an image inside the data folder"),
        (xml(), r"annotations: no object in any of 1 XML files"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_field(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)


def test_two_files_of_one_image_and_missing_images_are_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "annotations" / "b.xml", xml(sign()))
    with pytest.raises(UserError, match=r"b\.xml: image images/a\.png is listed a second time"):
        read(tmp_path, xml(sign()))
    write_text(tmp_path / "annotations" / "b.xml", xml(sign(), "b.png"))
    with pytest.raises(UserError, match=r"b\.xml: 1 of 2 images are missing, first: b\.png; put"):
        read_voc(tmp_path)
    dataset = read_voc(tmp_path, images_required=False)
    assert names(dataset) == ["images/a.png", "b.png"]
    (tmp_path / "annotations" / "a.xml").unlink()
    (tmp_path / "annotations" / "b.xml").unlink()
    with pytest.raises(UserError, match=r"no XML file in it or its Annotations/"):
        read_voc(tmp_path)


@pytest.mark.skipif(not REAL.is_dir(), reason="real photos with VOC labels are not at hand")
def test_real_photos_are_half_open_and_zero_based() -> None:
    dataset = open_sign_dataset(REAL, corners="half-open")
    assert dataset.classes == ("crosswalk", "speedlimit", "stop", "trafficlight")
    assert (len(dataset), dataset.report.signs, dataset.report.lines()) == (25, 53, [])
    assert dataset.sample(0).image.shape[2] == 3
    by_tradition = open_sign_dataset(REAL)
    assert by_tradition.report.anomalies == {
        "box leaves the image: clipped": 3,
        "corner at 0 where one-based-inclusive counts from 1: are these corners 0-based?": 3,
    }
