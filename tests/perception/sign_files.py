"""What the tests of the sign readers share: tiny images, and boxes as lists."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from perception.data.signs.dataset import SignFolder


def write_image(path: Path, height: int = 60, width: int = 80) -> None:
    done, data = cv2.imencode(path.suffix, np.full((height, width, 3), 90, np.uint8))
    assert done
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.tobytes())


def write_text(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def names(dataset: SignFolder) -> list[str]:
    return [dataset.truth(index).name for index in range(len(dataset))]


def signs(dataset: SignFolder, index: int = 0) -> list[tuple[str, list[float]]]:
    """(class, box) of each sign of an image."""
    truth = dataset.truth(index)
    return [(dataset.classes[label], box.tolist()) for label, box in zip(truth.labels, truth.boxes, strict=True)]


def ignored(dataset: SignFolder, index: int = 0) -> list[list[float]]:
    boxes: list[list[float]] = dataset.truth(index).ignored.tolist()
    return boxes


def class_counts(dataset: SignFolder) -> dict[str, int]:
    """Signs of each class that has any."""
    labels = np.concatenate([dataset.truth(index).labels for index in range(len(dataset))])
    return {dataset.classes[label]: int((labels == label).sum()) for label in np.unique(labels)}
