"""`evaluate lane`: counts of unusual files as the official tools give them, and loud failure on wrong paths."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perception.errors import UserError
from pipelines.evaluate import add_arguments, evaluate_lane_files, run

ROOT = Path(__file__).parents[2]
SHARED = ROOT / ".." / "shared" / "data"
GOLDEN = ROOT / "tests" / "golden" / "culane_corner_cases.txt"
NAME = "driver_1/a.MP4/00000"


def line(x: float, step: int = 10) -> str:
    return " ".join(f"{x + i * 3} {590 - i * step}" for i in range(25))


A, B = line(500.5), line(900.25)
DOUBLED = " ".join(f"{500.5 + i * 3} {590 - i * 10} {500.5 + i * 3} {590 - i * 10}" for i in range(25))
REVERSED = " ".join(f"{500.5 + i * 3} {590 - i * 10}" for i in reversed(range(25)))
SCIENTIFIC = " ".join(f"{500.5 + i * 3:e} {590 - i * 10:e}" for i in range(25))
ODD_FILES: dict[str, tuple[str | None, str | None, str, bool]] = {
    # what the file was: label, prediction (None: no file), list, is it warned of
    "identical": (A + "\n", A + "\n", f"{NAME}.jpg\n", False),
    "no trailing nl": (A + "\n", A, f"{NAME}.jpg\n", False),
    "pred missing": (A + "\n", None, f"{NAME}.jpg\n", True),
    "pred empty file": (A + "\n", "", f"{NAME}.jpg\n", False),
    "gt missing": (None, A + "\n", f"{NAME}.jpg\n", True),
    "both empty": ("", "", f"{NAME}.jpg\n", False),
    "pred blank line": (A + "\n", A + "\n\n", f"{NAME}.jpg\n", True),
    "gt blank line": (A + "\n\n", A + "\n", f"{NAME}.jpg\n", True),
    "pred 1pt lane": (A + "\n", A + "\n700 500\n", f"{NAME}.jpg\n", True),
    "CRLF pred": (A + "\n", A + "\r\n", f"{NAME}.jpg\n", True),
    "CRLF blank": (A + "\n", A + "\r\n\r\n", f"{NAME}.jpg\n", True),
    "BOM pred": (A + "\n", "\ufeff" + A + "\n", f"{NAME}.jpg\n", True),
    "sci": (A + "\n", SCIENTIFIC + "\n", f"{NAME}.jpg\n", True),
    "odd count": (A + "\n", A + " 77\n", f"{NAME}.jpg\n", True),
    "comma": (A + "\n", A.replace(" ", ",") + "\n", f"{NAME}.jpg\n", True),
    "nan pt": (A + "\n", "nan nan " + A + "\n", f"{NAME}.jpg\n", True),
    "dup consecutive pts": (A + "\n", DOUBLED + "\n", f"{NAME}.jpg\n", True),
    "reversed order": (A + "\n", REVERSED + "\n", f"{NAME}.jpg\n", True),
    "2 pts": (A + "\n", "500.5 590 572.5 350\n", f"{NAME}.jpg\n", True),
    "pred dup lane": (A + "\n", A + "\n" + A + "\n", f"{NAME}.jpg\n", True),
    "outside img": (A + "\n", A + "\n" + line(5000) + "\n", f"{NAME}.jpg\n", True),
    "two lanes swapped": (A + "\n" + B + "\n", B + "\n" + A + "\n", f"{NAME}.jpg\n", False),
    "list leading slash+dir": (A + "\n", A + "\n", f"/{NAME}.jpg\n", False),
    "list trailing space": (A + "\n", A + "\n", f"{NAME}.jpg \n", True),
    "list blank last line": (A + "\n", A + "\n", f"{NAME}.jpg\n\n", True),
    "list CRLF": (A + "\n", A + "\n", f"{NAME}.jpg\r\n", True),
    "list extra cols (train_gt style)": (A + "\n", A + "\n", f"/{NAME}.jpg /mask/00000.png 1 1 0 0\n", True),
}


def write_culane(folder: Path, files: dict[str, str | None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if text is not None:
            path = folder / f"{name}.lines.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    return folder


def write_list(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def arguments(*texts: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(text) for text in texts])


def tusimple(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def label(name: str, *lanes: list[int]) -> dict[str, Any]:
    return {"raw_file": name, "lanes": list(lanes), "h_samples": [680, 690, 700, 710]}


def found(name: str, *lanes: list[int], **changes: Any) -> dict[str, Any]:
    return {"raw_file": name, "lanes": list(lanes), "run_time": 10, **changes}


def test_every_recorded_file_has_a_test() -> None:
    recorded = [re.split(r"\s{2,}", text)[0] for text in GOLDEN.read_text().splitlines()]
    assert recorded == list(ODD_FILES)
    assert len(recorded) == 27


@pytest.mark.parametrize("what", ODD_FILES)
def test_unusual_files_count_as_in_the_official_tool(tmp_path: Path, what: str) -> None:
    recorded = next(text for text in GOLDEN.read_text().splitlines() if re.split(r"\s{2,}", text)[0] == what)
    match = re.search(r"tp: (\d+) fp: (\d+) fn: (\d+)", recorded)
    assert match
    labels, predictions, list_text, warned = ODD_FILES[what]
    evaluation = evaluate_lane_files(
        write_culane(tmp_path / "predictions", {NAME: predictions}),
        write_culane(tmp_path / "labels", {NAME: labels}),
        "culane",
        write_list(tmp_path / "list.txt", list_text),
    )
    metrics = evaluation.metrics
    assert [metrics["tp"], metrics["fp"], metrics["fn"]] == [int(text) for text in match.groups()]
    assert any("00000.lines.txt" in text or "list.txt:" in text for text in evaluation.warnings) == warned


def test_culane_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["driver_1/n", "driver_1/c", "driver_2/x"]
    write_culane(tmp_path / "L", {names[0]: A, names[1]: A + "\n" + B, names[2]: ""})
    write_culane(tmp_path / "P", {names[0]: A, names[1]: A, names[2]: B})
    splits = tmp_path / "L" / "list" / "test_split"
    write_list(splits / "test6_curve.txt", f"{names[1]}.jpg\n")
    write_list(splits / "test7_cross.txt", f"{names[2]}.jpg\n")
    write_list(splits / "test8_night.txt", f"{names[0]}.jpg\n")
    paths = ("--predictions", tmp_path / "P", "--labels", tmp_path / "L")
    out = tmp_path / "out.json"
    assert run(arguments("lane", *paths, "--metric", "culane", "--list", splits, "--json", out)) == 0
    expected = {
        "culane_f1_50": 2 * 2 / 6,
        "culane_f1_75": 2 * 2 / 6,
        "culane_mf1": pytest.approx(2 * 2 / 6),
        "tp": 2,
        "fp": 1,
        "fn": 1,
        "fp/cross": 1,
        "culane_f1_50/curve": 2 / 3,
        "culane_f1_50/night": 1.0,
    }
    assert json.loads(out.read_text()) == expected
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    printed = capsys.readouterr()
    assert re.search(r"^tp +2$", printed.out, re.MULTILINE)
    assert printed.out.startswith("3 images\n")
    assert printed.err == ""
    # Without a list: every label file, with the categories that the data set's own lists tell.
    assert evaluate_lane_files(tmp_path / "P", tmp_path / "L", "culane").metrics == expected


def test_a_missing_prediction_is_warned_of_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_culane(tmp_path / "L", {"a": A, "b": A})
    write_culane(tmp_path / "P", {"a": A})
    paths = ("--predictions", tmp_path / "P", "--labels", tmp_path / "L")
    assert run(arguments("lane", *paths, "--metric", "culane")) == 0
    err = capsys.readouterr().err
    assert re.fullmatch(r"warning: 1 x prediction file is missing: counted as no lanes: \S+/P/b\.lines\.txt\n", err)


def test_wrong_culane_paths_are_errors(tmp_path: Path) -> None:
    labels = write_culane(tmp_path / "L", {"v/a": A, "v/b": A})
    predictions = write_culane(tmp_path / "P", {"v/a": A, "v/b": A})
    images = write_list(tmp_path / "list.txt", "v/a.jpg\nv/b.jpg\n")
    with pytest.raises(UserError, match=r"--predictions .*nowhere: folder does not exist"):
        evaluate_lane_files(tmp_path / "nowhere", labels, "culane", images)
    with pytest.raises(UserError, match=r"--labels .*nowhere: folder does not exist"):
        evaluate_lane_files(predictions, tmp_path / "nowhere", "culane", images)
    with pytest.raises(UserError, match=r"--predictions \S+: all 2 listed prediction files are missing, .*P/v/v/a"):
        evaluate_lane_files(predictions / "v", labels, "culane", images)
    with pytest.raises(UserError, match=r"--labels \S+: all 2 listed label files are missing, first: \S+/L/v/v/a"):
        evaluate_lane_files(predictions, labels / "v", "culane", images)
    with pytest.raises(UserError, match=r"--list .*no\.txt: list file does not exist"):
        evaluate_lane_files(predictions, labels, "culane", tmp_path / "no.txt")
    with pytest.raises(UserError, match=r"--list .*empty\.txt: names no image"):
        evaluate_lane_files(predictions, labels, "culane", write_list(tmp_path / "empty.txt", "\n"))
    columns = write_list(tmp_path / "train_gt.txt", "/v/a.jpg /m/a.png 1 1 0 0\n/v/b.jpg /m/b.png 1 1 0 0\n")
    with pytest.raises(UserError, match=r"--list .* all 2 lines have mask or flag columns"):
        evaluate_lane_files(predictions, labels, "culane", columns)
    (tmp_path / "E").mkdir()
    with pytest.raises(UserError, match=r"--labels .*E: no \*\.lines\.txt below"):
        evaluate_lane_files(predictions, tmp_path / "E", "culane")
    with pytest.raises(UserError, match="--strict goes with --metric tusimple"):
        evaluate_lane_files(predictions, labels, "culane", images, strict=True)


def test_lanes_of_another_image_size(tmp_path: Path) -> None:
    larger = " ".join(f"{1000 + i} {1080 - i * 20}" for i in range(40))
    folder = write_culane(tmp_path / "L", {"a": larger})
    plain = evaluate_lane_files(folder, folder, "culane")
    assert any("reaches below an image of 1640x590: give --image-size" in text for text in plain.warnings)
    sized = evaluate_lane_files(folder, folder, "culane", image_size=(1080, 1920))
    assert sized.warnings == ()
    assert sized.metrics["culane_mf1"] == 1.0
    with pytest.raises(UserError, match="--image-size 1920: write it as WIDTHxHEIGHT"):
        paths = ("--predictions", folder, "--labels", folder)
        run(arguments("lane", *paths, "--metric", "culane", "--image-size", "1920"))


def test_tusimple_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = tusimple(tmp_path / "L.json", [label("a", [1, 2, 3, 4], [-2] * 4), label("b", [50, 50, 50, 50])])
    predictions = tusimple(tmp_path / "P.json", [found("b", [50, 50, 51, 50]), found("a", [1, 2, 3, 4])])
    paths = ("lane", "--predictions", predictions, "--labels", labels, "--metric", "tusimple")
    out = tmp_path / "out.json"
    assert run(arguments(*paths, "--json", out)) == 0
    results = json.loads(out.read_text())
    assert set(results) == {"tusimple_accuracy", "tusimple_fp", "tusimple_fn", "tusimple_f1"}
    assert (results["tusimple_accuracy"], results["tusimple_fp"], results["tusimple_fn"]) == (0.75, 0.0, 0.25)
    assert run(arguments(*paths, "--strict", "--json", out)) == 0
    assert json.loads(out.read_text())["tusimple_accuracy"] == 1.0
    assert capsys.readouterr().err == ""


def test_tusimple_files_that_do_not_fit(tmp_path: Path) -> None:
    labels = tusimple(tmp_path / "L.json", [label("a", [1, 2, 3, 4]), label("b", [50, 50, 50, 50])])

    def evaluate(*records: dict[str, Any]) -> Any:
        return evaluate_lane_files(tusimple(tmp_path / "P.json", list(records)), labels, "tusimple")

    one = evaluate(found("a", [1, 2, 3, 4]))
    assert one.metrics["tusimple_accuracy"] == 0.5
    assert one.warnings == ("1 x image without a prediction: counted as one without predicted lanes: b",)
    more = evaluate(found("a"), found("b"), found("c"))
    assert any("not labelled: ignored" in text and "P.json:3" in text for text in more.warnings)
    untimed = evaluate(found("a", run_time=None), found("b"))
    assert any("without run_time" in text for text in untimed.warnings)
    with pytest.raises(UserError, match=r"P\.json: predicts none of the 2 images of .*L\.json, first: x against a"):
        evaluate(found("x"))
    with pytest.raises(UserError, match=r"P\.json:1: field lanes has 3 values a lane, the label at .*L\.json:1 has 4"):
        evaluate(found("a", [1, 2, 3]))
    with pytest.raises(UserError, match=r"P\.json:2: field h_samples differs from the label's"):
        evaluate(found("b"), found("a", [1, 2, 3, 4], h_samples=[1, 2, 3, 4]))
    with pytest.raises(UserError, match=r"P\.json:2: field raw_file is predicted a second time"):
        evaluate(found("a"), found("a"))
    with pytest.raises(UserError, match=r"--predictions .*no\.json: file does not exist"):
        evaluate_lane_files(tmp_path / "no.json", labels, "tusimple")
    with pytest.raises(UserError, match="--list goes with --metric culane"):
        evaluate_lane_files(labels, labels, "tusimple", labels)
    (tmp_path / "P.json").write_text('{"raw_file": "a", "lanes"')
    with pytest.raises(UserError, match=r"P\.json:1: not JSON"):
        evaluate_lane_files(tmp_path / "P.json", labels, "tusimple")


def test_json_into_a_missing_folder_fails_before_the_work(tmp_path: Path) -> None:
    paths = ("lane", "--predictions", tmp_path, "--labels", tmp_path, "--metric", "culane")
    with pytest.raises(UserError, match=r"--json .*no/out\.json: folder .* does not exist"):
        run(arguments(*paths, "--json", tmp_path / "no" / "out.json"))
    with pytest.raises(
        UserError, match='--metric "f1" is unknown; allowed: culane, curvelanes, llamas, openlane, tusimple'
    ):
        evaluate_lane_files(tmp_path, tmp_path, "f1")


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = "import sys, pipelines.evaluate; print([m for m in ('torch', 'numpy', 'cv2', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_perfect_predictions_on_official_labels(tmp_path: Path) -> None:
    labels = SHARED / "tusimple_labels" / "label_data_0313.json"
    records = [json.loads(text) for text in labels.read_text().splitlines()]
    for record in records:
        record["lanes"] = [lane for lane in record["lanes"] if any(x >= 0 for x in lane)]
        record["run_time"] = 10
    predictions = tusimple(tmp_path / "P.json", records)
    official = evaluate_lane_files(predictions, labels, "tusimple").metrics
    assert official["tusimple_accuracy"] == pytest.approx(0.983, abs=5e-4)
    assert official["tusimple_fn"] == pytest.approx(0.047, abs=5e-4)
    assert official["tusimple_fp"] < 0
    strict = evaluate_lane_files(predictions, labels, "tusimple", strict=True).metrics
    assert (strict["tusimple_accuracy"], strict["tusimple_fn"]) == (1.0, 0.0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_real_culane_labels_match_themselves() -> None:
    folder = SHARED / "culane_mini"
    metrics = evaluate_lane_files(folder, folder, "culane", folder / "list" / "train.txt").metrics
    assert (metrics["tp"], metrics["fp"], metrics["fn"], metrics["culane_mf1"]) == (33, 0, 0, 1.0)
