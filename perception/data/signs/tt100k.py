"""TT100K (2016 and 2021): one JSON for all images, 2048x2048.

    annotations.json or annotations_all.json
        {"types": ["pn", "ph4.5", ...],
         "imgs": {"2468": {"path": "test/2468.jpg", "id": 2468,
                           "objects": [{"category": "pn", "bbox": {"xmin", "ymin", "xmax", "ymax"}, ...}]}}}
    train/2468.jpg, test/, other/, each with ids.txt

The split of an image is the first folder of its path. There is no official validation list: of the training images
one in eight, by the CRC-32 of the id, is held out. Boxes are floats, half-open.

| in the file                                          | rule                                       |
|------------------------------------------------------|--------------------------------------------|
| image without objects (more than a third)            | kept                                       |
| image without the field objects                      | kept without signs                         |
| box that leaves the image (55)                       | clipped                                    |
| type that no object has (59 of 221)                  | no class                                   |
| id differs from its key; several keys of one path    | the key counts; the first is kept          |
| category that is no type, id of a list not there     | UserError with file and key                |
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.data.sample import ReadReport
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_list, a_number, a_text, an_object, member, read_json
from perception.data.signs.listing import (
    CUT_SPLITS,
    PARTS,
    image_name,
    note_unlisted,
    place_images,
    read_keys,
    split_or_list,
)
from perception.errors import MissingListError, UserError, nearest

TT100K_SIZE = (2048, 2048)
_FILES = ("annotations_all.json", "annotations.json")
_OUTLINES = frozenset(("ellipse", "ellipse_org", "polygon"))
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class _Image:
    name: str
    where: str
    signs: tuple[tuple[str, Box, str], ...]
    """(class, box, place in the file)."""


def is_tt100k(folder: Path) -> bool:
    """Does the folder look like TT100K?"""
    return _annotation_file(folder) is not None


def read_tt100k(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "half-open",
) -> SignFolder:
    """Images of a split (one of CUT_SPLITS, or "other"), or those whose ids `list_name` holds, an id a line.

    Classes are the types that any image of the file has, in the file's order. An absent image, where that is
    allowed, is taken to be of TT100K_SIZE. Raises UserError by the table above, MissingListError where the folder
    has no image of this split.
    """
    split, list_name = split_or_list(split, list_name, (*CUT_SPLITS, "other"))
    check_corners(corners)
    report = ReadReport()
    path = _annotation_file(folder)
    if path is None:
        raise UserError(f"{folder}: no {' or '.join(_FILES)} with the field imgs; give the folder that holds it")
    raw = an_object(read_json(path, "TT100K annotation file", report, _OUTLINES), str(path))
    types = [
        a_text(name, str(path), f"types[{i}]")
        for i, name in enumerate(a_list(member(raw, "types", str(path)), str(path), "types"))
    ]
    images = _parse_images(an_object(member(raw, "imgs", str(path)), f"{path}: imgs"), frozenset(types), path, report)
    used = {name for image in images.values() for name, _, _ in image.signs}
    classes = tuple(dict.fromkeys(name for name in types if name in used or not used))
    if len(classes) < len(set(types)):
        report.note("type that no object has: no class", f"{path}: types", len(set(types)) - len(classes))
    note_unlisted(folder, (image.name for image in images.values()), report)

    chosen = _chosen_images(folder, images, split, list_name, report)
    builder = SignFolderBuilder(folder, classes)
    builder.report = report
    places = place_images(folder, [(image.name, image.where) for image in chosen], images_required, report)
    for (name, is_there), image in zip(places, chosen, strict=True):
        builder.add_image(name, image.where, None if is_there else TT100K_SIZE)
        for class_name, box, where in image.signs:
            builder.add_box(class_name, box_from_corners(box, corners, where, report), where)
    return builder.finish()


def _annotation_file(folder: Path) -> Path | None:
    """The first of the known files that is TT100K's: COCO's is often of the same name."""
    for name in _FILES:
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            if (
                b'"imgs"' in head
                or b'"types"' in head
                or any((folder / split / "ids.txt").is_file() for split in ("train", "test", "other"))
            ):
                return path
    return None


def _parse_images(imgs: Mapping[str, Any], types: frozenset[str], path: Path, report: ReadReport) -> dict[str, _Image]:
    """By key."""
    images: dict[str, _Image] = {}
    names: set[str] = set()
    for key, raw in imgs.items():
        where = f"{path}: imgs[{a_text(key, str(path), 'imgs: key')}]"
        name = image_name(member(raw, "path", where), where, "path")
        if str(raw.get("id", key)) != key:
            report.note("image id differs from its key: the key counts", where)
        if name in names:
            report.note("image listed twice: first kept", where)
            continue
        names.add(name)
        if "objects" not in raw:
            report.note("image without the field objects: kept without signs", where)
        objects = a_list(raw.get("objects", []), where, "objects")
        signs = tuple(_parse_sign(sign, types, f"{where}.objects[{i}]") for i, sign in enumerate(objects))
        images[key] = _Image(name, where, signs)
    if not images:
        raise UserError(f"{path}: field imgs holds no image")
    return images


def _parse_sign(raw: Any, types: frozenset[str], where: str) -> tuple[str, Box, str]:
    class_name = a_text(member(raw, "category", where), where, "category")
    if class_name not in types:
        raise UserError(f'{where}: category "{class_name}" is not among the types{nearest(class_name, types)}')
    bbox = member(raw, "bbox", where)
    x1, y1, x2, y2 = (
        a_number(member(bbox, side, f"{where}.bbox"), where, f"bbox.{side}")
        for side in ("xmin", "ymin", "xmax", "ymax")
    )
    return class_name, (x1, y1, x2, y2), where


def _chosen_images(
    folder: Path, images: dict[str, _Image], split: str, list_name: str, report: ReadReport
) -> list[_Image]:
    if list_name:
        keys = read_keys(folder / list_name, "TT100K id list", report)
        for key, where in keys.items():
            if key not in images:
                raise UserError(f'{where}: id "{key}" is not among the {len(images)} images of the annotation file')
        return [images[key] for key in keys]
    place = "train" if split in ("validation", "all-train") else split
    chosen = {key: image for key, image in images.items() if image.name.split("/")[0] == place}
    if split in ("train", "validation"):
        chosen = {key: image for key, image in chosen.items() if _held_out(key) == (split == "validation")}
    if not chosen:
        raise MissingListError(f"{folder}: no image for {split} (its path would start with {place}/)")
    return list(chosen.values())


def _held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % PARTS == 0
