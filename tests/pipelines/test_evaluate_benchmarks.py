"""`evaluate lane` on files of LLAMAS, CurveLanes and OpenLane, in the layouts of their own tools."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from perception.data.curvelanes import read_curvelanes
from perception.data.llamas import read_llamas
from perception.data.mixture import MixedLanes, Part
from perception.data.openlane import read_openlane
from perception.errors import UserError
from perception.metrics.lane_files import LaneEvaluation
from pipelines.evaluate import add_arguments, evaluate_lane_files, run

Pairs = list[tuple[float, float]]
LEFT: Pairs = [(400.0 + 2 * (700 - y), float(y)) for y in range(700, 300, -20)]
RIGHT: Pairs = [(900.0 - (700 - y), float(y)) for y in range(700, 300, -20)]


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def lines(*lanes: Pairs) -> str:
    return "".join(" ".join(f"{x} {y}" for x, y in lane) + "\n" for lane in lanes)


def llamas_label(*lanes: Pairs) -> dict[str, Any]:
    def markers(lane: Pairs) -> list[dict[str, Any]]:
        ends = [{"x": x, "y": y} for x, y in lane]
        world = {"x": 0, "y": 0, "z": 5}
        return [
            {"pixel_start": start, "pixel_end": end, "world_start": world} for start, end in itertools.pairwise(ends)
        ]

    return {"lanes": [{"lane_id": f"r{number}", "markers": markers(lane)} for number, lane in enumerate(lanes)]}


def curvelanes(*lanes: Pairs) -> dict[str, Any]:
    return {"Lines": [[{"x": str(x), "y": str(y)} for x, y in lane] for lane in lanes]}


def openlane(*lanes: Pairs) -> dict[str, Any]:
    return {"file_path": "validation/s/1.jpg", "lane_lines": [uv(lane) for lane in lanes]}


def uv(lane: Pairs) -> dict[str, Any]:
    return {"category": 1, "uv": [[x for x, _ in lane], [y for _, y in lane]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Each data set with an image of two lanes and one of none, and predictions: one lane right and one wrong; none."""
    wrong: Pairs = [(x + 200, y) for x, y in RIGHT]
    for name, labelled, predicted in (("1", (LEFT, RIGHT), (wrong, LEFT)), ("2", (), ())):
        write(tmp_path / f"L/labels/valid/drive/{name}.json", llamas_label(*labelled))
        write(tmp_path / f"L/P/drive/{name}.lines.txt", lines(*predicted))
        write(tmp_path / f"C/valid/labels/{name}.lines.json", curvelanes(*labelled))
        image = tmp_path / f"C/valid/images/{name}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(image), np.zeros((720, 1280, 3), np.uint8))
        write(tmp_path / f"C/P/{name}.lines.json", curvelanes(*predicted))
        write(tmp_path / f"O/lane3d_1000/validation/s/{name}.json", openlane(*labelled))
        write(tmp_path / f"O/P/s/{name}.json", openlane(*predicted))
    write(tmp_path / "C/valid/valid.txt", "images/1.jpg\nimages/2.jpg\n")
    write(tmp_path / "O/list.txt", "/s/1.jpg\ns/2.jpg\n")
    return tmp_path


LABELS = {"llamas": "L/labels/valid", "curvelanes": "C/valid", "openlane": "O/lane3d_1000/validation"}
PREDICTIONS = {"llamas": "L/P", "curvelanes": "C/P", "openlane": "O/P"}
LISTS = {"curvelanes": "C/valid/valid.txt", "openlane": "O/list.txt"}
PREDICTED = {"llamas": "L/P/drive/1.lines.txt", "curvelanes": "C/P/1.lines.json", "openlane": "O/P/s/1.json"}
HEADLINE = {"llamas": "llamas_f1_50", "curvelanes": "curvelanes_f1_50", "openlane": "openlane_f1_30"}


def evaluated(folder: Path, metric: str, **options: Any) -> LaneEvaluation:
    return evaluate_lane_files(folder / PREDICTIONS[metric], folder / LABELS[metric], metric, **options)


@pytest.mark.parametrize("metric", LABELS)
def test_by_command(folder: Path, metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    paths = ["--predictions", str(folder / PREDICTIONS[metric]), "--labels", str(folder / LABELS[metric])]
    arguments = parser.parse_args(["lane", *paths, "--metric", metric, "--json", str(folder / "out.json")])
    assert run(arguments) == 0
    results = json.loads((folder / "out.json").read_text())
    assert {HEADLINE[metric], f"{metric}_f1_75", f"{metric}_mf1", "tp", "fp", "fn"} == set(results)
    assert (results[HEADLINE[metric]], results["tp"], results["fp"], results["fn"]) == (0.5, 1, 1, 1)
    out = capsys.readouterr()
    assert out.out.startswith("2 images\n") and "0.500000" in out.out
    assert [text for text in out.err.splitlines() if "image without lanes: kept" not in text] == []
    if metric in LISTS:
        assert evaluated(folder, metric, list_path=folder / LISTS[metric]).metrics == results


@pytest.mark.parametrize("metric", LABELS)
def test_labels_as_predictions_are_perfect(folder: Path, metric: str) -> None:
    write(
        folder / PREDICTED[metric],
        {"llamas": lines, "curvelanes": curvelanes, "openlane": openlane}[metric](RIGHT, LEFT),
    )
    metrics = evaluated(folder, metric).metrics
    assert (metrics[HEADLINE[metric]], metrics["tp"], metrics["fp"], metrics["fn"]) == (1.0, 2, 0, 0)


@pytest.mark.parametrize("metric", LABELS)
def test_what_predict_wrote_for_the_images_is_taken_too(folder: Path, metric: str) -> None:
    expected = evaluated(folder, metric).metrics
    own = folder / PREDICTED[metric]
    own.unlink()
    ending = "_color_rect.lines.txt" if metric == "llamas" else ".lines.txt"
    wrong: Pairs = [(x + 200, y) for x, y in RIGHT]
    write(own.with_name(f"1{ending}"), lines(wrong, LEFT))
    assert evaluated(folder, metric).metrics == expected and expected["tp"] == 1


@pytest.mark.parametrize("metric", LABELS)
def test_a_missing_prediction_is_counted_and_all_missing_are_a_wrong_path(folder: Path, metric: str) -> None:
    (folder / PREDICTED[metric]).unlink()
    evaluation = evaluated(folder, metric)
    assert (evaluation.metrics["tp"], evaluation.metrics["fp"], evaluation.metrics["fn"]) == (0, 0, 2)
    assert any("prediction file is missing: counted as no lanes" in text for text in evaluation.warnings)
    with pytest.raises(UserError, match=r"--predictions .*: all 2 prediction files are missing, first: .*1\."):
        evaluate_lane_files(folder, folder / LABELS[metric], metric)
    with pytest.raises(UserError, match=r"--predictions .*nowhere: folder does not exist"):
        evaluate_lane_files(folder / "nowhere", folder / LABELS[metric], metric)
    with pytest.raises(UserError, match=r"--labels .*: no \*\..*json in this folder or below it"):
        evaluate_lane_files(folder / PREDICTIONS[metric], write(folder / "E/x.txt", "").parent, metric)
    with pytest.raises(UserError, match="--strict goes with --metric tusimple"):
        evaluated(folder, metric, strict=True)


@pytest.mark.parametrize(
    ("metric", "content", "message"),
    [
        (
            "curvelanes",
            {"Lines": [[{"x": "1", "y": "high"}]]},
            r"1\.lines\.json: Lines\[0\]\[0\]: field y must be a finite",
        ),
        ("curvelanes", {"lines": []}, r"1\.lines\.json: field Lines is missing; found lines"),
        ("curvelanes", "{", r"1\.lines\.json:1: "),
        (
            "openlane",
            {"lane_lines": [{"uv": [[1, 2], [3]]}]},
            r"lane_lines\[0\]: field uv must have two lists of equal",
        ),
        ("openlane", {"lane_lines": [{"uv": [[1], [None]]}]}, r"lane_lines\[0\]: field uv must be a finite number"),
        ("openlane", "[]", r"1\.json: must be a JSON object"),
    ],
)
def test_a_broken_prediction_is_named(folder: Path, metric: str, content: Any, message: str) -> None:
    write(folder / PREDICTED[metric], content)
    with pytest.raises(UserError, match=message):
        evaluated(folder, metric)


def test_odd_lanes_are_warned_of(folder: Path) -> None:
    odd = [(5.0, 500.0)]
    twice = [LEFT[0], *LEFT]
    write(folder / PREDICTED["llamas"], lines(odd, twice) + "7 600 8 x\n\n")
    llamas = evaluated(folder, "llamas")
    assert (llamas.metrics["tp"], llamas.metrics["fp"], llamas.metrics["fn"]) == (1, 0, 1)
    text = "\n".join(llamas.warnings)
    assert "2 x prediction: lane of one point: not counted" in text  # the third is cut short by its text
    assert "point twice in a row: one dropped" in text and "text that is no number" in text
    assert "lane without a point: not counted" in text
    write(folder / PREDICTED["curvelanes"], {"Lines": [{"points": [{"x": 5, "y": 6}], "score": "0.9"}, []]})
    curves = evaluated(folder, "curvelanes")
    assert (curves.metrics["tp"], curves.metrics["fp"], curves.metrics["fn"]) == (0, 1, 2)
    assert any("lane of one point: matches nothing" in text for text in curves.warnings)
    write(folder / PREDICTED["openlane"], openlane(odd, twice))
    open_lane = evaluated(folder, "openlane")
    assert (open_lane.metrics["tp"], open_lane.metrics["fp"], open_lane.metrics["fn"]) == (0, 1, 2)
    assert any("point twice in a row: the lane matches nothing" in text for text in open_lane.warnings)


def test_sizes_and_lists(folder: Path) -> None:
    whole = evaluated(folder, "curvelanes").metrics
    assert evaluated(folder, "curvelanes", image_size=(720, 1280)).metrics == whole
    (folder / "C/valid/images/1.jpg").unlink()
    with pytest.raises(UserError, match=r"images/1\.jpg: image is missing, and its size is needed: give --image-size"):
        evaluated(folder, "curvelanes")
    assert evaluated(folder, "curvelanes", image_size=(720, 1280)).metrics == whole
    with pytest.raises(UserError, match="--list goes with --metric culane, curvelanes and openlane"):
        evaluated(folder, "llamas", list_path=folder / LISTS["openlane"])
    with pytest.raises(UserError, match=r"1 of 2 listed label files are missing, first: s/9\.json"):
        evaluated(folder, "openlane", list_path=write(folder / "list.txt", "s/1.jpg\ns/9.jpg\n"))
    with pytest.raises(UserError, match="--image-size goes with --metric culane"):
        evaluate_lane_files(folder, folder, "tusimple", image_size=(720, 1280))


def test_names_as_predict_writes_them(folder: Path) -> None:
    before = evaluated(folder, "llamas").metrics
    path = folder / PREDICTED["llamas"]
    path.rename(path.with_name("1_color_rect.lines.txt"))
    assert evaluated(folder, "llamas").metrics == before


def test_data_sets_to_train_on_tell_their_benchmark(folder: Path) -> None:
    for read, place in ((read_llamas, "L"), (read_curvelanes, "C"), (read_openlane, "O")):
        data = read(folder / place, "validation", images_required=False)
        for truth in (data.truth(0), MixedLanes([(Part(place), data)]).truth(0)):
            assert truth.benchmark == read.__name__.removeprefix("read_") and len(truth.lanes) == 2
