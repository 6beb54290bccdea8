"""CurveLanes lanes: one JSON an image, images of several sizes (2560x1440 mostly).

    {train,valid}/images/NAME.jpg
    {train,valid}/labels/NAME.lines.json        {"Lines": [[{"x": "644.12", "y": "1439"}, ...], ...]}
    {train,valid}/{train,valid}.txt             an image a line, "images/NAME.jpg"; where it is absent, every label

Numbers are texts. Points of a lane stand in either order or in none: `lane_repair` says what is made of them.
Labels of test are not published.

| in the files                             | rule                                                        |
|------------------------------------------|-------------------------------------------------------------|
| no lines                                 | an image without lanes                                      |
| x left or right of the image             | kept                                                        |
| image listed twice                       | once                                                        |
| image without a label, no list           | left out                                                    |
| label missing for an image in the list   | UserError with the count and the first                      |
| labels far below the image               | UserError as soon as the image's size is known              |
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.lane_folder import LabelledImage, LaneFolder
from perception.data.lane_repair import repair_points
from perception.data.sample import ReadReport
from perception.data.signs.fields import a_list, a_number, an_object, member, read_json
from perception.data.signs.listing import folder_of, image_name, note_unlisted, read_keys, split_or_list
from perception.errors import MissingListError, UserError

CURVELANES_HEIGHT, CURVELANES_WIDTH = 1440, 2560
_PARTS = {"train": "train", "validation": "valid", "test": "test"}
_LABEL_SUFFIX = ".lines.json"


def is_curvelanes(folder: Path) -> bool:
    """Does the folder look like CurveLanes?"""
    return any(any((folder / part / "labels").glob(f"*{_LABEL_SUFFIX}")) for part in _PARTS.values())


def read_curvelanes(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
) -> LaneFolder:
    """Images of a split, or those that the file `list_name` names, relative to its own folder.

    An absent image, where that is allowed, is taken to be 2560x1440. Raises UserError by the table above,
    MissingListError where the folder has not this split.
    """
    split, list_name = split_or_list(split, list_name)
    report = ReadReport()
    list_file = folder / (list_name or f"{_PARTS[split]}/{_PARTS[split]}.txt")
    if list_name or list_file.is_file():
        images = _listed(folder, list_file, report)
    else:
        images = _labelled(folder, _PARTS[split], report)
    missing = [label for label in map(_label_of, images) if not (folder / label).is_file()]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} of {len(images)} label files are missing, first: {', '.join(missing[:3])}; "
            'an image without lanes has {"Lines": []}'
        )
    labelled = [
        LabelledImage(name, where, read_label(folder / _label_of(name), report)) for name, where in images.items()
    ]
    return LaneFolder(folder, labelled, images_required, (CURVELANES_HEIGHT, CURVELANES_WIDTH), report, "curvelanes")


def read_label(path: Path, report: ReadReport) -> list[NDArray[np.float32]]:
    """Lanes of one image, (K, 2) from bottom to top."""
    raw = an_object(read_json(path, "CurveLanes label file", report), str(path))
    lanes = []
    for number, line in enumerate(a_list(member(raw, "Lines", str(path)), str(path), "Lines")):
        where = f"{path}: Lines[{number}]"
        points = [_parse_point(point, f"{where}[{i}]") for i, point in enumerate(a_list(line, where, "Lines"))]
        lane = repair_points(np.array(points, dtype=np.float32).reshape(-1, 2), where, report)
        if lane is not None:
            lanes.append(lane)
    if not lanes:
        report.note("image without lanes: kept", str(path))
    return lanes


def _parse_point(raw: Any, where: str) -> tuple[float, float]:
    return a_number(member(raw, "x", where), where, "x"), a_number(member(raw, "y", where), where, "y")


def _listed(folder: Path, list_file: Path, report: ReadReport) -> dict[str, str]:
    """Image name → "file:line"."""
    place = folder_of(folder, list_file)
    images: dict[str, str] = {}
    for key, where in read_keys(list_file, "CurveLanes list", report).items():
        name = (place / image_name(key, where, "image")).as_posix()
        if PurePosixPath(name).parent.name != "images":
            raise UserError(f"{where}: {key:.60} is not in a folder images/, so its label cannot be found")
        images[name] = where
    return images


def _labelled(folder: Path, part: str, report: ReadReport) -> dict[str, str]:
    """Image name → label file, of every label."""
    labels = sorted((folder / part / "labels").glob(f"*{_LABEL_SUFFIX}"))
    if not labels:
        hint = "; CurveLanes's test labels are not published" if part == "test" else ""
        raise MissingListError(f"{folder}: no {part}/{part}.txt and no {part}/labels/*{_LABEL_SUFFIX}{hint}")
    images = {f"{part}/images/{path.name.removesuffix(_LABEL_SUFFIX)}.jpg": str(path) for path in labels}
    note_unlisted(folder, images, report)
    return images


def _label_of(name: str) -> str:
    """
    >>> _label_of("train/images/a.b.jpg")
    'train/labels/a.b.lines.json'
    """
    path = PurePosixPath(name)
    return (path.parent.parent / "labels" / f"{path.stem}{_LABEL_SUFFIX}").as_posix()
