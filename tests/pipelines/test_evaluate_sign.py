"""`evaluate sign`: figures of prediction files as COCO's evaluator has them, and loud failure on what does not fit."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perception.errors import UserError
from pipelines.evaluate import add_arguments, evaluate_sign_files, run

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"
GTSDB = SHARED / "gtsdb"
Row = dict[str, Any]

# Ids with gaps and out of order, an image without a sign, a crowd, an annotation with id 0.
LABELS: Row = {
    "images": [
        {"id": 70, "file_name": "b.jpg", "width": 400, "height": 300},
        {"id": 9, "file_name": "dir/a.jpg", "width": 400, "height": 300},
        {"id": 12, "file_name": "ö.png", "width": 400, "height": 300},
    ],
    "categories": [{"id": 5, "name": "stop"}, {"id": 2, "name": "danger"}, {"id": 8, "name": "keep-left"}],
    "annotations": [
        {"id": 0, "image_id": 70, "category_id": 5, "bbox": [10, 10, 20, 20], "iscrowd": 0},
        {"id": 4, "image_id": 9, "category_id": 2, "bbox": [50.5, 60.5, 30, 40], "iscrowd": 0},
        {"id": 3, "image_id": 9, "category_id": 5, "bbox": [200, 100, 100, 100], "iscrowd": 1},
    ],
}
RESULTS: list[Row] = [
    {"image_id": 70, "category_id": 5, "bbox": [10, 10, 20, 20], "score": 0.9},
    {"image_id": 9, "category_id": 2, "bbox": [50, 60, 30, 40], "score": 0.8},
    {"image_id": 9, "category_id": 5, "bbox": [210, 110, 20, 20], "score": 0.95},
]
# The same, with its own numbers and names.
SELF_CONTAINED: Row = {
    "images": [{"id": "first", "file_name": "b.jpg"}, {"id": "second", "file_name": "/data/dir/a.png"}],
    "categories": [{"id": 0, "name": "danger"}, {"id": 1, "name": "stop"}, {"id": 2, "name": "roundabout"}],
    "annotations": [
        {"id": 1, "image_id": "first", "category_id": 1, "bbox": [10, 10, 20, 20], "score": 0.9},
        {"id": 2, "image_id": "second", "category_id": 0, "bbox": [50, 60, 30, 40], "score": 0.8},
        {"id": 3, "image_id": "second", "category_id": 1, "bbox": [210, 110, 20, 20], "score": 0.95},
    ],
}


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def figures(folder: Path, predictions: Any, labels: Any = LABELS) -> dict[str, float]:
    found = evaluate_sign_files(write(folder / "P.json", predictions), write(folder / "L.json", labels), "coco")
    return found.metrics


def changed(row: int, **fields: Any) -> list[Row]:
    """RESULTS with fields of one row changed, or taken away by None."""
    rows = [dict(result) for result in RESULTS]
    rows[row] = {name: value for name, value in {**rows[row], **fields}.items() if value is not None}
    return rows


def arguments(*texts: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(text) for text in texts])


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ("--predictions", write(tmp_path / "P.json", RESULTS), "--labels", write(tmp_path / "L.json", LABELS))
    out = tmp_path / "out.json"
    assert run(arguments("sign", *paths, "--format", "coco", "--json", out)) == 0
    written = json.loads(out.read_text())
    # .95 IoU of the shifted box: 29.5 * 39.5 / (2 * 1200 - 29.5 * 39.5) = .9437
    assert written["ap50"] == written["ap75"] == written["ap50_class_agnostic"] == 1.0
    assert written["ap"] == pytest.approx((1.0 + 0.9) / 2)
    assert (written["images"], written["truths"], written["ignored"], written["detections"]) == (3, 2, 1, 3)
    assert (written["images_without_predictions"], written["truths_class/keep-left"]) == (1, 0)
    assert "ap_class/keep-left" not in written
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "ap                          0.950000" in lines
    assert any(line.split() == ["danger", "1", "0.900000", "1.000000"] for line in lines)
    assert "without truths, in no mean: keep-left" in lines
    assert printed.err.splitlines() == [
        f"warning: 1 x annotation id 0: counted, where COCO's evaluator loses its match (first: {tmp_path}/L.json: "
        "annotations[0])",
        "warning: 1 x image without a prediction: counted as one without detections (first: ö.png)",
    ]


def test_rates_at_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ("--predictions", write(tmp_path / "P.json", RESULTS), "--labels", write(tmp_path / "L.json", LABELS))
    assert run(arguments("sign", *paths, "--format", "coco", "--score-threshold", "0.85")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["tt100k_recall", "0.500000"] in lines and ["tt100k_accuracy", "1.000000"] in lines
    assert ["0-32", "1", "1.000000", "1.000000"] in lines and ["32-96", "1", "-", "0.000000"] in lines


def test_equals_pycocotools_on_the_same_files(tmp_path: Path) -> None:
    """Equal scores in several images: they rank by the images' ids, not by their names."""
    coco_module = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    evaluator = pytest.importorskip("pycocotools.cocoeval", reason="pycocotools is not installed")
    labels: Row = {"images": [], "annotations": [], "categories": LABELS["categories"]}
    results = []
    for image in (40, 3, 17, 8, 25):
        labels["images"].append({"id": image, "file_name": f"{-image}.jpg", "width": 400, "height": 300})
        for place in range(3):
            box = [100.5 * place, 7.25 * image, 33.3, 41]
            number = len(labels["annotations"]) + 1
            annotation = {"id": number, "image_id": image, "category_id": (5, 2)[place % 2], "bbox": box}
            labels["annotations"].append({**annotation, "iscrowd": 0, "area": box[2] * box[3]})
            shifted = [box[0] + (image * place) % 7, *box[1:]]
            results.append({"image_id": image, "category_id": 5, "bbox": shifted, "score": 0.5})
    ours = figures(tmp_path, results, labels)
    with contextlib.redirect_stdout(io.StringIO()):
        truths = coco_module.COCO(str(tmp_path / "L.json"))
        official = evaluator.COCOeval(truths, truths.loadRes(str(tmp_path / "P.json")), "bbox")
        official.evaluate()
        official.accumulate()
        official.summarize()
    assert 0 < ours["ap"] < 1
    assert [ours["ap"], ours["ap50"], ours["ap75"]] == pytest.approx(list(official.stats[:3]), abs=1e-9, rel=0)


def test_a_file_with_its_own_numbers_counts_the_same(tmp_path: Path) -> None:
    assert figures(tmp_path, SELF_CONTAINED) == figures(tmp_path, RESULTS)


def test_what_predict_wrote_goes_with_labels_of_any_format(tmp_path: Path) -> None:
    """Its numbers are its own: those of the labels must not be taken for them, though they are there too."""
    from perception.data.signs.classes import GTSDB_CLASSES
    from perception.data.signs.sample import SignPrediction
    from perception.predict_inputs import Frame
    from perception.predict_outputs import CocoWriter

    writer = CocoWriter(tmp_path / "found", GTSDB_CLASSES)
    stop, keep_left = (GTSDB_CLASSES.index(name) for name in ("stop", "keep-left"))
    for name, label in (("00601.jpg", stop), ("00602.jpg", keep_left), ("00603.jpg", None)):
        boxes = np.array([[10.0, 20, 40, 60]] * (label is not None)).reshape(-1, 4)
        found = SignPrediction(boxes, np.full(len(boxes), 0.9), np.full(len(boxes), label or 0))
        writer.write(Frame(name, np.zeros((100, 160, 3), np.uint8)), found, 1.0)
    writer.finish()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/gt.txt").write_text(
        f"00601.ppm;11;21;40;60;{stop}\n00602.ppm;11;21;40;60;{keep_left}\n00603.ppm;1;1;9;9;{stop}\n"
    )
    labels = {
        "images": [{"id": number, "file_name": f"00{604 - number}.jpg"} for number in (1, 2, 3)],
        "categories": [
            {"id": 1, "name": "keep-left"},
            {"id": stop + 1, "name": "danger"},
            {"id": keep_left + 1, "name": "stop"},
        ],
        "annotations": [
            {"id": 1, "image_id": 3, "category_id": keep_left + 1, "bbox": [10, 20, 30, 40]},
            {"id": 2, "image_id": 2, "category_id": 1, "bbox": [10, 20, 30, 40]},
            {"id": 3, "image_id": 1, "category_id": keep_left + 1, "bbox": [0, 0, 9, 9]},
        ],
    }
    for given in (tmp_path / "found", tmp_path / "found/results.json"):
        for truths, format in ((tmp_path / "data", "gtsdb"), (write(tmp_path / "L.json", labels), "coco")):
            metrics = evaluate_sign_files(given, truths, format).metrics
            assert (metrics["ap_class/keep-left"], metrics["images_without_predictions"]) == (1.0, 0)
            assert metrics["ap_class/stop"] == pytest.approx(0.5, abs=0.01), "one of two"
    (tmp_path / "found/images.json").write_text('{"images": [{"id": 1}]}')
    with pytest.raises(UserError, match=r"images\.json: images\[0\]: field file_name is missing"):
        evaluate_sign_files(tmp_path / "found", tmp_path / "data", "gtsdb")


def test_an_image_that_was_looked_at_is_not_missing(tmp_path: Path) -> None:
    images = [*SELF_CONTAINED["images"], {"id": 3, "file_name": "ö.png"}]
    assert figures(tmp_path, {**SELF_CONTAINED, "images": images})["images_without_predictions"] == 0


def test_no_detection_at_all(tmp_path: Path) -> None:
    found = evaluate_sign_files(write(tmp_path / "P.json", []), write(tmp_path / "L.json", LABELS), "coco")
    assert (found.metrics["ap"], found.metrics["images_without_predictions"]) == (0.0, 3)
    assert any("prediction file without a detection" in line for line in found.warnings)


def test_detections_of_a_class_without_truths_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "P.json", changed(2, category_id=8, bbox=[0, 0, 9, 9]))
    found = evaluate_sign_files(path, write(tmp_path / "L.json", LABELS), "coco")
    assert any(line.startswith("1 x detection of a class without truths") for line in found.warnings)
    assert found.metrics["ap50"] == 1.0 and found.metrics["ap50_class_agnostic"] < 1.0


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ("", r"P\.json: prediction file is empty"),
        ('[{"image_id": 70,\n "bbox"', r"P\.json:2: prediction file is not JSON"),
        ("7", r"P\.json: neither a list of COCO results nor an object"),
        ({"annotations": []}, r"P\.json: field images is missing"),
        ([RESULTS[0], 3], r"P\.json: \[1\]: must be a JSON object, got 3"),
        (changed(1, image_id=10), r"\[1\]: field image_id = 10 is none of the 3 images \(ids 9, 12, 70"),
        (changed(1, image_id="9"), r'\[1\]: field image_id = "9" is none of the 3 images'),
        (changed(1, image_id=None), r"\[1\]: field image_id is missing"),
        (changed(1, category_id=3), r"\[1\]: field category_id = 3 is none of the categories \(5 stop, 2 danger"),
        (changed(1, category_name="stop"), r'\[1\]: field category_name = "stop", but category 2 is "danger"'),
        (changed(1, category_id=None, category_name="dnger"), r'\[1\]: class "dnger" .*did you mean "danger"\?'),
        (changed(1, score=math.nan), r"\[1\]: field score must be a finite number, got NaN"),
        (changed(1, score=True), r"\[1\]: field score must be a finite number, got true"),
        (changed(1, score=None), r"\[1\]: field score is missing"),
        (changed(1, bbox=[1, 2, 3]), r"\[1\]: field bbox must be \[x, y, width, height\]"),
        (changed(1, bbox=[1, 2, math.inf, 4]), r"\[1\]: field bbox must be a finite number"),
        (changed(1, bbox=[9, 9, 4, -4]), r"\[1\]: field bbox is 4 wide and -4 high"),
        (changed(1, bbox=[10**400, 9, 4, 4]), r"\[1\]: field bbox must be a finite number"),
        (
            {**SELF_CONTAINED, "images": [{"id": 1, "file_name": "c.jpg"}]},
            r'images\[0\]: image "c\.jpg" is none of the 3 labelled ones, the first is dir/a\.jpg',
        ),
        (
            {**SELF_CONTAINED, "images": [{"id": 1, "file_name": "other/a.jpg"}]},
            r'image "other/a\.jpg" is none of the 3 labelled ones',
        ),
        (
            {**SELF_CONTAINED, "images": [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "dir/a.jpg"}]},
            r'images\[1\]: image "dir/a\.jpg" is dir/a\.jpg of the labels, as is "a\.jpg"',
        ),
        (
            {**SELF_CONTAINED, "images": [{"id": 1, "file_name": "b.jpg"}, {"id": 2, "file_name": "b.jpg"}]},
            r'images\[1\]: field file_name = "b\.jpg" stands twice',
        ),
        (
            {**SELF_CONTAINED, "categories": [{"id": 0, "name": "danger"}, {"id": 1, "name": "stopp"}]},
            r'annotations\[0\]: class "stopp" is none of the labels; did you mean "stop"\?',
        ),
    ],
)
def test_predictions_that_do_not_fit(tmp_path: Path, predictions: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        figures(tmp_path, predictions)
    assert "\n" not in str(error.value)


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    def with_annotation(**fields: Any) -> Row:
        return {**LABELS, "annotations": [{**LABELS["annotations"][0], **fields}]}

    with pytest.raises(UserError, match=r"annotations\[0\]: field image_id = 1 is none of the file's 3 images"):
        figures(tmp_path, RESULTS, with_annotation(image_id=1))
    with pytest.raises(UserError, match=r"annotations\[0\]: field category_id = 1 is none of the file's categories"):
        figures(tmp_path, RESULTS, with_annotation(category_id=1))
    with pytest.raises(UserError, match=r"--labels \S+L\.json: none of the 3 images has a sign"):
        figures(tmp_path, RESULTS, {**LABELS, "annotations": []})
    with pytest.raises(UserError, match=r"image b\.jpg stands twice"):
        figures(tmp_path, RESULTS, {**LABELS, "images": [*LABELS["images"], {"id": 1, "file_name": "b.jpg"}]})
    with pytest.raises(UserError, match=r"images\[3\]: field id = 70 stands twice"):
        figures(tmp_path, RESULTS, {**LABELS, "images": [*LABELS["images"], {"id": 70, "file_name": "c.jpg"}]})


def test_wrong_paths_and_options(tmp_path: Path) -> None:
    predictions, labels = write(tmp_path / "P.json", RESULTS), write(tmp_path / "L.json", LABELS)
    with pytest.raises(UserError, match=r"--labels .*nowhere: does not exist"):
        evaluate_sign_files(predictions, tmp_path / "nowhere", "coco")
    with pytest.raises(UserError, match=r"no\.json: prediction file cannot be read \(No such file"):
        evaluate_sign_files(tmp_path / "no.json", labels, "coco")
    with pytest.raises(UserError, match=r": no results\.json in it; give the folder that predict wrote"):
        evaluate_sign_files(tmp_path, labels, "coco")
    with pytest.raises(UserError, match=r"--labels .*L\.json: is a file; give the folder of the gtsdb data set"):
        evaluate_sign_files(predictions, labels, "gtsdb")
    with pytest.raises(UserError, match='--format "cocoo" is unknown; did you mean "coco"'):
        evaluate_sign_files(predictions, labels, "cocoo")
    with pytest.raises(UserError, match=r"--list goes with a folder of labels"):
        evaluate_sign_files(predictions, labels, "coco", "test")
    paths = ("--predictions", predictions, "--labels", labels)
    for options, message in (
        (("sign",), "give --format"),
        (("lane",), "give --metric; allowed: culane, tusimple"),
        (("sign", "--format", "coco", "--metric", "culane"), "--metric goes with evaluate lane"),
        (("sign", "--format", "coco", "--strict"), "--strict goes with evaluate lane"),
        (("sign", "--format", "coco", "--image-size", "8x8"), "--image-size goes with evaluate lane"),
        (("lane", "--metric", "culane", "--format", "coco"), "--format goes with evaluate sign"),
    ):
        with pytest.raises(UserError, match=message):
            run(arguments(options[0], *paths, *options[1:]))


def gtsdb_predictions(part: str, names: str = "file_name", shift: float = 0.0) -> list[Row]:
    """gt.txt as its own prediction, read by hand: corners count from 1 and are inclusive."""
    from perception.data.signs.classes import GTSDB_CLASSES

    rows = []
    for line in (GTSDB / "gt.txt").read_text().split():
        name, *numbers = line.split(";")
        left, top, right, bottom, label = (int(number) for number in numbers)
        if part == "all" or int(name[:5]) >= 600:
            bbox = [left - 1 + shift, top - 1 + shift, right - left + 1, bottom - top + 1]
            rows.append({names: name, "category_name": GTSDB_CLASSES[label], "bbox": bbox, "score": 0.5})
    return rows


@pytest.mark.skipif(not GTSDB.is_dir(), reason="real data not at ../shared/data")
def test_real_gtsdb_labels_match_themselves(tmp_path: Path) -> None:
    perfect = write(tmp_path / "P.json", gtsdb_predictions("test"))
    found = evaluate_sign_files(perfect, GTSDB, "gtsdb").metrics
    names = ("ap", "ap50_class_agnostic", "ap50_superclass", "gtsdb_auc")
    assert [found[name] for name in names] == [1.0] * 4
    assert found["images"] == 165 and found["truths"] == len(gtsdb_predictions("test"))
    # A part of the truth: images without a sign have no row here, and are told of.
    assert 0 < found["images_without_predictions"] < 165
    # A shift by one pixel alone costs what the field has measured, .18 of the mean AP.
    shifted = write(tmp_path / "S.json", gtsdb_predictions("test", shift=1.0))
    assert evaluate_sign_files(shifted, GTSDB, "gtsdb").metrics["ap"] == pytest.approx(0.82, abs=0.03)


@pytest.mark.skipif(not GTSDB.is_dir(), reason="real data not at ../shared/data")
def test_predictions_outside_a_list_are_left_out_only_if_it_is_given(tmp_path: Path) -> None:
    every = write(tmp_path / "P.json", gtsdb_predictions("all", names="image_id"))
    with pytest.raises(UserError, match=r'\[0\]: image "00000\.ppm" is none of the 165 labelled ones'):
        evaluate_sign_files(every, GTSDB, "gtsdb")
    found = evaluate_sign_files(every, GTSDB, "gtsdb", "test")
    assert found.metrics["ap"] == 1.0 and found.metrics["images"] == 165
    assert any("predicted image is not in --list: left out" in line for line in found.warnings)
    merged = [{**row, "category_name": "danger"} for row in gtsdb_predictions("test")]
    grouped = evaluate_sign_files(write(tmp_path / "M.json", merged), GTSDB, "gtsdb", "test", "gtsdb-superclasses")
    assert grouped.metrics["ap50_class_agnostic"] == 1.0
    assert 0 < grouped.metrics["ap50_superclass"] < 1


@pytest.mark.skipif(not GTSDB.is_dir(), reason="real data not at ../shared/data")
def test_formats_without_numbers_want_names(tmp_path: Path) -> None:
    rows = gtsdb_predictions("test")
    numbered = [{**rows[0], "file_name": "00600.ppm"}, {**rows[1], "image_id": 600}]
    numbered[1].pop("file_name")
    with pytest.raises(UserError, match=r"\[1\]: field image_id = 600, but labels of this format number no images"):
        evaluate_sign_files(write(tmp_path / "P.json", numbered), GTSDB, "gtsdb")
    without = [{name: value for name, value in rows[0].items() if name != "category_name"} | {"category_id": 4}]
    with pytest.raises(UserError, match=r"\[0\]: field category_id = 4, but labels of this format number no classes"):
        evaluate_sign_files(write(tmp_path / "P.json", without), GTSDB, "gtsdb")
