"""Damaged labels of every JSON and CSV reader: whatever a value is replaced by, the answer is data or one line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sign_files import write_text

from perception.data.bdd100k_lanes import read_bdd100k_lanes
from perception.data.curvelanes import read_curvelanes
from perception.data.llamas import read_llamas
from perception.data.openlane import read_openlane
from perception.data.signs.bdd100k import read_bdd100k
from perception.data.signs.gtsrb import read_gtsrb
from perception.data.signs.lisa import read_lisa
from perception.data.signs.mapillary import read_mapillary
from perception.data.signs.tt100k import read_tt100k
from perception.data.vil100 import read_vil100
from perception.errors import UserError

BOX = {"xmin": 1.5, "ymin": 2, "xmax": 30, "ymax": 40}
END = {"x": "300", "y": "500", "z": "4"}
MARKERS = [
    {"pixel_start": END, "pixel_end": {"x": 310, "y": 450}, "world_start": END},
    {"pixel_start": {"x": "320", "y": 400}, "pixel_end": {"x": 330, "y": "350"}, "world_start": END},
]
JSON_FORMATS: dict[str, tuple[Callable[..., Any], str, Any]] = {
    "tt100k": (
        read_tt100k,
        "annotations.json",
        {
            "types": ["pn"],
            "imgs": {"1": {"path": "other/1.jpg", "id": 1, "objects": [{"category": "pn", "bbox": BOX}]}},
        },
    ),
    "mapillary": (
        read_mapillary,
        "annotations/a.json",
        {
            "width": 80,
            "height": 60,
            "ispano": True,
            "objects": [{"label": "x", "bbox": BOX, "properties": {"dummy": False}}],
        },
    ),
    "bdd100k": (
        read_bdd100k,
        "labels/det_20/det_train.json",
        [
            {
                "name": "a.jpg",
                "labels": [
                    {
                        "category": "traffic sign",
                        "attributes": {"crowd": False},
                        "box2d": {"x1": 1, "y1": 2, "x2": 30, "y2": 40},
                    }
                ],
            }
        ],
    ),
    "llamas": (read_llamas, "labels/train/d/1.json", {"lanes": [{"lane_id": "l0", "markers": MARKERS}]}),
    "curvelanes": (
        read_curvelanes,
        "train/labels/a.lines.json",
        {"Lines": [[{"x": "1", "y": "9"}, {"x": "2", "y": "5"}, {"x": "4", "y": "7"}]]},
    ),
    "openlane": (
        read_openlane,
        "lane3d_1000/training/s/1.json",
        {"file_path": "training/s/1.jpg", "lane_lines": [{"category": 2, "uv": [[1, 2, 4], [9, 5, 7]]}]},
    ),
    "vil100": (
        read_vil100,
        "Json/v/0.jpg.json",
        {"info": {"height": 60, "width": 80}, "annotations": {"lane": [{"points": [[1, 9], [2, 5]]}]}},
    ),
    "bdd100k_lanes": (
        read_bdd100k_lanes,
        "labels/lane/polygons/lane_train.json",
        [
            {
                "name": "a.jpg",
                "labels": [
                    {
                        "category": "single white",
                        "attributes": {"laneDirection": "parallel", "laneStyle": "solid"},
                        "poly2d": [{"vertices": [[1, 9], [2, 5], [3, 3], [4, 1]], "types": "LCCC", "closed": False}],
                    }
                ],
            }
        ],
    ),
}
LISTS = {"mapillary": ("splits/train.txt", "a\n"), "vil100": ("data/train.txt", "/JPEGImages/v/0.jpg\n")}
"""Beside the labels: the list by which a format names its images."""
CSV_FORMATS: dict[str, tuple[Callable[..., Any], str, list[list[str]]]] = {
    "gtsrb": (
        read_gtsrb,
        "00001/GT-00001.csv",
        [
            ["Filename", "Width", "Height", "Roi.X1", "Roi.Y1", "Roi.X2", "Roi.Y2", "ClassId"],
            ["00000_00000.ppm", "29", "30", "5", "6", "24", "25", "1"],
            ["00001_00000.ppm", "29", "30", "5", "6", "24", "25", "1"],
        ],
    ),
    "lisa": (
        read_lisa,
        "allAnnotations.csv",
        [
            [
                "Filename",
                "Annotation tag",
                "Upper left corner X",
                "Upper left corner Y",
                "Lower right corner X",
                "Lower right corner Y",
                "Occluded,On another road",
                "Origin file",
                "Origin frame number",
                "Origin track",
            ],
            ["v/a.png", "stop", "1", "2", "30", "40", "0,0", "v.avi", "3", "t.avi"],
        ],
    ),
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(
        [
            "",
            "\0",
            "\ud800",
            "..",
            "/",
            "a" * 5000,
            "1_0",
            "nan",
            "٣",
            '"',
            ";",
            "\n",
            "a\nb",
            "\x1b[31m",
            "é\u2028b",
            [],
            {},
            [[]],
            {"x": {}},
            {"a\nb": 1},
        ]
    ),
)


def places(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in nested lists and dicts, the whole itself included."""
    inner = list(raw.items()) if isinstance(raw, dict) else list(enumerate(raw)) if isinstance(raw, list) else []
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def replaced(raw: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    raw = copy.deepcopy(raw)
    holder = raw
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return raw


def reads_or_tells(read: Callable[..., Any], folder: Path) -> None:
    split = {read_tt100k: "other", read_gtsrb: "all-train", read_lisa: "all-train"}.get(read, "train")
    try:
        dataset = read(folder, split, images_required=False)
        for index in range(len(dataset)):
            dataset.truth(index)
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 700
        str(error).encode()


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_value_replaced_in_json(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    read, file, raw = JSON_FORMATS[name]
    folder = tmp_path_factory.mktemp(name)
    damaged = replaced(raw, data.draw(st.sampled_from(places(raw))), data.draw(JUNK))
    write_text(folder / file, json.dumps(damaged))
    if name in LISTS:
        write_text(folder / LISTS[name][0], LISTS[name][1])
    if name == "llamas":
        (folder / "color_images").mkdir()
    reads_or_tells(read, folder)


@pytest.mark.parametrize("name", CSV_FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_value_replaced_in_csv(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    read, file, rows = CSV_FORMATS[name]
    folder = tmp_path_factory.mktemp(name)
    cells = [place for place in places(rows) if len(place) == 2]
    damaged = replaced(rows, data.draw(st.sampled_from(cells)), str(data.draw(JUNK)))
    text = "\n".join(";".join(row) for row in damaged)
    write_text(folder / file, text.encode(errors="surrogatepass"))
    reads_or_tells(read, folder)


@pytest.mark.parametrize("name", [*JSON_FORMATS, *CSV_FORMATS])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_file_cut_short(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp(name)
    if name in JSON_FORMATS:
        read, file, raw = JSON_FORMATS[name]
        text = json.dumps(raw)
    else:
        read, file, rows = CSV_FORMATS[name]
        text = "\n".join(";".join(row) for row in rows)
    end = data.draw(st.integers(0, len(text) - 1))
    write_text(folder / file, text[:end])
    if name in LISTS:
        write_text(folder / LISTS[name][0], LISTS[name][1])
    if name in JSON_FORMATS:
        with pytest.raises(UserError):
            read(folder, "other" if name == "tt100k" else "train", images_required=False)
    else:
        reads_or_tells(read, folder)
