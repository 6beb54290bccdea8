"""The TuSimple reader: official labels in full, and every corner case by its stated rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from perception.data.open import open_lane_dataset
from perception.data.sample import LaneDataset, ReadReport
from perception.data.tusimple import read_tusimple_file
from perception.errors import UserError

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"
H_SAMPLES = [160, 170, 180, 190]


def record(lanes: list[list[Any]], raw_file: str = "clips/1/20.jpg", **changes: Any) -> str:
    return json.dumps({"raw_file": raw_file, "lanes": lanes, "h_samples": H_SAMPLES, **changes})


def open_text(folder: Path, text: str | bytes) -> LaneDataset:
    path = folder / "label_data_0313.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_lane_dataset(folder, images_required=False)


def write_image(path: Path, height: int = 720, width: int = 1280) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    done, data = cv2.imencode(path.suffix, np.full((height, width, 3), 90, np.uint8))
    assert done
    path.write_bytes(data.tobytes())


def test_a_lane_comes_from_bottom_to_top_in_pixels(tmp_path: Path) -> None:
    dataset = open_text(tmp_path, record([[-2, 640, 650, 661]]) + "\n")
    truth = dataset.truth(0)
    assert (truth.name, truth.height, truth.width) == ("clips/1/20.jpg", 720, 1280)
    assert truth.h_samples == tuple(H_SAMPLES)
    assert truth.lanes[0].dtype == np.float64
    np.testing.assert_array_equal(truth.lanes[0], [[661, 190], [650, 180], [640, 170]])
    assert dataset.report.lines() == []
    assert (dataset.report.images, dataset.report.lanes) == (1, 1)


@pytest.mark.parametrize(
    ("line", "anomaly", "lanes"),
    [
        (record([[-2, -2, -2, -2]]), "lane without a point: dropped", []),
        (record([[-2, 5, -2, -2]]), "lane with one point: dropped", []),
        (record([[1, -2, 3, 4]]), "gap inside a lane: kept, joined straight", [[[4, 190], [3, 180], [1, 160]]]),
        (record([[-7, 2, 3, -2]]), "negative x other than -2: no point", [[[3, 180], [2, 170]]]),
        (record([[float("nan"), 2, 3, float("inf")]]), "x that is no finite number: no point", [[[3, 180], [2, 170]]]),
        (record([[1280, 1290, -2, -2]]), "lane past the right border: kept", [[[1290, 170], [1280, 160]]]),
        (
            record([[9, 9, -2, -2], [5, 5, -2, -2]]),
            "lanes not listed left to right: kept in their order",
            [[[9, 170], [9, 160]], [[5, 170], [5, 160]]],
        ),
        (record([]), "image without lanes: kept", []),
        (
            record([[4, 3, 2, 1]], h_samples=[190, 180, 170, 160]),
            "h_samples not rising: sorted",
            [[[4, 190], [3, 180], [2, 170], [1, 160]]],
        ),
        ("\ufeff" + record([[1, 2, -2, -2]]), "byte order mark: skipped", [[[2, 170], [1, 160]]]),
    ],
)
def test_corner_cases_of_a_line(tmp_path: Path, line: str, anomaly: str, lanes: list[Any]) -> None:
    dataset = open_text(tmp_path, line)
    assert [lane.tolist() for lane in dataset.truth(0).lanes] == lanes
    assert dataset.report.anomalies[anomaly] >= 1
    assert dataset.report.examples[anomaly].endswith("label_data_0313.json:1")
    assert dataset.report.lanes == len(lanes)


def test_blank_lines_and_carriage_returns(tmp_path: Path) -> None:
    dataset = open_text(tmp_path, record([[1, 2, 3, 4]]) + "\r\n\r\n" + record([[5, 6, 7, 8]]) + "\r\n")
    assert len(dataset) == 2
    assert dataset.truth(1).lanes[0][0].tolist() == [8, 190]
    assert dict(dataset.report.anomalies) == {
        "blank line: skipped": 1,
        "image listed twice: kept twice": 1,
    }
    assert dataset.report.examples["blank line: skipped"].endswith(":2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (record([[1, 2, 3, 4]])[:-30], "not JSON"),
        ("[1, 2]", "a JSON object .* not a list"),
        (record([[1, 2, 3]]), r"field lanes\[0\] has 3 values, h_samples has 4"),
        (record([["a", 2, 3, 4]]), r"field lanes\[0\] must hold numbers"),
        (record([[1, 2, None, 4]]), r"field lanes\[0\] must hold numbers"),
        (record([[1, 2, 10**400, 4]]), r"field lanes\[0\] must hold numbers"),
        (json.dumps({"raw_file": "a.jpg", "lanes": []}), "field h_samples is missing"),
        (json.dumps({"lanes": [], "h_samples": H_SAMPLES}), "field raw_file is missing"),
        (record([], raw_file=""), "field raw_file must be an image path"),
        (record([], h_samples=[]), "field h_samples must be a list"),
        (record([], h_samples=[1, 1, 2, 3]), "field h_samples names a row twice"),
        (record([], h_samples=[1.5, 2, 3, 4]), "field h_samples must hold whole numbers"),
        (record([]).encode("utf-16"), "not UTF-8"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    good = record([[1, 2, 3, 4]]).encode() + b"\n"
    with pytest.raises(UserError, match=rf"label_data_0313\.json:2: {message}"):
        open_text(tmp_path, good + (line if isinstance(line, bytes) else line.encode()))


def test_an_empty_file_and_a_missing_list_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"label_data_0313\.json: no line of labels"):
        open_text(tmp_path, "\n\n")
    with pytest.raises(UserError, match=r"no label_data_0531\.json for validation.*label_data_0313\.json"):
        open_lane_dataset(tmp_path, split="validation")
    with pytest.raises(UserError, match=r"other\.json: list file does not exist"):
        open_lane_dataset(tmp_path, list_name="other.json")


def test_predictions_are_read_by_the_same_function(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps({"raw_file": "a.jpg", "lanes": [[1.5, -2]], "run_time": 10}))
    prediction = read_tusimple_file(path, ReadReport(), needs_rows=False)[0]
    assert (prediction.h_samples, prediction.run_time_milliseconds) == (None, 10.0)
    assert prediction.rows.tolist() == [[1.5, -2]]


def test_images_missing_and_of_another_suffix(tmp_path: Path) -> None:
    open_text(tmp_path, record([[1, 2, 3, 4]]) + "\n" + record([[1, 2, 3, 4]], "clips/2/20.jpg"))
    write_image(tmp_path / "clips/1/20.png")
    with pytest.raises(UserError, match=r"1 of 2 listed images are missing, first: clips/2/20\.jpg"):
        open_lane_dataset(tmp_path)
    write_image(tmp_path / "clips/2/20.jpg")
    dataset = open_lane_dataset(tmp_path)
    assert dict(dataset.report.anomalies) == {"image .jpg found as .png: used": 1}
    sample = dataset.sample(0)
    assert sample.image.shape == (720, 1280, 3)
    assert sample.truth.name == "clips/1/20.jpg"


def test_labels_of_another_size_are_an_error(tmp_path: Path) -> None:
    open_text(tmp_path, record([[1, 2, 3, 4]]))
    write_image(tmp_path / "clips/1/20.jpg", height=180)
    dataset = open_lane_dataset(tmp_path)
    for read in (dataset.truth, dataset.sample):
        with pytest.raises(UserError, match=r"20\.jpg: image is 180 pixels high, its h_samples reach 190"):
            read(0)


def test_official_train_list_is_0313_and_0601_in_order(tmp_path: Path) -> None:
    for number in ("0313", "0531", "0601"):
        (tmp_path / f"label_data_{number}.json").write_text(record([[1, 2, 3, 4]], f"clips/{number}/20.jpg"))
    train = open_lane_dataset(tmp_path, images_required=False)
    assert [train.truth(i).name for i in range(len(train))] == ["clips/0313/20.jpg", "clips/0601/20.jpg"]
    validation = open_lane_dataset(tmp_path, split="validation", images_required=False)
    assert validation.truth(0).name == "clips/0531/20.jpg"
    again = open_lane_dataset(tmp_path, list_name="train", split="validation", images_required=False)
    assert len(again) == 2


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_all_official_labels() -> None:
    folder = SHARED / "tusimple_labels"
    counts = {}
    for name in ("label_data_0313", "label_data_0531", "label_data_0601", "test_label"):
        dataset = open_lane_dataset(folder, list_name=f"{name}.json", images_required=False)
        counts[name] = (len(dataset), dataset.report.lanes, dict(dataset.report.anomalies))
        truth = dataset.truth(len(dataset) - 1)
        assert truth.h_samples is not None
        assert len(truth.h_samples) == (48 if name.endswith("0313") else 56)
    assert counts["label_data_0313"] == (
        2858,
        2858 * 4 - 537 - 4,
        {
            "lane without a point: dropped": 537,
            "lane with one point: dropped": 4,
            "lanes not listed left to right: kept in their order": 2577,
        },
    )
    assert counts["label_data_0531"][0] == 358
    assert counts["label_data_0601"][0] == 410
    assert counts["test_label"][0] == 2782
    assert sum(c[2].get("lane with one point: dropped", 0) for c in counts.values()) == 8


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_real_frames() -> None:
    dataset = open_lane_dataset(SHARED / "tusimple_mini")
    assert len(dataset) == 6
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        assert sample.image.shape == (720, 1280, 3)
        assert len(sample.truth.lanes) in (4, 5)
        assert len(dataset.truth(index).lanes) == len(sample.truth.lanes)
