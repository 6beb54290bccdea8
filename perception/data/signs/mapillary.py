"""Mapillary traffic signs (MTSD v2, fully annotated): one JSON an image, three lists of image keys.

    annotations/KEY.json
        {"width", "height", "ispano", "objects": [{"key", "label": "regulatory--keep-right--g1",
         "bbox": {"xmin", "ymin", "xmax", "ymax"}, "properties": {"ambiguous", "dummy", "exterior", "occluded", ...}}]}
    splits/{train,val,test}.txt                     a key a line; the labels of test are not published
    images/KEY.jpg, images/SPLIT/KEY.jpg or the folders that the archives unpack to

Boxes are floats, half-open. Classes are the labels of all signs of all lists, by name; "g1" is part of a name.

| in a file                                                  | rule                                                 |
|------------------------------------------------------------|------------------------------------------------------|
| label "other-sign"; ambiguous, dummy or exterior           | a region to be ignored, no sign and no class         |
| occluded, out of frame, inside another sign                | a sign                                               |
| panorama with xmin > xmax: a sign across the image's seam  | the larger half is the sign, the other is ignored    |
| image without objects                                      | kept                                                 |
| annotation missing, key twice in its list                  | UserError with the count; once                       |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.data.sample import ReadReport
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_flag, a_list, a_number, a_text, a_whole_number, an_object, member, read_json
from perception.data.signs.listing import find_images, place_images, read_keys, split_or_list
from perception.errors import MissingListError, UserError

_RELEASES = ("", "mtsd_v2_fully_annotated", "mtsd_fully_annotated")
_LISTS = {"train": "splits/train.txt", "validation": "splits/val.txt", "test": "splits/test.txt"}
_OTHER = "other-sign"
_IGNORING = ("ambiguous", "dummy", "exterior")


@dataclass(frozen=True)
class _Sign:
    label: str
    pieces: tuple[Box, ...]
    """The sign, and after it the smaller half of one that a panorama's seam cuts."""
    ignored: bool
    where: str


@dataclass(frozen=True)
class _Image:
    where: str
    size: tuple[int, int]
    signs: tuple[_Sign, ...]


def is_mapillary(folder: Path) -> bool:
    """Does the folder look like MTSD?"""
    return _release(folder) is not None


def read_mapillary(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "half-open",
) -> SignFolder:
    """Images of a split, or of the keys in the file `list_name`.

    Raises UserError by the table above, MissingListError where the folder has not this split.
    """
    split, list_name = split_or_list(split, list_name)
    check_corners(corners)
    report = ReadReport()
    root = _release(folder)
    if root is None:
        raise UserError(f"{folder}: no folders annotations/ and splits/ in it; give the folder that holds both")
    list_file = folder / list_name if list_name else root / _LISTS[split]
    if split and not list_file.is_file():
        raise MissingListError(f"{list_file}: no such list, so no images for {split}; name a file of image keys")
    keys = read_keys(list_file, "MTSD list", report)
    if split == "test" and not any((root / _annotation(key)).is_file() for key in keys):
        raise MissingListError(
            f"{list_file}: none of its images has an annotation; MTSD's test labels are not published"
        )
    everywhere = {**keys, **_other_keys(root, list_file)}
    images = _read_annotations(root, keys, everywhere, report)
    classes = sorted({sign.label for image in images.values() for sign in image.signs if not sign.ignored})

    names = find_images(folder, _image_places(folder, root))
    listed = [(names.get(key, f"images/{key}.jpg"), where) for key, where in keys.items()]
    builder = SignFolderBuilder(folder, tuple(classes))
    builder.report = report
    for (name, _), key in zip(place_images(folder, listed, images_required, report), keys, strict=True):
        image = images[key]
        builder.add_image(name, image.where, image.size)
        for sign in image.signs:
            for number, piece in enumerate(sign.pieces):
                box = box_from_corners(piece, corners, sign.where, report)
                builder.add_box(sign.label, box, sign.where, ignored=sign.ignored or number > 0)
    return builder.finish()


def _release(folder: Path) -> Path | None:
    """The folder with annotations/ and splits/: this one, or the one that the archive unpacks to."""
    roots = (folder / name for name in _RELEASES)
    return next((root for root in roots if (root / "annotations").is_dir() and (root / "splits").is_dir()), None)


def _annotation(key: str) -> str:
    return f"annotations/{key}.json"


def _other_keys(root: Path, list_file: Path) -> dict[str, str]:
    """Keys of the official lists, for their classes: a list alone may lack some."""
    others = (root / name for name in _LISTS.values())
    keys: dict[str, str] = {}
    for path in others:
        if path.is_file() and path != list_file:
            keys.update(read_keys(path, "MTSD list", ReadReport()))
    return keys


def _image_places(folder: Path, root: Path) -> list[str]:
    """Folders, relative to the data folder, where images may lie, the likeliest first."""
    archives = sorted(folder.glob("*images*/images"))
    bases = [
        base / images for base in (root, folder) for images in ("images", "images/train", "images/val", "images/test")
    ]
    return [path.relative_to(folder).as_posix() for path in (*bases, *archives)]


def _read_annotations(
    root: Path, wanted: dict[str, str], keys: dict[str, str], report: ReadReport
) -> dict[str, _Image]:
    """Images by key: those `wanted`, and those of `keys` that have an annotation. Only the wanted are reported on."""
    missing = [key for key in wanted if not (root / _annotation(key)).is_file()]
    if missing:
        raise UserError(
            f"{wanted[missing[0]]}: {len(missing)} of {len(wanted)} annotation files are missing, first: "
            f"{', '.join(_annotation(key) for key in missing[:3])}; put them into {root / 'annotations'}"
        )
    images = {key: _read_image(root / _annotation(key), report) for key in wanted}
    unreported = ReadReport()
    for key in keys:
        if key not in wanted and (root / _annotation(key)).is_file():
            images[key] = _read_image(root / _annotation(key), unreported)
    return images


def _read_image(path: Path, report: ReadReport) -> _Image:
    where = str(path)
    raw = an_object(read_json(path, "MTSD annotation", report), where)
    height, width = (a_whole_number(member(raw, side, where), where, side, 1) for side in ("height", "width"))
    is_panorama = a_flag(raw.get("ispano", False), where, "ispano")
    objects = a_list(member(raw, "objects", where), where, "objects")
    signs = [_parse_sign(sign, width, is_panorama, f"{where}: objects[{i}]", report) for i, sign in enumerate(objects)]
    return _Image(where, (height, width), tuple(signs))


def _parse_sign(raw: Any, width: int, is_panorama: bool, where: str, report: ReadReport) -> _Sign:
    label = a_text(member(raw, "label", where), where, "label")
    bbox = member(raw, "bbox", where)
    x1, y1, x2, y2 = (
        a_number(member(bbox, side, f"{where}.bbox"), where, f"bbox.{side}")
        for side in ("xmin", "ymin", "xmax", "ymax")
    )
    properties = an_object(raw.get("properties", {}), f"{where}.properties")
    ignored = label == _OTHER or any(a_flag(properties.get(name, False), where, name) for name in _IGNORING)
    pieces: tuple[Box, ...] = ((x1, y1, x2, y2),)
    if is_panorama and x1 > x2:
        report.note("sign across a panorama's seam: larger half kept, the other ignored", where)
        halves = ((x1, y1, float(width), y2), (0.0, y1, x2, y2))
        pieces = tuple(sorted(halves, key=lambda half: half[0] - half[2]))
    return _Sign(label, pieces, ignored, where)
