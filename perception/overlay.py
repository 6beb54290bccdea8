"""Lanes and signs drawn on images, by OpenCV alone: no torch, so that an exported model's predictions are drawn too."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from perception.data.sample import Lane, LanePrediction
from perception.data.signs.sample import Boxes
from perception.lane_follow import FollowedPrediction
from perception.onnx_model import Prediction

COLOURS = ((255, 70, 200), (60, 200, 255), (120, 230, 60), (255, 170, 30), (170, 120, 255), (250, 235, 60))
DRAWN_SCORE = 0.3
"""Signs found with less are written, for average precision, but not drawn."""
_SHIFT = 4
"""cv2 takes points in sixteenths of a pixel."""


def draw_prediction(image: NDArray[np.uint8], prediction: Prediction, classes: Sequence[str]) -> NDArray[np.uint8]:
    """A copy of `image` (H, W, 3) RGB with its lanes, or its signs' boxes and classes.

    Lanes are coloured from left to right, followed ones by their numbers.
    """
    picture = image.copy()
    thickness = max(1, round(min(image.shape[:2]) / 150))
    if isinstance(prediction, LanePrediction):
        if isinstance(prediction, FollowedPrediction):
            numbered = list(zip(prediction.identities, prediction.lanes, strict=True))
        else:
            numbered = list(enumerate(sorted(prediction.lanes, key=lambda lane: float(lane[0, 0]))))
        for number, lane in numbered:
            draw_lanes(picture, [lane], COLOURS[number % len(COLOURS)], thickness)
        return picture
    for box, score, label in zip(prediction.boxes, prediction.scores, prediction.labels, strict=True):
        if score >= DRAWN_SCORE:
            name = classes[label] if label < len(classes) else str(label)
            draw_signs(picture, box[None], [f"{name} {score:.2f}"], COLOURS[int(label) % len(COLOURS)], 1)
    return picture


def draw_lanes(image: NDArray[np.uint8], lanes: Sequence[Lane], colour: tuple[int, int, int], thickness: int) -> None:
    """Draw lanes, (K, 2) in pixels of `image` (H, W, 3) RGB, in place."""
    for lane in lanes:
        points = np.round(lane * (1 << _SHIFT)).clip(-(1 << 28), 1 << 28).astype(np.int32).reshape(-1, 1, 2)
        cv2.polylines(image, [points], False, colour, thickness, cv2.LINE_AA, _SHIFT)


def draw_signs(
    image: NDArray[np.uint8], boxes: Boxes, texts: Sequence[str], colour: tuple[int, int, int], thickness: int
) -> None:
    """Draw boxes, (M, 4) half-open in pixels of `image` (H, W, 3) RGB, in place, a text above each or else below it."""
    height, width = image.shape[:2]
    for box, text in zip(boxes, texts, strict=True):
        # cv2 counts from the centres of pixels.
        edges = np.round((box - 0.5) * (1 << _SHIFT)).clip(-(1 << 28), 1 << 28).astype(int).tolist()
        cv2.rectangle(image, edges[:2], edges[2:], colour, thickness, cv2.LINE_AA, _SHIFT)
        if not text:
            continue
        (text_width, text_height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.4, 1)
        x = int(np.clip(box[0], 0, max(0, width - text_width)))
        y = int(box[1]) - 4 if box[1] > text_height + 4 else int(np.clip(box[3] + text_height + 4, 0, height - 2))
        # A dark outline, since the ground may have the text's colour.
        for shade, stroke in (((0, 0, 0), 3), (colour, 1)):
            cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, 0.4, shade, stroke, cv2.LINE_AA)
