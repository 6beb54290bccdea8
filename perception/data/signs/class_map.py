"""Class maps: which classes are merged, renamed, dropped or ignored, by name, in a small TOML file.

    drop = ["snow"]                          # their boxes become background
    ignore = ["danger"]                      # their boxes become ignored regions
    others = "keep"                          # or "drop", "ignore": what is not named here

    [rename]
    "stop" = "halt"

    [merge]
    "speed-limit" = ["speed-limit-20", "speed-limit-30"]

A class keeps the place of its first member among the data set's. A new name that an unmapped class has already takes
that class in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perception.data.sample import ReadReport
from perception.data.signs.classes import GTSDB_SUPERCLASSES
from perception.data.signs.dataset import DROPPED, IGNORED, SignFolder
from perception.data.signs.fields import read_text
from perception.errors import UserError, nearest

GTSDB_SUPERCLASSES_MAP = "gtsdb-superclasses"
BUILT_IN = (GTSDB_SUPERCLASSES_MAP,)
_FIELDS = ("drop", "ignore", "others", "rename", "merge")
_OTHERS = ("keep", "drop", "ignore")
_LABEL = {"drop": DROPPED, "ignore": IGNORED}


@dataclass(frozen=True)
class ClassMap:
    source: str
    """The file, or the built-in map's name."""
    targets: Mapping[str, str | int]
    """Class → its new name, DROPPED or IGNORED."""
    others: str = "keep"
    """What becomes of a class that is not in `targets`: keep, drop or ignore."""


def load_class_map(name: str) -> ClassMap:
    """A built-in map by its name, or a TOML file. Raises UserError naming file and field of what is wrong."""
    if name in BUILT_IN:
        return ClassMap(name, GTSDB_SUPERCLASSES)
    path = Path(name)
    if not path.is_file():
        raise UserError(f"class map {name}: no such file, and no built-in map{nearest(name, BUILT_IN)}")
    try:
        raw = tomllib.loads(read_text(path, "class map", ReadReport()))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: class map is not TOML ({error})") from None
    for field in raw:
        if field not in _FIELDS:
            raise UserError(f"{path}: field {field} is unknown{nearest(field, _FIELDS)}")
    others = raw.get("others", "keep")
    if others not in _OTHERS:
        raise UserError(f"{path}: field others = {others!r:.40} is unknown; allowed: {', '.join(_OTHERS)}")
    pairs: list[tuple[str, str | int]] = []
    for field, label in _LABEL.items():
        pairs += [(source, label) for source in _names(raw.get(field, []), path, field)]
    for source, target in _table(raw, "rename", path).items():
        pairs.append((source, _name(target, path, f"rename.{source}")))
    for target, sources in _table(raw, "merge", path).items():
        pairs += [(source, target) for source in _names(sources, path, f"merge.{target}")]
    targets: dict[str, str | int] = {}
    for source, new in pairs:
        if source in targets:
            raise UserError(f'{path}: class "{source}" is mapped twice; name it once')
        targets[source] = new
    if not targets:
        raise UserError(f"{path}: class map names no class; it has the fields {', '.join(_FIELDS)}")
    return ClassMap(str(path), targets, others)


def apply_class_map(images: SignFolder, class_map: ClassMap) -> SignFolder:
    """The same images with the map's classes; boxes dropped and ignored are noted in the report.

    Raises UserError for a class in the map that the data set has not, and where no class is left.
    """
    unknown = [name for name in class_map.targets if name not in images.classes]
    if unknown:
        raise UserError(
            f'{class_map.source}: class "{unknown[0]}" is none of the data set\'s{nearest(unknown[0], images.classes)}'
        )
    new = [class_map.targets.get(name, _LABEL.get(class_map.others, name)) for name in images.classes]
    classes = tuple(dict.fromkeys(name for name in new if isinstance(name, str)))
    if not classes:
        raise UserError(f"{class_map.source}: no class is left; merge, rename or keep at least one")
    label_of = [classes.index(name) if isinstance(name, str) else name for name in new]
    return images.relabelled(classes, np.array(label_of, dtype=np.int64))


def _table(raw: Mapping[str, Any], field: str, path: Path) -> Mapping[str, Any]:
    table = raw.get(field, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: field {field} must be a table, [{field}], got {table!r:.40}")
    return table


def _names(value: Any, path: Path, field: str) -> list[str]:
    if not isinstance(value, list):
        raise UserError(f"{path}: field {field} must be a list of classes, got {value!r:.40}")
    return [_name(name, path, field) for name in value]


def _name(value: Any, path: Path, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{path}: field {field} must hold names of classes, got {value!r:.40}")
    return value
