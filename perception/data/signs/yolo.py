"""YOLO text labels: `class cx cy width height` a line, in shares of the image's size, in labels/ beside images/.

Classes have their names from data.yaml (names), classes.txt or obj.names. A part is what data.yaml says of train, val
or test: a folder of images, a text file of image paths, or several; without it train.txt, images/train or
train/images and the like; else all images are for training.

| in the folder                                            | rule                                             |
|----------------------------------------------------------|--------------------------------------------------|
| empty label file                                         | an image without signs                           |
| no label file                                            | the same, noted; for every image: UserError      |
| label file without image                                 | left out, noted                                  |
| outline instead of a box (7 and more values)             | the box around it, noted                         |
| blank line; byte order mark                              | skipped, noted                                   |
| image named twice in a list                              | kept once, noted                                 |
| data.yaml from another computer (path, ../train/images)  | looked for in the data folder, noted             |
| 6 values (a prediction's score), pixels, unknown class   | UserError with file:line and field               |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perception.data.images import IMAGE_SUFFIXES
from perception.data.sample import ReadReport
from perception.data.signs.corners import Box
from perception.data.signs.dataset import SignFolder, SignFolderBuilder
from perception.data.signs.fields import a_number, a_text, a_whole_number, read_text, shown
from perception.data.signs.listing import check_split, read_keys
from perception.errors import MissingListError, UserError

CLASS_FILES = ("classes.txt", "obj.names", "labels/classes.txt")
_WORDS = {"train": ("train",), "validation": ("val", "valid", "validation"), "test": ("test",)}
_NOT_LABELS = ("classes.txt", "train.txt", "val.txt", "valid.txt", "validation.txt", "test.txt")
_LOWEST, _HIGHEST = -1.0, 2.0
"""Shares beyond these are no slips of a labeller: the file is in pixels."""


def is_yolo(folder: Path) -> bool:
    return _yaml_file(folder) is not None or any((folder / name).is_file() for name in CLASS_FILES)


def read_yolo(folder: Path, split: str = "train", list_name: str = "", images_required: bool = True) -> SignFolder:
    """Images of one part in the order of their names, or of the list that tells them.

    `list_name`, relative to `folder`, is a text file of image paths or a folder of images. Images are always
    required, for boxes are in shares of their size. Raises UserError for what is wrong, with file, line and field;
    MissingListError where the data set has no such part.
    """
    report = ReadReport()
    yaml_file = _yaml_file(folder)
    settings = _read_yaml(yaml_file, report) if yaml_file else {}
    classes = _yaml_classes(settings, yaml_file) if yaml_file else _text_classes(folder, report)
    if list_name:
        places = [folder / list_name]
    elif yaml_file:
        places = _places_of_yaml(settings, yaml_file, folder, split, report)
    else:
        places = _places(folder, split)
    builder = SignFolderBuilder(folder, classes)
    builder.report = report
    images = [image for place in places for image in _images_at(folder, place, report)]
    label_files = [_label_file(image) for image, _ in images]
    missing = [path for path in label_files if not path.is_file()]
    if len(missing) == len(images):
        raise UserError(
            f"{missing[0]}: label file is missing, as of all {len(images)} images; put labels/ beside images/"
        )
    taken: set[Path] = set()
    for (image, where), label_file in zip(images, label_files, strict=True):
        if label_file in taken:
            report.note("two images of one label file: both kept", where)
        taken.add(label_file)
        builder.add_image(_name(image, folder), where)
        if label_file.is_file():
            _add_labels(builder, label_file, classes)
        else:
            report.note("image without label file: an image without signs", str(image))
    if all(place.is_dir() for place in places):
        _note_labels_without_image(label_files, report)
    return builder.finish()


def _add_labels(builder: SignFolderBuilder, path: Path, classes: tuple[str, ...]) -> None:
    height, width = builder.size
    for number, line in enumerate(read_text(path, "YOLO label file", builder.report).splitlines(), start=1):
        where = f"{path}:{number}"
        values = line.split()
        if not values:
            builder.report.note("blank line: skipped", where)
            continue
        if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
            raise UserError(f"{where}: {len(values)} values, 5 are wanted: class cx cy width height, got {line[:60]!r}")
        label = a_whole_number(values[0], where, "class")
        if label >= len(classes):
            raise UserError(f"{where}: field class = {label} is unknown; there are {len(classes)} classes, from 0")
        shares = [_share(value, where, index) for index, value in enumerate(values[1:], start=2)]
        if len(shares) > 4:
            builder.report.note("outline: the box around it", where)
            x1, x2, y1, y2 = min(shares[::2]), max(shares[::2]), min(shares[1::2]), max(shares[1::2])
        else:
            cx, cy, box_width, box_height = shares
            x1, x2, y1, y2 = cx - box_width / 2, cx + box_width / 2, cy - box_height / 2, cy + box_height / 2
        box: Box = (x1 * width, y1 * height, x2 * width, y2 * height)
        builder.add_box(classes[label], box, where)


def _share(text: str, where: str, column: int) -> float:
    value = a_number(text, where, f"column {column}")
    if not _LOWEST <= value <= _HIGHEST:
        raise UserError(f"{where}: field column {column} = {text:.40} must be a share of the image's size, 0 to 1")
    return value


def _yaml_file(folder: Path) -> Path | None:
    """data.yaml, or the first other one that names classes."""
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")], key=lambda path: (path.stem != "data", path.name))
    return next((path for path in files if path.is_file() and b"names" in path.read_bytes()[:65536]), None)


def _read_yaml(path: Path, report: ReadReport) -> dict[str, Any]:
    import yaml  # Only this format needs it.

    text = read_text(path, "YOLO data file", report)
    try:
        # Plain texts only: no dates, no truth values from a class called no, no objects.
        settings = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{place}: not YAML ({getattr(error, 'problem', None) or 'unreadable'})") from None
    except (RecursionError, ValueError):
        raise UserError(f"{path}: no usable YAML (nested too deep, or a value that is none)") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path}: must hold the fields names, train and val, got {shown(settings)}")
    return settings


def _yaml_classes(settings: dict[str, Any], path: Path) -> tuple[str, ...]:
    names = settings.get("names")
    if isinstance(names, dict):
        if set(names) != {str(number) for number in range(len(names))}:
            raise UserError(f"{path}: field names must number the classes from 0 without gaps")
        names = [names[str(number)] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise UserError(f"{path}: field names must list the classes, got {shown(names)}")
    if "nc" in settings and a_whole_number(settings["nc"], str(path), "nc") != len(names):
        raise UserError(f"{path}: field nc = {settings['nc']}, but names has {len(names)} classes")
    return _distinct([a_text(name, str(path), f"names[{number}]") for number, name in enumerate(names)], str(path))


def _text_classes(folder: Path, report: ReadReport) -> tuple[str, ...]:
    path = next((folder / name for name in CLASS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder}: neither data.yaml nor classes.txt in it; one has to name the classes")
    lines = [line.strip() for line in read_text(path, "list of classes", report).splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return _distinct(lines, str(path))


def _distinct(names: list[str], path: str) -> tuple[str, ...]:
    for number, name in enumerate(names):
        if not name:
            raise UserError(f"{path}: class {number} has no name; each class needs one, for labels count them")
        if names.index(name) != number:
            raise UserError(f'{path}: class "{name}" stands twice, as {names.index(name)} and {number}; rename one')
    if not names:
        raise UserError(f"{path}: no class in it; it names a class a line, from 0")
    return tuple(names)


def _places_of_yaml(settings: dict[str, Any], path: Path, folder: Path, split: str, report: ReadReport) -> list[Path]:
    check_split(split)
    key = next((word for word in _WORDS[split] if settings.get(word)), None)
    if key is None:
        raise MissingListError(f"{path}: no field {_WORDS[split][0]} in it, so no images are for {split}")
    values = settings[key] if isinstance(settings[key], list) else [settings[key]]
    base = folder
    if settings.get("path"):
        base = folder / a_text(settings["path"], str(path), "path")
        if not base.is_dir():
            report.note("path of the data file is not here: the data folder is used", str(path))
            base = folder
    places = []
    for value in values:
        text = a_text(value, str(path), key)
        # Exports write ../train/images for what lies beside the file.
        tried = [base / text, folder / text, *([folder / text[3:]] if text.startswith("../") else [])]
        place = next((place for place in tried if place.exists()), None)
        if place is None:
            raise UserError(f"{path}: field {key} = {shown(value)} does not exist in {base}; mend the path")
        if place == tried[-1] and len(tried) == 3:
            report.note("path of the data file begins with ../: looked for beside it", str(path))
        places.append(place)
    return places


def _places(folder: Path, split: str) -> list[Path]:
    check_split(split)
    patterns = ("{}.txt", "images/{}", "{}/images")
    of = {name: [folder / p.format(word) for word in words for p in patterns] for name, words in _WORDS.items()}
    found = next((place for place in of[split] if place.exists()), None)
    if found is None and split == "train" and not any(place.exists() for places in of.values() for place in places):
        found = folder / "images" if (folder / "images").is_dir() else folder
    if found is None:
        raise MissingListError(
            f"{folder}: no data.yaml, {_WORDS[split][0]}.txt or images/{_WORDS[split][0]} for {split}"
        )
    return [found]


def _images_at(folder: Path, place: Path, report: ReadReport) -> list[tuple[Path, str]]:
    """(image, where it is listed) of a folder or of a text file of paths."""
    if place.is_dir():
        images = sorted(path for path in place.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
        if not images:
            raise UserError(f"{place}: no image in this folder; it should hold those of data.yaml's field")
        return [(path, str(path)) for path in images]
    keys = read_keys(place, "list of images", report)
    # Paths in a list are relative to the list, or to the data set's folder.
    images_listed = [(key, _first_file(place.parent / key, folder / key)) for key in keys]
    missing = [key for key, image in images_listed if image is None]
    if missing:
        raise UserError(
            f"{keys[missing[0]]}: image {missing[0]:.80} is missing, and {len(missing)} of {len(keys)} in all"
        )
    return [(image, keys[key]) for key, image in images_listed if image is not None]


def _first_file(*paths: Path) -> Path | None:
    with contextlib.suppress(OSError):  # a name that is too long
        return next((path for path in paths if path.is_file()), None)
    return None


def _label_file(image: Path) -> Path:
    """labels/x.txt for images/x.jpg, or x.txt beside x.jpg where no folder is called images."""
    parts = list(image.with_suffix(".txt").parts)
    for index in reversed(range(len(parts) - 1)):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    return Path(*parts)


def _name(image: Path, folder: Path) -> str:
    path, root = os.path.normpath(image), os.path.normpath(folder)
    return Path(path).relative_to(root).as_posix() if Path(path).is_relative_to(root) else path


def _note_labels_without_image(label_files: Iterable[Path], report: ReadReport) -> None:
    known = set(label_files)
    for parent in sorted({path.parent for path in known if path.parent.is_dir()}):
        alone = sorted(set(parent.glob("*.txt")) - known)
        alone = [path for path in alone if path.name not in _NOT_LABELS]
        if alone:
            report.note("label file without image: left out", str(alone[0]), len(alone))
