"""An exported file against torch, before it is written: the same lanes or signs, and as good a figure in int8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perception.data.generated import GeneratedScenes, render_sign_scene
from perception.data.sample import Lane, LanePrediction
from perception.data.signs.sample import SignPrediction, SignSample, SignTruth
from perception.data.sources import SCENES_SEED
from perception.model_config import SignModelConfig
from perception.onnx_model import OnnxModel, Prediction, Predictor
from perception.run_model import RunModel, TrainedModel
from perception.tasks import task_for

if TYPE_CHECKING:
    from perception.export import ExportOptions

LARGEST_POINT_DIFFERENCE_PIXELS = 0.5
LARGEST_BOX_DIFFERENCE_PIXELS = 0.5
LARGEST_SCORE_DIFFERENCE = 1e-3
LARGEST_INT8_DIFFERENCE = 0.01
COMPARED_SCORE = 0.05
"""Signs found with less are many, and which of them suppresses which other hangs on the last bit."""
_TIE = 1e-3
"""IoUs so near to the threshold of suppression may fall on either side of it."""
_CLASS_AGNOSTIC = "ap50_class_agnostic"


@dataclass(frozen=True)
class LaneChecks:
    """What was compared on generated scenes before the file was written; metrics by the task's primary one."""

    num_scenes: int
    metric: str
    num_objects: int
    """Lanes that torch finds in them."""
    point_difference_pixels: float
    """Largest |dx| between a lane's points by torch and by the fp32 file, in original pixels."""
    metric_torch: float
    metric_fp32: float
    metric_int8: float | None = None
    num_int8_convolutions: int = 0

    def lines(self) -> list[str]:
        """For people, each with the limit beside the figure."""
        lines = [
            f"{self.num_scenes} generated scenes, {self.num_objects} lanes found by torch",
            f"largest distance of lane points, fp32 file to torch: {self.point_difference_pixels:.4f} px "
            f"(at most {LARGEST_POINT_DIFFERENCE_PIXELS})",
            f"{self.metric}: torch {self.metric_torch:.4f}, fp32 file {self.metric_fp32:.4f}",
        ]
        if self.metric_int8 is not None:
            lines.append(
                f"{self.metric}: int8 file {self.metric_int8:.4f}, fp32 file {self.metric_fp32:.4f} "
                f"(at most {LARGEST_INT8_DIFFERENCE} apart); {self.num_int8_convolutions} convolutions in int8"
            )
        return lines

    def notes(self) -> list[str]:
        """Why a check that passed may say little."""
        notes = []
        if not self.num_objects:
            notes.append("torch finds nothing in the check scenes: the comparison of points says nothing")
        if self.metric_int8 is not None and self.metric_fp32 < 0.5:
            notes.append(f"{self.metric} is only {self.metric_fp32:.2f} on generated scenes: int8 may lose elsewhere")
        return notes

    def failure(self) -> str | None:
        """What is wrong with the exported file, None where it may be written."""
        if self.point_difference_pixels > LARGEST_POINT_DIFFERENCE_PIXELS:
            return (
                f"lane points of the fp32 file are up to {self.point_difference_pixels:.3f} px from torch's, more than "
                f"{LARGEST_POINT_DIFFERENCE_PIXELS}"
            )
        if self.metric_int8 is not None and abs(self.metric_int8 - self.metric_fp32) > LARGEST_INT8_DIFFERENCE:
            return (
                f"{self.metric} is {self.metric_int8:.4f} in int8, {self.metric_fp32:.4f} in fp32: more than "
                f"{LARGEST_INT8_DIFFERENCE} apart; take more --calibration-scenes, or export without --int8"
            )
        return None


@dataclass(frozen=True)
class SignChecks:
    """The same of signs; the metric is class-agnostic AP50, which needs no classes of the scenes' own."""

    num_scenes: int
    metric: str
    num_objects: int
    """Signs that torch finds in them, of a score of COMPARED_SCORE or more."""
    box_difference_pixels: float
    """Largest distance of a box's sides between torch and the fp32 file, in original pixels."""
    score_difference: float
    num_ties: int
    """Signs that one of the two suppresses and the other not, by an IoU at the threshold; not compared."""
    metric_torch: float
    metric_fp32: float
    metric_int8: float | None = None
    num_int8_convolutions: int = 0

    def lines(self) -> list[str]:
        """For people, each with the limit beside the figure."""
        ties = f"; {self.num_ties} suppressed by the last bit of an IoU, not compared" if self.num_ties else ""
        lines = [
            f"{self.num_scenes} generated scenes, {self.num_objects} signs of a score of {COMPARED_SCORE} or more "
            f"found by torch{ties}",
            f"largest distance of boxes, fp32 file to torch: {self.box_difference_pixels:.4f} px "
            f"(at most {LARGEST_BOX_DIFFERENCE_PIXELS}); of scores: {self.score_difference:.2e} "
            f"(at most {LARGEST_SCORE_DIFFERENCE:g})",
            f"{self.metric}: torch {self.metric_torch:.4f}, fp32 file {self.metric_fp32:.4f}",
        ]
        if self.metric_int8 is not None:
            lines.append(
                f"{self.metric}: int8 file {self.metric_int8:.4f}, fp32 file {self.metric_fp32:.4f} "
                f"(aim: at most {LARGEST_INT8_DIFFERENCE} apart); {self.num_int8_convolutions} convolutions in int8"
            )
        return lines

    def notes(self) -> list[str]:
        """What a user of the file should know, and why a check that passed may say little."""
        notes = []
        gain = 0.0 if self.metric_int8 is None else self.metric_int8 - self.metric_fp32
        if gain < -LARGEST_INT8_DIFFERENCE:
            notes.append(
                f"int8 loses {-gain:.4f} of {self.metric}, more than the {LARGEST_INT8_DIFFERENCE} that was aimed at: "
                "more --calibration-scenes may help, or no --int8"
            )
        elif gain > LARGEST_INT8_DIFFERENCE:
            notes.append(f"int8 gains {gain:.4f} of {self.metric}: so far do these scenes tell the two apart by chance")
        if not self.num_objects:
            notes.append("torch finds nothing in the check scenes: the comparison of boxes says nothing")
        if self.metric_int8 is not None and self.metric_fp32 < 0.5:
            notes.append(f"{self.metric} is only {self.metric_fp32:.2f} on generated scenes: int8 may lose elsewhere")
        return notes

    def failure(self) -> str | None:
        """What is wrong with the exported file, None where it may be written."""
        if self.box_difference_pixels > LARGEST_BOX_DIFFERENCE_PIXELS:
            return (
                f"boxes of the fp32 file are up to {self.box_difference_pixels:.3f} px from torch's, more than "
                f"{LARGEST_BOX_DIFFERENCE_PIXELS}"
            )
        if self.score_difference > LARGEST_SCORE_DIFFERENCE:
            return (
                f"scores of the fp32 file are up to {self.score_difference:.2e} from torch's, more than "
                f"{LARGEST_SCORE_DIFFERENCE:g}"
            )
        return None


Checks = LaneChecks | SignChecks


class GeneratedSigns:
    """Sign scenes, drawn when asked for."""

    def __init__(self, seed: int, first_index: int, count: int, height: int, width: int) -> None:
        self.seed, self.first_index, self.count, self.height, self.width = seed, first_index, count, height, width

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int) -> SignSample:
        return render_sign_scene(self.seed, self.first_index + index, self.height, self.width)


def scenes_for(
    trained: TrainedModel, options: ExportOptions, first: int, count: int
) -> GeneratedScenes | GeneratedSigns:
    """Scenes of the size that the run is configured for, or that a sign file is to be fixed to."""
    data = trained.config.data
    if trained.config.task == "lane":
        return GeneratedScenes(SCENES_SEED, first, count, data.scene_height, data.scene_width)
    return GeneratedSigns(SCENES_SEED, first, count, *(options.size or (data.scene_height, data.scene_width)))


def check_files(
    trained: TrainedModel, fp32: Path, int8: Path | None, options: ExportOptions, num_int8_convolutions: int = 0
) -> Checks:
    """Torch, the fp32 and the int8 file on the same scenes, never seen in training or calibration."""
    scenes = scenes_for(trained, options, 0, options.num_check_scenes)
    if options.size is not None:
        trained = whole_images(trained)
    # On the CPU as the files are: a GPU's shorter mantissas in convolutions are not what is compared.
    predictors: list[Predictor] = [RunModel(trained, device="cpu")]
    predictors += [OnnxModel(path, options.num_threads) for path in (fp32, int8) if path is not None]
    metrics = [_Metric(trained) for _ in predictors]
    differences = Differences()
    for indices in parts(len(scenes), options.batch or 8):
        samples = [scenes.sample(index) for index in indices]
        predicted = []
        for predictor, metric in zip(predictors, metrics, strict=True):
            prepared = [predictor.prepare(sample.image, sample.truth.name) for sample in samples]
            predicted.append(predictor.predict(prepared)[0])
            metric.update(predicted[-1], [sample.truth for sample in samples])
        for mine, other in zip(predicted[0], predicted[1], strict=True):
            differences.add(mine, other, trained)
    values = [metric.compute() for metric in metrics]
    return differences.checks(
        len(scenes), metrics[0].name, values, None if int8 is None else values[2], num_int8_convolutions
    )


def whole_images(trained: TrainedModel) -> TrainedModel:
    """The same sign model without tiles of its own: what a file of one size does with images of that size."""
    assert isinstance(trained.config.model, SignModelConfig)
    config = replace(trained.config, model=replace(trained.config.model, tile_size=0))
    return replace(trained, config=config, task=task_for(config))


@dataclass
class Differences:
    """The largest ones between torch's predictions and a file's."""

    num_objects: int = 0
    point_pixels: float = 0.0
    box_pixels: float = 0.0
    score: float = 0.0
    num_ties: int = 0

    def add(self, mine: Prediction, other: Prediction, trained: TrainedModel) -> None:
        if isinstance(mine, LanePrediction):
            assert isinstance(other, LanePrediction)
            self.num_objects += len(mine.lanes)
            self.point_pixels = max(self.point_pixels, lane_difference_pixels(mine.lanes, other.lanes))
            return
        assert isinstance(other, SignPrediction) and isinstance(trained.config.model, SignModelConfig)
        self.num_objects += int((mine.scores >= COMPARED_SCORE).sum())
        box, score, ties = sign_differences(mine, other, trained.config.model.nms_iou_threshold)
        self.box_pixels, self.score = max(self.box_pixels, box), max(self.score, score)
        self.num_ties += ties

    def checks(
        self, num_scenes: int, metric: str, values: Sequence[float], int8: float | None, num_int8_convolutions: int
    ) -> Checks:
        if metric != _CLASS_AGNOSTIC:
            return LaneChecks(
                num_scenes,
                metric,
                self.num_objects,
                self.point_pixels,
                values[0],
                values[1],
                int8,
                num_int8_convolutions,
            )
        return SignChecks(
            num_scenes,
            metric,
            self.num_objects,
            self.box_pixels,
            self.score,
            self.num_ties,
            values[0],
            values[1],
            int8,
            num_int8_convolutions,
        )


def sign_differences(a: SignPrediction, b: SignPrediction, iou_threshold: float) -> tuple[float, float, int]:
    """Largest distance of sides and of scores between two predictions of one image, and the number of ties.

    Each sign of COMPARED_SCORE or more, of either, is compared with the nearest of its class of the other; inf where
    there is none. A sign without a near one is a tie if the other has, in its stead, a surer one whose IoU with it is
    at the threshold of suppression.
    """
    box_pixels, score, num_ties = 0.0, 0.0, 0
    for one, other in ((a, b), (b, a)):
        for index in np.flatnonzero(one.scores >= COMPARED_SCORE):
            same = np.flatnonzero(other.labels == one.labels[index])
            distances = np.abs(other.boxes[same] - one.boxes[index]).max(axis=1, initial=0.0)
            nearest = int(distances.argmin()) if len(same) else -1
            distance = float(distances[nearest]) if len(same) else float("inf")
            if distance > LARGEST_BOX_DIFFERENCE_PIXELS and _is_tie(one, int(index), other, iou_threshold):
                num_ties += 1
                continue
            box_pixels = max(box_pixels, distance)
            if distance <= LARGEST_BOX_DIFFERENCE_PIXELS:
                score = max(score, abs(float(other.scores[same[nearest]] - one.scores[index])))
    return box_pixels, score, num_ties


def _is_tie(one: SignPrediction, index: int, other: SignPrediction, iou_threshold: float) -> bool:
    box = one.boxes[index]
    sides = np.minimum(other.boxes[:, 2:], box[2:]) - np.maximum(other.boxes[:, :2], box[:2])
    overlap = sides.clip(0).prod(axis=1)
    areas = (other.boxes[:, 2:] - other.boxes[:, :2]).prod(axis=1)
    iou = overlap / (areas + (box[2:] - box[:2]).prod() - overlap)
    surer = other.scores >= one.scores[index] - LARGEST_SCORE_DIFFERENCE
    return bool((surer & (np.abs(iou - iou_threshold) < _TIE)).any())


def lane_difference_pixels(lanes: Sequence[Lane], others: Sequence[Lane]) -> float:
    """Largest |dx| at the rows that paired lanes share; inf where lanes are missing or end more than a row apart.

    A row more or less at an end is no difference: extents are rounded to whole rows.
    """
    if len(lanes) != len(others):
        return float("inf")
    left = list(others)
    largest = 0.0
    for lane in lanes:
        distances = [_rows_apart(lane, other) for other in left]
        nearest = int(np.argmin(distances))
        largest = max(largest, distances[nearest])
        left.pop(nearest)
    return largest


def _rows_apart(lane: Lane, other: Lane) -> float:
    _, mine, theirs = np.intersect1d(lane[:, 1], other[:, 1], return_indices=True)
    if len(mine) < max(len(lane), len(other)) - 2:
        return float("inf")
    return float(np.abs(lane[mine, 0] - other[theirs, 0]).max(initial=0.0))


def parts(count: int, size: int) -> Iterator[range]:
    """0 .. count - 1 in parts of `size`, the last one shorter."""
    return (range(first, min(first + size, count)) for first in range(0, count, size))


class _Metric:
    """The figure by which a task's files are compared."""

    def __init__(self, trained: TrainedModel) -> None:
        self._of_signs = trained.config.task == "sign"
        self.name = trained.task.primary_metric
        if self._of_signs:
            from perception.metrics.sign import SignMetric

            self.name = _CLASS_AGNOSTIC
            # A model of other classes than the scenes' finds signs all the same.
            self._metric: Any = SignMetric(("sign",), {})
        else:
            self._metric = trained.task.metric()

    def update(self, predictions: Sequence[Any], truths: Sequence[Any]) -> None:
        if self._of_signs:
            predictions = [_of_one_class(prediction) for prediction in predictions]
            truths = [_of_one_class(truth) for truth in truths]
        self._metric.update(predictions, truths)

    def compute(self) -> float:
        return float(self._metric.compute()[self.name])


def _of_one_class(signs: Any) -> Any:
    assert isinstance(signs, SignPrediction | SignTruth)
    return replace(signs, labels=np.zeros_like(signs.labels))
