"""Evaluate files of sign predictions against labels of any sign format.

Predictions are JSON, boxes as [x, y, width, height] in original pixels, in one of two layouts:

- COCO results, a list of {"image_id", "category_id", "bbox", "score"}. The numbers are those of a COCO label file; with
  labels of another format each has "file_name" (or image_id as text) and "category_name" in their place
- an object with "images", "categories" and "annotations", these with scores. It names its own images and classes,
  so that it goes with labels of any format. The folder that `predict` wrote, or its results.json, is such an object
  in two files: its numbers are those of images.json beside it

COCO labels count as in COCO's own evaluator: boxes as they are, and images in the order of their ids where scores are
equal. Only crowds differ: here they excuse detections of every class. What can only be a mistake (an image or class
that the labels do not have, a score that is no number) is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import ReadReport
from perception.data.signs.coco import EXACT_CORNERS
from perception.data.signs.fields import a_list, a_number, a_text, an_object, member, read_json, shown
from perception.data.signs.open import FORMATS, open_sign_dataset
from perception.data.signs.sample import SignPrediction, SignTruth
from perception.errors import UserError, nearest
from perception.metrics.sign import SignMetric, superclasses_of

_Box = tuple[float, float, float, float]
_OUTLINES = ("segmentation", "counts")


@dataclass(frozen=True)
class SignEvaluation:
    metrics: dict[str, float]
    """As SignMetric.compute() gives them, and `images_without_predictions`."""
    classes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Labels:
    truths: list[SignTruth]
    file_names: list[str]
    """Of each truth, as predictions name it."""
    classes: tuple[str, ...]
    place_of_id: Mapping[Hashable, int] | None = None
    """Place in `truths` by the number of the image; None where the format numbers none."""
    class_of_id: Mapping[Hashable, str] | None = None


def evaluate_sign_files(
    predictions: Path,
    labels: Path,
    format: str,
    list_name: str = "",
    class_map: str = "",
    corners: str = "",
    score_threshold: float | None = None,
) -> SignEvaluation:
    """Score a prediction file. `labels` is a COCO label file or a data set's folder.

    For a folder `list_name`, `class_map` and `corners` are as in open_sign_dataset; predictions of images outside a
    list are left out and counted. Without a list the test split is meant, and every predicted image must be in it. An
    image that the predictions do not speak of counts as one without detections. With `score_threshold`, TT100K's
    precision and recall from that score on are given too. Raises UserError where a file is missing or wrong, a row
    names an image or class that the labels do not have, or the labels hold no sign.
    """
    if format not in FORMATS:
        raise UserError(f'--format "{format}" is unknown{nearest(format, FORMATS)}')
    report = ReadReport()
    if labels.is_file() and format in ("auto", "coco"):
        for option, value in (("--list", list_name), ("--class-map", class_map), ("--corners", corners)):
            if value:
                raise UserError(f"{option} goes with a folder of labels; {labels} is a COCO label file")
        read = _read_coco_labels(labels, report)
    elif labels.is_dir():
        dataset = open_sign_dataset(
            labels, format, list_name, "test", class_map, images_required=False, corners=corners
        )
        for anomaly, count in dataset.report.anomalies.items():
            report.note(f"labels: {anomaly}", dataset.report.examples[anomaly], count)
        truths = [dataset.truth(index) for index in range(len(dataset))]
        read = _Labels(truths, [truth.name for truth in truths], dataset.classes)
    elif labels.exists():
        raise UserError(f"--labels {labels}: is a file; give the folder of the {format} data set")
    else:
        raise UserError(f"--labels {labels}: does not exist; give the folder of the data set, or a COCO label file")
    twice = [name for name, count in Counter(read.file_names).items() if count > 1]
    if twice:
        raise UserError(f"--labels {labels}: image {twice[0]} stands twice; each image is labelled once")
    if not any(len(truth.labels) for truth in read.truths):
        raise UserError(
            f"--labels {labels}: none of the {len(read.truths)} images has a sign, so there is none to find"
        )
    predicted, spoken_of = _read_predictions(predictions, read, bool(list_name), report)
    for name, known in zip(read.file_names, spoken_of, strict=True):
        if not known:
            report.note("image without a prediction: counted as one without detections", name)
    metric = SignMetric(read.classes, superclasses_of(read.classes))
    metric.update(predicted, read.truths)
    metrics = {**metric.compute(), "images_without_predictions": spoken_of.count(False)}
    if score_threshold is not None:
        metrics |= metric.tt100k(score_threshold)
    num_detections = np.bincount(
        np.concatenate([prediction.labels for prediction in predicted]), minlength=len(read.classes)
    )
    for name, count in zip(read.classes, num_detections.tolist(), strict=True):
        if count and not metrics[f"truths_class/{name}"]:
            report.note("detection of a class without truths: in no class's figure", name, count)
    return SignEvaluation(metrics, read.classes, tuple(report.lines()))


def _read_coco_labels(path: Path, report: ReadReport) -> _Labels:
    where = str(path)
    document = an_object(read_json(path, "COCO label file", report, unused=_OUTLINES), where)
    class_of_id = _categories(document, path)
    classes = tuple(dict.fromkeys(class_of_id.values()))
    label_of = {name: label for label, name in enumerate(classes)}
    name_of_id: dict[Hashable, str] = {}
    for row, place in _rows(document, "images", path):
        number = _identifier(row, "id", place)
        if number in name_of_id:
            raise UserError(f"{place}: field id = {shown(number)} stands twice among the images")
        name_of_id[number] = a_text(member(row, "file_name", place), place, "file_name")
    ids = sorted(name_of_id, key=lambda number: (isinstance(number, str), number))
    signs: dict[Hashable, list[tuple[_Box, int]]] = {number: [] for number in ids}
    ignored: dict[Hashable, list[_Box]] = {number: [] for number in ids}
    for row, place in _rows(document, "annotations", path):
        image, category = _identifier(row, "image_id", place), _identifier(row, "category_id", place)
        if image not in name_of_id:
            raise UserError(f"{place}: field image_id = {shown(image)} is none of the file's {len(ids)} images")
        if category not in class_of_id:
            raise UserError(f"{place}: field category_id = {shown(category)} is none of the file's categories")
        if row.get("id") == 0:
            report.note("annotation id 0: counted, where COCO's evaluator loses its match", place)
        box = _box(row, place)
        if box[0] == box[2] or box[1] == box[3]:
            report.note("label without area: kept, though nothing matches it", place)
        if row.get("iscrowd"):
            ignored[image].append(box)
        else:
            signs[image].append((box, label_of[class_of_id[category]]))
    truths = [
        SignTruth(
            f"{place:09d}",  # Images rank by this name where scores are equal: in the order of ids.
            0,
            0,
            _array([box for box, _ in signs[number]]),
            np.array([label for _, label in signs[number]], dtype=np.int64),
            _array(ignored[number]),
        )
        for place, number in enumerate(ids)
    ]
    place_of_id = {number: place for place, number in enumerate(ids)}
    return _Labels(truths, [name_of_id[number] for number in ids], classes, place_of_id, class_of_id)


def _read_predictions(
    path: Path, labels: _Labels, leave_out: bool, report: ReadReport
) -> tuple[list[SignPrediction], list[bool]]:
    """A prediction for each truth, and whether the file speaks of its image; `leave_out` images of no truth."""
    path, numbering, document = _read_document(path, report)
    names = _Names(labels.file_names, leave_out, report)
    place_of_id, class_of_id = labels.place_of_id, labels.class_of_id
    spoken_of = [False] * len(labels.truths)
    if isinstance(document, dict):
        own_places: dict[Hashable, int | None] = {}
        for row, where in _rows(document, "images", numbering):
            number = _identifier(row, "id", where)
            if number in own_places:
                raise UserError(f"{where}: field id = {shown(number)} stands twice among the images")
            name = a_text(member(row, "file_name", where), where, "file_name")
            place = own_places[number] = names.place(name, where)
            if place is not None:
                if spoken_of[place]:
                    raise UserError(f"{where}: field file_name = {shown(name)} stands twice among the images")
                spoken_of[place] = True
        rows, class_of_id = _rows(document, "annotations", path), _categories(document, numbering)
        places: Mapping[Hashable, int | None] | None = own_places
    elif isinstance(document, list):
        rows, places = _rows({"": document}, "", path), place_of_id
    else:
        raise UserError(f"{path}: neither a list of COCO results nor an object with images, categories and annotations")
    label_of = {name: label for label, name in enumerate(labels.classes)}
    found: list[list[tuple[_Box, float, int]]] = [[] for _ in labels.truths]
    num_rows = 0
    for row, where in rows:
        num_rows += 1
        place = _place(row, where, places, names)
        detection = (
            _box(row, where),
            a_number(member(row, "score", where), where, "score"),
            _label(row, where, class_of_id, label_of),
        )
        if place is not None:
            spoken_of[place] = True
            found[place].append(detection)
    if not num_rows:
        report.note("prediction file without a detection", str(path))
    elif not any(spoken_of):
        raise UserError(f"{path}: predicts none of the {len(found)} labelled images, the first is {names.names[0]}")
    predictions = [
        SignPrediction(
            _array([box for box, _, _ in rows_of_image]),
            np.array([score for _, score, _ in rows_of_image], dtype=np.float64),
            np.array([label for _, _, label in rows_of_image], dtype=np.int64),
        )
        for rows_of_image in found
    ]
    return predictions, spoken_of


def _read_document(path: Path, report: ReadReport) -> tuple[Path, Path, Any]:
    """The file of detections, that which numbers images and classes, and what they hold."""
    if path.is_dir():
        if not (path / "results.json").is_file():
            raise UserError(f"{path}: no results.json in it; give the folder that predict wrote, or a JSON file")
        path = path / "results.json"
    numbering = path.with_name("images.json")
    document = read_json(path, "prediction file", report)
    if path.name != "results.json" or not isinstance(document, list) or not numbering.is_file():
        return path, path, document
    told = an_object(read_json(numbering, "list of predicted images", report), str(numbering))
    return path, numbering, {**told, "annotations": document}


class _Names:
    """Labelled images by name: as it is, else by the end of its path ("00600.jpg" for "images/00600.ppm")."""

    def __init__(self, names: list[str], leave_out: bool, report: ReadReport) -> None:
        self.names, self._leave_out, self._report = names, leave_out, report
        self._place_of = {name: place for place, name in enumerate(names)}
        self._places_of_stem: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            self._places_of_stem.setdefault(PurePosixPath(name).stem, []).append(place)
        self._found: dict[str, int | None] = {}
        self._name_found: dict[int, str] = {}

    def place(self, name: str, where: str) -> int | None:
        """None for an image to be left out."""
        if name not in self._found:
            place = self._found[name] = self._place(name, where)
            if place is not None and self._name_found.setdefault(place, name) != name:
                raise UserError(
                    f"{where}: image {shown(name)} is {self.names[place]} of the labels, as is "
                    f"{shown(self._name_found[place])}; predict each image once"
                )
        return self._found[name]

    def _place(self, name: str, where: str) -> int | None:
        if name in self._place_of:
            return self._place_of[name]
        places = [
            place
            for place in self._places_of_stem.get(PurePosixPath(name).stem, [])
            if _same_end(PurePosixPath(name), PurePosixPath(self.names[place]))
        ]
        if len(places) == 1:
            self._report.note("image found by the end of its path, whatever its suffix: used", where)
            return places[0]
        if self._leave_out and not places:
            self._report.note("predicted image is not in --list: left out", where)
            return None
        if places:
            what = f"could be each of {len(places)}, among them {self.names[places[0]]} and {self.names[places[1]]}"
        else:
            what = f"is none of the {len(self.names)} labelled ones, the first is {self.names[0]}"
        raise UserError(f"{where}: image {shown(name)} {what}; with --list, images of other splits are left out")


def _same_end(one: PurePosixPath, other: PurePosixPath) -> bool:
    """Whether the shorter path, without suffix, is how the longer one ends."""
    ends = ((path.stem, *path.parts[-2::-1]) for path in (one, other))
    return all(part == twin for part, twin in zip(*ends, strict=False))


def _place(
    row: dict[str, Any], where: str, place_of_id: Mapping[Hashable, int | None] | None, names: _Names
) -> int | None:
    if place_of_id is not None:
        number = _identifier(row, "image_id", where)
        if number not in place_of_id:
            few = ", ".join(shown(known) for known in list(place_of_id)[:3])
            raise UserError(
                f"{where}: field image_id = {shown(number)} is none of the {len(place_of_id)} images (ids {few}, …)"
            )
        return place_of_id[number]
    field = "file_name" if "file_name" in row else "image_id"
    if field == "image_id" and not isinstance(row.get(field), str):
        raise UserError(
            f"{where}: field image_id = {shown(row.get(field))}, but labels of this format number no images; "
            "give file_name"
        )
    return names.place(a_text(row[field], where, field), where)


def _label(
    row: dict[str, Any], where: str, class_of_id: Mapping[Hashable, str] | None, label_of: Mapping[str, int]
) -> int:
    name = a_text(row["category_name"], where, "category_name") if "category_name" in row else ""
    if class_of_id is not None and ("category_id" in row or not name):
        number = _identifier(row, "category_id", where)
        if number not in class_of_id:
            few = ", ".join(f"{shown(known)} {named}" for known, named in list(class_of_id.items())[:3])
            raise UserError(f"{where}: field category_id = {shown(number)} is none of the categories ({few}, …)")
        if name and name != class_of_id[number]:
            raise UserError(
                f'{where}: field category_name = "{name}", but category {number} is "{class_of_id[number]}"'
            )
        name = class_of_id[number]
    if not name:
        raise UserError(
            f"{where}: field category_id = {shown(row.get('category_id'))}, but labels of this format number no "
            "classes; give category_name"
        )
    if name not in label_of:
        raise UserError(f'{where}: class "{name}" is none of the labels{nearest(name, label_of)}')
    return label_of[name]


def _categories(document: dict[str, Any], path: Path) -> dict[Hashable, str]:
    """Class by category id; two categories of one name are one class."""
    class_of_id: dict[Hashable, str] = {}
    for row, where in _rows(document, "categories", path):
        number = _identifier(row, "id", where)
        if number in class_of_id:
            raise UserError(f"{where}: field id = {shown(number)} stands twice among the categories")
        class_of_id[number] = a_text(member(row, "name", where), where, "name")
    return class_of_id


def _rows(document: Mapping[str, Any], field: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a list, each with its place in the file, counted from 0."""
    for number, row in enumerate(a_list(member(document, field, str(path)), str(path), field)):
        where = f"{path}: {field}[{number}]"
        yield an_object(row, where), where


def _identifier(row: dict[str, Any], field: str, where: str) -> Hashable:
    value = member(row, field, where)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"{where}: field {field} must be a whole number or a text, got {shown(value)}")
    return value


def _box(row: dict[str, Any], where: str) -> _Box:
    box = member(row, "bbox", where)
    if not isinstance(box, list) or len(box) != 4:
        raise UserError(f"{where}: field bbox must be [x, y, width, height], got {shown(box)}")
    x, y, width, height = (a_number(value, where, "bbox") for value in box)
    if width < 0 or height < 0:
        raise UserError(f"{where}: field bbox is {width:g} wide and {height:g} high; it is [x, y, width, height]")
    corners = row.get(EXACT_CORNERS)
    if isinstance(corners, list) and len(corners) == 4:
        x1, y1, x2, y2 = (a_number(value, where, EXACT_CORNERS) for value in corners)
        if max(abs(x1 - x), abs(y1 - y), abs(x2 - x - width), abs(y2 - y - height)) < 1e-6:
            return x1, y1, x2, y2
    return x, y, x + width, y + height


def _array(boxes: list[_Box]) -> NDArray[np.float64]:
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)
