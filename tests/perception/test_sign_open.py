"""Opening a sign data set: the format is found, the split chosen, a mistake answered in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sign_files import names, write_image, write_text

from perception.data.signs.open import FORMATS, detect_sign_format, find_sign_format, open_sign_dataset
from perception.errors import MissingListError, UserError

ROOT = Path(__file__).parents[2]
VOC = (
    "<annotation><object><name>stop</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox>"
    "</object></annotation>"
)
COCO = json.dumps({"images": [{"id": 1, "file_name": "a.png"}], "categories": [{"id": 1, "name": "stop"}]})
GTSDB = "00001.ppm;10;20;30;40;14\n"
FILES = {
    "gtsdb": {"gt.txt": GTSDB},
    "gtsrb": {"Final_Training/Images/00000/GT-00000.csv": "Filename;Width;Height;Roi.X1;Roi.Y1;ClassId\n"},
    "lisa": {"allAnnotations.csv": "Filename;Annotation tag\n"},
    "bdd100k": {"labels/det_20/det_train.json": "[]"},
    "mapillary": {"annotations/x.json": '{"width": 1, "objects": []}', "splits/train.txt": "x\n"},
    "tt100k": {"annotations.json": '{"types": [], "imgs": {}}'},
    "coco": {"annotations/instances_train2017.json": COCO},
    "yolo": {"data.yaml": "names: [stop]\n"},
    "voc": {"Annotations/a.xml": VOC},
}


@pytest.mark.parametrize("format", FILES)
def test_the_format_is_found_from_what_lies_in_the_folder(tmp_path: Path, format: str) -> None:
    for name, text in FILES[format].items():
        write_text(tmp_path / name, text)
    assert detect_sign_format(tmp_path) == format and format in FORMATS


def test_every_format_is_known_to_detection() -> None:
    assert set(FORMATS) == {"auto", *FILES}


def test_a_conversion_beside_the_original_does_not_confuse_detection(tmp_path: Path) -> None:
    write_text(tmp_path / "gt.txt", GTSDB)
    write_text(tmp_path / "train.json", COCO)
    assert find_sign_format(tmp_path) == "gtsdb"


def test_two_general_formats_or_none_ask_for_a_name(tmp_path: Path) -> None:
    assert find_sign_format(tmp_path) == ""
    with pytest.raises(UserError, match=r"holds no sign data set that is known \(gtsdb, .*; give its own folder"):
        open_sign_dataset(tmp_path)
    write_text(tmp_path / "train.json", COCO)
    write_text(tmp_path / "a.xml", VOC)
    write_image(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"could be coco or voc; set data\.format to one"):
        open_sign_dataset(tmp_path)
    assert names(open_sign_dataset(tmp_path, "coco")) == names(open_sign_dataset(tmp_path, "voc")) == ["a.png"]


def test_a_name_of_a_split_in_place_of_a_list_means_that_split(tmp_path: Path) -> None:
    write_text(tmp_path / "train.json", COCO)
    write_image(tmp_path / "a.png")
    assert names(open_sign_dataset(tmp_path, list_name="train", split="test")) == ["a.png"]
    with pytest.raises(MissingListError):
        open_sign_dataset(tmp_path, list_name="validation")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "cocoo"}, r'data\.format = "cocoo" is unknown; did you mean "coco"\?'),
        ({"split": "val"}, r'split = "val" is unknown'),
        ({"list_name": "nowhere.json"}, r"nowhere\.json: COCO annotation file cannot be read \(No such file"),
        ({"corners": "inclusive"}, r'corners = "inclusive": coco has no corners, its boxes are x, y, width, height'),
        ({"format": "voc", "corners": "inklusive"}, r'corners = "inklusive" is unknown; did you mean "inclusive"\?'),
        ({"class_map": "none.toml"}, r"class map none\.toml: no such file"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, str], message: str) -> None:
    write_text(tmp_path / "train.json", COCO)
    write_image(tmp_path / "a.png")
    with pytest.raises(UserError, match=message):
        open_sign_dataset(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"data folder does not exist"):
        open_sign_dataset(tmp_path / "none", **options)  # type: ignore[arg-type]


def whole_sets(folder: Path) -> dict[str, tuple[Path, list[Path]]]:
    """Format → a folder that holds one, and the files in it to be damaged."""
    label = json.loads(COCO) | {"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3.5, 4]}]}
    files = {
        "gtsdb": {"gt.txt": GTSDB, "00001.png": ""},
        "coco": {"train.json": json.dumps(label), "a.png": ""},
        "yolo": {
            "data.yaml": "train: images\nnc: 2\nnames: [stop, go]\n",
            "labels/a.txt": "1 0.5 0.5 0.2 0.2\n",
            "images/a.png": "",
        },
        "voc": {"Annotations/a.xml": VOC, "a.png": "", "ImageSets/Main/train.txt": "a\n"},
    }
    for format, contents in files.items():
        for name, text in contents.items():
            if text:
                write_text(folder / format / name, text)
            else:
                write_image(folder / format / name)
    return {
        format: (folder / format, [folder / format / name for name, text in contents.items() if text])
        for format, contents in files.items()
    }


NASTY = [
    "",
    "nan",
    "-1",
    "1e999",
    "9" * 30,
    "null",
    "[]",
    "{",
    '"',
    "\0",
    "é",
    "..",
    "&x;",
    "<!--",
    "- ",
    "\n",
    "9" * 300,
]


@pytest.mark.parametrize("format", ["gtsdb", "coco", "yolo", "voc"])
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, format: str) -> None:
    folder, files = whole_sets(tmp_path)[format]
    assert len(open_sign_dataset(folder, format)) == 1
    random = np.random.default_rng(7)
    num_refused = 0
    for path in files * (80 // len(files)):
        whole = path.read_bytes()
        start = int(random.integers(len(whole)))
        end = start + int(random.integers(12))
        write_text(path, whole[:start] + NASTY[random.integers(len(NASTY))].encode() + whole[end:])
        try:
            dataset = open_sign_dataset(folder, format)
            assert all(np.isfinite(dataset.truth(index).boxes).all() for index in range(len(dataset)))
        except UserError as error:
            assert "\n" not in str(error)
            num_refused += 1
        path.write_bytes(whole)
    assert 15 < num_refused < 80


def test_readers_need_no_torch() -> None:
    program = "import sys, perception.data.signs.open; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=60).returncode == 0
