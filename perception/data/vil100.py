"""VIL-100 lanes: frames of a hundred videos, one JSON a frame; sizes differ from video to video.

    JPEGImages/VIDEO/NNNNN.jpg
    Json/VIDEO/NNNNN.jpg.json
        {"info": {"height", "width", "image_path"},
         "annotations": {"lane": [{"id", "lane_id", "attribute", "occlusion", "points": [[x, y], ...]}]}}
    data/{train,test}.txt           a frame a line, "/JPEGImages/VIDEO/NNNNN.jpg"

The labels in CULane's text form that go round beside it are read as `culane`.

| in the files                                   | rule                                                        |
|------------------------------------------------|-------------------------------------------------------------|
| no lanes                                       | an image without lanes                                      |
| consecutive duplicates, y that does not fall   | by `lane_repair`                                            |
| points from top to bottom                      | reversed                                                    |
| more columns in a list                         | ignored                                                     |
| image listed twice                             | once                                                        |
| label missing for a frame in the list          | UserError with the count and the first                      |
| no validation list                             | MissingListError: the data set has none of its own          |
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from perception.data.lane_folder import LabelledImage, LaneFolder
from perception.data.lane_repair import repair_points
from perception.data.sample import ReadReport
from perception.data.signs.fields import a_list, a_number, a_whole_number, an_object, member, read_json
from perception.data.signs.listing import image_name, read_keys, split_or_list
from perception.errors import MissingListError, UserError

_IMAGES, _LABELS = "JPEGImages", "Json"


def is_vil100(folder: Path) -> bool:
    """Does the folder look like VIL-100?"""
    return (folder / _IMAGES).is_dir() and (folder / _LABELS).is_dir()


def read_vil100(folder: Path, split: str = "train", list_name: str = "", images_required: bool = True) -> LaneFolder:
    """Frames of a split, or those that the list file `list_name` names.

    An absent image, where that is allowed, has the size that its label tells, or that of most videos. Raises UserError
    by the table above, MissingListError where the folder has not this split.
    """
    split, list_name = split_or_list(split, list_name)
    list_file = folder / (list_name or f"data/{split}.txt")
    if not list_file.is_file():
        hint = "; VIL-100 has no validation list of its own" if split == "validation" else ""
        raise MissingListError(f"{list_file}: list file does not exist{hint}; name one")
    report = ReadReport()
    frames: dict[str, str] = {}
    for line, where in read_keys(list_file, "VIL-100 list", report).items():
        name = image_name(line.split()[0], where, "image")
        if PurePosixPath(name).parts[0] != _IMAGES:
            raise UserError(f"{where}: {name:.60} is not in {_IMAGES}/, so its label cannot be found")
        if name in frames:
            report.note("image listed twice: kept once", where)
        frames.setdefault(name, where)
    missing = [_label_of(name) for name in frames if not (folder / _label_of(name)).is_file()]
    if missing:
        raise UserError(f"{folder}: {len(missing)} of {len(frames)} label files are missing, first: {missing[0]}")
    images, sizes = [], set()
    for name, where in frames.items():
        lanes, size = read_label(folder / _label_of(name), report)
        images.append(LabelledImage(name, where, lanes))
        sizes.add(size)
    # Videos of several sizes: those of absent images cannot be told one by one, and the largest holds all lanes.
    return LaneFolder(folder, images, images_required, max(sizes), report)


def read_label(path: Path, report: ReadReport) -> tuple[list[NDArray[np.float32]], tuple[int, int]]:
    """Lanes of one frame, (K, 2) from bottom to top, and the (height, width) that the label tells."""
    raw = an_object(read_json(path, "VIL-100 label file", report), str(path))
    info = an_object(member(raw, "info", str(path)), f"{path}: info")
    height, width = (
        a_whole_number(member(info, side, f"{path}: info"), str(path), side, 1) for side in ("height", "width")
    )
    annotations = an_object(member(raw, "annotations", str(path)), f"{path}: annotations")
    lanes = []
    for number, lane in enumerate(a_list(member(annotations, "lane", str(path)), str(path), "lane")):
        where = f"{path}: lane[{number}]"
        points = []
        for i, point in enumerate(a_list(member(lane, "points", where), where, "points")):
            pair = a_list(point, f"{where}.points[{i}]", "points")
            if len(pair) != 2:
                raise UserError(f"{where}.points[{i}]: must be a pair x, y, got {len(pair)} values")
            points.append([a_number(value, where, f"points[{i}]") for value in pair])
        repaired = repair_points(np.array(points, dtype=np.float32).reshape(-1, 2), where, report)
        if repaired is not None:
            lanes.append(repaired)
    if not lanes:
        report.note("image without lanes: kept", str(path))
    return lanes, (height, width)


def _label_of(name: str) -> str:
    """
    >>> _label_of("JPEGImages/0_Road001/00003.jpg")
    'Json/0_Road001/00003.jpg.json'
    """
    return (PurePosixPath(_LABELS) / PurePosixPath(name).relative_to(_IMAGES)).as_posix() + ".json"
