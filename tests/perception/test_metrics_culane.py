"""CULane metric against recorded outputs of the official tool, against full-size drawing, and its sums."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

from perception.data.sample import LanePrediction, LaneTruth
from perception.metrics.culane import CulaneMetric, matched_ious
from perception.metrics.lane_raster import draw_lane, lane_ious, lane_vertices

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "culane_official_golden.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
HEIGHT, WIDTH = 590, 1640


def arrays(lanes: list[Any]) -> list[NDArray[np.float64]]:
    return [np.array(lane, dtype=np.float64) for lane in lanes]


def straight(x: float, lean: float = 0.0, bottom: int = 590, top: int = 290) -> NDArray[np.float64]:
    y = np.arange(bottom, top, -10.0)
    return np.stack([x + lean * (bottom - y), y], axis=1)


def prediction(*lanes: NDArray[np.float64]) -> LanePrediction:
    return LanePrediction(lanes, (1.0,) * len(lanes))


def truth(
    *lanes: NDArray[np.float64], category: str | None = None, height: int = HEIGHT, width: int = WIDTH
) -> LaneTruth:
    return LaneTruth("a.jpg", height, width, lanes, None, category)


def full_mask(vertices: NDArray[np.int32], height: int, width: int, lane_width: int) -> NDArray[np.uint8]:
    mask = np.zeros((height, width), np.uint8)
    for start, end in zip(vertices[:-1].tolist(), vertices[1:].tolist(), strict=True):
        cv2.line(mask, start, end, (1,), lane_width)
    return mask


def scipy_vertices(points: NDArray[np.float64]) -> NDArray[np.int32]:
    """The recipe once more, by SciPy's spline, one point after another."""
    rounded = points.astype(np.float32).astype(np.float64)
    if len(rounded) > 2:
        chords = np.linalg.norm(np.diff(rounded, axis=0), axis=1)
        at = np.concatenate([[0], np.cumsum(chords)])
        steps = (at[:-1, None] + chords[:, None] * np.arange(50) / 50).ravel()
        curve = CubicSpline(at, rounded, bc_type="natural")(steps)
        rounded = np.concatenate([curve, rounded[-1:]]).astype(np.float32).astype(np.float64)
    return np.rint(rounded).astype(np.int32)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_official_ious_and_counts(number: int) -> None:
    case = CASES[number]
    lanes, predicted = arrays(case["gt"]), arrays(case["pred"])
    ious = lane_ious(lanes, predicted, case["height"], case["width"], case["lane_width"])
    assert ious.shape == (len(lanes), len(predicted))
    for i, lane in enumerate(lanes):
        for j, other in enumerate(predicted):
            official = case["iou_gt_by_pred"][i][j]
            # The official tool's OpenCV clips a two-point line at the border a little differently.
            crosses = any(
                len(line) == 2 and ((line < 0) | (line >= [case["width"], case["height"]])).any()
                for line in (lane, other)
            )
            # None: 0/0 there, both lanes outside the image.
            assert ious[i, j] == pytest.approx(official or 0.0, abs=0.005 if crosses else 1e-6)
    matched = matched_ious(ious)
    for threshold, counts in case["official"].items():
        tp = int((matched > float(threshold)).sum())
        assert {"tp": tp, "fp": len(predicted) - tp, "fn": len(lanes) - tp} == counts


POINT = st.tuples(st.floats(-300, 500, width=32), st.floats(-100, 260, width=32))


@settings(deadline=None)
@given(st.lists(POINT, min_size=2, max_size=7, unique=True), st.sampled_from([1, 5, 30]))
def test_a_lane_in_its_box_is_the_lane_on_the_whole_canvas(points: list[tuple[float, float]], lane_width: int) -> None:
    height, width = 160, 240
    lane = np.array(points)
    mask = draw_lane(lane, height, width, lane_width)
    whole = full_mask(lane_vertices(lane), height, width, lane_width)
    if mask is None:
        assert not whole.any()
        return
    pasted = np.zeros((height, width), np.uint8)
    box = (slice(mask.top, mask.top + mask.pixels.shape[0]), slice(mask.left, mask.left + mask.pixels.shape[1]))
    pasted[box] = mask.pixels
    np.testing.assert_array_equal(pasted, whole)
    assert mask.area == whole.sum()


def test_vertices_are_those_of_scipys_spline() -> None:
    for case in CASES:
        for lane in arrays(case["gt"] + case["pred"]):
            expected = scipy_vertices(lane)
            distinct = np.concatenate([[True], (np.diff(expected, axis=0) != 0).any(axis=1)])
            np.testing.assert_array_equal(lane_vertices(lane), expected[distinct])


@pytest.mark.parametrize(
    "lane",
    [
        np.zeros((0, 2)),
        np.array([[800.0, 500.0]]),
        np.array([[np.nan, 1.0], [2.0, 3.0], [4.0, 5.0]]),
        np.array([[1e30, 590.0], [1e30, 580.0]]),
        straight(-500),
        np.repeat(straight(800), 2, axis=0),
    ],
)
def test_a_broken_lane_matches_nothing(lane: NDArray[np.float64]) -> None:
    assert (lane_ious([lane], [straight(800), straight(300)], HEIGHT, WIDTH, 30) < 0.5).all()


def test_perfect_and_empty_predictions() -> None:
    metric = CulaneMetric()
    metric.update([prediction(straight(300), straight(900))], [truth(straight(900), straight(300))])
    assert metric.compute() == {
        "culane_f1_50": 1.0,
        "culane_f1_75": 1.0,
        "culane_mf1": 1.0,
        "tp": 2,
        "fp": 0,
        "fn": 0,
    }
    metric.update([prediction()], [truth(straight(900), straight(300))])
    assert metric.compute()["culane_f1_50"] == pytest.approx(2 * 2 / (2 + 4))
    empty = CulaneMetric()
    empty.update([prediction()], [truth()])
    assert empty.compute()["culane_f1_50"] == 0.0
    assert CulaneMetric().compute()["culane_mf1"] == 0.0


def test_thresholds_differ() -> None:
    metric = CulaneMetric()
    metric.update([prediction(straight(508))], [truth(straight(500))])
    iou = float(lane_ious([straight(500)], [straight(508)], HEIGHT, WIDTH, 30)[0, 0])
    assert 0.5 < iou < 0.6
    results = metric.compute()
    assert (results["culane_f1_50"], results["culane_f1_75"]) == (1.0, 0.0)
    assert results["culane_mf1"] == pytest.approx(sum(iou > t / 100 for t in range(50, 100, 5)) / 10)


def test_categories_and_cross() -> None:
    metric = CulaneMetric()
    metric.update(
        [prediction(straight(500)), prediction(straight(500)), prediction(straight(500))],
        [truth(straight(500), category="night"), truth(category="cross"), truth(straight(900), category="curve")],
    )
    results = metric.compute()
    assert results["culane_f1_50/night"] == 1.0
    assert results["culane_f1_50/curve"] == 0.0
    assert results["fp/cross"] == 1
    assert "culane_f1_50/cross" not in results
    assert (results["tp"], results["fp"], results["fn"]) == (1, 2, 1)


def test_counts_are_whole_and_add_up() -> None:
    images = [
        (prediction(*arrays(case["pred"])), truth(*arrays(case["gt"]), category=("night", "curve")[number % 2]))
        for number, case in enumerate(CASES[:10])
    ]
    whole, merged = CulaneMetric(), CulaneMetric()
    whole.update(*zip(*images, strict=True))
    for share in (images[::3], images[1::3], images[2::3]):
        part = CulaneMetric()
        part.update(*zip(*share, strict=True))
        assert all(isinstance(value, int) for value in part.counts().values())
        merged.merge(json.loads(json.dumps(part.counts())))
    assert merged.counts() == whole.counts()
    assert merged.compute() == whole.compute()


def test_another_image_size_is_scaled_to_the_canvas() -> None:
    small = (np.array([straight(500), straight(520)]) + 0.5) / 2 - 0.5
    scaled, plain, unscaled = CulaneMetric(), CulaneMetric(), CulaneMetric(scale_to_canvas=False)
    for metric in (scaled, unscaled):
        metric.update([prediction(small[0])], [truth(small[1], height=HEIGHT // 2, width=WIDTH // 2)])
    plain.update([prediction(straight(500))], [truth(straight(520))])
    assert scaled.counts() == plain.counts()
    assert plain.compute()["tp"] == 0
    # Twenty pixels apart on the canvas are ten in the small image, where a lane of 30 overlaps by half.
    assert unscaled.compute()["tp"] == 1


def official_vertices(lane: NDArray[np.float64]) -> NDArray[np.int32]:
    """All points that the official tool joins, repeated ones too, by SciPy's spline: 50 steps a segment."""
    points = lane.astype(np.float32).astype(np.float64)
    at = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    steps = np.concatenate([np.linspace(a, b, 50, endpoint=False) for a, b in itertools.pairwise(at)] + [at[-1:]])
    return np.rint(CubicSpline(at, points, bc_type="natural")(steps).astype(np.float32)).astype(np.int32)


@pytest.mark.slow
def test_speed_against_full_size_masks_for_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """An image has four lanes and four found. The other side's splines are not timed, only its drawing and counting."""
    lanes = [straight(x, lean) for x, lean in ((250, 1.2), (650, 0.4), (1050, -0.5), (1500, -1.3))]
    predicted = [lane + np.array([6.0, 0.0]) for lane in lanes]
    curves = [[official_vertices(lane).reshape(-1, 1, 2) for lane in side] for side in (lanes, predicted)]

    def full_size() -> NDArray[np.float64]:
        ious = np.zeros((4, 4))
        for i, curve in enumerate(curves[0]):
            for j, other in enumerate(curves[1]):
                masks = []
                for line in (curve, other):
                    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
                    cv2.polylines(mask, [line], False, (1,), 30)
                    masks.append(mask)
                shared = cv2.countNonZero(cv2.bitwise_and(*masks))
                ious[i, j] = shared / (cv2.countNonZero(masks[0]) + cv2.countNonZero(masks[1]) - shared)
        return ious

    def seconds(function: Any) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    np.testing.assert_array_equal(lane_ious(lanes, predicted, HEIGHT, WIDTH, 30), full_size())
    ours = min(seconds(lambda: lane_ious(lanes, predicted, HEIGHT, WIDTH, 30)) for _ in range(20))
    theirs = min(seconds(full_size) for _ in range(10))
    with capsys.disabled():
        print(f"\nIoU of 4 x 4 lanes: {ours * 1e3:.2f} ms, full size {theirs * 1e3:.2f} ms: {theirs / ours:.1f} x")
    assert theirs / ours > 4
