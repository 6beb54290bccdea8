"""BDD100K's lane markings, 1280x720: outlines in one JSON for a part, in either of two schemas, or one mask an image.

    labels/lane/polygons/lane_{train,val}.json          labels/bdd100k_labels_images_{train,val}.json
        [{"name": "a-b.jpg", "labels": [{"category": "single white" | "lane",
            "attributes": {"laneDirection": "parallel", "laneStyle": "solid", "laneTypes" | "laneType": "..."},
            "poly2d": [{"vertices": [[x, y], ...], "types": "LCCC", "closed": false}]}]}]
    labels/lane/masks/{train,val}/a-b.png               where there are no outlines
    images/100k/{train,val}/a-b.jpg

In `types` a C is a vertex of a cubic Bezier curve: two control points and its end, from the vertex before. A mask's
byte: bits 0 to 2 the category, bit 3 background, bit 4 the style, bit 5 the direction (set: vertical).

| in the labels                                            | rule                                                 |
|----------------------------------------------------------|------------------------------------------------------|
| category that is no lane (cars, drivable areas)          | left out, counted                                    |
| laneDirection vertical (stop lines), crosswalk           | left out, counted                                    |
| road curb                                                | left out, counted, unless `curbs`                    |
| two edges of one marking: same category and style, over  | one lane in the middle, counted; a rule of ours      |
| half of their rows at most 20 pixels apart               |                                                      |
| Cs that are no whole number of curves; other letters     | UserError with the place                             |
| closed outline                                           | left out, counted: an area, not a line               |
| outline as it goes to and fro                            | by `lane_repair`                                     |
| image whose labels are absent or null                    | kept without lanes                                   |
| image listed twice                                       | the first is kept                                    |
| image without labels                                     | left out, counted                                    |

Labels of test are not published. No real files of this format were at hand when this was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.images import read_image
from perception.data.lane_folder import LabelledImage, LaneFolder
from perception.data.lane_repair import repair_points
from perception.data.sample import ReadReport
from perception.data.signs.fields import a_list, a_number, a_text, an_object, member, read_json
from perception.data.signs.listing import find_images, image_name, note_unlisted, split_or_list
from perception.errors import MissingListError, UserError

BDD100K_HEIGHT, BDD100K_WIDTH = 720, 1280
CATEGORIES = (
    "crosswalk",
    "double other",
    "double white",
    "double yellow",
    "road curb",
    "single other",
    "single white",
    "single yellow",
)
"""In the order of the masks' bits."""
_PARTS = {"train": "train", "validation": "val", "test": "test"}
_OUTLINES = ("labels/lane/polygons/lane_{part}.json", "labels/bdd100k_labels_images_{part}.json")
_MASKS = "labels/lane/masks/{part}"
_POINTS_A_CURVE = 16
_LARGEST_GAP_PIXELS = 20.0
_LEAST_SHARED_ROWS = 0.5
_LOWEST_MARK_PIXELS = 10
_ROWS_BETWEEN_POINTS = 5
_UNUSED = frozenset(("box2d", "timestamp", "id", "manualShape", "manualAttributes"))


@dataclass(frozen=True)
class _Marking:
    """One outline that may become a lane."""

    kind: tuple[str, str]
    """Category and style."""
    points: NDArray[np.float32]
    """(K, 2) from bottom to top."""


def is_bdd100k_lanes(folder: Path) -> bool:
    """Does the folder hold BDD100K's lanes?"""
    return any(_source(folder, part) is not None for part in _PARTS.values())


def read_bdd100k_lanes(
    folder: Path, split: str = "train", list_name: str = "", images_required: bool = True, curbs: bool = False
) -> LaneFolder:
    """Images of a split, or of the JSON file or folder of masks `list_name`.

    Raises UserError by the table above and where a required image is missing, MissingListError where the folder has
    no labels of this split.
    """
    split, list_name = split_or_list(split, list_name)
    part = _PARTS.get(split, "")
    source = folder / list_name if list_name else _source(folder, part)
    if source is None or not source.exists():
        hint = "; BDD100K's test labels are not published" if split == "test" else "; name the label file"
        raise MissingListError(f"{folder}: no {list_name or _OUTLINES[0].format(part=part)}{hint}")
    report = ReadReport()
    read = _from_masks if source.is_dir() else _from_outlines
    found = find_images(folder, [f"images/100k/{name}" for name in ([part] if part else _PARTS.values())])
    images, known = [], set()
    for name, where, markings in read(source, curbs, report):
        stem = PurePosixPath(name).stem
        if stem in known:
            report.note("image listed twice: first kept", where)
            continue
        known.add(stem)
        lanes = _joined(markings, where, report)
        if not lanes:
            report.note("image without lanes: kept", where)
        images.append(LabelledImage(found.get(stem, f"images/100k/{part or 'train'}/{stem}.jpg"), where, lanes))
    if not images:
        raise UserError(f"{source}: no image in these BDD100K labels")
    note_unlisted(folder, (image.name for image in images), report)
    return LaneFolder(folder, images, images_required, (BDD100K_HEIGHT, BDD100K_WIDTH), report)


def _source(folder: Path, part: str) -> Path | None:
    outlines = [folder / name.format(part=part) for name in _OUTLINES]
    masks = folder / _MASKS.format(part=part)
    return next((path for path in outlines if path.is_file()), masks if masks.is_dir() else None)


# Outlines.


def _from_outlines(source: Path, curbs: bool, report: ReadReport) -> list[tuple[str, str, list[_Marking]]]:
    raw = read_json(source, "BDD100K label file", report, _UNUSED)
    frames = a_list(raw["frames"] if isinstance(raw, dict) and "frames" in raw else raw, str(source), "frames")
    images = []
    for number, frame in enumerate(frames):
        where = f"{source}: [{number}]"
        name = image_name(member(an_object(frame, where), "name", where), where, "name")
        labels = a_list(frame.get("labels") or [], where, "labels")
        markings = []
        for i, label in enumerate(labels):
            markings += _parse_label(label, f"{where} {name} labels[{i}]", curbs, report)
        images.append((name, f"{where} {name}", markings))
    return images


def _parse_label(raw: Any, where: str, curbs: bool, report: ReadReport) -> list[_Marking]:
    category = a_text(member(raw, "category", where), where, "category")
    attributes = an_object(raw.get("attributes") or {}, f"{where}.attributes")
    if category == "lane":
        category = str(attributes.get("laneType") or attributes.get("laneTypes") or "single other")
    if category not in CATEGORIES:
        report.note("label of another category: left out", where)
        return []
    if _is_left_out(category, attributes.get("laneDirection") == "vertical", curbs, where, report):
        return []
    kind = (category, str(attributes.get("laneStyle", "")))
    markings = []
    for number, outline in enumerate(a_list(raw.get("poly2d") or [], where, "poly2d")):
        place = f"{where}.poly2d[{number}]"
        if outline.get("closed") if isinstance(outline, dict) else False:
            report.note("closed outline: left out", place)
            continue
        points = repair_points(_polyline(outline, place), place, report)
        if points is not None:
            markings.append(_Marking(kind, points))
    return markings


def _is_left_out(category: str, vertical: bool, curbs: bool, where: str, report: ReadReport) -> bool:
    if vertical or category == "crosswalk":
        report.note("marking across the road: left out", where)
        return True
    if category == "road curb" and not curbs:
        report.note("road curb: left out", where)
        return True
    return False


def _polyline(raw: Any, where: str) -> NDArray[np.float32]:
    """(K, 2) points of one outline, curves as `_POINTS_A_CURVE` short lines."""
    vertices = [
        [a_number(value, where, f"vertices[{i}]") for value in a_list(vertex, where, f"vertices[{i}]")]
        for i, vertex in enumerate(a_list(member(raw, "vertices", where), where, "vertices"))
    ]
    if any(len(vertex) != 2 for vertex in vertices):
        raise UserError(f"{where}: field vertices must hold pairs x, y")
    types = a_text(member(raw, "types", where), where, "types")
    if len(types) != len(vertices) or set(types) - {"L", "C"}:
        need = f"an L or C for each of {len(vertices)} vertices"
        raise UserError(f'{where}: field types must have {need}, got "{types:.30}"')
    points = [np.array(vertices[:1], dtype=np.float64)]
    index = 1
    while index < len(vertices):
        if types[index] == "L":
            points.append(np.array([vertices[index]], dtype=np.float64))
            index += 1
            continue
        if types[index : index + 3] != "CCC":
            raise UserError(f'{where}: field types = "{types:.30}": a curve is three C, its control points and its end')
        points.append(_curve(np.array(vertices[index - 1 : index + 3], dtype=np.float64)))
        index += 3
    return np.concatenate(points).astype(np.float32)


def _curve(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """(4, 2) control points → (K, 2) points of the cubic Bezier curve, without its begin."""
    t = np.linspace(0, 1, _POINTS_A_CURVE + 1)[1:, None]
    weights = np.concatenate([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], axis=1)
    return np.asarray(weights @ corners)


# Masks.


def _from_masks(source: Path, curbs: bool, report: ReadReport) -> list[tuple[str, str, list[_Marking]]]:
    paths = sorted(source.glob("*.png"))
    return [(f"{path.stem}.jpg", str(path), _read_mask(path, curbs, report)) for path in paths]


def _read_mask(path: Path, curbs: bool, report: ReadReport) -> list[_Marking]:
    mask = read_image(path)[:, :, 0]
    markings = []
    for value in np.unique(mask[mask & 8 == 0]):
        number, labels, _, _ = cv2.connectedComponentsWithStats((mask == value).astype(np.uint8), connectivity=8)
        kind = (CATEGORIES[int(value) & 7], "dashed" if int(value) & 16 else "solid")
        for component in range(1, number):
            where = f"{path}: value {value}, mark {component}"
            if _is_left_out(kind[0], bool(int(value) & 32), curbs, where, report):
                continue
            points = _middle(labels == component)
            if points[0, 1] - points[-1, 1] < _LOWEST_MARK_PIXELS:
                report.note(f"mark lower than {_LOWEST_MARK_PIXELS} pixels: dropped", where)
            else:
                markings.append(_Marking(kind, points))
    return markings


def _middle(mark: NDArray[np.bool_]) -> NDArray[np.float32]:
    """(K, 2) middles of a mark's rows from bottom to top; the first and last row, and every fifth between."""
    rows = np.flatnonzero(mark.any(axis=1))[::-1]
    chosen = np.unique(np.append(np.arange(0, len(rows), _ROWS_BETWEEN_POINTS), len(rows) - 1))
    columns = np.arange(mark.shape[1])
    # A line drawn through (x, y) marks the pixel of these numbers.
    points = [(columns[mark[row]].mean(), row) for row in rows[chosen]]
    return np.array(points, dtype=np.float32)


# Both edges of a marking.


def _joined(markings: Sequence[_Marking], where: str, report: ReadReport) -> list[NDArray[np.float32]]:
    """Lanes, two edges of one marking joined to its middle; the nearest pairs first, each edge once."""
    pairs = []
    for i, first in enumerate(markings):
        for j in range(i + 1, len(markings)):
            gap = _gap(first, markings[j])
            if gap is not None:
                pairs.append((gap, i, j))
    taken: set[int] = set()
    lanes = []
    for _, i, j in sorted(pairs):
        if i in taken or j in taken:
            continue
        taken |= {i, j}
        report.note("two edges of one marking: joined", where)
        lanes.append(_between(markings[i].points, markings[j].points))
    return lanes + [marking.points for index, marking in enumerate(markings) if index not in taken]


def _gap(first: _Marking, second: _Marking) -> float | None:
    """Mean distance in x over shared rows; None where they are no two edges of one marking."""
    if first.kind != second.kind:
        return None
    low, high = _shared(first.points, second.points)
    heights = [points[0, 1] - points[-1, 1] for points in (first.points, second.points)]
    if low - high < _LEAST_SHARED_ROWS * min(heights):
        return None
    rows = np.linspace(high, low, 16)
    gap = float(np.abs(_x_at(first.points, rows) - _x_at(second.points, rows)).mean())
    return gap if gap <= _LARGEST_GAP_PIXELS else None


def _between(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float32]:
    low, high = _shared(first, second)
    rows = np.unique(np.concatenate([first[:, 1], second[:, 1], [low, high]]))[::-1]
    rows = rows[(rows <= low) & (rows >= high)]
    middle = (_x_at(first, rows) + _x_at(second, rows)) / 2
    return np.stack([middle, rows], axis=1).astype(np.float32)


def _shared(first: NDArray[np.float32], second: NDArray[np.float32]) -> tuple[float, float]:
    """Lowest and highest row (largest and smallest y) that both reach."""
    return float(min(first[0, 1], second[0, 1])), float(max(first[-1, 1], second[-1, 1]))


def _x_at(points: NDArray[np.float32], rows: NDArray[np.floating]) -> NDArray[np.float64]:
    return np.asarray(np.interp(rows, points[::-1, 1], points[::-1, 0]))
