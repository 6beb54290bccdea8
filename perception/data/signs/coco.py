"""COCO detection: one JSON with images, categories and annotations a part; boxes are x, y, width, height, 0-based.

Layouts: annotations/instances_train2017.json with train2017/ or images/, train/_annotations.coco.json among its
images, or one JSON with images/. A part's file is the one that has train, val or test in its name; a single JSON
with neither is for training.

| in the file                                        | rule                                                    |
|----------------------------------------------------|---------------------------------------------------------|
| ids in any order, with gaps, texts                 | classes in the order of the file's categories           |
| iscrowd = 1                                        | ignored region of no class, noted                       |
| two categories of one name                         | one class, noted                                        |
| image without annotations                          | kept                                                    |
| image without width and height                     | size from the image's header                            |
| annotation of an image that is not listed          | dropped, noted                                          |
| annotation id twice                                | both kept, noted                                        |
| image id or file name twice; unknown category      | UserError with file, entry and field                    |
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from perception.data.sample import ReadReport
from perception.data.signs.corners import Box
from perception.data.signs.dataset import SignFolder, SignFolderBuilder
from perception.data.signs.fields import (
    LARGEST_NUMBER,
    a_list,
    a_number,
    a_text,
    a_whole_number,
    an_object,
    member,
    read_json,
    shown,
)
from perception.data.signs.listing import check_split, image_name, note_unlisted, place_images
from perception.errors import MissingListError, UserError

EXACT_CORNERS = "bbox_xyxy"
"""Our own field beside bbox, written where x + width is not x2 to the last bit."""
SPLIT_WORDS = {"train": ("train",), "validation": ("val", "valid", "validation"), "test": ("test",)}
_OTHER_KINDS = ("captions", "person_keypoints", "panoptic", "stuff", "image_info")
_HEAD_BYTES = 1 << 16
_WHAT = "COCO annotation file"


def is_coco(folder: Path) -> bool:
    return any(_looks_like_coco(path) for path in _annotation_files(folder))


def read_coco(folder: Path, split: str = "train", list_name: str = "", images_required: bool = True) -> SignFolder:
    """Images of one annotation file in its order: `list_name`, relative to `folder`, or else that of `split`.

    Raises UserError naming file, entry and field of what is wrong, MissingListError where no file is for the split.
    """
    path = folder / list_name if list_name else _file_of_split(folder, split)
    report = ReadReport()
    # Outlines are most of the official files, and not read.
    raw = an_object(read_json(path, _WHAT, report, unused=("segmentation", "counts")), str(path))
    where = str(path)
    class_of = _categories(a_list(member(raw, "categories", where), where, "categories"), where, report)
    builder = SignFolderBuilder(folder, tuple(dict.fromkeys(class_of.values())))
    builder.report = report

    images = a_list(member(raw, "images", where), where, "images")
    if not images:
        raise UserError(f"{path}: no image in field images; give the file that lists them")
    index_of: dict[Hashable, int] = {}
    names = []
    for index, image in enumerate(images):
        place = f"{path}: images[{index}]"
        number = _identifier(member(image, "id", place), place, "id")
        if number in index_of:
            raise UserError(f"{place}: field id = {shown(number)} stands in images[{index_of[number]}] too")
        index_of[number] = index
        names.append(image_name(member(image, "file_name", place), place, "file_name"))
    annotations = a_list(raw.get("annotations", []), where, "annotations")
    annotations_of = _group(annotations, index_of, where, report)

    prefix = _images_prefix(folder, path, names)
    listed = [(f"{prefix}{name}", f"{path}: images[{index}]") for index, name in enumerate(names)]
    placed = place_images(folder, listed, images_required, report)
    for index, ((name, is_there), (_, place)) in enumerate(zip(placed, listed, strict=True)):
        builder.add_image(name, place, _size(images[index], place, is_there))
        for number in annotations_of[index]:
            _add_annotation(builder, annotations[number], class_of, f"{path}: annotations[{number}]")
    if len(_annotation_files(folder)) == 1:  # else the images may be another part's
        note_unlisted(folder, (name for name, _ in placed), report)
    return builder.finish()


def _add_annotation(
    builder: SignFolderBuilder, annotation: dict[str, Any], class_of: dict[Hashable, str], where: str
) -> None:
    category = _identifier(member(annotation, "category_id", where), where, "category_id")
    crowd = annotation.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise UserError(f"{where}: field iscrowd must be 0 or 1, got {shown(crowd)}")
    if category not in class_of:
        raise UserError(f"{where}: field category_id = {shown(category)} is none of the file's categories")
    if crowd:
        builder.report.note("iscrowd: ignored region", where)
    builder.add_box(class_of[category], _box(annotation, where), where, ignored=bool(crowd))


def _categories(categories: list[Any], path: str, report: ReadReport) -> dict[Hashable, str]:
    """Category id → class."""
    class_of: dict[Hashable, str] = {}
    seen: set[str] = set()
    for index, category in enumerate(categories):
        where = f"{path}: categories[{index}]"
        number = _identifier(member(category, "id", where), where, "id")
        if number in class_of:
            raise UserError(f"{where}: field id = {shown(number)} stands twice among the categories")
        class_of[number] = a_text(member(category, "name", where), where, "name")
        if class_of[number] in seen:
            report.note("two categories of one name: one class", where)
        seen.add(class_of[number])
    if not class_of:
        raise UserError(f"{path}: no class in field categories; give the file that names them")
    return class_of


def _group(annotations: list[Any], index_of: dict[Hashable, int], path: str, report: ReadReport) -> list[list[int]]:
    """For each image the annotations that are its own, by their place in the list."""
    numbers: list[list[int]] = [[] for _ in index_of]
    ids: set[Hashable] = set()
    for number, annotation in enumerate(annotations):
        where = f"{path}: annotations[{number}]"
        image = _identifier(member(annotation, "image_id", where), where, "image_id")
        if "id" in annotation:
            own = _identifier(annotation["id"], where, "id")
            if own in ids:
                report.note("annotation id stands twice: both kept", where)
            ids.add(own)
        if image in index_of:
            numbers[index_of[image]].append(number)
        else:
            report.note("annotation of an image that is not listed: dropped", where)
    return numbers


def _identifier(value: Any, where: str, field: str) -> Hashable:
    """Ids are numbers or texts, and those of official crowds have twelve digits."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UserError(f"{where}: field {field} must be a whole number or a text, got {shown(value)}")
    return value


def _box(annotation: dict[str, Any], where: str) -> Box:
    box = member(annotation, "bbox", where)
    if not isinstance(box, list) or len(box) != 4:
        raise UserError(f"{where}: field bbox must be [x, y, width, height], got {shown(box)}")
    x, y, width, height = _numbers(box, where, "bbox")
    corners = annotation.get(EXACT_CORNERS)
    if isinstance(corners, list) and len(corners) == 4:
        x1, y1, x2, y2 = _numbers(corners, where, EXACT_CORNERS)
        if max(abs(x1 - x), abs(y1 - y), abs(x2 - x - width), abs(y2 - y - height)) < 1e-6:
            return x1, y1, x2, y2
    return x, y, x + width, y + height


def _numbers(values: list[Any], where: str, field: str) -> list[float]:
    # Nearly every box passes the first test, and a file may hold a million.
    if all(type(value) in (int, float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER for value in values):
        return values
    return [a_number(value, where, f"{field}[{index}]") for index, value in enumerate(values)]


def _size(image: dict[str, Any], where: str, is_there: bool) -> tuple[int, int] | None:
    """(height, width) that the file tells, None where the image has to."""
    if image.get("height") is None and image.get("width") is None and is_there:
        return None
    height, width = (a_whole_number(member(image, name, where), where, name, 1) for name in ("height", "width"))
    return height, width


def _file_of_split(folder: Path, split: str) -> Path:
    check_split(split)
    files = [path for path in _annotation_files(folder) if _looks_like_coco(path)]
    if not files:
        raise UserError(f"{folder}: no COCO annotation file in it or its annotations/; give the folder that has one")
    words = {name: [path for path in files if _words(path) & set(own)] for name, own in SPLIT_WORDS.items()}
    found = words[split]
    if split == "train" and not found:
        found = [path for path in files if not any(path in named for named in words.values())]
    names = ", ".join(path.relative_to(folder).as_posix() for path in found or files)
    if len(found) > 1:
        raise UserError(f"{folder}: several annotation files are for {split}: {names:.200}; name the one to read")
    if not found:
        raise MissingListError(f"{folder}: no annotation file is for {split}; there is {names:.200}")
    return found[0]


def _annotation_files(folder: Path) -> list[Path]:
    found: Iterable[Path] = (
        *sorted(folder.glob("*.json")),
        *sorted(folder.glob("annotations/*.json")),
        *sorted(folder.glob("*/_annotations.coco.json")),
    )
    return [path for path in found if not path.name.startswith(_OTHER_KINDS)]


def _looks_like_coco(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and any(
        key in head for key in (b'"images"', b'"annotations"', b'"categories"')
    )


def _words(path: Path) -> set[str]:
    name = path.parent.name if path.name == "_annotations.coco.json" else path.stem
    return set(re.split(r"[^a-z]+", name.lower()))


def _images_prefix(folder: Path, path: Path, names: list[str]) -> str:
    """What stands before the names of the images: the first folder that has one of the first of them."""
    part = path.stem.removeprefix("instances_")
    beside = path.parent.relative_to(folder).as_posix() if path.is_relative_to(folder) else "."
    for place in (beside, f"images/{part}", part, "images", f"{beside}/images", "JPEGImages", "."):
        if any((folder / place / name).is_file() for name in names[:20]):
            return "" if place == "." else f"{Path(place).as_posix()}/"
    return ""
