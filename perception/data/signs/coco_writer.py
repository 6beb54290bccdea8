"""Any sign data set as one COCO JSON, which `read_coco` reads back the same to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perception.data.signs.coco import EXACT_CORNERS
from perception.data.signs.corners import Box
from perception.data.signs.sample import SignDataset, SignTruth
from perception.errors import UserError
from perception.run_folder import write_atomic


def write_coco(dataset: SignDataset, path: Path) -> None:
    """Write images (by their names in the data set), categories and annotations, each with ids from 1, atomically.

    An ignored region becomes an annotation with iscrowd = 1 of the first category, for COCO has none without. Raises
    UserError where the file cannot be written, or the data set has no classes.
    """
    if not dataset.classes:
        raise UserError(f"{path}: a data set without classes cannot be written as COCO")
    categories = [{"id": number, "name": name} for number, name in enumerate(dataset.classes, start=1)]
    images: list[str] = []
    annotations: list[str] = []
    for image in range(1, len(dataset) + 1):
        truth = dataset.truth(image - 1)
        images.append(json.dumps({"id": image, "file_name": truth.name, "height": truth.height, "width": truth.width}))
        for annotation in _annotations(truth):
            entry = {"id": len(annotations) + 1, "image_id": image, **annotation}
            annotations.append(json.dumps(entry, allow_nan=False))
    parts = {"images": images, "annotations": annotations, "categories": [json.dumps(entry) for entry in categories]}
    # An entry a line, so that two files can be compared.
    lists = (f'"{name}": [\n' + ",\n".join(entries) + "\n]" for name, entries in parts.items())
    write_atomic(path, "{" + ",\n".join(lists) + "}\n")


def _annotations(truth: SignTruth) -> Iterator[dict[str, Any]]:
    for box, label in zip(truth.boxes.tolist(), truth.labels.tolist(), strict=True):
        yield {"category_id": label + 1, "iscrowd": 0, **_box_fields(box)}
    for box in truth.ignored.tolist():
        yield {"category_id": 1, "iscrowd": 1, **_box_fields(box)}


def _box_fields(box: Box) -> dict[str, Any]:
    x1, y1, x2, y2 = box
    width, height = x2 - x1, y2 - y1
    fields: dict[str, Any] = {"bbox": [x1, y1, width, height], "area": width * height}
    if (x1 + width, y1 + height) != (x2, y2):
        fields[EXACT_CORNERS] = [x1, y1, x2, y2]
    return fields
