"""BDD100K detection, 1280x720: a list of frames in one JSON, or one JSON an image.

    labels/det_20/det_{train,val}.json or labels/bdd100k_labels_images_{train,val}.json
        [{"name": "a-b.jpg", "labels": [{"category": "traffic sign", "attributes": {...},
                                         "box2d": {"x1", "y1", "x2", "y2"}}]}]      or {"frames": [the same]}
    labels/100k/{train,val}/a-b.json
        {"name": "a-b", "frames": [{"objects": [{"category", "attributes", "box2d"}]}]}
    images/100k/{train,val}/a-b.jpg

Corners are inclusive, so that the width is x2 - x1 + 1, an option. The older release's names are read as the newer's:
bike as bicycle, motor as motorcycle, person as pedestrian, rider stays. Labels of test are not published.

| in the file                                           | rule                                        |
|-------------------------------------------------------|---------------------------------------------|
| image whose labels are absent or null                 | kept without signs                          |
| label of another category than those wanted           | left out, counted                           |
| label without box2d (lanes, drivable areas)           | left out, counted                           |
| crowd                                                 | a region to be ignored                      |
| image listed twice                                    | the first is kept                           |
| image without labels in the folder (137 in training)  | left out                                    |
| absent image, where that is allowed                   | taken to be of BDD100K_SIZE                 |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from perception.data.sample import ReadReport
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_flag, a_list, a_number, a_text, an_object, member, read_json
from perception.data.signs.listing import find_images, image_name, note_unlisted, place_images, split_or_list
from perception.errors import MissingListError, UserError

BDD100K_SIZE = (720, 1280)
_RENAMED = {"bike": "bicycle", "motor": "motorcycle", "person": "pedestrian"}
_RELEASES = ("", "bdd100k")
_PARTS = {"train": "train", "validation": "val", "test": "test"}
_LABELS = (
    "labels/det_20/det_{part}.json",
    "labels/bdd100k_labels_images_{part}.json",
    "bdd100k_labels_images_{part}.json",
    "det_{part}.json",
    "labels/100k/{part}",
)
_IMAGES = ("images/100k/{part}", "images/{part}", "{part}", "images/100k", "images", "")
_UNUSED = frozenset(("poly2d", "timestamp", "id", "manualShape", "manualAttributes"))


@dataclass(frozen=True)
class _Image:
    name: str
    """As in the file, with a suffix."""
    where: str
    signs: tuple[tuple[str, Box, bool, str], ...]
    """(category, box, is a crowd, place in the file)."""


def is_bdd100k(folder: Path) -> bool:
    """Does the folder look like BDD100K?"""
    return any(_label_source(folder, part) is not None for part in _PARTS.values())


def read_bdd100k(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "inclusive",
    categories: tuple[str, ...] = ("traffic sign",),
) -> SignFolder:
    """Images of a split, or of the label file (or folder of one JSON an image) `list_name`, with their `categories`.

    Raises UserError by the table above, MissingListError where the folder has no labels of this split.
    """
    split, list_name = split_or_list(split, list_name)
    check_corners(corners)
    report = ReadReport()
    part = _PARTS.get(split, "")
    source = folder / list_name if list_name else _label_source(folder, part)
    if source is None:
        hint = "; BDD100K's test labels are not published" if split == "test" else "; name the label file"
        raise MissingListError(f"{folder}: no {_LABELS[0].format(part=part)} nor {_LABELS[-1].format(part=part)}{hint}")
    images = _read_images(source, frozenset(categories), report)

    found = find_images(folder, _image_places(folder, source, part))
    names = [
        found.get(PurePosixPath(image.name).stem, f"{part and f'images/100k/{part}/'}{image.name}") for image in images
    ]
    note_unlisted(folder, names, report)
    builder = SignFolderBuilder(folder, categories)
    builder.report = report
    listed = [(name, image.where) for name, image in zip(names, images, strict=True)]
    for (name, is_there), image in zip(place_images(folder, listed, images_required, report), images, strict=True):
        builder.add_image(name, image.where, None if is_there else BDD100K_SIZE)
        for category, box, is_crowd, where in image.signs:
            builder.add_box(category, box_from_corners(box, corners, where, report), where, ignored=is_crowd)
    return builder.finish()


def _label_source(folder: Path, part: str) -> Path | None:
    candidates = (folder / base / name.format(part=part) for name in _LABELS for base in _RELEASES)
    return next((path for path in candidates if path.exists()), None)


def _image_places(folder: Path, source: Path, part: str) -> list[str]:
    """Folders, relative to the data folder, where images may lie: first that of the part, if the source tells."""
    told = part or next((word for word in _PARTS.values() if word in source.stem), "")
    places = [f"{base}/{name.format(part=told)}" for name in _IMAGES for base in _RELEASES]
    return [PurePosixPath(place.strip("/") or ".").as_posix() for place in places]


def _read_images(source: Path, categories: frozenset[str], report: ReadReport) -> list[_Image]:
    images: dict[str, _Image] = {}
    for raw, where in _raw_frames(source, report):
        image = _parse_image(raw, categories, where, report)
        if image.name in images:
            report.note("image listed twice: first kept", where)
        else:
            images[image.name] = image
    if not images:
        raise UserError(f"{source}: no image in these BDD100K labels")
    return list(images.values())


def _raw_frames(source: Path, report: ReadReport) -> Iterator[tuple[dict[str, Any], str]]:
    """Each frame with its place; one JSON an image has the name outside the frame and calls its labels objects."""
    if source.is_dir():
        files = sorted(source.glob("*.json"))
        if not files:
            raise UserError(f"{source}: no *.json in this folder")
        for path in files:
            raw = an_object(read_json(path, "BDD100K label file", report, _UNUSED), str(path))
            frames = a_list(member(raw, "frames", str(path)), str(path), "frames")
            if len(frames) != 1:
                raise UserError(f"{path}: field frames has {len(frames)} frames; detection labels have one an image")
            frame = an_object(frames[0], f"{path}: frames[0]")
            yield {"name": member(raw, "name", str(path)), "labels": frame.get("objects")}, str(path)
        return
    raw = read_json(source, "BDD100K label file", report, _UNUSED)
    frames = a_list(raw["frames"] if isinstance(raw, dict) and "frames" in raw else raw, str(source), "frames")
    for number, frame in enumerate(frames):
        where = f"{source}: [{number}]"
        yield an_object(frame, where), where


def _parse_image(raw: dict[str, Any], categories: frozenset[str], where: str, report: ReadReport) -> _Image:
    name = image_name(member(raw, "name", where), where, "name")
    where = f"{where} {name}"
    if raw.get("labels") is None:
        report.note("image without the field labels: kept without signs", where)
    signs = []
    others = []
    for number, label in enumerate(a_list([] if raw.get("labels") is None else raw["labels"], where, "labels")):
        place = f"{where} labels[{number}]"
        category = member(label, "category", place)
        category = (
            _RENAMED.get(category, category) if isinstance(category, str) else a_text(category, place, "category")
        )
        if category not in categories:
            others.append(place)
            continue
        if label["category"] != category:
            report.note(f'category "{label["category"]}": read as "{category}"', place)
        if label.get("box2d") is None:
            report.note("label without box2d: left out", place)
            continue
        box = label["box2d"]
        x1, y1, x2, y2 = (
            a_number(member(box, side, place), place, f"box2d.{side}") for side in ("x1", "y1", "x2", "y2")
        )
        given = label.get("attributes")
        attributes = an_object({} if given is None else given, f"{place}.attributes")
        is_crowd = a_flag(attributes.get("crowd", False), place, "attributes.crowd")
        signs.append((category, (x1, y1, x2, y2), is_crowd, place))
    if others:
        report.note("label of another category: left out", others[0], len(others))
    return _Image(name if PurePosixPath(name).suffix else f"{name}.jpg", where, tuple(signs))
