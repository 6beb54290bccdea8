"""GTSRB: crops of single signs, a CSV line each: `Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId`.

    Final_Training/Images/000CC/{TTTTT_NNNNN.ppm, GT-000CC.csv}     39,209 images, 43 classes
    Final_Test/Images/{NNNNN.ppm, GT-final_test.csv}                12,630 images

and, as many copies have it, Train.csv and Test.csv with a column Path and commas.

A track TTTTT of a class is one physical sign that the car drives towards, so tracks are never cut: every eighth
track of a class, or the last of a class that has two to seven, is for validation.

Corners are half-open by default: the crop has a margin of the same width on every side only if read so.

| in the files                                        | rule                                          |
|-----------------------------------------------------|-----------------------------------------------|
| class in the line differs from the folder's         | the line counts                               |
| file named in several lines                         | one image with several boxes                  |
| image without a line                                | left out                                      |
| image on disk with another suffix (.png for .ppm)   | used                                          |
| class beyond 0..42, no track in a training name     | UserError with file:line                      |
| test lines without ClassId (GT-final_test.test.csv) | UserError: the classes are in another archive |

What happens to boxes outside their image, swapped or empty is in `dataset.repair_box`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from perception.data.sample import ReadReport
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.signs.corners import Box, check_corners
from perception.data.signs.dataset import SignFolder, SignFolderBuilder, box_from_corners
from perception.data.signs.fields import a_number, a_whole_number, listed, read_rows
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

_COLUMNS = ("Width", "Height", "Roi.X1", "Roi.Y1", "Roi.X2", "Roi.Y2", "ClassId")
_TRACK = re.compile(r"(\d+)_\d+\.\w+\Z")
# Where each release keeps the lines of a split; the first that is there counts.
_TRAINING = (
    "Final_Training/Images/*/GT-*.csv",
    "GTSRB/Final_Training/Images/*/GT-*.csv",
    "GTSRB/Training/*/GT-*.csv",
    "Training/*/GT-*.csv",
    "*/GT-*.csv",
    "Train.csv",
)
_TEST_PLACES = ("", "Final_Test/", "Final_Test/Images/", "GTSRB/", "GTSRB/Final_Test/", "GTSRB/Final_Test/Images/")
_TEST = (*(f"{place}GT-final_test.csv" for place in _TEST_PLACES), "Test.csv")
_TEST_WITHOUT_CLASSES = "GT-final_test.test.csv"


@dataclass
class _Crop:
    where: str
    track: tuple[str, str]
    """Folder and number; the number is "" where the file's name has none."""
    size: tuple[int, int]
    signs: list[tuple[int, Box, str]] = field(default_factory=list)
    """(class, box, "file:line")."""


def is_gtsrb(folder: Path) -> bool:
    """Does the folder look like GTSRB?"""
    has_lines = any(any(folder.glob(pattern)) for pattern in (*_TRAINING[:-1], *_TEST[:-1]))
    return has_lines or ((folder / "Train.csv").is_file() and (folder / "Train").is_dir())


def read_gtsrb(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    corners: str = "half-open",
) -> SignFolder:
    """Crops of a split (one of CUT_SPLITS), or of `list_name`: a CSV file, or a folder with such files below it.

    Raises UserError by the table above, MissingListError where the folder has not this split.
    """
    split, list_name = split_or_list(split, list_name, CUT_SPLITS)
    check_corners(corners)
    report = ReadReport()
    crops = _read_crops(folder, _annotation_files(folder, split, list_name), report)
    note_unlisted(folder, crops, report)
    if split in ("train", "validation"):
        validation = _validation_tracks(crops)
        crops = {name: crop for name, crop in crops.items() if (crop.track in validation) == (split == "validation")}
        if not crops:
            raise MissingListError(
                f"{folder}: no class has two tracks, so none is for {split}; use the split all-train"
            )
    builder = SignFolderBuilder(folder, GTSDB_CLASSES)
    builder.report = report
    places = place_images(folder, [(name, crop.where) for name, crop in crops.items()], images_required, report)
    for (name, _), crop in zip(places, crops.values(), strict=True):
        builder.add_image(name, crop.where, crop.size)
        for label, box, where in crop.signs:
            builder.add_box(GTSDB_CLASSES[label], box_from_corners(box, corners, where, report), where)
    return builder.finish()


def _annotation_files(folder: Path, split: str, list_name: str) -> list[Path]:
    if list_name:
        path = folder / list_name
        files = sorted(path.rglob("GT-*.csv")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path}: no GT-*.csv in this folder or below it")
        return files
    patterns = _TEST if split == "test" else _TRAINING
    for pattern in patterns:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    if split == "test" and any(folder.rglob(_TEST_WITHOUT_CLASSES)):
        raise UserError(
            f"{folder}: {_TEST_WITHOUT_CLASSES} has no classes; add GT-final_test.csv of GTSRB_Final_Test_GT.zip"
        )
    raise MissingListError(f"{folder}: no {patterns[0]} nor {patterns[-1]} for {split}; name the GTSRB annotation file")


def _read_crops(folder: Path, files: list[Path], report: ReadReport) -> dict[str, _Crop]:
    """By name relative to `folder`."""
    crops: dict[str, _Crop] = {}
    for path in files:
        place = _image_folder(folder, path)
        for where, row in read_rows(path, "GTSRB annotation file", report, _COLUMNS):
            if "path" in row:
                name = image_name(row["path"], where, "Path")
            elif "filename" in row:
                name = (place / image_name(row["filename"], where, "Filename")).as_posix()
            else:
                raise UserError(f"{where}: column Filename is missing in the header; found {listed(row)}")
            label = a_whole_number(row["classid"], where, "ClassId")
            if label >= len(GTSDB_CLASSES):
                raise UserError(f"{where}: ClassId {label} is unknown; GTSRB has 0 to {len(GTSDB_CLASSES) - 1}")
            holder = Path(name).parent.name
            if holder.isdecimal() and int(holder) != label:
                report.note("class differs from the folder's: the line counts", where)
            height, width = (a_whole_number(row[side], where, side.title(), 1) for side in ("height", "width"))
            crop = crops.setdefault(name, _Crop(where, (holder, _track_number(name)), (height, width)))
            if crop.size != (height, width):
                raise UserError(f"{where}: {name} is {width}x{height} here and {crop.size[1]}x{crop.size[0]} before")
            box = tuple(a_number(row[key], where, key.title()) for key in ("roi.x1", "roi.y1", "roi.x2", "roi.y2"))
            crop.signs.append((label, (box[0], box[1], box[2], box[3]), where))
    if not crops:
        raise UserError(f"{files[0]}: no image in this GTSRB annotation file")
    return crops


def _image_folder(folder: Path, annotation_file: Path) -> Path:
    """Folder of the images that a file names, relative to `folder`: its own, save for a test file beside Images/."""
    place = annotation_file.parent
    for images in (place / "GTSRB/Final_Test/Images", place / "Final_Test/Images", place / "Images"):
        if annotation_file.name.startswith("GT-final_test") and images.is_dir():
            place = images
            break
    return folder_of(folder, place / annotation_file.name)


def _track_number(name: str) -> str:
    match = _TRACK.search(name)
    return match[1] if match else ""


def _validation_tracks(crops: dict[str, _Crop]) -> set[tuple[str, str]]:
    tracks_of_class: defaultdict[str, set[str]] = defaultdict(set)
    for crop in crops.values():
        holder, number = crop.track
        if not number:
            raise UserError(
                f"{crop.where}: no track in the file's name (TTTTT_NNNNN); training images cannot be split by sign"
            )
        tracks_of_class[holder].add(number)
    held_out = set()
    for holder, numbers in tracks_of_class.items():
        tracks = sorted(numbers)
        chosen = tracks[PARTS - 1 :: PARTS] if len(tracks) >= PARTS else tracks[1:][-1:]
        held_out |= {(holder, number) for number in chosen}
    return held_out
