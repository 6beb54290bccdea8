"""Open a lane data set in whichever official layout it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perception.data.bdd100k_lanes import is_bdd100k_lanes, read_bdd100k_lanes
from perception.data.culane import TEST_SPLIT_FOLDER, CulaneDataset
from perception.data.curvelanes import is_curvelanes, read_curvelanes
from perception.data.llamas import is_llamas, read_llamas
from perception.data.openlane import is_openlane, read_openlane
from perception.data.sample import LaneDataset
from perception.data.tusimple import TusimpleDataset
from perception.data.vil100 import is_vil100, read_vil100
from perception.errors import MissingListError, UserError, nearest

# Formats of JSON labels: how a folder of each is recognised and read.
_JSON_FORMATS: dict[str, tuple[Callable[[Path], bool], Callable[[Path, str, str, bool], LaneDataset]]] = {
    "llamas": (is_llamas, read_llamas),
    "curvelanes": (is_curvelanes, read_curvelanes),
    "openlane": (is_openlane, read_openlane),
    "vil100": (is_vil100, read_vil100),
    "bdd100k_lanes": (is_bdd100k_lanes, read_bdd100k_lanes),
}
FORMATS = ("auto", "tusimple", "culane", *_JSON_FORMATS)
SPLITS = ("train", "validation", "test")

# The first alternative of which a file is there, every file of it that is. TuSimple has no official
# validation list: 0531 is what most published work holds out.
_OFFICIAL_LISTS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("tusimple", "train"): (("label_data_0313.json", "label_data_0601.json"),),
    ("tusimple", "validation"): (("label_data_0531.json",),),
    ("tusimple", "test"): (("test_label.json",),),
    ("culane", "train"): (("list/train_gt.txt",), ("list/train.txt",)),
    ("culane", "validation"): (("list/val_gt.txt",), ("list/val.txt",)),
    ("culane", "test"): ((TEST_SPLIT_FOLDER.as_posix(),), ("list/test.txt",)),
}
_LIST_SUFFIX = {"tusimple": ".json", "culane": ".txt"}


def open_lane_dataset(
    folder: str | Path,
    format: str = "auto",
    list_name: str = "",
    split: str = "train",
    images_required: bool = True,
) -> LaneDataset:
    """Open the folder of a lane data set in one of `FORMATS`.

    `list_name` is a label file (TuSimple, BDD100K), list file (CULane, CurveLanes, VIL-100) or a folder of them
    (LLAMAS, OpenLane: of labels), relative to `folder`; one of "train", "validation", "test" means that split's
    official one; empty: that of `split`. What the reader repaired or dropped is in `.report`. Raises UserError for a
    missing or unknown folder, a missing or empty list, missing labels and, if required, missing images; its kind
    MissingListError where no list was named and the folder has none for the split.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{root}: data folder does not exist; give the folder that holds the data set")
    if format not in FORMATS:
        raise UserError(f'data.format = "{format}" is unknown{nearest(format, FORMATS)}')
    name = detect_format(root, list_name) if format == "auto" else format
    if name in _JSON_FORMATS:
        return _JSON_FORMATS[name][1](root, split, list_name, images_required)
    files = _list_files(root, name, list_name, split)
    if name == "tusimple":
        return TusimpleDataset(root, files, images_required)
    return CulaneDataset(root, files, images_required)


def detect_format(folder: Path, list_name: str = "") -> str:
    """The format of what lies in the folder; of TuSimple and CULane the list's suffix tells first."""
    for name, (is_format, _) in _JSON_FORMATS.items():
        if is_format(folder):
            return name
    by_suffix = [name for name, suffix in _LIST_SUFFIX.items() if Path(list_name).suffix == suffix]
    if by_suffix:
        return by_suffix[0]
    has_tusimple = any(folder.glob("label_data_*.json")) or any(folder.glob("test_label*.json"))
    has_culane = (folder / "list").is_dir() or any(folder.glob("driver_*"))
    if has_tusimple == has_culane:
        found = "both label_data_*.json and list/" if has_tusimple else "neither label_data_*.json nor list/"
        raise UserError(f"{folder}: {found} in it; set data.format to tusimple or culane")
    return "tusimple" if has_tusimple else "culane"


def _list_files(folder: Path, format: str, list_name: str, split: str) -> list[Path]:
    suffix = _LIST_SUFFIX[format]
    if list_name and list_name not in SPLITS:
        return _files_at(folder / list_name, suffix)
    wanted = list_name or split
    if wanted not in SPLITS:
        raise UserError(f'split = "{wanted}" is unknown{nearest(wanted, SPLITS)}')
    alternatives = _OFFICIAL_LISTS[format, wanted]
    for alternative in alternatives:
        present = [folder / name for name in alternative if (folder / name).exists()]
        if present:
            return [file for path in present for file in _files_at(path, suffix)]
    names = " or ".join(name for alternative in alternatives for name in alternative)
    beside = [*sorted(folder.glob(f"*{suffix}")), *sorted(folder.glob(f"list/*{suffix}"))]
    others = [path.relative_to(folder).as_posix() for path in beside]
    hint = f"; files there: {', '.join(others[:4])}" if others else ""
    raise MissingListError(f"{folder}: no {names} for {wanted}; name the {format} list or label file{hint}")


def _files_at(path: Path, suffix: str) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob(f"*{suffix}"))
        if not files:
            raise UserError(f"{path}: no *{suffix} list in this folder")
        return files
    if not path.is_file():
        raise UserError(f"{path}: list file does not exist; give a path relative to the data folder")
    return [path]
