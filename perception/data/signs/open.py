"""Open a sign data set in whichever layout it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perception.data.signs.bdd100k import is_bdd100k, read_bdd100k
from perception.data.signs.class_map import apply_class_map, load_class_map
from perception.data.signs.coco import is_coco, read_coco
from perception.data.signs.corners import CORNERS
from perception.data.signs.dataset import SignFolder
from perception.data.signs.gtsdb import is_gtsdb, read_gtsdb
from perception.data.signs.gtsrb import is_gtsrb, read_gtsrb
from perception.data.signs.lisa import is_lisa, read_lisa
from perception.data.signs.mapillary import is_mapillary, read_mapillary
from perception.data.signs.tt100k import is_tt100k, read_tt100k
from perception.data.signs.voc import is_voc, read_voc
from perception.data.signs.yolo import is_yolo, read_yolo
from perception.errors import UserError, nearest

# How a format is recognised and read, in the order of detection.
_FORMATS: dict[str, tuple[Callable[[Path], bool], Callable[..., SignFolder]]] = {
    "gtsdb": (is_gtsdb, read_gtsdb),
    "gtsrb": (is_gtsrb, read_gtsrb),
    "lisa": (is_lisa, read_lisa),
    "bdd100k": (is_bdd100k, read_bdd100k),
    "mapillary": (is_mapillary, read_mapillary),
    "tt100k": (is_tt100k, read_tt100k),
    "coco": (is_coco, read_coco),
    "yolo": (is_yolo, read_yolo),
    "voc": (is_voc, read_voc),
}
_GENERAL = ("coco", "yolo", "voc")
_WITHOUT_CORNERS = {"coco": "x, y, width, height", "yolo": "shares of the image's size"}
FORMATS = ("auto", *_FORMATS)
SPLITS = ("train", "validation", "test")


def open_sign_dataset(
    folder: str | Path,
    format: str = "auto",
    list_name: str = "",
    split: str = "train",
    class_map: str = "",
    images_required: bool = True,
    corners: str = "",
) -> SignFolder:
    """Open one part of a sign data set.

    `list_name` is what the format lists its images by (an annotation file, a list of images, a folder; GTSDB: the name
    of a part), relative to `folder`; "train", "validation" and "test" mean that split, empty: `split`. `class_map` is a
    TOML file or a built-in map. `corners` overrides the format's convention (perception.data.signs.corners). What the
    reader repaired or dropped is in `.report`. Raises UserError for whatever is wrong; its kind MissingListError where
    no list was named and the data set has no such split.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{root}: data folder does not exist; give the folder that holds the data set")
    if format not in FORMATS:
        raise UserError(f'data.format = "{format}" is unknown{nearest(format, FORMATS)}')
    if split not in SPLITS:
        raise UserError(f'split = "{split}" is unknown{nearest(split, SPLITS)}')
    name = detect_sign_format(root) if format == "auto" else format
    options = {}
    if corners:
        if name in _WITHOUT_CORNERS:
            raise UserError(f'corners = "{corners}": {name} has no corners, its boxes are {_WITHOUT_CORNERS[name]}')
        if corners not in CORNERS:
            raise UserError(f'corners = "{corners}" is unknown{nearest(corners, CORNERS)}')
        options["corners"] = corners
    classes = load_class_map(class_map) if class_map else None
    if list_name in SPLITS:
        split, list_name = list_name, ""
    _, read = _FORMATS[name]
    images = read(root, split=split, list_name=list_name, images_required=images_required, **options)
    return images if classes is None else apply_class_map(images, classes)


def detect_sign_format(folder: Path) -> str:
    """The format of what lies in the folder; UserError where it is none or could be several."""
    name = find_sign_format(folder)
    if not name:
        known = ", ".join(_FORMATS)
        raise UserError(
            f"{folder}: holds no sign data set that is known ({known}); give its own folder, or data.format"
        )
    return name


def find_sign_format(folder: Path) -> str:
    """The same, "" where it is none."""
    # A conversion to a general format may lie beside the original, so the others are asked first.
    own = next((name for name, (is_format, _) in _FORMATS.items() if name not in _GENERAL and is_format(folder)), "")
    if own:
        return own
    found = [name for name in _GENERAL if _FORMATS[name][0](folder)]
    if len(found) > 1:
        raise UserError(f"{folder}: could be {' or '.join(found)}; set data.format to one")
    return found[0] if found else ""
