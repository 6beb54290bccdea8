"""TuSimple metric against recorded outputs of the official tool, its strict mode and its sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from perception.data.sample import LanePrediction, LaneTruth
from perception.metrics.tusimple import TusimpleMetric, default_rows, image_scores, x_at_rows

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tusimple_official_golden.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
ROWS = np.array(GOLDEN["h_samples"], dtype=np.float64)
H_SAMPLES = tuple(GOLDEN["h_samples"])


def rows_of(lanes: list[list[float]]) -> NDArray[np.float64]:
    return np.array(lanes, dtype=np.float64).reshape(len(lanes), len(ROWS))


def points_of(lanes: list[list[float]]) -> tuple[NDArray[np.float64], ...]:
    """(K, 2) from bottom to top, of lanes without inner gaps."""
    return tuple(np.stack([x[x >= 0], ROWS[x >= 0]], axis=1)[::-1] for x in rows_of(lanes) if (x >= 0).any())


def straight(x: float, bottom: float = 710, top: float = 160) -> NDArray[np.float64]:
    y = np.arange(bottom, top - 1, -10.0)
    return np.stack([np.full(len(y), x), y], axis=1)


def truth(*lanes: NDArray[np.float64], h_samples: tuple[int, ...] | None = H_SAMPLES, scale: float = 1.0) -> LaneTruth:
    return LaneTruth("a.jpg", int(720 * scale), int(1280 * scale), lanes, h_samples)


def prediction(*lanes: NDArray[np.float64]) -> LanePrediction:
    return LanePrediction(lanes, (1.0,) * len(lanes))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_official_scores(number: int) -> None:
    case = CASES[number]
    scores = image_scores(rows_of(case["pred"]), rows_of(case["gt"]), ROWS, case["run_time"])
    assert scores == pytest.approx(case["official"], abs=1e-12)


def test_lanes_as_points_score_as_rows_do() -> None:
    compared = 0
    for case in CASES:
        lanes = [*case["pred"], *case["gt"]]
        whole = all((np.diff(np.flatnonzero(x >= 0)) == 1).all() and (x >= 0).any() for x in rows_of(lanes))
        if not whole or case["run_time"] > 200:
            continue
        metric = TusimpleMetric()
        metric.update([prediction(*points_of(case["pred"]))], [truth(*points_of(case["gt"]))])
        results = metric.compute()
        found = [results[f"tusimple_{name}"] for name in ("accuracy", "fp", "fn")]
        assert found == pytest.approx(case["official"], abs=1e-12)
        compared += 1
    assert compared > 20


def test_an_unused_slot_is_kept_or_in_strict_mode_dropped() -> None:
    lane, unused = np.full(56, 600.0), np.full(56, -2.0)
    labels, found = np.stack([lane, unused]), lane[None]
    official, strict = TusimpleMetric(), TusimpleMetric(strict=True)
    for metric in (official, strict):
        metric.update_rows(found, labels, ROWS)
    assert official.compute()["tusimple_fn"] == 0.5
    assert official.compute()["tusimple_accuracy"] == 0.5
    assert strict.compute() == {
        "tusimple_accuracy": 1.0,
        "tusimple_fp": 0.0,
        "tusimple_fn": 0.0,
        "tusimple_f1": 1.0,
    }
    for metric in (official, strict):
        metric.update_rows(np.zeros((0, 56)), unused[None], ROWS)
    assert strict.compute()["tusimple_accuracy"] == 1.0


def test_several_labels_that_share_a_prediction_make_fp_negative() -> None:
    labels = np.stack([np.full(56, 600.0), np.full(56, 605.0)])
    assert image_scores(np.full((1, 56), 602.0), labels, ROWS) == (1.0, -1.0, 0.0)


def test_the_threshold_is_strict() -> None:
    label = np.full((1, 56), 600.0)
    assert image_scores(label + 20.0, label, ROWS)[2] == 1.0
    assert image_scores(label + 19.999, label, ROWS)[2] == 0.0


def test_f1_is_of_one_minus_fp_and_one_minus_fn() -> None:
    metric = TusimpleMetric()
    metric.update([prediction(straight(300), straight(900))], [truth(straight(300), straight(500), straight(600))])
    results = metric.compute()
    precision, recall = 1 - results["tusimple_fp"], 1 - results["tusimple_fn"]
    assert (precision, recall) == (0.5, pytest.approx(1 / 3))
    assert results["tusimple_f1"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert set(TusimpleMetric().compute().values()) == {0.0}


def test_points_are_joined_straight_and_end_where_they_end() -> None:
    lane = np.array([[100.0, 700.0], [200.0, 600.0]])
    assert x_at_rows([lane], np.array([590.0, 600.0, 650.0, 700.0, 710.0])).tolist() == [[-2, 200, 150, 100, -2]]
    assert x_at_rows([np.zeros((0, 2))], np.array([1.0])).tolist() == [[-2]]


def test_default_rows_follow_the_labelled_lanes_and_the_height() -> None:
    rows = default_rows(truth(straight(500, top=305), h_samples=None))
    assert (rows[0], rows[-1], len(rows)) == (310, 710, 41)
    assert default_rows(truth(h_samples=None))[0] == 160
    half = default_rows(truth(straight(250, 355, 155), h_samples=None, scale=0.5))
    assert (half[0], half[1], half[-1]) == (155, 160, 355)


def test_another_image_size_is_scaled_to_the_canvas() -> None:
    def found(scale: float, scale_to_canvas: bool) -> float:
        metric = TusimpleMetric(scale_to_canvas=scale_to_canvas)
        h_samples = tuple(int(row * scale) for row in H_SAMPLES)
        label, lane = straight(600) * scale, straight(630) * scale
        metric.update([prediction(lane)], [truth(label, h_samples=h_samples, scale=scale)])
        return 1 - metric.compute()["tusimple_fn"]

    assert (found(1.0, True), found(0.5, True), found(2.0, True)) == (0.0, 0.0, 0.0)
    assert (found(0.5, False), found(2.0, False)) == (1.0, 0.0)


def test_counts_add_up_over_parts_and_categories() -> None:
    whole, merged = TusimpleMetric(), TusimpleMetric()
    for number, case in enumerate(CASES):
        part = TusimpleMetric()
        for metric in (whole, part):
            rows = (rows_of(case["pred"]), rows_of(case["gt"]))
            metric.update_rows(*rows, ROWS, case["run_time"], category=("day", "night")[number % 2])
        merged.merge(json.loads(json.dumps(part.counts())))
    assert merged.counts()["images"] == len(CASES)
    assert isinstance(merged.counts()["images"], int)
    assert merged.compute() == pytest.approx(whole.compute(), abs=1e-12)
    official = np.array([case["official"] for case in CASES])
    assert whole.compute()["tusimple_accuracy"] == pytest.approx(official[:, 0].mean())
    assert whole.compute()["tusimple_fp/night"] == pytest.approx(official[1::2, 1].mean())


def test_f1_is_never_negative_although_fn_may_pass_one() -> None:
    metric = TusimpleMetric()
    metric.update_rows(np.zeros((0, 56)), np.stack([np.full(56, 100.0 * number) for number in range(1, 7)]), ROWS)
    results = metric.compute()
    assert results["tusimple_fn"] == 1.25 and results["tusimple_f1"] == 0.0
