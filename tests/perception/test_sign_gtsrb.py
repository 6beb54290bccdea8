"""The GTSRB reader: official folders and the flat copy, tracks never cut, bad lines named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sign_files import class_counts, names, signs, write_image, write_text

from perception.data.signs.gtsrb import is_gtsrb, read_gtsrb
from perception.errors import MissingListError, UserError

HEADER = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"
ROW = "00000_00000.ppm;29;30;5;6;24;25;14\n"


def write_training(folder: Path, tracks_of_class: dict[int, int], images_of_track: int = 3) -> None:
    for label, num_tracks in tracks_of_class.items():
        rows = "".join(
            f"{track:05d}_{number:05d}.ppm;29;30;5;6;24;25;{label}\n"
            for track in range(num_tracks)
            for number in range(images_of_track)
        )
        write_text(folder / f"Final_Training/Images/{label:05d}/GT-{label:05d}.csv", HEADER + rows)


def open_rows(folder: Path, rows: str | bytes, **options: Any) -> Any:
    header = HEADER.encode()
    write_text(folder / "GT-some.csv", header + (rows if isinstance(rows, bytes) else rows.encode()))
    return read_gtsrb(folder, list_name="GT-some.csv", images_required=False, **options)


def test_boxes_are_half_open_so_that_the_margin_is_even(tmp_path: Path) -> None:
    dataset = open_rows(tmp_path, ROW)
    assert signs(dataset) == [("stop", [5, 6, 24, 25])]
    assert (dataset.truth(0).height, dataset.truth(0).width) == (30, 29)
    assert signs(open_rows(tmp_path, ROW, corners="inclusive")) == [("stop", [5, 6, 25, 26])]
    assert len(dataset.classes) == 43
    assert dataset.report.images == dataset.report.signs == 1


def track(name: str) -> str:
    return name.rpartition("_")[0]


@settings(max_examples=12, deadline=None)
@given(tracks=st.dictionaries(st.integers(0, 42), st.integers(1, 17), min_size=1, max_size=4))
def test_a_track_is_never_on_both_sides(tmp_path_factory: pytest.TempPathFactory, tracks: dict[int, int]) -> None:
    folder = tmp_path_factory.mktemp("gtsrb")
    write_training(folder, {**tracks, 7: 30})
    everything = read_gtsrb(folder, "all-train", images_required=False)
    train, validation = (read_gtsrb(folder, split, images_required=False) for split in ("train", "validation"))
    assert sorted(names(train) + names(validation)) == sorted(names(everything))
    assert not {track(name) for name in names(train)} & {track(name) for name in names(validation)}
    for label, num_tracks in {**tracks, 7: 30}.items():
        held_out = {track(name) for name in names(validation) if f"/{label:05d}/" in name}
        assert len(held_out) == (num_tracks // 8 if num_tracks >= 8 else min(num_tracks - 1, 1))


def test_official_folders(tmp_path: Path) -> None:
    write_training(tmp_path, {0: 2, 14: 2})
    write_text(tmp_path / "Final_Test/Images/GT-final_test.csv", HEADER + "00000.ppm;53;54;6;5;48;49;16\n")
    assert is_gtsrb(tmp_path)
    train = read_gtsrb(tmp_path, images_required=False)
    assert names(train)[0] == "Final_Training/Images/00000/00000_00000.ppm"
    assert class_counts(train) == {"speed-limit-20": 3, "stop": 3}
    test = read_gtsrb(tmp_path, "test", images_required=False)
    assert names(test) == ["Final_Test/Images/00000.ppm"]
    assert signs(test) == [("no-trucks", [6, 5, 48, 49])]
    assert names(read_gtsrb(tmp_path, list_name="Final_Training", images_required=False)) == names(
        read_gtsrb(tmp_path, "all-train", images_required=False)
    )
    assert names(read_gtsrb(tmp_path, list_name="test", images_required=False)) == names(test)


def test_the_test_file_may_lie_beside_its_images(tmp_path: Path) -> None:
    write_image(tmp_path / "Final_Test/Images/00000.ppm", 54, 53)
    write_text(tmp_path / "GT-final_test.csv", HEADER + "00000.ppm;53;54;6;5;48;49;16\n")
    assert read_gtsrb(tmp_path, "test").sample(0).image.shape == (54, 53, 3)


def test_the_folders_that_a_common_downloader_makes(tmp_path: Path) -> None:
    rows = "00000_00000.ppm;29;30;5;6;24;25;0\n00001_00000.ppm;29;30;5;6;24;25;0\n"
    write_text(tmp_path / "GTSRB/Training/00000/GT-00000.csv", HEADER + rows)
    assert is_gtsrb(tmp_path)
    write_text(tmp_path / "GT-final_test.csv", HEADER + "00000.ppm;53;54;6;5;48;49;16\n")
    write_image(tmp_path / "GTSRB/Final_Test/Images/00000.ppm", 54, 53)
    assert names(read_gtsrb(tmp_path, images_required=False)) == ["GTSRB/Training/00000/00000_00000.ppm"]
    assert names(read_gtsrb(tmp_path, "test")) == ["GTSRB/Final_Test/Images/00000.ppm"]


def test_the_flat_copy_with_commas(tmp_path: Path) -> None:
    header = "Width,Height,Roi.X1,Roi.Y1,Roi.X2,Roi.Y2,ClassId,Path\n"
    rows = "".join(f"27,26,5,5,22,20,20,Train/20/00020_{track:05d}_00000.png\n" for track in range(8))
    write_text(tmp_path / "Train.csv", header + rows)
    write_text(tmp_path / "Test.csv", header + "53,54,6,5,48,49,16,Test/00000.png\n")
    (tmp_path / "Train").mkdir()
    assert is_gtsrb(tmp_path)
    validation = read_gtsrb(tmp_path, "validation", images_required=False)
    assert names(validation) == ["Train/20/00020_00007_00000.png"]
    assert class_counts(read_gtsrb(tmp_path, images_required=False)) == {"bend-right": 7}
    assert names(read_gtsrb(tmp_path, "test", images_required=False)) == ["Test/00000.png"]


def test_anomalies_are_counted_with_their_first_place(tmp_path: Path) -> None:
    write_image(tmp_path / "00014/00000_00000.png", 30, 29)
    write_image(tmp_path / "00014/00009_00000.png", 30, 29)
    rows = ["00000_00000.ppm;29;30;5;6;24;25;13", "00000_00000.ppm;29;30;24;6;40;25;14", "", ""]
    write_text(tmp_path / "00014/GT-00014.csv", "\ufeff" + HEADER + "\r\n".join(rows) + "\r\n")
    dataset = read_gtsrb(tmp_path, "all-train")
    assert signs(dataset) == [("give-way", [5, 6, 24, 25]), ("stop", [24, 6, 29, 25])]
    assert dict(dataset.report.anomalies) == {
        "byte order mark: skipped": 1,
        "blank line: skipped": 2,
        "class differs from the folder's: the line counts": 1,
        "box leaves the image: clipped": 1,
        "image .ppm found as .png: used": 1,
        "image without labels: left out": 1,
    }
    assert dataset.report.examples["box leaves the image: clipped"].endswith("GT-00014.csv:3")
    assert dataset.report.examples["image without labels: left out"].endswith("00009_00000.png")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("00000_00000.ppm;29;30;5;6;24;25", r"GT-some\.csv:3: 7 values in this row, the header has 8"),
        ("00000_00000.ppm;29;30;5;6;24;25;43", r"GT-some\.csv:3: ClassId 43 is unknown; GTSRB has 0 to 42"),
        ("00000_00000.ppm;29;30;5;6;24;25;-1", r"GT-some\.csv:3: field ClassId must be a whole number from 0"),
        ("00000_00000.ppm;29;30;5;6;24;25;1.5", r"GT-some\.csv:3: field ClassId must be a whole number"),
        ("00000_00000.ppm;0;30;5;6;24;25;1", r"GT-some\.csv:3: field Width must be a whole number from 1"),
        ("00000_00000.ppm;29;30;x;6;24;25;1", r'GT-some\.csv:3: field Roi\.X1 must be a finite number, got "x"'),
        ("00000_00000.ppm;29;30;nan;6;24;25;1", r"GT-some\.csv:3: field Roi\.X1 must be a finite number"),
        ("00000_00000.ppm;29;30;5;6;1e12;25;1", r"GT-some\.csv:3: field Roi\.X2 = .* is beyond any image"),
        (";29;30;5;6;24;25;1", r"GT-some\.csv:3: field Filename must be a text"),
        ("../../a_1.ppm;29;30;5;6;24;25;1", r"GT-some\.csv:3: field Filename must name an image inside"),
        (b"stra\xdfe_1.ppm;29;30;5;6;24;25;1", r"GT-some\.csv:3: GTSRB annotation file is not UTF-8"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number(tmp_path: Path, row: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        open_rows(tmp_path, ROW.encode() + (row if isinstance(row, bytes) else row.encode()))
    assert "\n" not in str(error.value)


def test_missing_files_columns_and_splits_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingListError, match=r"no Final_Training/.* for train"):
        read_gtsrb(tmp_path)
    with pytest.raises(UserError, match=r"nowhere\.csv: GTSRB annotation file cannot be read"):
        read_gtsrb(tmp_path, list_name="nowhere.csv")
    write_text(tmp_path / "GT-empty.csv", "")
    with pytest.raises(UserError, match=r"GT-empty\.csv: GTSRB annotation file is empty"):
        read_gtsrb(tmp_path, list_name="GT-empty.csv")
    write_text(tmp_path / "GT-empty.csv", HEADER)
    with pytest.raises(UserError, match=r"GT-empty\.csv: no image in this"):
        read_gtsrb(tmp_path, list_name="GT-empty.csv")
    write_text(tmp_path / "GT-empty.csv", "Filename;Width;Height\n")
    with pytest.raises(UserError, match=r"GT-empty\.csv:1: column Roi\.X1 is missing in the header; found Filename"):
        read_gtsrb(tmp_path, list_name="GT-empty.csv")
    write_text(tmp_path / "Final_Test/Images/GT-final_test.test.csv", HEADER)
    with pytest.raises(UserError, match=r"has no classes; add GT-final_test\.csv"):
        read_gtsrb(tmp_path, "test")
    with pytest.raises(UserError, match='split = "tests" is unknown; did you mean "test"'):
        read_gtsrb(tmp_path, "tests")
    with pytest.raises(UserError, match='corners = "half" is unknown'):
        read_gtsrb(tmp_path, corners="half")


def test_a_training_name_without_a_track_and_a_class_with_one(tmp_path: Path) -> None:
    write_training(tmp_path, {3: 1})
    with pytest.raises(MissingListError, match="no class has two tracks"):
        read_gtsrb(tmp_path, "validation", images_required=False)
    write_text(tmp_path / "Final_Training/Images/00004/GT-00004.csv", HEADER + "a.ppm;29;30;5;6;24;25;4\n")
    with pytest.raises(UserError, match=r"GT-00004\.csv:2: no track in the file's name"):
        read_gtsrb(tmp_path, images_required=False)


def test_missing_images_are_counted(tmp_path: Path) -> None:
    write_training(tmp_path, {3: 2}, images_of_track=1)
    with pytest.raises(
        UserError, match=r"GT-00003\.csv:2: 1 of 1 listed images are missing, first: .*00000_00000\.ppm"
    ):
        read_gtsrb(tmp_path)
    dataset = read_gtsrb(tmp_path, images_required=False)
    assert dataset.report.anomalies["image is not there: labels kept"] == 1
    with pytest.raises(UserError, match="image cannot be read"):
        dataset.sample(0)


def test_names_beyond_ascii(tmp_path: Path) -> None:
    write_image(tmp_path / "Größe/標識_00001.png", 30, 29)
    write_text(tmp_path / "Größe/GT-x.csv", HEADER + "標識_00001.png;29;30;5;6;24;25;14\n")
    dataset = read_gtsrb(tmp_path, list_name="Größe")
    assert dataset.sample(0).truth.name == "Größe/標識_00001.png"
