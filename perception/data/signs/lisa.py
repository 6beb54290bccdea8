"""LISA traffic signs: semicolon CSV, a line a sign, frames of road videos beside it.

    allAnnotations.csv; in the extension training/allTrainingAnnotations.csv
        Filename;Annotation tag;Upper left corner X;Upper left corner Y;Lower right corner X;Lower right corner Y;
        Occluded,On another road;Origin file;Origin frame number;Origin track;Origin track frame number
        aiua120214-0/frameAnnotations-A.avi_annotations/stop_1.avi_image0.png;stop;862;104;916;158;0,0;
        aiua120214-0/A.avi;2667;stop_1.avi;2
    negatives/                                          frames without signs, anywhere below it

Columns are found by name; the extension has no `Occluded,On another road`, which otherwise holds two values ("0,0").
There is no official split. A track is one sign in successive frames, and the tracks of several signs may show the
same seconds of a video; so tracks of one video that overlap in time make one scene, and of the scenes in order one in
eight is for test, one in eight for validation. Negatives are cut in three runs by name, since neighbours look alike.

The corners' convention is not published; they are read as half-open, an option.

| in the file                                  | rule                                                       |
|----------------------------------------------|------------------------------------------------------------|
| several lines of one frame                   | one image                                                  |
| sign on another road, occluded sign          | kept                                                       |
| image below the folders of frames, no line   | left out                                                   |
| absent image, where that is allowed          | taken to be of LISA_SIZE, the largest there is             |
| frame number that is none, column missing    | UserError with file:line and column                        |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from perception.data.images import IMAGE_SUFFIXES
from perception.data.sample import ReadReport
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_number, a_text, a_whole_number, read_rows
from perception.data.signs.listing import (
    CUT_SPLITS,
    PARTS,
    folder_of,
    image_name,
    note_unlisted,
    place_images,
    split_or_list,
)
from perception.errors import MissingListError, UserError

LISA_SIZE = (960, 1280)
_FILES = ("allAnnotations.csv", "training/allTrainingAnnotations.csv", "allTrainingAnnotations.csv")
_SIDES = ("Upper left corner X", "Upper left corner Y", "Lower right corner X", "Lower right corner Y")
_ORIGIN = ("Origin file", "Origin frame number", "Origin track")
_NEGATIVES = "negatives"
# Place of a scene among PARTS of them → split; the others train.
_HELD_OUT = {3: "validation", 7: "test"}


_Track = tuple[str, str]
"""Video and track."""


@dataclass
class _Frame:
    where: str
    tracks: dict[_Track, list[int]] = field(default_factory=dict)
    """Frame numbers in the video, by track; usually one of one track."""
    signs: list[tuple[str, Box, str]] = field(default_factory=list)
    """(class, box, "file:line")."""


def is_lisa(folder: Path) -> bool:
    """Does the folder look like LISA?"""
    return any((folder / name).is_file() for name in _FILES)


def read_lisa(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "half-open",
    negatives: bool = True,
) -> SignFolder:
    """Frames of a split (one of CUT_SPLITS), or all of the annotation file `list_name`, without negatives.

    Classes are the tags in all annotation files, by name, or in `list_name`. Raises UserError by the table above,
    MissingListError where no scene falls in this split.
    """
    split, list_name = split_or_list(split, list_name, CUT_SPLITS)
    check_corners(corners)
    report = ReadReport()
    paths = [folder / list_name] if list_name else [path for path in map(folder.joinpath, _FILES) if path.is_file()]
    if not paths:
        raise UserError(f"{folder}: no {' or '.join(_FILES)} in it; name the LISA annotation file")
    frames = _read_frames(folder, paths, report)
    classes = sorted({class_name for frame in frames.values() for class_name, _, _ in frame.signs})
    note_unlisted(folder, frames, report)
    empty = _negatives(folder) if negatives and split else {}
    if split:
        wanted = ("train", "validation") if split == "all-train" else (split,)
        split_of = _split_of_tracks(frames.values())
        frames = {name: frame for name, frame in frames.items() if split_of[next(iter(frame.tracks))] in wanted}
        empty = {name: part for name, part in empty.items() if part in wanted}
        if not frames:
            raise MissingListError(f"{folder}: too few scenes to cut a part for {split}; use the split all-train")
    builder = SignFolderBuilder(folder, tuple(classes))
    builder.report = report
    listed = [(name, frame.where) for name, frame in frames.items()]
    for (name, is_there), frame in zip(
        place_images(folder, listed, images_required, report), frames.values(), strict=True
    ):
        builder.add_image(name, frame.where, None if is_there else LISA_SIZE)
        for class_name, box, where in frame.signs:
            builder.add_box(class_name, box_from_corners(box, corners, where, report), where)
    for name in empty:
        builder.add_image(name, str(folder / name))
    return builder.finish()


def _read_frames(folder: Path, paths: list[Path], report: ReadReport) -> dict[str, _Frame]:
    """By name relative to `folder`."""
    frames: dict[str, _Frame] = {}
    columns = ("Filename", "Annotation tag", *_SIDES, *_ORIGIN)
    for path in paths:
        place = folder_of(folder, path)
        for where, row in read_rows(path, "LISA annotation file", report, columns):
            name = (place / image_name(row["filename"], where, "Filename")).as_posix()
            video, track = (a_text(row[column.lower()], where, column) for column in ("Origin file", "Origin track"))
            number = a_whole_number(row["origin frame number"], where, "Origin frame number")
            x1, y1, x2, y2 = (a_number(row[side.lower()], where, side) for side in _SIDES)
            frame = frames.setdefault(name, _Frame(where))
            frame.tracks.setdefault((video, track), []).append(number)
            frame.signs.append((a_text(row["annotation tag"], where, "Annotation tag"), (x1, y1, x2, y2), where))
    if not frames:
        raise UserError(f"{paths[0]}: no frame in this LISA annotation file")
    return frames


def _split_of_tracks(frames: Iterable[_Frame]) -> dict[_Track, str]:
    spans: dict[_Track, tuple[int, int]] = {}
    leaders: dict[_Track, _Track] = {}

    def leader(track: _Track) -> _Track:
        while leaders[track] != track:
            track = leaders[track]
        return track

    for frame in frames:
        for track, numbers in frame.tracks.items():
            first, last = spans.get(track, (min(numbers), max(numbers)))
            spans[track] = (min(first, *numbers), max(last, *numbers))
            leaders.setdefault(track, track)
            leaders[leader(track)] = leader(next(iter(frame.tracks)))
    in_order = sorted(spans, key=lambda track: (track[0], spans[track][0], track))
    furthest = in_order[0]
    for track in in_order[1:]:
        if track[0] == furthest[0] and spans[track][0] <= spans[furthest][1]:
            leaders[leader(track)] = leader(furthest)
        if track[0] != furthest[0] or spans[track][1] > spans[furthest][1]:
            furthest = track
    scenes = {scene: number for number, scene in enumerate(dict.fromkeys(map(leader, in_order)))}
    return {track: _HELD_OUT.get(scenes[leader(track)] % PARTS, "train") for track in in_order}


def _negatives(folder: Path) -> dict[str, str]:
    """Name relative to `folder` → split."""
    paths = sorted(path for path in (folder / _NEGATIVES).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    num_train, num_validation = (len(paths) * share // PARTS for share in (PARTS - 2, 1))
    parts = ["train"] * num_train + ["validation"] * num_validation
    parts += ["test"] * (len(paths) - len(parts))
    return {path.relative_to(folder).as_posix(): part for path, part in zip(paths, parts, strict=True)}
