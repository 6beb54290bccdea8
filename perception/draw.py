"""Pictures for people: labels and predictions drawn on images, contact sheets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from perception.data.lane_targets import SampleKey
from perception.data.sample import LaneTruth
from perception.data.signs.sample import SignTruth
from perception.data.sources import LabelledImages
from perception.errors import UserError
from perception.overlay import DRAWN_SCORE, draw_lanes, draw_signs
from perception.tasks import Task

LABEL_COLOUR = (40, 220, 60)
PREDICTION_COLOUR = (255, 70, 200)
IGNORED_COLOUR = (150, 150, 150)


def draw_truth_and_prediction(
    picture: NDArray[np.uint8], scale: float, truth: Any, prediction: Any, classes: Sequence[str]
) -> None:
    """Labels and predictions of a task in two colours on `picture`, the image rescaled by `scale`; in place.

    Of signs those as sure as DRAWN_SCORE are drawn.
    """
    if isinstance(truth, LaneTruth):
        centre = 0.5 * scale - 0.5
        draw_lanes(picture, [lane * scale + centre for lane in truth.lanes], LABEL_COLOUR, 5)
        draw_lanes(picture, [lane * scale + centre for lane in prediction.lanes], PREDICTION_COLOUR, 2)
    elif isinstance(truth, SignTruth):
        draw_signs(picture, truth.ignored * scale, [""] * len(truth.ignored), IGNORED_COLOUR, 1)
        draw_signs(picture, truth.boxes * scale, [""] * len(truth.boxes), LABEL_COLOUR, 2)
        sure = np.flatnonzero(prediction.scores >= DRAWN_SCORE)
        texts = [f"{classes[prediction.labels[index]]} {prediction.scores[index]:.2f}" for index in sure]
        draw_signs(picture, prediction.boxes[sure] * scale, texts, PREDICTION_COLOUR, 1)
    else:
        raise TypeError(f"no drawing for labels of type {type(truth).__name__}")


def tile(images: Sequence[NDArray[np.uint8]], columns: int, gap: int = 4) -> NDArray[np.uint8]:
    """Equal-sized (H, W, 3) images in rows of `columns`, on a dark ground."""
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 24, np.uint8)
    for number, image in enumerate(images):
        top = gap + number // columns * (height + gap)
        left = gap + number % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet


def legend(width: int, entries: Sequence[tuple[str, tuple[int, int, int]]]) -> NDArray[np.uint8]:
    """(28, width, 3): each entry's name beside a line in its colour."""
    strip = np.full((28, width, 3), 24, np.uint8)
    left = 12
    for text, colour in entries:
        cv2.line(strip, (left, 14), (left + 36, 14), colour, 4, cv2.LINE_AA)
        cv2.putText(strip, text, (left + 46, 19), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (235, 235, 235), 1, cv2.LINE_AA)
        left += 60 + 10 * len(text)
    return strip


def write_image(path: Path, image: NDArray[np.uint8]) -> None:
    """Write (H, W, 3) RGB as the format of the suffix, as a whole or not at all."""
    try:
        done, data = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    except cv2.error:
        done = False
    if not done:
        raise UserError(f"{path}: the picture cannot be encoded; use .png or .jpg")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data.tobytes())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room or permission there") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@torch.no_grad()
def draw_contact_sheet(
    path: Path, task: Task, model: nn.Module, samples: LabelledImages, count: int = 24, columns: int = 3
) -> None:
    """Evenly spread samples, with their labels and the model's predictions in two colours."""
    device = next(model.parameters()).device
    model.eval()
    count = min(count, len(samples))
    indices = sorted({round(number * (len(samples) - 1) / max(1, count - 1)) for number in range(count)})
    width = 640
    pictures = []
    for index in indices:
        sample = samples.sample(index)
        batch = task.collate([task.prepare(sample, SampleKey(0, index), train=False)]).to(device)
        prediction = task.predict(model, batch)[0]
        scale = width / sample.truth.width
        height = round(sample.truth.height * scale)
        picture = np.asarray(cv2.resize(sample.image, (width, height), interpolation=cv2.INTER_AREA), dtype=np.uint8)
        draw_truth_and_prediction(picture, scale, sample.truth, prediction, getattr(task, "classes", ()))
        pictures.append(picture)
    tallest = max(picture.shape[0] for picture in pictures)
    pictures = [np.pad(p, ((0, tallest - p.shape[0]), (0, 0), (0, 0))) for p in pictures]
    sheet = tile(pictures, min(columns, len(pictures)))
    entries = [("label", LABEL_COLOUR), ("prediction", PREDICTION_COLOUR)]
    write_image(path, np.concatenate([legend(sheet.shape[1], entries), sheet]))
