"""SignMetric: equal to pycocotools, whatever the order of images and the ranks; and what others stumble over."""

from __future__ import annotations

import contextlib
import io
import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perception.data.signs.classes import GTSDB_CLASSES, GTSDB_SUPERCLASSES
from perception.data.signs.sample import SignPrediction, SignTruth
from perception.errors import UserError
from perception.metrics.average_precision import BoxTable, area_under_curve
from perception.metrics.sign import SIZE_BINS, SignMetric, superclasses_of

CLASSES = ("stop", "keep-right", "danger", "bend-left")
SUPERCLASSES = superclasses_of(CLASSES)
Scene = tuple[SignPrediction, SignTruth]


def prediction(*rows: tuple[Sequence[float], float, int]) -> SignPrediction:
    return SignPrediction(
        np.array([box for box, _, _ in rows], dtype=np.float64).reshape(-1, 4),
        np.array([score for _, score, _ in rows], dtype=np.float64),
        np.array([label for _, _, label in rows], dtype=np.int64),
    )


def truth(name: str, *rows: tuple[Sequence[float], int], ignored: Sequence[Sequence[float]] = ()) -> SignTruth:
    return SignTruth(
        name,
        800,
        1360,
        np.array([box for box, _ in rows], dtype=np.float64).reshape(-1, 4),
        np.array([label for _, label in rows], dtype=np.int64),
        np.array(ignored, dtype=np.float64).reshape(-1, 4),
    )


def metric_of(scenes: Sequence[Scene], classes: tuple[str, ...] = CLASSES) -> SignMetric:
    metric = SignMetric(classes, superclasses_of(classes))
    metric.update([predicted for predicted, _ in scenes], [labelled for _, labelled in scenes])
    return metric


def drawn_scenes(seed: int, num_images: int, num_detections: int, num_scores: int, num_classes: int) -> list[Scene]:
    """Detections near truths and anywhere; few different scores make many ties."""
    rng = np.random.default_rng(seed)
    scenes = []
    for image in range(num_images):
        corner, side = rng.uniform(0, 700, (rng.integers(0, 6), 2)), rng.uniform(8, 130, 2)
        boxes = np.concatenate([corner, corner + side], axis=1).round(rng.integers(0, 3))
        labels = rng.integers(0, num_classes, len(boxes))
        found, found_labels = rng.uniform(0, 700, (num_detections, 2)), rng.integers(0, num_classes, num_detections)
        found_boxes = np.concatenate([found, found + rng.uniform(8, 130, (num_detections, 1))], axis=1)
        if len(boxes):
            near = rng.integers(0, len(boxes), num_detections // 2)
            shift = rng.integers(-6, 6, (len(near), 4)) / 2
            found_boxes[: len(near)] = boxes[near] + shift
            found_boxes[:, 2:] = np.maximum(found_boxes[:, 2:], found_boxes[:, :2])
            found_labels[: len(near)] = np.where(rng.random(len(near)) < 0.8, labels[near], found_labels[: len(near)])
        scores = rng.integers(1, num_scores + 1, num_detections) / num_scores
        ignored = np.array([[600.0, 600, 760, 760]]) if image % 5 == 4 else np.zeros((0, 4))
        scenes.append(
            (
                SignPrediction(found_boxes, scores, found_labels),
                SignTruth(f"{image:04d}.jpg", 800, 1360, boxes, labels, ignored),
            )
        )
    return scenes


def official(scenes: Sequence[Scene], group_of: NDArray[np.int64]) -> NDArray[np.float64]:
    """(groups, IoU thresholds, areas) AP by pycocotools; -1 without truths. group_of[label] -1: left out."""
    reason = "pycocotools, the other side of this comparison, is not installed"
    coco_module = pytest.importorskip("pycocotools.coco", reason=reason)
    evaluator = pytest.importorskip("pycocotools.cocoeval", reason=reason)
    num_groups = int(group_of.max()) + 1
    annotations: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []

    def entry(image: int, group: int, box: NDArray[np.float64], **more: Any) -> dict[str, Any]:
        width, height = box[2] - box[0], box[3] - box[1]
        bbox = [float(box[0]), float(box[1]), float(width), float(height)]
        return {
            "image_id": image,
            "category_id": group + 1,
            "bbox": bbox,
            "area": float(width * height),
            "iscrowd": 0,
            **more,
        }

    for image, (predicted, labelled) in enumerate(sorted(scenes, key=lambda scene: scene[1].name), start=1):
        for box, label in zip(labelled.boxes, labelled.labels, strict=True):
            if group_of[label] >= 0:
                annotations.append(entry(image, int(group_of[label]), box, id=len(annotations) + 1))
        for box in labelled.ignored:
            for group in range(num_groups):
                annotations.append(entry(image, group, box, id=len(annotations) + 1, iscrowd=1))
        for box, score, label in zip(predicted.boxes, predicted.scores, predicted.labels, strict=True):
            if group_of[label] >= 0:
                detections.append(entry(image, int(group_of[label]), box, id=len(detections) + 1, score=float(score)))
    with contextlib.redirect_stdout(io.StringIO()):
        sides = []
        for rows in (annotations, detections):
            side = coco_module.COCO()
            side.dataset = {
                "images": [{"id": image + 1} for image in range(len(scenes))],
                "categories": [{"id": group + 1} for group in range(num_groups)],
                "annotations": rows,
            }
            side.createIndex()
            sides.append(side)
        evaluation = evaluator.COCOeval(*sides, "bbox")
        evaluation.params.maxDets = [100]
        below = [float(np.nextafter(root**2, 0)) for root in (16.0, 32.0, 96.0)]
        evaluation.params.areaRng = [
            [0, 1e10],
            [0, below[0]],
            [16.0**2, below[1]],
            [32.0**2, below[2]],
            [96.0**2, 1e10],
        ]
        evaluation.params.areaRngLbl = ["all", *SIZE_BINS]
        evaluation.evaluate()
        evaluation.accumulate()
    return np.asarray(evaluation.eval["precision"][:, :, :, :, 0].mean(axis=1).transpose(1, 0, 2))


def mean(values: NDArray[np.float64]) -> float:
    return float(values[values > -1].mean()) if (values > -1).any() else 0.0


def assert_equals_pycocotools(scenes: Sequence[Scene], classes: tuple[str, ...] = CLASSES) -> None:
    figures = metric_of(scenes, classes).compute()
    by_class = official(scenes, np.arange(len(classes)))
    expected = {"ap": mean(by_class[:, :, 0]), "ap50": mean(by_class[:, 0, 0]), "ap75": mean(by_class[:, 5, 0])}
    for number, name in enumerate(SIZE_BINS, start=1):
        if (by_class[:, :, number] > -1).any():
            expected[f"ap_size/{name}"] = mean(by_class[:, :, number])
            expected[f"ap50_size/{name}"] = mean(by_class[:, 0, number])
    for label, name in enumerate(classes):
        if by_class[label, 0, 0] > -1:
            expected[f"ap_class/{name}"] = mean(by_class[label, :, 0])
            expected[f"ap50_class/{name}"] = mean(by_class[label, 0, 0])
    together = official(scenes, np.zeros(len(classes), dtype=np.int64))[0]
    expected["ap50_class_agnostic"] = mean(together[0, :1])
    for number, name in enumerate(SIZE_BINS, start=1):
        if together[0, number] > -1:
            expected[f"ap50_class_agnostic_size/{name}"] = together[0, number]
    superclasses = superclasses_of(classes)
    groups = sorted(set(superclasses.values()))
    by_group = official(scenes, np.array([groups.index(superclasses[name]) for name in classes]))
    for number, group in enumerate(groups):
        if by_group[number, 0, 0] > -1:
            expected[f"ap_superclass/{group}"] = mean(by_group[number, :, 0])
            expected[f"ap50_superclass/{group}"] = mean(by_group[number, 0, 0])
    expected["ap50_superclass"] = mean(
        np.array([values[0, 0] for group, values in zip(groups, by_group, strict=True) if group != "other"])
    )
    compared = {name: value for name, value in figures.items() if name.startswith("ap")}
    assert compared == pytest.approx(expected, abs=1e-9, rel=0)


EDGES = st.integers(0, 8).map(lambda step: float(step * 8))
BOX = st.tuples(EDGES, EDGES, st.integers(1, 6), st.integers(1, 6)).map(
    lambda box: (box[0], box[1], box[0] + 8.0 * box[2], box[1] + 8.0 * box[3])
)
LABEL = st.integers(0, len(CLASSES) - 1)
SCORE = st.sampled_from([0.25, 0.5, 0.75])
IMAGE = st.tuples(
    st.lists(st.tuples(BOX, LABEL), max_size=3), st.lists(st.tuples(BOX, SCORE, LABEL), max_size=6), st.booleans()
)


@settings(max_examples=50, deadline=None)
@given(st.lists(IMAGE, min_size=1, max_size=3))
def test_equals_pycocotools_on_ties_of_score_and_overlap(
    images: list[tuple[list[tuple[Any, int]], list[tuple[Any, float, int]], bool]],
) -> None:
    """On a grid of 8 pixels, areas of 16^2 and 32^2, IoU of exactly .5 and .75 and equal boxes are frequent."""
    assert_equals_pycocotools(
        [
            (prediction(*found), truth(f"{number}.jpg", *signs, ignored=[(0, 0, 32, 32)] if is_ignored else []))
            for number, (signs, found, is_ignored) in enumerate(images)
        ]
    )


@pytest.mark.parametrize("num_scores", [3, 10**9])
def test_equals_pycocotools_on_random_scenes(num_scores: int) -> None:
    """Over 100 detections in an image, so that the limit of the class-agnostic figure is in force."""
    assert_equals_pycocotools(drawn_scenes(num_scores, 25, 130, num_scores, len(CLASSES)))


def test_result_depends_on_neither_order_nor_batches_nor_ranks() -> None:
    scenes = drawn_scenes(1, 21, 40, 4, len(CLASSES))
    expected = metric_of(scenes).compute()
    rng = np.random.default_rng(0)
    for num_ranks, batch_size in ((1, 1), (2, 3), (4, 5)):
        order = rng.permutation(len(scenes)).tolist()
        order += order[: -len(order) % num_ranks]  # Padded: the first images come twice.
        merged = SignMetric(CLASSES, SUPERCLASSES)
        for rank in rng.permutation(num_ranks).tolist():
            metric = SignMetric(CLASSES, SUPERCLASSES)
            share = [scenes[index] for index in order[rank::num_ranks]]
            for start in range(0, len(share), batch_size):
                batch = share[start : start + batch_size]
                metric.update([predicted for predicted, _ in batch], [labelled for _, labelled in batch])
            merged.merge(pickle.loads(pickle.dumps(metric.counts())))
        assert merged.compute() == expected


def test_an_image_that_comes_twice_counts_once() -> None:
    scene = prediction(((0, 0, 40, 40), 0.9, 0)), truth("a.jpg", ((0, 0, 40, 40), 0))
    rounded = prediction(((0, 0, 40, 40.000001), 0.9, 0)), scene[1]
    once = metric_of([scene])
    assert metric_of([scene, scene]).compute() == once.compute()
    # Rounding that differs with the batch: which comes first makes no difference.
    there, back = metric_of([scene, rounded]), metric_of([rounded, scene])
    assert pickle.dumps(there.counts()) == pickle.dumps(back.counts())
    assert there.compute()["truths"] == 1
    with pytest.raises(UserError, match=r"a\.jpg: stands for two images with different labels"):
        metric_of([scene, (scene[0], truth("a.jpg"))])


def test_merging_nothing_and_other_classes() -> None:
    metric = metric_of([(prediction(((0, 0, 40, 40), 0.9, 0)), truth("a.jpg", ((0, 0, 40, 40), 0)))])
    before = metric.compute()
    metric.merge(SignMetric(CLASSES, SUPERCLASSES).counts())
    assert metric.compute() == before
    with pytest.raises(UserError, match="sign metrics of 1 and 4 classes cannot be added up"):
        metric.merge(SignMetric(("stop",), {}).counts())


def test_counts_are_small() -> None:
    metric = metric_of(drawn_scenes(2, 100, 100, 1000, len(CLASSES)))
    assert len(pickle.dumps(metric.counts())) < 60 * 100 * 100


def test_the_first_match_is_not_lost() -> None:
    """COCO's evaluators take a match with annotation id 0 for none."""
    figures = metric_of([(prediction(((0, 0, 40, 40), 0.9, 0)), truth("a.jpg", ((0, 0, 40, 40), 0)))]).compute()
    assert (figures["ap"], figures["ap50_class_agnostic"]) == (1.0, 1.0)


def test_beyond_a_hundred_detections_an_image_and_class_nothing_counts() -> None:
    wrong = [((100 + place, 100, 140 + place, 140), 0.9, 0) for place in range(100)]
    right = ((0, 0, 40, 40), 0.5, 0)
    labelled = truth("a.jpg", ((0, 0, 40, 40), 0))
    assert metric_of([(prediction(*wrong, right), labelled)]).compute()["ap50"] == 0.0
    assert metric_of([(prediction(*wrong[:99], right), labelled)]).compute()["ap50"] == pytest.approx(1 / 100)


def test_without_detections_truths_or_images() -> None:
    headline = ("ap", "ap50", "ap75", "ap50_class_agnostic", "ap50_superclass")
    nothing = SignMetric(CLASSES, SUPERCLASSES).compute()
    no_truths = metric_of([(prediction(((0, 0, 40, 40), 0.9, 0)), truth("a.jpg"))]).compute()
    no_detections = metric_of([(prediction(), truth("a.jpg", ((0, 0, 40, 40), 1)))]).compute()
    for figures, num_images, num_truths in ((nothing, 0, 0), (no_truths, 1, 0), (no_detections, 1, 1)):
        assert [figures[name] for name in headline] == [0.0] * 5
        assert (figures["images"], figures["truths"]) == (num_images, num_truths)
        assert min(figures.values()) == 0.0
    assert "ap_class/keep-right" in no_detections and "ap_class/keep-right" not in no_truths


def test_classes_without_truths_are_in_no_mean_but_named() -> None:
    figures = metric_of(
        [(prediction(((0, 0, 40, 40), 0.9, 1), ((200, 0, 240, 40), 0.95, 0)), truth("a.jpg", ((0, 0, 40, 40), 1)))]
    ).compute()
    assert (figures["ap"], figures["ap_class/keep-right"], figures["truths_class/keep-right"]) == (1.0, 1.0, 1)
    assert figures["truths_class/stop"] == 0 and "ap_class/stop" not in figures
    # Mandatory alone has truths among the super-classes that count.
    assert (figures["ap50_superclass"], figures["gtsdb_auc"]) == (1.0, 1.0)
    assert figures["truths_superclass/danger"] == 0 and "ap50_superclass/danger" not in figures
    # The detection of the class without truths is a false one where all signs are one class.
    assert figures["ap50_class_agnostic"] == pytest.approx(0.5)


def test_super_classes_and_all_signs_forgive_the_class() -> None:
    danger, bend = CLASSES.index("danger"), CLASSES.index("bend-left")
    figures = metric_of([(prediction(((0, 0, 40, 40), 0.9, bend)), truth("a.jpg", ((0, 0, 40, 40), danger)))]).compute()
    assert (figures["ap50"], figures["ap50_superclass/danger"], figures["ap50_class_agnostic"]) == (0.0, 1.0, 1.0)


def test_other_is_scored_in_no_mean_of_super_classes() -> None:
    stop = CLASSES.index("stop")
    figures = metric_of([(prediction(), truth("a.jpg", ((0, 0, 40, 40), stop)))]).compute()
    assert figures["truths_superclass/other"] == 1 and figures["ap50_superclass/other"] == 0.0
    assert figures["ap50_superclass"] == 0.0
    assert "ap50_superclass" not in metric_of([], ("car", "stop")).compute()


def test_super_classes_of_known_classes_only() -> None:
    assert superclasses_of(GTSDB_CLASSES) == GTSDB_SUPERCLASSES
    assert superclasses_of(("danger", "mandatory")) == {"danger": "danger", "mandatory": "mandatory"}
    assert superclasses_of(("stop", "traffic-light")) == {}


@pytest.mark.parametrize(("side", "expected"), [(16, "16-32"), (32, "32-96"), (96, "over-96"), (15.5, "under-16")])
def test_a_size_on_the_edge_is_in_the_upper_bin_alone(side: float, expected: str) -> None:
    box = (10, 10, 10 + side, 10 + side)
    figures = metric_of([(prediction((box, 0.9, 0)), truth("a.jpg", (box, 0)))]).compute()
    assert [name for name in SIZE_BINS if figures[f"truths_size/{name}"]] == [expected]
    assert [name for name in SIZE_BINS if f"ap_size/{name}" in figures] == [expected]
    assert figures[f"ap50_class_agnostic_size/{expected}"] == 1.0


def test_in_an_ignored_region_a_detection_is_neither_right_nor_wrong() -> None:
    found = prediction(((200, 200, 240, 240), 0.95, 2), ((0, 0, 40, 40), 0.9, 2))
    labelled = ((0, 0, 40, 40), 2)
    with_region = truth("a.jpg", labelled, ignored=[(190, 190, 300, 300)])
    counted, excused = (metric_of([(found, own)]).compute() for own in (truth("a.jpg", labelled), with_region))
    for name in ("ap50", "ap50_class_agnostic", "ap50_superclass", "gtsdb_auc"):
        assert (counted[name], excused[name]) == (pytest.approx(0.5, abs=0.01), 1.0)
    assert excused["ignored"] == 1
    # A region is nothing to be found.
    assert metric_of([(prediction(), truth("a.jpg", ignored=[(0, 0, 9, 9)]))]).compute()["truths"] == 0


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        (prediction(((0, 0, 40, 40), float("nan"), 0)), r"a\.jpg: a predicted score is nan"),
        (
            prediction(((0, 0, float("inf"), 40), 0.5, 0)),
            r"a\.jpg: a predicted box has a coordinate that is not finite",
        ),
        (prediction(((0, 0, -40, 40), 0.5, 0)), r"a\.jpg: a predicted box ends before it begins"),
        (prediction(((0, 0, 40, 40), 0.5, 4)), r"a\.jpg: a predicted label is 4, there are 4 classes"),
        (prediction(((0, 0, 40, 40), 0.5, -1)), r"a\.jpg: a predicted label is -1"),
    ],
)
def test_what_is_no_prediction_is_refused(predicted: SignPrediction, message: str) -> None:
    with pytest.raises(UserError, match=message):
        metric_of([(predicted, truth("a.jpg", ((0, 0, 40, 40), 0)))])


def table(*rows: tuple[int, Sequence[float]], scores: Sequence[float] | None = None) -> BoxTable:
    return BoxTable(
        np.array([image for image, _ in rows], dtype=np.int64),
        np.array([box for _, box in rows], dtype=np.float64).reshape(-1, 4),
        None if scores is None else np.array(scores),
    )


A, B, FAR = (0, 0, 10, 10), (50, 0, 60, 10), (500, 0, 510, 10)


@pytest.mark.parametrize(
    ("found", "scores", "area"),
    [
        ([(0, A), (1, B)], [0.9, 0.8], 1.0),
        ([(0, FAR), (0, A), (1, B)], [0.95, 0.9, 0.8], 0.5 * 1 / 2 + 0.5 * 2 / 3),
        ([(0, A), (0, FAR), (1, B)], [0.9, 0.9, 0.9], 2 / 3),  # one threshold lets all in
        ([(0, A), (0, A), (1, B)], [0.9, 0.8, 0.7], 0.5 + 0.5 * 2 / 3),  # a second one is false
        ([(1, A)], [0.9], 0.0),  # another image's
        ([(0, (0, 0, 10, 6))], [0.9], 0.5),  # IoU of exactly .6
        ([(0, (0, 0, 10, 5.9))], [0.9], 0.0),
        ([(0, (0, 0, 0, 0))], [0.9], 0.0),
        ([], [], 0.0),
    ],
)
def test_area_under_the_curve_by_hand(found: list[tuple[int, Any]], scores: list[float], area: float) -> None:
    truths, none = table((0, A), (1, B)), table()
    assert area_under_curve(table(*found, scores=scores), truths, none, 0.6) == pytest.approx(area)
    assert np.isnan(area_under_curve(table(*found, scores=scores), none, none, 0.6))


def test_the_surest_detection_takes_the_best_free_truth() -> None:
    near = (2, 0, 12, 10)  # IoU with A .667
    found = table((0, near), (0, A), scores=[0.8, 0.9])
    assert area_under_curve(found, table((0, A), (0, (3, 0, 13, 10))), table(), 0.6) == 1.0


def test_tt100k_counts_by_hand() -> None:
    """Pairs go by overlap, not by score; a class must match; sizes are of the longer side."""
    sign, small, wide = (0, 0, 40, 40), (100, 0, 110, 10), (200, 0, 700, 40)
    found = prediction(
        ((0, 0, 40, 36), 0.95, 0),  # IoU .9: false, for the next one fits better
        ((0, 0, 40, 40), 0.6, 0),
        ((100, 0, 110, 10), 0.9, 1),  # another class
        ((200, 0, 700, 40), 0.9, 0),  # found, but longer than 400
        ((300, 300, 310, 310), 0.9, 0),  # in an ignored region
        ((400, 400, 410, 410), 0.4, 0),  # below the threshold
    )
    labelled = truth("a.jpg", (sign, 0), (small, 0), (wide, 0), ignored=[(290, 290, 400, 400)])
    assert metric_of([(found, labelled)]).tt100k(0.5) == {
        "tt100k_accuracy": 1 / 3,
        "tt100k_recall": 1 / 2,
        "truths_side/0-32": 1,
        "tt100k_accuracy_side/0-32": 0.0,
        "tt100k_recall_side/0-32": 0.0,
        "truths_side/32-96": 1,
        "tt100k_accuracy_side/32-96": 1 / 2,
        "tt100k_recall_side/32-96": 1.0,
        "truths_side/96-400": 0,
    }
    # An IoU of exactly .5 is none.
    half = prediction(((0, 0, 40, 20), 0.9, 0))
    assert metric_of([(half, truth("a.jpg", (sign, 0)))]).tt100k(0.5)["tt100k_recall"] == 0.0
    assert metric_of([]).tt100k(0.5) == {f"truths_side/{name}": 0 for name in ("0-32", "32-96", "96-400")}


@pytest.mark.slow
def test_forty_thousand_detections_take_about_a_second() -> None:
    metric = metric_of(drawn_scenes(3, 300, 133, 1000, len(GTSDB_CLASSES)), GTSDB_CLASSES)
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        assert metric.compute()["detections"] == 39900
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 2.5  # Measured: 0.75 s.
