"""`data check`: what a lane or sign data set holds, what was wrong in it, and whether it can be trained on.

python -m pipelines data check FOLDER [--format F] [--list L] [--class-map M] [--corners C] [--decode] [--json FILE]

Exit code 0: sound, or repaired by the rules stated for each kind of anomaly; 2: unusable.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perception.errors import MissingListError, UserError, nearest
from perception.run_folder import check_folder_of, write_json

if TYPE_CHECKING:
    from perception.data.sample import LaneDataset, LaneTruth
    from perception.data.signs.dataset import SignFolder
    from perception.data.signs.sample import SignTruth

SPLITS = ("train", "validation", "test")
BOX_SIZES = ("<16", "16-32", "32-96", ">96")
_OBJECT_BINS = ((0, "0"), (1, "1"), (2, "2"), (3, "3"), (4, "4"), (5, "5-9"), (10, "10-19"), (20, "20-49"), (50, "50+"))
_MAX_SIZES_SHOWN = 5

Verdict = Literal["sound", "repaired", "unusable"]


@dataclass
class Anomaly:
    what: str
    count: int
    first: str
    """Where it was met first, as file:line; of an unusable image, what is wrong with it."""
    unusable: bool = False


@dataclass
class SplitCheck:
    """One part of a data set."""

    split: str
    images: int = 0
    objects: int = 0
    ignored_regions: int = 0
    images_by_size: dict[str, int] = field(default_factory=dict)
    """WIDTHxHEIGHT → images."""
    images_by_objects: dict[str, int] = field(default_factory=dict)
    boxes_by_size: dict[str, int] = field(default_factory=dict)
    """Bin of the square root of the area in pixels → boxes; empty for lanes."""
    box_size_percentiles: tuple[float, float, float] | None = None
    """5, 50 and 95 % of the square root of the area in pixels."""
    objects_by_class: dict[str, int] = field(default_factory=dict)
    """Signs: of each class; lanes: of each category that the data set names."""
    anomalies: list[Anomaly] = field(default_factory=list)


@dataclass
class DataCheck:
    folder: str
    format: str
    objects: Literal["signs", "lanes"]
    splits: list[SplitCheck]
    notes: list[str]
    """Parts that the data set has no list for."""
    causes: list[str]
    """Why it is unusable."""

    @property
    def verdict(self) -> Verdict:
        if self.causes:
            return "unusable"
        return "repaired" if any(split.anomalies for split in self.splits) else "sound"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="look at a data set: counts, sizes, anomalies, a verdict")
    parser.add_argument("folder", type=Path, help="the data set in its official layout")
    parser.add_argument(
        "--format",
        default="auto",
        help="auto; for lanes tusimple, culane, llamas or curvelanes; for signs gtsdb, gtsrb, tt100k, mapillary, lisa, "
        "bdd100k, coco, yolo or voc",
    )
    parser.add_argument(
        "--list",
        default="",
        metavar="L",
        help="label or list file relative to the folder, or train, validation or test; without it all three parts",
    )
    parser.add_argument("--class-map", default="", metavar="M", help="TOML file, or gtsdb-superclasses")
    parser.add_argument(
        "--corners",
        default="",
        help="half-open, inclusive, one-based-half-open or one-based-inclusive, where labels differ from the format",
    )
    parser.add_argument("--decode", action="store_true", help="decode every image in full, not only its header")
    parser.add_argument("--labels-only", action="store_true", help="images may be missing and are not looked at")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")


def run(options: argparse.Namespace) -> int:
    """Print what was found; 0 where the data set is sound or repaired, 2 where it is unusable."""
    check_folder_of("--json", options.json)
    if options.decode and options.labels_only:
        raise UserError("--decode and --labels-only exclude each other: give one")
    check = check_data(
        options.folder,
        options.format,
        list_name=options.list,
        class_map=options.class_map,
        corners=options.corners,
        decode=options.decode,
        labels_only=options.labels_only,
    )
    print("\n".join(lines(check)))
    if options.json is not None:
        write_json(options.json, {**dataclasses.asdict(check), "verdict": check.verdict})
    return 2 if check.verdict == "unusable" else 0


def check_data(
    folder: Path,
    format: str = "auto",
    list_name: str = "",
    class_map: str = "",
    corners: str = "",
    decode: bool = False,
    labels_only: bool = False,
) -> DataCheck:
    """Read a data set, or one list of it, in whole.

    What makes it unusable is in `causes`. Raises UserError where nothing can be looked at: no such folder, format or
    option.
    """
    # NumPy and OpenCV are imported here so that --help answers at once.
    from perception.data import open as lanes
    from perception.data.signs import open as signs
    from perception.data.signs.class_map import load_class_map
    from perception.data.signs.corners import check_corners

    if not folder.is_dir():
        raise UserError(f"{folder}: data folder does not exist; give the folder that holds the data set")
    formats = (*lanes.FORMATS, *signs.FORMATS[1:])
    if format not in formats:
        raise UserError(f'--format "{format}" is unknown{nearest(format, formats)}')
    if class_map:
        load_class_map(class_map)  # A mistake in it is none of the data set's.
    if corners:
        check_corners(corners)
    if format == "auto":
        format = signs.find_sign_format(folder) or _lane_format(folder, list_name, formats)
    is_lane = format in lanes.FORMATS
    if is_lane and (class_map or corners):
        raise UserError(f"{'--class-map' if class_map else '--corners'} is for signs, {format} has lanes; leave it out")

    def open_split(split: str) -> LaneDataset | SignFolder:
        name = list_name or split
        if is_lane:
            return lanes.open_lane_dataset(folder, format, list_name, split, images_required=not labels_only)
        return signs.open_sign_dataset(
            folder, format, name, class_map=class_map, images_required=not labels_only, corners=corners
        )

    check = DataCheck(str(folder), format, "lanes" if is_lane else "signs", [], [], [])
    places: dict[str, str] = {}
    for split in [list_name] if list_name else SPLITS:
        try:
            dataset = open_split(split)
        except MissingListError as error:
            check.notes.append(f"{split}: {error}")
            continue
        except UserError as error:
            if str(error) not in check.causes:
                check.causes.append(str(error))
            continue
        part = _check_split(split, dataset, folder, decode, labels_only, places)
        check.splits.append(part)
        check.causes += [f"{part.split}: {a.count} x {a.what}" for a in part.anomalies if a.unusable]
    if check.splits and not any(part.objects for part in check.splits):
        check.causes.append(f"no {check.objects} in it")
    if not check.splits and not check.causes:
        check.causes.append("no part of it has a list; name one by --list")
    return check


def _lane_format(folder: Path, list_name: str, formats: Iterable[str]) -> str:
    from perception.data.open import detect_format

    try:
        return detect_format(folder, list_name)
    except UserError:
        known = ", ".join(name for name in formats if name != "auto")
        raise UserError(f"{folder}: not one data set in a known layout; give --format, one of {known}") from None


def _check_split(
    split: str, dataset: LaneDataset | SignFolder, folder: Path, decode: bool, labels_only: bool, places: dict[str, str]
) -> SplitCheck:
    """`places` gathers image name → part, over the parts."""
    from perception.data.sample import LaneTruth
    from perception.data.signs.dataset import SignFolder

    classes = dataset.classes if isinstance(dataset, SignFolder) else ()
    part = SplitCheck(split, images=len(dataset))
    part.anomalies = [
        Anomaly(what, count, dataset.report.examples[what]) for what, count in sorted(dataset.report.anomalies.items())
    ]
    part.objects_by_class.update(dict.fromkeys(classes, 0))
    sides = array("d")
    faults: list[str] = []
    shared: dict[str, list[str]] = {}
    for index in range(len(dataset)):
        try:
            truth = dataset.truth(index)
            if isinstance(truth, LaneTruth):
                _count_lanes(part, truth)
            else:
                _count_signs(part, truth, classes, sides)
                if not decode and not labels_only:
                    _check_size(folder / truth.name, truth)
            if decode:
                dataset.sample(index)
        except UserError as error:
            faults.append(str(error))
            continue
        if places.setdefault(truth.name, split) != split:
            shared.setdefault(places[truth.name], []).append(truth.name)
    _count_boxes(part, sides)
    if faults:
        part.anomalies.append(Anomaly("image that cannot be used", len(faults), faults[0], unusable=True))
    for other, names in shared.items():
        part.anomalies.append(Anomaly(f"image that is in {other} too: kept in both", len(names), names[0]))
    return part


def _count_image(part: SplitCheck, height: int, width: int, num_objects: int) -> None:
    part.objects += num_objects
    _add(part.images_by_size, f"{width}x{height}")
    _add(part.images_by_objects, next(name for lowest, name in reversed(_OBJECT_BINS) if num_objects >= lowest))


def _add(counts: dict[str, int], name: str, count: int = 1) -> None:
    counts[name] = counts.get(name, 0) + count


def _count_lanes(part: SplitCheck, truth: LaneTruth) -> None:
    _count_image(part, truth.height, truth.width, len(truth.lanes))
    if truth.category is not None:
        _add(part.objects_by_class, truth.category, len(truth.lanes))


def _count_signs(part: SplitCheck, truth: SignTruth, classes: tuple[str, ...], sides: array[float]) -> None:
    _count_image(part, truth.height, truth.width, len(truth.boxes))
    part.ignored_regions += len(truth.ignored)
    for (x1, y1, x2, y2), label in zip(truth.boxes.tolist(), truth.labels.tolist(), strict=True):
        _add(part.objects_by_class, classes[label])
        sides.append(math.sqrt((x2 - x1) * (y2 - y1)))


def _count_boxes(part: SplitCheck, sides: array[float]) -> None:
    """`sides`: the square root of each box's area."""
    import numpy as np

    if not sides:
        return
    values = np.asarray(sides)
    small, medium, large = values < 16, values < 32, values <= 96
    counts = (small.sum(), (medium & ~small).sum(), (large & ~medium).sum(), (~large).sum())
    part.boxes_by_size.update(dict(zip(BOX_SIZES, map(int, counts), strict=True)))
    low, middle, high = np.percentile(values, (5, 50, 95)).tolist()
    part.box_size_percentiles = (low, middle, high)


def _check_size(path: Path, truth: SignTruth) -> None:
    from perception.data.images import image_size

    height, width = image_size(path)
    if (height, width) != (truth.height, truth.width):
        raise UserError(f"{path}: image is {width}x{height}, its labels are for {truth.width}x{truth.height}")


def lines(check: DataCheck) -> list[str]:
    """The result as a table with a column a part, the anomalies, and a verdict."""
    parts = check.splits
    shown = [f"{check.folder}: {check.format}"]
    if parts:
        shown += _table(check.objects, parts)
    for part in parts:
        shown += [f"{part.split}: {a.count} x {a.what} (first: {a.first})" for a in part.anomalies]
    shown += [f"not there: {note}" for note in check.notes]
    if check.verdict == "unusable":
        shown += [*(f"wrong: {cause}" for cause in check.causes), "verdict: unusable"]
    elif check.verdict == "repaired":
        count = sum(anomaly.count for part in parts for anomaly in part.anomalies)
        shown.append(f"verdict: repaired, usable; {count} anomalies, each treated as its line says")
    else:
        shown.append("verdict: sound")
    return shown


def _table(objects: str, parts: Sequence[SplitCheck]) -> list[str]:
    rows: list[tuple[str, Sequence[object]]] = [
        ("", [part.split for part in parts]),
        ("images", [part.images for part in parts]),
        (objects, [part.objects for part in parts]),
    ]
    if any(part.ignored_regions for part in parts):
        rows.append(("ignored regions", [part.ignored_regions for part in parts]))
    sizes = sum((Counter(part.images_by_size) for part in parts), Counter[str]())
    common = [size for size, _ in sizes.most_common(_MAX_SIZES_SHOWN)]
    rows.append(("images of size", []))
    rows += [(f"  {size}", [part.images_by_size.get(size, 0) for part in parts]) for size in common]
    if len(sizes) > len(common):
        others = [part.images - sum(part.images_by_size.get(size, 0) for size in common) for part in parts]
        rows.append((f"  {len(sizes) - len(common)} other sizes", others))
    rows.append((f"images with so many {objects}", []))
    used = [name for _, name in _OBJECT_BINS if any(name in part.images_by_objects for part in parts)]
    rows += [(f"  {name}", [part.images_by_objects.get(name, 0) for part in parts]) for name in used]
    if any(part.box_size_percentiles for part in parts):
        rows.append(("boxes of size (square root of the area, pixels)", []))
        rows += [(f"  {name}", [part.boxes_by_size.get(name, 0) for part in parts]) for name in BOX_SIZES]
        rows.append(("  5 / 50 / 95 %", [_percentiles(part) for part in parts]))
    classes = dict.fromkeys(name for part in parts for name in part.objects_by_class)
    if classes:
        rows.append((f"{objects} of class" if objects == "signs" else f"{objects} of category", []))
        rows += [(f"  {name}", [part.objects_by_class.get(name, 0) for part in parts]) for name in classes]
    return _aligned(rows)


def _percentiles(part: SplitCheck) -> str:
    return " / ".join(f"{value:.0f}" for value in part.box_size_percentiles or ())


def _aligned(rows: Iterable[tuple[str, Sequence[object]]]) -> list[str]:
    texts = [(name, [str(value) for value in values]) for name, values in rows]
    first = max(len(name) for name, values in texts if values)
    width = max(len(value) for _, values in texts for value in values)
    return [(f"{name:{first}}" + "".join(f"  {value:>{width}}" for value in values)).rstrip() for name, values in texts]
