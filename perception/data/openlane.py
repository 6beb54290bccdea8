"""OpenLane's lanes in the image, 1920x1280: one JSON an image.

    images/{training,validation}/segment-.../TIME.jpg
    lane3d_1000/{training,validation,test/CASE}/segment-.../TIME.json       or lane3d_300, or another lane3d_*
        {"file_path": "training/segment-.../TIME.jpg",
         "lane_lines": [{"category": 2, "uv": [[u, ...], [v, ...]], "xyz": [...], "track_id": 1, ...}]}

What the labels of test's cases name lies in images/validation. `file_path` tells the image; the points in space are
not read. Categories 1 to 12 are painted lines, 20 and 21 the left and right curb, 0 is unknown; all are lanes, as in
the data set's own 2D evaluation, unless `curbs` is False.

| in the files                                  | rule                                                        |
|-----------------------------------------------|-------------------------------------------------------------|
| no lane_lines                                 | an image without lanes                                      |
| points in either order or in none             | by `lane_repair`                                            |
| u and v of different length                   | UserError with the place                                    |
| several lane3d_* folders with this part       | UserError that names them: give one as the list             |
| image labelled twice                          | both, as two samples, counted                               |
| image without a label beside labelled ones    | left out, counted                                           |
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.lane_folder import LabelledImage, LaneFolder
from perception.data.lane_repair import repair_points
from perception.data.sample import ReadReport
from perception.data.signs.fields import a_list, a_number, a_whole_number, an_object, listed, member, read_json
from perception.data.signs.listing import image_name, note_unlisted, split_or_list
from perception.errors import MissingListError, UserError

OPENLANE_HEIGHT, OPENLANE_WIDTH = 1280, 1920
_PARTS = {"train": "training", "validation": "validation", "test": "test"}
_CURBS = frozenset((20, 21))
_CATEGORIES = frozenset((*range(13), *_CURBS))
_UNUSED = frozenset(("xyz", "visibility", "extrinsic", "intrinsic", "pose", "attribute", "track_id", "trackid"))


def is_openlane(folder: Path) -> bool:
    """Does the folder look like OpenLane?"""
    return any(any((place / part).is_dir() for part in _PARTS.values()) for place in folder.glob("lane3d_*"))


def read_openlane(
    folder: Path, split: str = "train", list_name: str = "", images_required: bool = True, curbs: bool = True
) -> LaneFolder:
    """Images of a split, or of the folder of labels `list_name` ("lane3d_300/training").

    Raises UserError by the table above and where a required image is missing, MissingListError where the folder has
    not this split.
    """
    split, list_name = split_or_list(split, list_name)
    place = folder / list_name if list_name else _labels_of(folder, _PARTS[split])
    if not place.is_dir():
        raise MissingListError(f"{place}: no such folder of OpenLane labels; name one, such as lane3d_1000/training")
    report = ReadReport()
    images, known = [], set()
    for path in sorted(place.rglob("*.json")):
        raw = an_object(read_json(path, "OpenLane label file", report, _UNUSED), str(path))
        name = (
            PurePosixPath("images") / image_name(member(raw, "file_path", str(path)), str(path), "file_path")
        ).as_posix()
        if name in known:
            report.note("image labelled twice: kept twice", str(path))
        known.add(name)
        images.append(LabelledImage(name, str(path), _read_lanes(raw, str(path), report, curbs)))
    if not images:
        raise UserError(f"{place}: no *.json in this folder or below it")
    note_unlisted(folder, (image.name for image in images), report)
    return LaneFolder(folder, images, images_required, (OPENLANE_HEIGHT, OPENLANE_WIDTH), report, "openlane")


def _labels_of(folder: Path, part: str) -> Path:
    places = sorted(place / part for place in folder.glob("lane3d_*") if (place / part).is_dir())
    if not places:
        raise MissingListError(f"{folder}: no lane3d_*/{part} in it; name the folder of labels")
    if len(places) > 1:
        names = listed(place.relative_to(folder).as_posix() for place in places)
        raise UserError(f"{folder}: several folders of labels: {names}; name one of them as the list")
    return places[0]


def _read_lanes(raw: dict[str, Any], path: str, report: ReadReport, curbs: bool) -> list[NDArray[np.float32]]:
    lanes = []
    for number, line in enumerate(a_list(member(raw, "lane_lines", path), path, "lane_lines")):
        where = f"{path}: lane_lines[{number}]"
        category = a_whole_number(member(line, "category", where), where, "category")
        if category not in _CATEGORIES:
            report.note(f"unknown category {category}: kept", where)
        if category in _CURBS and not curbs:
            report.note("curb: left out", where)
            continue
        axes = a_list(member(line, "uv", where), where, "uv")
        if len(axes) != 2:
            raise UserError(f"{where}: field uv must have two lists, u and v, got {len(axes)}")
        u, v = ([a_number(value, where, f"uv[{i}]") for value in a_list(axes[i], where, f"uv[{i}]")] for i in (0, 1))
        if len(u) != len(v):
            raise UserError(f"{where}: field uv has {len(u)} u and {len(v)} v")
        lane = repair_points(np.array([u, v], dtype=np.float32).T.reshape(-1, 2), where, report)
        if lane is not None:
            lanes.append(lane)
    if not lanes:
        report.note("image without lanes: kept", path)
    return lanes
