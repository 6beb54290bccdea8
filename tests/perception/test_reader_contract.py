"""What holds for the reader of every format: whatever is wrong is counted, or is one line with file, row and field."""

from __future__ import annotations

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from reader_cases import CASES, LANE_CASES, SIGN_CASES, STEM, Case
from sign_files import write_image
from test_images import with_orientation

from perception.data.sample import ReadReport
from perception.errors import UserError
from pipelines.__main__ import main
from pipelines.data_check import check_data

LARGEST_COORDINATE = 1e7
READS_ANY_TEXT = ("culane",)
"""Formats in which a label that is cut short is still one, and its loss is counted."""
EMPTY_IS_NO_OBJECT = ("culane", "yolo")


def of(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.format)


every_reader = of(CASES)


def message(case: Case, folder: Path) -> str:
    """Of the one-line error that the data set must end in."""
    with pytest.raises(UserError) as caught:
        case.open(folder)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700
    return text


def coordinates(case: Case, folder: Path) -> tuple[NDArray[np.float64], ReadReport]:
    """Of all labels, in one array."""
    opened = case.open(folder)
    truths = [opened.truth(index) for index in range(len(opened))]
    parts = [part for truth in truths for part in (truth.lanes if case.kind == "lane" else [truth.boxes])]
    return np.concatenate([np.empty(0), *(np.ravel(part) for part in parts)]), opened.report


def is_told_or_counted(case: Case, folder: Path) -> str:
    """The error, or the places of what was counted; no value that is none gets through."""
    try:
        values, report = coordinates(case, folder)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    assert np.isfinite(values).all() and (np.abs(values) <= LARGEST_COORDINATE).all()
    return " ".join(report.lines())


class TestEveryReader:
    @every_reader
    def test_a_sound_set_is_known_by_its_look_and_nothing_is_wrong_with_it(self, case: Case, tmp_path: Path) -> None:
        opened = case.open(case.build(tmp_path), "auto")
        assert len(opened) == 1 + len(case.others)
        counts = sorted(
            len(truth.lanes if case.kind == "lane" else truth.boxes) for truth in map(opened.truth, range(len(opened)))
        )
        assert counts[-1] >= 1 and sum(counts[:-1]) == 0
        if case.kind == "lane":
            assert sorted(opened.report.lane_counts.elements()) == counts and opened.report.lanes == counts[-1]
        assert set(opened.report.anomalies) <= {"image without lanes: kept"}
        for index in range(len(opened)):
            sample = opened.sample(index)
            assert sample.image.shape == (*case.size, 3) and (sample.truth.height, sample.truth.width) == case.size

    @every_reader
    def test_a_missing_folder(self, case: Case, tmp_path: Path) -> None:
        assert message(case, tmp_path / "none").startswith(f"{tmp_path / 'none'}: data folder does not exist")

    @every_reader
    def test_a_file_in_place_of_the_folder(self, case: Case, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        assert "data folder does not exist" in message(case, tmp_path / "file")

    @every_reader
    def test_an_empty_folder_is_told_what_is_looked_for(self, case: Case, tmp_path: Path) -> None:
        assert message(case, tmp_path).startswith(str(tmp_path))

    @every_reader
    def test_a_value_that_is_no_number_is_named_by_file_row_and_field(self, case: Case, tmp_path: Path) -> None:
        told = message(case, case.with_label(case.mark, case.text).build(tmp_path))
        assert told.startswith(f"{tmp_path / case.label}:")
        row, column = told.find(case.row), told.find(case.field)
        assert 0 <= row <= column, told

    @every_reader
    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e300", "1e300", "1e30"])
    def test_a_value_that_is_in_no_image_gets_no_further(self, case: Case, value: str, tmp_path: Path) -> None:
        told = is_told_or_counted(case, case.with_label(case.mark, value).build(tmp_path))
        assert f"{tmp_path / case.label}" in told and case.row in told

    @every_reader
    def test_a_label_that_is_cut_short(self, case: Case, tmp_path: Path) -> None:
        label = case.build(tmp_path) / case.label
        text = label.read_text()
        label.write_text(text[: text.index(case.mark) + 1])
        told = is_told_or_counted(case, tmp_path) if case.format in READS_ANY_TEXT else message(case, tmp_path)
        assert str(label) in told

    @every_reader
    def test_a_label_that_is_no_text(self, case: Case, tmp_path: Path) -> None:
        label = case.build(tmp_path) / case.label
        label.write_bytes(label.read_bytes().replace(case.mark.encode(), b"\xff\xfe"))
        assert str(label) in message(case, tmp_path)

    @every_reader
    def test_an_empty_label(self, case: Case, tmp_path: Path) -> None:
        (case.build(tmp_path) / case.label).write_text("")
        if case.format in EMPTY_IS_NO_OBJECT:
            values, report = coordinates(case, tmp_path)
            assert len(values) == 0 and report.images == 2
        else:
            assert message(case, tmp_path).startswith(str(tmp_path))

    @every_reader
    def test_a_folder_in_place_of_a_label(self, case: Case, tmp_path: Path) -> None:
        label = case.build(tmp_path) / case.label
        label.unlink()
        label.mkdir()
        told = is_told_or_counted(case, tmp_path)
        assert str(tmp_path) in told

    @of([case for case in CASES if case.list_file])
    def test_an_empty_list(self, case: Case, tmp_path: Path) -> None:
        for text in ("", "\n\n"):
            (case.build(tmp_path) / case.list_file).write_text(text)
            assert message(case, tmp_path).startswith(str(tmp_path))

    @every_reader
    def test_labels_without_their_image(self, case: Case, tmp_path: Path) -> None:
        (case.build(tmp_path) / case.image).unlink()
        if case.format == "yolo":  # Images make the list: the label has none.
            assert case.label in " ".join(case.open(tmp_path).report.lines())
            return
        told = message(case, tmp_path)
        assert Path(case.image).name in told and str(tmp_path) in told
        opened = case.open(tmp_path, images_required=False)
        assert len(opened) == 1 + len(case.others)
        with pytest.raises(UserError, match=re.escape(Path(case.image).stem)):
            opened.sample(0)

    @of([case for case in CASES if case.unlabelled])
    def test_an_image_without_labels_is_counted(self, case: Case, tmp_path: Path) -> None:
        write_image(case.build(tmp_path) / case.unlabelled, *case.size)
        assert Path(case.unlabelled).name in " ".join(case.open(tmp_path).report.lines())

    @every_reader
    def test_a_label_that_is_not_there(self, case: Case, tmp_path: Path) -> None:
        """Of an image that is: an incomplete copy must not pass for a smaller data set."""
        (case.build(tmp_path) / case.label).unlink()
        told = is_told_or_counted(case, tmp_path)
        assert str(tmp_path) in told and told != " ".join(case.open(case.build(tmp_path)).report.lines())

    @every_reader
    @pytest.mark.parametrize("share", [0, 0.5, 0.99])
    def test_a_truncated_image(
        self, case: Case, share: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        image = case.build(tmp_path) / case.image
        data = image.read_bytes()
        image.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(UserError, match=rf"{re.escape(case.image)}: image .*copy it again"):
            case.open(tmp_path).sample(0)
        assert capfd.readouterr() == ("", ""), "the one line is not the only one"

    @every_reader
    @pytest.mark.parametrize("kind", ["grey", "rgba", "sixteen-bit", "turned"])
    def test_every_kind_of_image_is_three_bytes_a_pixel_as_stored(self, case: Case, kind: str, tmp_path: Path) -> None:
        (case.build(tmp_path) / case.image).unlink()
        height, width = case.size
        pixels = {
            "grey": np.full((height, width), 70, np.uint8),
            "rgba": np.full((height, width, 4), 70, np.uint8),
            "sixteen-bit": np.full((height, width, 3), 70 << 8, np.uint16),
            "turned": np.full((height, width, 3), 70, np.uint8),
        }[kind]
        path = (tmp_path / case.image).with_suffix(".jpg" if kind == "turned" else ".png")
        done, data = cv2.imencode(path.suffix, pixels)
        assert done
        path.write_bytes(with_orientation(data.tobytes(), 6) if kind == "turned" else data.tobytes())
        sample = case.open(tmp_path).sample(0)
        assert sample.image.shape == (*case.size, 3) and sample.image.dtype == np.uint8
        assert (sample.truth.height, sample.truth.width) == case.size
        assert abs(int(sample.image[0, 0, 0]) - 70) <= 1

    @every_reader
    def test_names_beyond_ascii(self, case: Case, tmp_path: Path) -> None:
        case = case.renamed("straße道路é")
        opened = case.open(case.build(tmp_path / "données 数据"))
        names = [opened.truth(index).name for index in range(len(opened))]
        assert opened.sample(0).image.shape == (*case.size, 3) and case.image in names
        assert STEM not in case.image

    @every_reader
    def test_an_image_of_another_size_than_its_labels(self, case: Case, tmp_path: Path) -> None:
        write_image(case.build(tmp_path) / case.image, 50, 70)
        if case.format == "yolo":  # Its boxes are shares of whatever size the image has.
            assert case.open(tmp_path).sample(0).truth.boxes.max() <= 70
            return
        try:
            opened = case.open(tmp_path)
            opened.sample(0)
        except UserError as error:
            assert Path(case.image).stem in str(error) and re.search(r"\b(50|70x50)\b", str(error))
        else:
            assert not case.size_in_labels and opened.report.anomalies["box outside the image: dropped"] == 1

    @every_reader
    def test_the_check_of_data_says_the_same_and_ends_with_2(
        self, case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = case.with_label(case.mark, case.text).build(tmp_path)
        told = message(case, folder)
        part = ["--list", case.list_name] if case.list_name else []
        assert main(["data", "check", "--format", case.format, str(folder), *part]) == 2
        lines = capsys.readouterr().out.splitlines()
        assert f"wrong: {told}" in lines and lines[-1] == "verdict: unusable"

    @pytest.mark.parametrize("kind", ["lane", "sign"])
    def test_an_unknown_format_is_answered_with_the_nearest(self, kind: str, tmp_path: Path) -> None:
        for case in (case for case in CASES if case.kind == kind):
            with pytest.raises(UserError, match=rf'did you mean "{case.format}"\?'):
                case.open(tmp_path, case.format + "x")


@of(LANE_CASES)
class TestEveryLaneReader:
    def test_a_lane_of_one_point_is_dropped_and_counted_at_its_place(self, case: Case, tmp_path: Path) -> None:
        opened = case.with_label(*case.one_point).open(case.with_label(*case.one_point).build(tmp_path))
        dropped = [line for line in opened.report.lines() if "dropped" in line]
        assert len(dropped) == 1 and str(tmp_path / case.label) in dropped[0]
        assert len(opened.truth(0).lanes) == len(case.open(case.build(tmp_path)).truth(0).lanes) - 1

    def test_lanes_rise_from_the_bottom(self, case: Case, tmp_path: Path) -> None:
        for lane in case.open(case.build(tmp_path)).truth(0).lanes:
            assert len(lane) >= 2 and (np.diff(lane[:, 1]) < 0).all()


@of(SIGN_CASES)
class TestEverySignReader:
    def test_the_box_is_where_the_format_means_it(self, case: Case, tmp_path: Path) -> None:
        """Half-open and 0-based, whatever the format: inclusive corners add a pixel, 1-based ones lose one."""
        (box,) = case.open(case.build(tmp_path)).truth(0).boxes.tolist()
        expected = {
            "gtsdb": [416, 19, 450, 60],
            "voc": [416, 19, 450, 60],
            "bdd100k": [417, 20, 451, 61],
            "yolo": [800 * (0.417 - 0.05), 270, 800 * (0.417 + 0.05), 330],
        }
        assert box == pytest.approx(expected.get(case.format, [417, 20, 450, 60]), abs=1e-9)

    def test_a_part_that_is_not_there_is_no_broken_one(self, case: Case, tmp_path: Path) -> None:
        check = check_data(case.build(tmp_path), case.format)
        assert all(" " in note for note in check.notes)
        assert len(check.splits) + len(check.notes) + len(check.causes) >= 3
