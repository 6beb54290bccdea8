"""The CULane reader: lists and labels in the official layout, and every corner case by its stated rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception.data.culane import parse_lane_file, read_label_file
from perception.data.open import open_lane_dataset
from perception.data.sample import LaneDataset, ReadReport
from perception.errors import UserError

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"
LANE = b"10.5 590 20 580 30 570\n"
POINTS = [[10.5, 590], [20, 580], [30, 570]]
IMAGE = "driver_1/a.MP4/00000.jpg"


def make(folder: Path, list_text: str | bytes, labels: dict[str, bytes], list_name: str = "list/train.txt") -> None:
    for name, data in labels.items():
        path = folder / (name.rpartition(".")[0] + ".lines.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    path = folder / list_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(list_text if isinstance(list_text, bytes) else list_text.encode())


def open_labels(folder: Path, list_text: str | bytes, labels: dict[str, bytes]) -> LaneDataset:
    make(folder, list_text, labels)
    return open_lane_dataset(folder, images_required=False)


def write_image(path: Path, height: int = 590, width: int = 1640) -> None:
    done, data = cv2.imencode(path.suffix, np.full((height, width, 3), 90, np.uint8))
    assert done
    path.write_bytes(data.tobytes())


@pytest.mark.parametrize(
    ("data", "anomalies", "lanes"),
    [
        (LANE, [], [POINTS]),
        (b"-12.5 590 1700 580\n", [], [[[-12.5, 590], [1700, 580]]]),
        (b"", ["image without lanes: kept"], []),
        (b"\n" + LANE, ["blank line: dropped"], [POINTS]),
        (LANE + b"\r\n", ["blank line: dropped"], [POINTS]),
        (LANE + b"7 8\n", ["lane with fewer than two points: dropped"], [POINTS]),
        (LANE[:-1] + b" 40\n", ["odd count of numbers: last dropped"], [POINTS]),
        (b"10.5 590 nan 585 20 580 30 570 inf 560", ["point that is not finite: dropped"], [POINTS]),
        (b"10.5 590 10.5 590 20 580 30 570", ["consecutive duplicate point: dropped"], [POINTS]),
        (b"30 570 20 580 10.5 590", ["points from top to bottom: reversed"], [POINTS]),
        (b"10.5 590 20 580 15 585 30 570 33 570", ["point whose y does not fall: dropped"], [POINTS]),
        (b"1 570 2 570 3 570", ["point whose y does not fall: dropped"], []),
        (b"\xef\xbb\xbf" + LANE, ["byte order mark: skipped"], [POINTS]),
        (LANE.replace(b"\n", b"\r\n"), [], [POINTS]),
        (b"1.05e1 590 2E+1 580 30 5.7e2", [], [POINTS]),
    ],
)
def test_corner_cases_of_a_label_file(tmp_path: Path, data: bytes, anomalies: list[str], lanes: list[Any]) -> None:
    dataset = open_labels(tmp_path, f"/{IMAGE}\n", {IMAGE: data})
    assert [lane.tolist() for lane in dataset.truth(0).lanes] == lanes
    assert set(anomalies) <= set(dataset.report.anomalies)
    assert bool(anomalies) == bool(dataset.report.anomalies)
    for where in dataset.report.examples.values():
        assert "00000.lines.txt:" in where
    assert dataset.report.lanes == len(lanes)


@pytest.mark.parametrize("text", [b"10,5 590 20 580", b"10 590 x", b"\xff\xfe1 590", b"{}"])
def test_text_in_a_label_is_an_error_with_its_line(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(UserError, match=r'00000\.lines\.txt:2: ".*" is no number'):
        open_labels(tmp_path, IMAGE, {IMAGE: LANE + text})


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 60)), max_size=12))
def test_every_repaired_lane_keeps_the_contract(tmp_path_factory: Any, points: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.mktemp("lane") / "a.lines.txt"
    path.write_text(" ".join(f"{x} {y}" for x, y in points))
    for lane in read_label_file(path, ReadReport()):
        assert len(lane) >= 2
        assert (np.diff(lane[:, 1]) < 0).all()
        assert {tuple(point) for point in lane.tolist()} <= set(points)


@pytest.mark.parametrize(
    ("line", "points", "rest"),
    [
        (b"1 2 3 4", [[1, 2], [3, 4]], b""),
        (b"  1.5\t-2e0 +3 .5 \r", [[1.5, -2], [3, 0.5]], b""),
        (b"1 2 3", [[1, 2]], b"3"),
        (b"1 2 3 nan 5 6", [[1, 2]], b"3 nan 5 6"),
        (b"1,2 3,4", [], b"1,2 3,4"),
        (b"\xef\xbb\xbf1 2 3 4", [], b"\xef\xbb\xbf1 2 3 4"),
        (b"1 2 3e 4 5 6", [[1, 2]], b"3e 4 5 6"),
        (b"1 2 1e999 4", [[1, 2]], b"1e999 4"),
        (b"1.5.25 7 8", [[1.5, 0.25], [7, 8]], b""),
        (b"1_0 2", [], b"1_0 2"),
        (b"", [], b""),
    ],
)
def test_parsing_reads_numbers_as_a_cpp_stream_does(line: bytes, points: list[Any], rest: bytes) -> None:
    (lane,) = parse_lane_file(line + b"\n")
    assert lane.points.tolist() == points
    assert (lane.rest, lane.line) == (rest, 1)


def test_parsing_keeps_blank_lines_as_lanes() -> None:
    assert [len(lane.points) for lane in parse_lane_file(b"1 2 3 4\n\n5 6")] == [2, 0, 1]
    assert parse_lane_file(b"") == []


@pytest.mark.parametrize(
    ("list_text", "anomalies"),
    [
        (f"/{IMAGE}\n", set()),
        (f"{IMAGE}  \n", {"list: trailing space: skipped"}),
        (f"{IMAGE}\r\n", set()),
        (f"\n{IMAGE}\n\n", {"list: blank line: skipped"}),
        (f"\ufeff{IMAGE}", {"list: byte order mark: skipped"}),
        (f"/{IMAGE} /laneseg_label_w16/a/00000.png 0 1 0 0\n", set()),
        (f"/{IMAGE} /laneseg_label_w16/a/00000.png 1 1 0 0\n", {"list: lane flags differ from the label file"}),
        (f"{IMAGE}\n{IMAGE}\n", {"image listed twice: kept twice"}),
    ],
)
def test_corner_cases_of_a_list(tmp_path: Path, list_text: str, anomalies: set[str]) -> None:
    dataset = open_labels(tmp_path, list_text, {IMAGE: LANE})
    truth = dataset.truth(len(dataset) - 1)
    assert (truth.name, truth.height, truth.width, truth.h_samples) == (IMAGE, 590, 1640, None)
    found = {anomaly.removesuffix(": label file counts") for anomaly in dataset.report.anomalies}
    assert found == anomalies
    for where in dataset.report.examples.values():
        assert "train.txt:" in where


def test_wrong_lists_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.txt:2: no image name in 'hello'"):
        open_labels(tmp_path, f"{IMAGE}\nhello\n", {IMAGE: LANE})
    with pytest.raises(UserError, match=r"train\.txt: list file names no image"):
        open_labels(tmp_path, "\n", {IMAGE: LANE})
    with pytest.raises(UserError, match=r"train\.txt: list file is not UTF-8"):
        open_labels(tmp_path, b"driver/stra\xdfe.jpg", {IMAGE: LANE})
    with pytest.raises(UserError, match=r"no list/val_gt\.txt or list/val\.txt for validation.*list/train\.txt"):
        open_lane_dataset(tmp_path, split="validation")


def test_missing_folders_labels_and_images_are_counted_and_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data folder does not exist"):
        open_lane_dataset(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"neither .* set data\.format"):
        open_lane_dataset(tmp_path)
    with pytest.raises(UserError, match=r'data\.format = "culan" is unknown; did you mean "culane"'):
        open_lane_dataset(tmp_path, "culan")
    with pytest.raises(UserError, match=r"1 of 2 label files are missing, first: driver_1/b\.lines\.txt"):
        open_labels(tmp_path, f"{IMAGE}\ndriver_1/b.jpg\n", {IMAGE: LANE})
    make(tmp_path, f"{IMAGE}\n", {IMAGE: LANE})
    with pytest.raises(UserError, match=rf"1 of 1 listed images are missing, first: {IMAGE}"):
        open_lane_dataset(tmp_path)


def test_images_size_and_twins(tmp_path: Path) -> None:
    make(tmp_path, f"{IMAGE}\n", {IMAGE: LANE})
    write_image((tmp_path / IMAGE).with_suffix(".png"), height=600, width=800)
    dataset = open_lane_dataset(tmp_path)
    assert dict(dataset.report.anomalies) == {"image .jpg found as .png: used": 1}
    sample = dataset.sample(0)
    assert sample.image.shape == (600, 800, 3)
    assert (sample.truth.height, sample.truth.width) == (dataset.truth(0).height, dataset.truth(0).width) == (600, 800)


def test_labels_of_another_size_are_an_error(tmp_path: Path) -> None:
    make(tmp_path, f"{IMAGE}\n", {IMAGE: LANE})
    write_image(tmp_path / IMAGE, height=320, width=800)
    dataset = open_lane_dataset(tmp_path)
    for read in (dataset.truth, dataset.sample):
        with pytest.raises(UserError, match=r"00000\.lines\.txt: lanes reach down to y = 590, the image is 320"):
            read(0)


def test_a_broken_image_is_an_error_naming_it(tmp_path: Path) -> None:
    make(tmp_path, f"{IMAGE}\n", {IMAGE: LANE})
    (tmp_path / IMAGE).write_bytes(b"\xff\xd8\xff")
    with pytest.raises(UserError, match=r"00000\.jpg"):
        open_lane_dataset(tmp_path).sample(0)


def test_categories_come_from_the_test_splits(tmp_path: Path) -> None:
    night, curve, plain = (f"driver_1/{name}.jpg" for name in ("n", "c", "p"))
    labels = dict.fromkeys((night, curve, plain), LANE)
    make(tmp_path, f"{night} \n", labels, "list/test_split/test8_night.txt")
    make(tmp_path, f"{curve}\n", {}, "list/test_split/test6_curve.txt")
    make(tmp_path, f"/{plain}\n/{night}\n", {}, "list/test.txt")
    splits = open_lane_dataset(tmp_path, split="test", images_required=False)
    assert [(splits.truth(i).name, splits.truth(i).category) for i in range(2)] == [(curve, "curve"), (night, "night")]
    whole = open_lane_dataset(tmp_path, list_name="list/test.txt", images_required=False)
    assert [whole.truth(i).category for i in range(2)] == [None, "night"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_real_frames() -> None:
    dataset = open_lane_dataset(SHARED / "culane_mini")
    assert len(dataset) == 10
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        assert sample.image.shape == (590, 1640, 3)
        assert 2 <= len(sample.truth.lanes) <= 4
    assert dataset.report.lines() == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_odd_labels_go_through_and_keep_the_contract(tmp_path: Path) -> None:
    folder = SHARED / "vil100_labels_subset"
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.lines.txt"))]
    (tmp_path / "all.txt").write_text("".join(name.replace(".lines.txt", ".jpg") + "\n" for name in names))
    dataset = open_lane_dataset(folder, "culane", str(tmp_path / "all.txt"), images_required=False)
    assert len(dataset) == len(names) > 100
    for index in range(len(dataset)):
        for lane in dataset.truth(index).lanes:
            assert len(lane) >= 2
            assert (np.diff(lane[:, 1]) < 0).all()
    assert dataset.report.anomalies["points from top to bottom: reversed"] == 2
    assert dataset.report.anomalies["image without lanes: kept"] == 10
    assert dataset.report.anomalies["consecutive duplicate point: dropped"] >= 41
    assert dataset.report.lanes == 507


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="real data not at ../shared/data")
def test_all_official_test_lists(tmp_path: Path) -> None:
    splits = tmp_path / "list" / "test_split"
    splits.parent.mkdir()
    splits.symlink_to((SHARED / "culane_lists").resolve())
    for path in splits.glob("*.txt"):
        for line in path.read_text().splitlines():
            label = tmp_path / (line.strip().lstrip("/").removesuffix(".jpg") + ".lines.txt")
            label.parent.mkdir(parents=True, exist_ok=True)
            label.touch()
    dataset = open_lane_dataset(tmp_path, split="test", images_required=False)
    assert len(dataset) == 34680
    assert dataset.report.anomalies["list: trailing space: skipped"] == 3357
    categories = [dataset.truth(index).category for index in range(len(dataset))]
    assert (categories.count("night"), categories.count("cross"), categories.count(None)) == (7029, 3122, 0)
