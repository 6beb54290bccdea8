"""LLAMAS lanes, 1276x717: one JSON an image, a lane as its painted markers.

    labels/{train,valid}/DRIVE/ID.json
        {"lanes": [{"lane_id": "l0", "markers": [{"pixel_start": {"x", "y"}, "pixel_end": {"x", "y"},
                                                  "world_start": {"x", "y", "z"}, ...}]}]}
    color_images/{train,valid}/DRIVE/ID_color_rect.png

Numbers may be texts. Labels of test are not published. A lane becomes a polyline, by the rules of the data set's own
label reader (Behrendt and Soussan, "Unsupervised Labeled Lane Markers Using Maps", ICCV Workshops 2019):

| in a label file                                       | rule                                                        |
|-------------------------------------------------------|-------------------------------------------------------------|
| fewer than two markers; lower than 20 pixels          | lane dropped                                                |
| ids with holes (l3 l2 l0 r0 r2)                       | counted anew from the middle: l2 l1 l0 r0 r1                |
| lanes beyond l1 and r1                                | left out, as in the benchmark, unless `all_lanes`           |
| marker                                                | straight from its start up to its end; of one that is two   |
|                                                       | pixels high or less, or upside down, only the start counts  |
| markers side by side                                  | their mean x                                                |
| gap between markers                                   | joined straight                                             |
| below the nearest marker                              | that marker's line is continued to the bottom or the border |
| every marker horizontal or vertical                   | nothing is continued (the original reader fails)            |
| marker whose start or end lies above or below the image | dropped (the original reader fails or wraps around)       |
| image without a label beside labelled ones            | left out, counted                                           |

The nearest marker is the one whose start has the least `world_start.z`; where that is not known, the lowest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.lane_folder import LabelledImage, LaneFolder
from perception.data.sample import ReadReport
from perception.data.signs.fields import a_list, a_number, a_text, an_object, member, read_json
from perception.data.signs.listing import note_unlisted, split_or_list
from perception.errors import MissingListError, UserError

LLAMAS_HEIGHT, LLAMAS_WIDTH = 717, 1276
_PLACES = {"train": "labels/train", "validation": "labels/valid", "test": "labels/test"}
_IMAGE_SUFFIX = "_color_rect.png"
_LOWEST_LANE_PIXELS = 20
_LOWEST_MARKER_PIXELS = 2
_LANES_A_SIDE = 2
_LANE_ID = re.compile(r"([lr])(\d{1,4})")
_UNUSED = frozenset(("world_end", "lane_marker_id", "projection_matrix"))


@dataclass(frozen=True)
class _Marker:
    start: tuple[float, float]
    """x, y of the end that is nearer to the camera, and lower in the image."""
    end: tuple[float, float]
    distance: float
    """z of its start; infinity where the file has none."""

    @property
    def is_tall(self) -> bool:
        return self.start[1] - self.end[1] > _LOWEST_MARKER_PIXELS

    def x_at(self, y: float) -> float:
        return self.start[0] + (self.start[1] - y) * (self.end[0] - self.start[0]) / (self.start[1] - self.end[1])


def is_llamas(folder: Path) -> bool:
    """Does the folder look like LLAMAS?"""
    return (folder / "color_images").is_dir() and (folder / "labels").is_dir()


def read_llamas(
    folder: Path,
    split: str = "train",
    list_name: str = "",
    images_required: bool = True,
    all_lanes: bool = False,
) -> LaneFolder:
    """Images of a split, or of the folder of labels `list_name` ("labels/train/DRIVE"), lanes from left to right.

    Raises UserError where a label is wrong or, if required, an image is missing; MissingListError where the folder
    has not this split.
    """
    split, list_name = split_or_list(split, list_name)
    place = PurePosixPath(list_name or _PLACES[split])
    if place.parts[:1] != ("labels",):
        raise UserError(f"list = {list_name}: LLAMAS has folders of labels, such as labels/train; name one")
    if not (folder / place).is_dir():
        hint = "; LLAMAS's test labels are not published" if split == "test" else ""
        raise MissingListError(f"{folder / place}: no such folder of LLAMAS labels{hint}")
    report = ReadReport()
    images = []
    for path in sorted((folder / place).rglob("*.json")):
        inside = PurePosixPath(path.relative_to(folder / "labels").as_posix())
        name = PurePosixPath("color_images") / inside.parent / (inside.name.removesuffix(".json") + _IMAGE_SUFFIX)
        images.append(LabelledImage(name.as_posix(), str(path), read_label(path, report, all_lanes)))
    if not images:
        raise UserError(f"{folder / place}: no *.json in this folder or below it")
    note_unlisted(folder, (image.name for image in images), report)
    return LaneFolder(folder, images, images_required, (LLAMAS_HEIGHT, LLAMAS_WIDTH), report, "llamas")


def read_label(path: Path, report: ReadReport, all_lanes: bool = False) -> list[NDArray[np.float32]]:
    """Lanes of one image, (K, 2) from bottom to top, the leftmost first."""
    raw = an_object(read_json(path, "LLAMAS label file", report, _UNUSED), str(path))
    sides: dict[str, dict[int, list[_Marker]]] = {"l": {}, "r": {}}
    for number, lane in enumerate(a_list(member(raw, "lanes", str(path)), str(path), "lanes")):
        where = f"{path}: lanes[{number}]"
        lane_id = a_text(member(lane, "lane_id", where), where, "lane_id")
        match = _LANE_ID.fullmatch(lane_id)
        if match is None:
            raise UserError(f'{where}: field lane_id must be l or r and a number, such as "l0", got "{lane_id:.20}"')
        markers = a_list(member(lane, "markers", where), where, "markers")
        parsed = [_parse_marker(marker, f"{where}.markers[{i}]", report) for i, marker in enumerate(markers)]
        kept = [marker for marker in parsed if marker is not None]
        if _is_long_enough(kept, where, report):
            same = sides[match[1]].setdefault(int(match[2]), [])
            if same:
                report.note("lane id stands twice: markers joined", where)
            same += kept
    lefts, rights = ([side[number] for number in sorted(side)] for side in sides.values())
    num_outer = sum(max(len(side) - _LANES_A_SIDE, 0) for side in (lefts, rights))
    if num_outer and not all_lanes:
        report.note("lane beyond l1 and r1: left out", str(path), num_outer)
        lefts, rights = lefts[:_LANES_A_SIDE], rights[:_LANES_A_SIDE]
    if not lefts and not rights:
        report.note("image without lanes: kept", str(path))
    return [_polyline(markers, str(path), report) for markers in (*reversed(lefts), *rights)]


def _parse_marker(raw: Any, where: str, report: ReadReport) -> _Marker | None:
    start, end = (
        tuple(
            a_number(member(member(raw, end, where), axis, f"{where}.{end}"), where, f"{end}.{axis}") for axis in "xy"
        )
        for end in ("pixel_start", "pixel_end")
    )
    world = raw.get("world_start")
    distance = math.inf if world is None else a_number(member(world, "z", where), where, "world_start.z")
    if not all(0 <= y < LLAMAS_HEIGHT for _, y in (start, end)):
        report.note("marker outside the image: dropped", where)
        return None
    return _Marker((start[0], start[1]), (end[0], end[1]), distance)


def _is_long_enough(markers: list[_Marker], where: str, report: ReadReport) -> bool:
    if len(markers) < 2:
        report.note("lane with fewer than two markers: dropped", where)
        return False
    starts = [marker.start[1] for marker in markers]
    if max(starts) - min(starts) < _LOWEST_LANE_PIXELS:
        report.note(f"lane lower than {_LOWEST_LANE_PIXELS} pixels: dropped", where)
        return False
    return True


def _polyline(markers: list[_Marker], where: str, report: ReadReport) -> NDArray[np.float32]:
    continuation = _continuation(markers)
    if continuation is None:
        report.note("no marker to continue to the bottom: lane ends at its lowest", where)
    markers = [*(continuation or ()), *markers]
    rows = {marker.start[1] for marker in markers} | {marker.end[1] for marker in markers if marker.is_tall}
    points = []
    for y in sorted(rows, reverse=True):
        xs = [marker.x_at(y) for marker in markers if marker.is_tall and marker.end[1] <= y <= marker.start[1]]
        xs += [marker.start[0] for marker in markers if not marker.is_tall and marker.start[1] == y]
        points.append((sum(xs) / len(xs), y))
    return np.array(points, dtype=np.float32)


def _continuation(markers: list[_Marker]) -> list[_Marker] | None:
    """What lies between the nearest marker and the bottom or side of the image, as a marker; None where unknown."""
    slanted = [marker for marker in markers if marker.start[0] != marker.end[0] and marker.start[1] != marker.end[1]]
    if not slanted:
        return None
    nearest = min(slanted, key=lambda marker: (marker.distance, -marker.start[1]))
    if nearest.distance < 0:
        return None
    bottom = LLAMAS_HEIGHT - 1
    if nearest.start[1] == bottom:
        return []
    x = nearest.x_at(bottom)
    border = min(max(x, 0.0), float(LLAMAS_WIDTH))
    y = float(bottom)
    if x != border:
        (x1, y1), (x2, y2) = nearest.start, nearest.end
        y = y1 + (border - x1) * (y2 - y1) / (x2 - x1)
    return [_Marker((border, y), nearest.start, 0.0)]
