"""The LISA reader: one line a box, scenes never cut, negatives, bad lines named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sign_files import class_counts, names, signs, write_image, write_text

from perception.data.signs.dataset import SignFolder
from perception.data.signs.lisa import is_lisa, read_lisa
from perception.errors import MissingListError, UserError

HEADER = (
    "Filename;Annotation tag;Upper left corner X;Upper left corner Y;Lower right corner X;Lower right corner Y;"
    "Occluded,On another road;Origin file;Origin frame number;Origin track;Origin track frame number\n"
)


def row(name: str = "v/stop_1.avi_image0.png", number: int = 5, track: str = "stop_1.avi", **fields: Any) -> str:
    video, tag, box = fields.get("video", "v/a.avi"), fields.get("tag", "stop"), fields.get("box", "62;10;71;18")
    return f"{name};{tag};{box};0,0;{video};{number};{track};2\n"


def open_rows(folder: Path, rows: str | bytes, **options: Any) -> SignFolder:
    data = rows if isinstance(rows, bytes) else rows.encode()
    write_text(folder / "allAnnotations.csv", HEADER.encode() + data)
    return read_lisa(folder, "all-train", images_required=False, **options)


def test_a_line_is_a_box_and_lines_of_a_frame_are_one_image(tmp_path: Path) -> None:
    rows = row() + row(tag="speedLimit25", box="1;2;3;4") + row("v/stop_1.avi_image1.png", 10)
    write_image(tmp_path / "v/stop_1.avi_image0.png")
    dataset = open_rows(tmp_path, rows)
    assert is_lisa(tmp_path)
    assert dataset.classes == ("speedLimit25", "stop")
    assert names(dataset) == ["v/stop_1.avi_image0.png", "v/stop_1.avi_image1.png"]
    assert signs(dataset) == [("stop", [62, 10, 71, 18]), ("speedLimit25", [1, 2, 3, 4])]
    assert class_counts(dataset) == {"stop": 2, "speedLimit25": 1}
    assert [(dataset.truth(i).height, dataset.truth(i).width) for i in (0, 1)] == [(60, 80), (960, 1280)]
    assert signs(open_rows(tmp_path, rows, corners="inclusive"))[0] == ("stop", [62, 10, 72, 19])
    with pytest.raises(UserError, match=r"csv:4: 1 of 2 listed images are missing, first: v/stop_1\.avi_image1\.png"):
        read_lisa(tmp_path, "all-train")


Tracks = list[tuple[int, int, int]]
"""(video, first frame, number of frames)."""


def frame_rows(tracks: Tracks) -> dict[str, tuple[int, int, int, str]]:
    """Frame's file name → (track, video, frame number in the video, line)."""
    rows = {}
    for index, (video, first, length) in enumerate(tracks):
        for step in range(length):
            name, number = f"v{video}/stop_{index}.avi_image{step}.png", first + 5 * step
            line = row(name, number, f"stop_{index}.avi", video=f"v{video}/a.avi")
            rows[name] = (index, video, number, line)
    return rows


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(1, 6)), max_size=12))
def test_no_track_and_no_second_of_a_video_is_on_two_sides(
    tmp_path_factory: pytest.TempPathFactory, tracks: Tracks
) -> None:
    folder = tmp_path_factory.mktemp("lisa")
    rows = frame_rows([*tracks, *((3, 100 * number, 3) for number in range(16))])
    write_text(folder / "allAnnotations.csv", HEADER + "".join(line for *_, line in rows.values()))
    parts = {split: names(read_lisa(folder, split, images_required=False)) for split in ("train", "validation", "test")}
    assert sorted(name for part in parts.values() for name in part) == sorted(rows)
    side = {name: split for split, part in parts.items() for name in part}
    side_of_track: dict[int, str] = {}
    for name, (index, *_) in rows.items():
        assert side_of_track.setdefault(index, side[name]) == side[name]
    spans: dict[int, list[int]] = {}
    for index, _, number, _ in rows.values():
        spans.setdefault(index, []).append(number)
    videos = {index: video for index, video, _, _ in rows.values()}
    for a, frames_a in spans.items():
        for b, frames_b in spans.items():
            if videos[a] == videos[b] and min(frames_a) <= max(frames_b) and min(frames_b) <= max(frames_a):
                assert side_of_track[a] == side_of_track[b]


def test_a_frame_with_signs_of_two_tracks_joins_them(tmp_path: Path) -> None:
    rows = "".join(row(f"v{number}/i.png", 5, f"t{number}", video=f"v{number}/a.avi") for number in range(8))
    # Scene 7 is for test; a sign of its track stands in a frame of scene 0, too.
    joined = row("v0/i.png", 5, "t7", video="v7/a.avi")
    write_text(tmp_path / "allAnnotations.csv", HEADER + rows)
    assert names(read_lisa(tmp_path, "test", images_required=False)) == ["v7/i.png"]
    write_text(tmp_path / "allAnnotations.csv", HEADER + rows + joined)
    with pytest.raises(MissingListError, match="too few scenes to cut a part for test; use the split all-train"):
        read_lisa(tmp_path, "test", images_required=False)
    assert {"v0/i.png", "v7/i.png"} <= set(names(read_lisa(tmp_path, images_required=False)))


def test_negatives_are_cut_in_runs(tmp_path: Path) -> None:
    for number in range(16):
        write_image(tmp_path / f"negatives/negativePics/{number:02d}.png")
    write_text(tmp_path / "negatives/negatives.dat", "negativePics/00.png\n")
    rows = "".join(row(f"v{n}/i.png", 5, f"t{n}", video=f"v{n}/a.avi") for n in range(8))
    write_text(tmp_path / "allAnnotations.csv", HEADER + rows)
    runs = {}
    for split in ("train", "validation", "test", "all-train"):
        dataset = read_lisa(tmp_path, split, images_required=False)
        empty = [index for index in range(len(dataset)) if not signs(dataset, index)]
        runs[split] = [int(Path(dataset.truth(index).name).stem) for index in empty]
    assert runs == {
        "train": list(range(12)),
        "validation": [12, 13],
        "test": [14, 15],
        "all-train": list(range(14)),
    }
    assert dataset.sample(empty[0]).image.shape == (60, 80, 3)
    without = read_lisa(tmp_path, "all-train", images_required=False, negatives=False)
    assert len(without) == 7
    assert len(read_lisa(tmp_path, list_name="allAnnotations.csv", images_required=False)) == 8


def test_the_extension_has_other_columns_and_its_own_folder(tmp_path: Path) -> None:
    header = HEADER.replace("Occluded,On another road;", "")
    lines = row("trainingFrames/größe.png", tag="yield").replace("0,0;", "")
    write_text(tmp_path / "training/allTrainingAnnotations.csv", header + lines)
    write_image(tmp_path / "training/trainingFrames/größe.png")
    dataset = read_lisa(tmp_path, "all-train")
    assert names(dataset) == ["training/trainingFrames/größe.png"]
    assert dataset.classes == ("yield",)
    assert names(read_lisa(tmp_path, list_name="training/allTrainingAnnotations.csv")) == names(dataset)


def test_anomalies_are_counted_with_their_first_place(tmp_path: Path) -> None:
    write_image(tmp_path / "v/a.jpg", 20, 30)
    write_image(tmp_path / "v/b.png")
    rows = row("v\\a.png", box="-4;2;8;9") + "\n" + row("v/a.png", box="40;2;50;9") + row("v/a.png", box="-4;2;8;9")
    write_text(tmp_path / "allAnnotations.csv", HEADER + rows.replace("\n", "\r\n"))
    dataset = read_lisa(tmp_path, "all-train")
    assert names(dataset) == ["v/a.jpg"]
    assert signs(dataset) == [("stop", [0, 2, 8, 9])] * 2
    assert dict(dataset.report.anomalies) == {
        "blank line: skipped": 1,
        "image .png found as .jpg: used": 1,
        "image without labels: left out": 1,
        "box leaves the image: clipped": 2,
        "box outside the image: dropped": 1,
        "box stands twice in an image: kept twice": 1,
    }
    assert dataset.report.examples["box outside the image: dropped"].endswith("allAnnotations.csv:4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.png;stop;1;2;3;4\n", r"allAnnotations\.csv:3: 6 values in this row, the header has 11"),
        (row(box="1;2;x;4"), r'csv:3: field Lower right corner X must be a finite number, got "x"'),
        (row(box="1;2;;4"), r'csv:3: field Lower right corner X must be a finite number, got ""'),
        (row(box="1;2;3;1_0"), r"csv:3: field Lower right corner Y must be a finite number"),
        (row(box="1;-inf;3;4"), r"csv:3: field Upper left corner Y must be a finite number"),
        (row(tag=" "), r"csv:3: field Annotation tag must be a text"),
        (row(number=-1), r"csv:3: field Origin frame number must be a whole number from 0"),
        (row(track=""), r"csv:3: field Origin track must be a text"),
        (row("/"), r"csv:3: field Filename must name an image inside"),
        (row("a\0.png"), r"csv:3: field Filename must be a text"),
        (b'"', r"csv:3: LISA annotation file is no CSV"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(UserError, match=message) as error:
        open_rows(tmp_path, row().encode() + data)
    assert "\n" not in str(error.value)


def test_missing_files_and_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no allAnnotations\.csv or .* in it; name the LISA annotation file"):
        read_lisa(tmp_path)
    with pytest.raises(UserError, match=r"my\.csv: LISA annotation file cannot be read"):
        read_lisa(tmp_path, list_name="my.csv")
    with pytest.raises(UserError, match=r"allAnnotations\.csv: no frame in this"):
        open_rows(tmp_path, "")
    write_text(tmp_path / "allAnnotations.csv", HEADER.replace("Origin track;", "Track;") + row())
    with pytest.raises(UserError, match=r"csv:1: column Origin track is missing in the header; found Filename"):
        read_lisa(tmp_path)
    open_rows(tmp_path, row())
    with pytest.raises(MissingListError, match="too few scenes to cut a part for validation"):
        read_lisa(tmp_path, "validation", images_required=False)
