"""A small sound data set of every lane and every sign format, and where in it the contract's tests do their damage."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from sign_files import write_text

from perception.data.open import open_lane_dataset
from perception.data.signs.open import open_sign_dataset

MARK = "417"
"""The coordinate of the first point or corner: the one that is damaged."""
STEM = "scene"
"""In the names of the first image and its label, where the format does not want numbers."""


@dataclass(frozen=True)
class Case:
    format: str
    kind: str
    """lane or sign."""
    files: dict[str, str]
    """Labels, and lists of images where the format has them."""
    label: str
    """The file that holds MARK, in a label of `image`."""
    row: str
    """How an error names the place of MARK: a line or an entry."""
    field: str
    """How it names the field."""
    image: str
    """The first image, which has labels."""
    others: tuple[str, ...] = ()
    """Images that have no object, by their label or by having none; after the first in any order."""
    list_file: str = ""
    list_name: str = ""
    """To be opened with, where the official parts would not all hold the few images."""
    mark: str = MARK
    one_point: tuple[str, str] = ("", "")
    """Lanes: text of the label, and what replaces it to leave a single point."""
    unlabelled: str = ""
    """Where an image without a label would lie; "" where a list or file names those in use, among many others."""
    text: str = '"x"'
    """MARK as a text that is no number, as the format would write it."""
    size_in_labels: bool = False
    size: tuple[int, int] = (600, 800)
    """Height and width of all images."""

    def build(self, folder: Path) -> Path:
        for name, text in self.files.items():
            write_text(folder / name, text)
        for name in (self.image, *self.others):
            write_text(folder / name, _encoded(Path(name).suffix, self.size))
        return folder

    def open(self, folder: Path, format: str | None = None, **options: Any) -> Any:
        function: Callable[..., Any] = open_lane_dataset if self.kind == "lane" else open_sign_dataset
        return function(folder, format or self.format, **{"list_name": self.list_name, **options})

    def renamed(self, stem: str) -> Case:
        """With another STEM, wherever it stands."""
        return dataclasses.replace(
            self,
            files={name.replace(STEM, stem): text.replace(STEM, stem) for name, text in self.files.items()},
            label=self.label.replace(STEM, stem),
            image=self.image.replace(STEM, stem),
        )

    def with_label(self, old: str, new: str) -> Case:
        assert self.files[self.label].count(old) == 1, (old, self.files[self.label])
        return dataclasses.replace(self, files={**self.files, self.label: self.files[self.label].replace(old, new)})


@functools.cache
def _encoded(suffix: str, size: tuple[int, int]) -> bytes:
    done, data = cv2.imencode(suffix, np.full((*size, 3), 90, np.uint8))
    assert done
    return data.tobytes()


_ROWS = [500, 600, 700]
_TUSIMPLE = [
    {"raw_file": "clips/scene.png", "lanes": [[417, 420, 430], [-2, 600, 610]], "h_samples": _ROWS},
    {"raw_file": "clips/z.png", "lanes": [], "h_samples": _ROWS},
]
_POINTS = [[417, 500], [420, 450], [430, 400]]


def _marker(x: float, y: int) -> dict[str, Any]:
    return {"pixel_start": {"x": x, "y": y}, "pixel_end": {"x": x + 9, "y": y - 90}, "world_start": {"z": "5"}}


def _bdd100k(name: str, labels: list[Any]) -> dict[str, Any]:
    return {"name": name, "labels": labels}


_OUTLINE = {"vertices": _POINTS, "types": "LLL", "closed": False}
_LANES = (720, 640)
LANE_CASES = [
    Case(
        "tusimple",
        "lane",
        {"label_data_0313.json": "".join(json.dumps(line) + "\n" for line in _TUSIMPLE)},
        label="label_data_0313.json",
        list_file="label_data_0313.json",
        row=":1",
        field="lanes[0]",
        image="clips/scene.png",
        others=("clips/z.png",),
        one_point=("[417, 420, 430]", "[417, -2, -2]"),
        size=_LANES,
    ),
    Case(
        "culane",
        "lane",
        {
            "list/train_gt.txt": "/d.MP4/scene.png /m/1.png 1 0 0 0\n/d.MP4/2.png /m/2.png 0 0 0 0\n",
            "d.MP4/scene.lines.txt": "417 500 420 450 430 400\n",
            "d.MP4/2.lines.txt": "",
        },
        label="d.MP4/scene.lines.txt",
        list_file="list/train_gt.txt",
        row=":1",
        field="x y x y",
        image="d.MP4/scene.png",
        others=("d.MP4/2.png",),
        one_point=("417 500 420 450 430 400", "417 500"),
        text="x",
        size=_LANES,
    ),
    Case(
        "llamas",
        "lane",
        {
            "labels/train/d/scene.json": json.dumps(
                {"lanes": [{"lane_id": "l0", "markers": [_marker(417, 600), _marker(430, 400)]}]}
            ),
            "labels/train/d/z.json": '{"lanes": []}',
        },
        label="labels/train/d/scene.json",
        row="lanes[0].markers[0]",
        field="pixel_start.x",
        image="color_images/train/d/scene_color_rect.png",
        others=("color_images/train/d/z_color_rect.png",),
        one_point=(f", {json.dumps(_marker(430, 400))}", ""),
        unlabelled="color_images/train/d/3_color_rect.png",
        size=_LANES,
    ),
    Case(
        "curvelanes",
        "lane",
        {
            "train/labels/scene.lines.json": json.dumps({"Lines": [[{"x": x, "y": str(y)} for x, y in _POINTS]]}),
            "train/labels/z.lines.json": '{"Lines": []}',
        },
        label="train/labels/scene.lines.json",
        row="Lines[0][0]",
        field="field x",
        image="train/images/scene.jpg",
        others=("train/images/z.jpg",),
        one_point=(', {"x": 420, "y": "450"}, {"x": 430, "y": "400"}', ""),
        unlabelled="train/images/c.jpg",
        size=_LANES,
    ),
    Case(
        "openlane",
        "lane",
        {
            "lane3d_1000/training/s/scene.json": json.dumps(
                {
                    "file_path": "training/s/scene.jpg",
                    "lane_lines": [{"category": 2, "uv": [[417, 420, 430], [500, 450, 400]]}],
                }
            ),
            "lane3d_1000/training/s/z.json": '{"file_path": "training/s/z.jpg", "lane_lines": []}',
        },
        label="lane3d_1000/training/s/scene.json",
        row="lane_lines[0]",
        field="uv[0]",
        image="images/training/s/scene.jpg",
        others=("images/training/s/z.jpg",),
        one_point=("[[417, 420, 430], [500, 450, 400]]", "[[417], [500]]"),
        unlabelled="images/training/s/3.jpg",
        size=_LANES,
    ),
    Case(
        "vil100",
        "lane",
        {
            "data/train.txt": "/JPEGImages/v/scene.jpg\n/JPEGImages/v/1.jpg\n",
            "Json/v/scene.jpg.json": json.dumps(
                {"info": {"height": 720, "width": 1280}, "annotations": {"lane": [{"points": _POINTS}]}}
            ),
            "Json/v/1.jpg.json": '{"info": {"height": 720, "width": 1280}, "annotations": {"lane": []}}',
        },
        label="Json/v/scene.jpg.json",
        list_file="data/train.txt",
        row="lane[0]",
        field="points[0]",
        image="JPEGImages/v/scene.jpg",
        others=("JPEGImages/v/1.jpg",),
        one_point=("[[417, 500], [420, 450], [430, 400]]", "[[417, 500]]"),
        size=_LANES,
    ),
    Case(
        "bdd100k_lanes",
        "lane",
        {
            "labels/lane/polygons/lane_train.json": json.dumps(
                [_bdd100k("scene.jpg", [{"category": "single white", "poly2d": [_OUTLINE]}]), _bdd100k("z.jpg", [])]
            )
        },
        label="labels/lane/polygons/lane_train.json",
        list_file="labels/lane/polygons/lane_train.json",
        row="[0] scene.jpg labels[0].poly2d[0]",
        field="vertices[0]",
        image="images/100k/train/scene.jpg",
        others=("images/100k/train/z.jpg",),
        one_point=(
            '"vertices": [[417, 500], [420, 450], [430, 400]], "types": "LLL"',
            '"vertices": [[417, 500]], "types": "L"',
        ),
        unlabelled="images/100k/train/c.jpg",
        size=_LANES,
    ),
]
_BOX = {"xmin": 417, "ymin": 20, "xmax": 450, "ymax": 60}
_LISA_COLUMNS = (
    "Filename;Annotation tag;Upper left corner X;Upper left corner Y;Lower right corner X;Lower right corner Y;"
    "Occluded,On another road;Origin file;Origin frame number;Origin track"
)
_VOC = (
    "<annotation><filename>{name}.jpg</filename>\n<size><width>800</width><height>600</height></size>\n{signs}"
    "</annotation>"
)
_VOC_SIGN = (
    "<object><name>stop</name>\n<bndbox><xmin>417</xmin><ymin>20</ymin><xmax>450</xmax><ymax>60</ymax></bndbox>"
    "</object>\n"
)
SIGN_CASES = [
    Case(
        "gtsdb",
        "sign",
        {"gt.txt": "00001.jpg;417;20;450;60;14\n"},
        label="gt.txt",
        list_file="gt.txt",
        row=":1",
        field="left",
        image="00001.jpg",
        others=("00002.jpg",),
        text="x",
    ),
    Case(
        "gtsrb",
        "sign",
        {
            "00001/GT-00001.csv": "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"
            "00000_00000.jpg;800;600;417;20;450;60;1\n"
        },
        label="00001/GT-00001.csv",
        list_file="00001/GT-00001.csv",
        list_name="all-train",
        row=":2",
        field="Roi.X1",
        image="00001/00000_00000.jpg",
        unlabelled="00001/00000_00001.jpg",
        text="x",
        size_in_labels=True,
    ),
    Case(
        "lisa",
        "sign",
        {"allAnnotations.csv": f"{_LISA_COLUMNS}\nv/scene.jpg;stop;417;20;450;60;0,0;v.avi;3;t.avi\n"},
        label="allAnnotations.csv",
        list_file="allAnnotations.csv",
        list_name="all-train",
        row=":2",
        field="Upper left corner X",
        image="v/scene.jpg",
        unlabelled="v/b.jpg",
        text="x",
    ),
    Case(
        "bdd100k",
        "sign",
        {
            "labels/det_20/det_train.json": json.dumps(
                [
                    _bdd100k(
                        "scene.jpg", [{"category": "traffic sign", "box2d": {"x1": 417, "y1": 20, "x2": 450, "y2": 60}}]
                    ),
                    _bdd100k("z.jpg", []),
                ]
            )
        },
        label="labels/det_20/det_train.json",
        list_file="labels/det_20/det_train.json",
        row="[0] scene.jpg labels[0]",
        field="box2d.x1",
        image="images/100k/train/scene.jpg",
        others=("images/100k/train/z.jpg",),
        unlabelled="images/100k/train/c.jpg",
    ),
    Case(
        "mapillary",
        "sign",
        {
            "splits/train.txt": "scene\nz\n",
            "annotations/scene.json": json.dumps(
                {"width": 800, "height": 600, "objects": [{"label": "stop", "bbox": _BOX, "properties": {}}]}
            ),
            "annotations/z.json": '{"width": 800, "height": 600, "objects": []}',
        },
        label="annotations/scene.json",
        list_file="splits/train.txt",
        row="objects[0]",
        field="bbox.xmin",
        image="images/scene.jpg",
        others=("images/z.jpg",),
        size_in_labels=True,
    ),
    Case(
        "tt100k",
        "sign",
        {
            "annotations.json": json.dumps(
                {
                    "types": ["pn"],
                    "imgs": {
                        "1": {"path": "train/scene.jpg", "id": 1, "objects": [{"category": "pn", "bbox": _BOX}]},
                        "2": {"path": "train/2.jpg", "id": 2, "objects": []},
                    },
                }
            )
        },
        label="annotations.json",
        list_file="annotations.json",
        list_name="all-train",
        row="imgs[1].objects[0]",
        field="bbox.xmin",
        image="train/scene.jpg",
        others=("train/2.jpg",),
        unlabelled="train/3.jpg",
    ),
    Case(
        "coco",
        "sign",
        {
            "train.json": json.dumps(
                {
                    "images": [
                        {"id": number, "file_name": f"{name}.jpg", "width": 800, "height": 600}
                        for number, name in enumerate(("scene", "z"), start=7)
                    ],
                    "categories": [{"id": 3, "name": "stop"}],
                    "annotations": [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [417, 20, 33, 40]}],
                }
            )
        },
        label="train.json",
        list_file="train.json",
        row="annotations[0]",
        field="bbox[0]",
        image="scene.jpg",
        others=("z.jpg",),
        unlabelled="c.jpg",
        size_in_labels=True,
    ),
    Case(
        "yolo",
        "sign",
        {"classes.txt": "stop\n", "labels/scene.txt": "0 0.417 0.5 0.1 0.1\n", "labels/z.txt": ""},
        label="labels/scene.txt",
        row=":1",
        field="column 2",
        image="images/scene.jpg",
        others=("images/z.jpg",),
        unlabelled="images/c.jpg",
        mark="0.417",
        text="x",
    ),
    Case(
        "voc",
        "sign",
        {
            "Annotations/scene.xml": _VOC.format(name="scene", signs=_VOC_SIGN),
            "Annotations/z.xml": _VOC.format(name="z", signs=""),
        },
        label="Annotations/scene.xml",
        row=":4",
        field="bndbox.xmin",
        image="JPEGImages/scene.jpg",
        others=("JPEGImages/z.jpg",),
        unlabelled="JPEGImages/c.jpg",
        text="x",
        size_in_labels=True,
    ),
]
CASES = [*LANE_CASES, *SIGN_CASES]
