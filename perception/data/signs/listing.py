"""Which images a data set lists, where they lie and which part of the data they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from perception.data.images import IMAGE_SUFFIXES, locate_images
from perception.data.sample import ReadReport
from perception.data.signs.fields import a_text, read_text
from perception.errors import UserError, nearest

SPLITS = ("train", "validation", "test")
CUT_SPLITS = (*SPLITS, "all-train")
"""Splits of a format whose validation part is cut from the training part: "all-train" has both."""
LONGEST_FILE_NAME = 255
"""Bytes that file systems allow."""
PARTS = 8
"""One part of so many is held out where a format has no official validation list."""


def check_split(split: str, allowed: Sequence[str] = SPLITS) -> None:
    """Raises UserError where `split` is none of `allowed`."""
    if split not in allowed:
        raise UserError(f'split = "{split}" is unknown{nearest(split, allowed)}')


def split_or_list(split: str, list_name: str, allowed: Sequence[str] = SPLITS) -> tuple[str, str]:
    """(split, "") or ("", list): a list that is named by a split's name is that split.

    >>> split_or_list("train", "validation")
    ('validation', '')
    >>> split_or_list("train", "splits/mine.txt")
    ('', 'splits/mine.txt')
    """
    if list_name and list_name not in allowed:
        return "", list_name
    check_split(list_name or split, allowed)
    return list_name or split, ""


def image_name(value: Any, where: str, field: str) -> str:
    """A name relative to the data set's folder, with plain slashes.

    >>> image_name("/test/2468.jpg", "annotations.json", "path")
    'test/2468.jpg'
    """
    path = PurePosixPath(a_text(value, where, field).replace("\\", "/").lstrip("/"))
    if ".." in path.parts or not path.parts or any(len(part.encode()) > LONGEST_FILE_NAME for part in path.parts):
        raise UserError(f"{where}: field {field} must name an image inside the data folder, got {str(path)!r:.60}")
    return path.as_posix()


def folder_of(folder: Path, file: Path) -> Path:
    """Where the images that a label file names lie, relative to the data folder: there if the file is outside."""
    return file.parent.relative_to(folder) if file.is_relative_to(folder) else Path()


def read_keys(path: Path, what: str, report: ReadReport) -> dict[str, str]:
    """Key → "file:line" of a list with a key a line, in its order; a key that stands twice counts once."""
    keys: dict[str, str] = {}
    for number, line in enumerate(read_text(path, what, report).split("\n"), start=1):
        key, where = line.strip(), f"{path}:{number}"
        if key in keys:
            report.note("image listed twice: kept once", where)
        elif key:
            keys[a_text(key, where, "key")] = where
    if not keys:
        raise UserError(f"{path}: {what} names no image")
    return keys


def find_images(folder: Path, places: Iterable[str]) -> dict[str, str]:
    """Stem → name relative to `folder` of every image in those of the folders `places` that are there.

    The first folder counts where a stem lies in several.
    """
    found: dict[str, str] = {}
    for place in places:
        if (folder / place).is_dir():
            for stem, name in _images_in(folder / place).items():
                found.setdefault(stem, (PurePosixPath(place) / name).as_posix())
    return found


def place_images(
    folder: Path, listed: Sequence[tuple[str, str]], required: bool, report: ReadReport
) -> list[tuple[str, bool]]:
    """(name on disk, is it there) of each listed (name, "file:line"); raises UserError where required and missing."""
    located = locate_images(folder, listed, False, report)
    missing = [entry for entry, name in zip(listed, located, strict=True) if not name]
    if missing and required:
        first = ", ".join(name for name, _ in missing[:3])
        raise UserError(
            f"{missing[0][1]}: {len(missing)} of {len(listed)} listed images are missing, first: {first}; "
            f"put them at these names into {folder}"
        )
    if missing:
        report.note("image is not there: labels kept", missing[0][1], len(missing))
    return [(name or given, bool(name)) for (given, _), name in zip(listed, located, strict=True)]


def note_unlisted(folder: Path, listed: Iterable[str], report: ReadReport) -> None:
    """Count the images that lie beside listed ones and are in no list."""
    stems: dict[str, set[str]] = {}
    for name in listed:
        path = PurePosixPath(name)
        stems.setdefault(path.parent.as_posix(), set()).add(path.stem)
    for place, known in sorted(stems.items()):
        if (folder / place).is_dir():
            unlisted = sorted(name for stem, name in _images_in(folder / place).items() if stem not in known)
            if unlisted:
                first = str(folder / place / unlisted[0]).encode(errors="replace").decode()
                report.note("image without labels: left out", first, len(unlisted))


def _images_in(folder: Path) -> dict[str, str]:
    """Stem → file name of the images in a folder, in the order of their names; of twins the first."""
    images: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            images.setdefault(path.stem, path.name)
    return images
