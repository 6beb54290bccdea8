"""`data check`: counts by hand, anomalies with their first place, a verdict and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from perception.errors import UserError
from pipelines.__main__ import main
from pipelines.data_check import check_data

ROOT = Path(__file__).parents[2]
SHARED = ROOT / ".." / "shared" / "data"


def write_image(path: Path, height: int = 200, width: int = 300) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    done, data = cv2.imencode(path.suffix, np.full((height, width, 3), 90, np.uint8))
    assert done
    path.write_bytes(data.tobytes())


def write_gtsdb(folder: Path, *lines: str) -> None:
    """Images 1 (train), 8 (validation), 700 (test)."""
    for number in (1, 8, 700):
        write_image(folder / f"{number:05d}.png")
    (folder / "gt.txt").write_text("\n".join(lines) + "\n")


SOUND = (
    "00001.png;1;1;10;10;14",  # a side of 10
    "00001.png;1;1;16;16;14",
    "00001.png;1;1;96;96;0",
    "00001.png;1;1;97;97;13",
    "00008.png;1;1;32;32;14",
)


def test_counts_and_sizes_of_signs(tmp_path: Path) -> None:
    write_gtsdb(tmp_path, *SOUND)
    check = check_data(tmp_path)
    assert (check.format, check.objects, check.verdict, check.causes) == ("gtsdb", "signs", "sound", [])
    train, validation, test = check.splits
    assert [part.split for part in check.splits] == ["train", "validation", "test"]
    assert [(part.images, part.objects) for part in check.splits] == [(1, 4), (1, 1), (1, 0)]
    assert train.boxes_by_size == {"<16": 1, "16-32": 1, "32-96": 1, ">96": 1}
    assert validation.boxes_by_size == {"<16": 0, "16-32": 0, "32-96": 1, ">96": 0}
    assert validation.box_size_percentiles == (32, 32, 32) and test.box_size_percentiles is None
    assert [part.images_by_objects for part in check.splits] == [{"4": 1}, {"1": 1}, {"0": 1}]
    assert train.images_by_size == {"300x200": 1}
    counted = {name: count for name, count in train.objects_by_class.items() if count}
    assert counted == {"stop": 2, "speed-limit-20": 1, "give-way": 1} and len(train.objects_by_class) == 43


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gtsdb(tmp_path, *SOUND, "00008.png;5;5;4;4;13", "00008.png;900;5;910;14;13")
    json_file = tmp_path / "check.json"
    arguments = ["data", "check", str(tmp_path), "--class-map", "gtsdb-superclasses", "--json", str(json_file)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    rows = {" ".join(line.split()) for line in out.splitlines()}
    assert {"train validation test", "images 1 1 1", "signs 4 2 0", "300x200 1 1 1", "16-32 1 0 0"} <= rows
    assert {"prohibitory 1 0 0", "other 3 2 0", "danger 0 0 0"} <= rows
    label_file = tmp_path / "gt.txt"
    assert f"validation: 1 x box outside the image: dropped (first: {label_file}:7)" in rows
    assert out.endswith("verdict: repaired, usable; 2 anomalies, each treated as its line says\n")
    written = json.loads(json_file.read_text())
    assert written["verdict"] == "repaired" and written["splits"][1]["objects_by_class"]["other"] == 2
    assert written["splits"][1]["anomalies"][0] == {
        "what": "box outside the image: dropped",
        "count": 1,
        "first": f"{label_file}:7",
        "unusable": False,
    }


def test_a_wrong_line_makes_it_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gtsdb(tmp_path, *SOUND, "00008.png;5;5;4;4")
    assert main(["data", "check", "--format", "gtsdb", str(tmp_path), "--list", "train"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"wrong: {tmp_path / 'gt.txt'}:6: 5 fields, 6 are wanted")
    assert lines[-1] == "verdict: unusable"


def test_images_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    write_gtsdb(tmp_path, *SOUND)
    image = tmp_path / "00001.png"
    image.write_bytes(image.read_bytes()[:-40])
    assert check_data(tmp_path).verdict == "sound"
    check = check_data(tmp_path, decode=True)
    assert check.verdict == "unusable" and check.causes == ["train: 1 x image that cannot be used"]
    assert "00001.png: image cannot be decoded" in check.splits[0].anomalies[0].first


def test_labels_of_another_image_size_are_found_from_the_headers(tmp_path: Path) -> None:
    labels = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 300, "height": 200} for n in (1, 2)],
        "categories": [{"id": 1, "name": "stop"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}],
    }
    (tmp_path / "train.json").write_text(json.dumps(labels))
    write_image(tmp_path / "1.png")
    write_image(tmp_path / "2.png", 300, 200)
    check = check_data(tmp_path)
    assert check.verdict == "unusable"
    assert check.splits[0].anomalies[0].first == f"{tmp_path / '2.png'}: image is 200x300, its labels are for 300x200"
    assert [note.partition(":")[0] for note in check.notes] == ["validation", "test"]
    assert check_data(tmp_path, labels_only=True).verdict == "sound"


def test_an_image_in_two_parts_is_noted(tmp_path: Path) -> None:
    labels = {
        "images": [{"id": 1, "file_name": "1.png"}],
        "categories": [{"id": 1, "name": "stop"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}],
    }
    for split in ("train", "val"):
        (tmp_path / f"{split}.json").write_text(json.dumps(labels))
    write_image(tmp_path / "1.png")
    (anomaly,) = check_data(tmp_path).splits[1].anomalies
    assert (anomaly.what, anomaly.first) == ("image that is in train too: kept in both", "1.png")


def test_a_data_set_without_signs_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("stop\n")
    write_image(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("")
    check = check_data(tmp_path)
    assert (check.verdict, check.causes) == ("unusable", ["no signs in it"])


def test_lanes(tmp_path: Path) -> None:
    rows = [160, 170, 180]
    lines = [
        {"raw_file": "clips/1.png", "lanes": [[1, 2, 3], [9, 8, 7]], "h_samples": rows},
        {"raw_file": "clips/2.png", "lanes": [[-2, -2, -2]], "h_samples": rows},
    ]
    (tmp_path / "label_data_0313.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number in (1, 2):
        write_image(tmp_path / "clips" / f"{number}.png")
    check = check_data(tmp_path)
    (train,) = check.splits
    assert (check.format, check.objects, check.verdict) == ("tusimple", "lanes", "repaired")
    assert (train.images, train.objects, train.images_by_objects) == (2, 2, {"2": 1, "0": 1})
    assert {anomaly.what: anomaly.count for anomaly in train.anomalies} == {
        "lane without a point: dropped": 1,
        "image without lanes: kept": 1,
    }
    write_image(tmp_path / "clips" / "2.png", 100)
    check = check_data(tmp_path)
    assert check.verdict == "unusable" and "image is 100 pixels high" in check.splits[0].anomalies[-1].first
    with pytest.raises(UserError, match=r"--class-map is for signs, tusimple has lanes"):
        check_data(tmp_path, class_map="gtsdb-superclasses")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["none"], "error: none: data folder does not exist"),
        (["FOLDER", "--format", "gtsdp"], 'error: --format "gtsdp" is unknown; did you mean "gtsdb"?'),
        (["FOLDER", "--class-map", "gtsdb-superclass"], 'did you mean "gtsdb-superclasses"?'),
        (["FOLDER", "--json", "none/x.json"], "error: --json none/x.json: folder none does not exist"),
        (["FOLDER", "--decode", "--labels-only"], "error: --decode and --labels-only exclude each other"),
        (
            ["FOLDER"],
            "error: FOLDER: not one data set in a known layout; give --format, one of tusimple, culane, llamas",
        ),
        (["FOLDER", "--corners", "inklusive"], 'error: corners = "inklusive" is unknown; did you mean "inclusive"?'),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "FOLDER").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", "data", "check", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert line in done.stderr and done.stderr.count("\n") == 1


def test_help_answers_without_heavy_imports() -> None:
    program = """
import sys
from pipelines.__main__ import main
try:
    main(["data", "--help"])
finally:
    print("imported:", *sorted({"torch", "numpy", "cv2"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0 and "--class-map" in done.stdout
    assert done.stdout.endswith("imported:\n")


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data sets are not at hand")
def test_real_data() -> None:
    signs = check_data(SHARED / "gtsdb")
    assert [(part.images, part.objects) for part in signs.splits] == [(351, 534), (49, 79), (165, 203)]
    assert signs.verdict == "repaired" and not any(part.boxes_by_size["<16"] for part in signs.splits)
    assert check_data(SHARED / "roadsign", corners="half-open", decode=True).verdict == "sound"
    lanes = check_data(SHARED / "culane_mini", "culane")
    assert [(part.images, part.objects) for part in lanes.splits] == [(10, 33)]
