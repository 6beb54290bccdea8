"""Metrics of LLAMAS, CurveLanes and OpenLane: against their recipes done anew at full size, by hand, and as sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline, make_interp_spline

from perception.data.sample import LanePrediction, LaneTruth
from perception.metrics.culane import CulaneMetric
from perception.metrics.lane_benchmarks import BENCHMARKS, BenchmarkMetric
from perception.metrics.lane_raster import draw_vertices, mask_ious

Points = NDArray[np.float64]
SIZES = {"llamas": (717, 1276), "curvelanes": (1440, 2560), "openlane": (1280, 1920)}
HEADLINE = {"llamas": "llamas_f1_50", "curvelanes": "curvelanes_f1_50", "openlane": "openlane_f1_30"}


def straight(x: float, bottom: float, top: float, lean: float = 0.0, step: float = 10.0) -> Points:
    """From (x, bottom) up to the row `top`, both included."""
    y = np.append(np.arange(bottom, top, -step), top)
    return np.stack([x + lean * (bottom - y), y], axis=1)


def moved(lane: Points, pixels: float) -> Points:
    """To the right."""
    return np.add(lane, np.array([pixels, 0.0]))


def truth(benchmark: str | None, *lanes: Points, size: tuple[int, int] | None = None) -> LaneTruth:
    height, width = size or SIZES.get(benchmark or "", (590, 1640))
    return LaneTruth("a.jpg", height, width, lanes, benchmark=benchmark)


def found(*lanes: Points) -> LanePrediction:
    return LanePrediction(lanes, (1.0,) * len(lanes))


def scored(benchmark: str, predicted: LanePrediction, labelled: LaneTruth) -> dict[str, float]:
    metric = CulaneMetric(rules=BENCHMARKS[benchmark])
    metric.update([predicted], [labelled])
    return metric.compute()


def counted(figures: dict[str, float]) -> list[float]:
    return [figures["tp"], figures["fp"], figures["fn"]]


# The recipes once more: every pair of points by a line of its own on a whole canvas.


def on_canvas(vertices: Any, height: int, width: int, thickness: int) -> NDArray[np.uint8]:
    canvas = np.zeros((height, width), np.uint8)
    for start, end in itertools.pairwise(vertices):
        cv2.line(canvas, (int(start[0]), int(start[1])), (int(end[0]), int(end[1])), (1,), thickness)
    return canvas


def plain_llamas_truth(lane: Points) -> NDArray[np.uint8]:
    x_of_row = {}
    for row in range(717):
        for (x1, y1), (x2, y2) in itertools.pairwise(lane):
            if y2 <= row <= y1:
                x_of_row[row] = x1 + (x2 - x1) * (row - y1) / (y2 - y1)
    points = [(round(x_of_row[row]), row) for row in range(300, 717) if x_of_row.get(row, -1) >= 0]
    return on_canvas(points, 717, 1276, 30)


def plain_llamas_prediction(lane: Points) -> NDArray[np.uint8]:
    chords = np.linalg.norm(np.diff(lane, axis=0), axis=1)
    at = np.concatenate([[0], np.cumsum(chords)]) / chords.sum()
    curve = make_interp_spline(at, lane, k=min(3, len(lane) - 1))(np.linspace(0, 1, 50))
    return on_canvas(curve, 717, 1276, 30)


def plain_curvelanes(lane: Points) -> NDArray[np.uint8]:
    small = lane * [224 / 2560, 224 / 1440]
    chords = np.linalg.norm(np.diff(small, axis=0), axis=1)
    knots = np.concatenate([[0], np.cumsum(chords)])
    at = [start + t for start, chord in zip(knots[:-1], chords, strict=True) for t in range(int(np.ceil(chord)))]
    # With two knots SciPy's natural spline is the straight line.
    curve = CubicSpline(knots, small, bc_type="natural")([*at, knots[-1]])
    return on_canvas(curve, 224, 224, 5)


def plain_openlane(lane: Points) -> NDArray[np.uint8]:
    points = lane[np.argsort(lane[:, 1])].astype(np.float32).astype(np.float64)
    knots = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])
    at = np.concatenate([np.linspace(a, b, 50, endpoint=False) for a, b in itertools.pairwise(knots)] + [knots[-1:]])
    curve = points if len(points) == 2 else CubicSpline(knots, points, bc_type="natural")(at)
    return on_canvas(np.rint(curve.astype(np.float32)), 1280, 1920, 30)


PLAIN: dict[str, tuple[Callable[[Points], NDArray[np.uint8]], Callable[[Points], NDArray[np.uint8]]]] = {
    "llamas": (plain_llamas_truth, plain_llamas_prediction),
    "curvelanes": (plain_curvelanes, plain_curvelanes),
    "openlane": (plain_openlane, plain_openlane),
}


@st.composite
def lanes_in(draw: st.DrawFn, height: int, width: int, highest: int) -> list[Points]:
    """Lanes from the lower third up, well apart, as roads have them: a drawn bend, a drawn spacing of the points."""
    lanes = []
    for place in range(draw(st.integers(1, 4))):
        bottom = draw(st.integers(height * 2 // 3, height - 1))
        top = draw(st.integers(highest, height // 2))
        y = np.linspace(bottom, top, draw(st.integers(2, 12)))
        t = (bottom - y) / height
        bend, lean = draw(st.floats(-0.1, 0.1)), draw(st.floats(-0.1, 0.1))
        lanes.append(np.stack([width * ((place + 1) / 5 + lean * t + bend * t**2), y], axis=1))
    return lanes


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_ious_are_those_of_the_recipe_at_full_size(benchmark: str, data: st.DataObject) -> None:
    height, width = SIZES[benchmark]
    # Between whole numbers, which their last bits would let be cut to either side.
    labelled = [lane + 0.17 for lane in data.draw(lanes_in(height, width, highest=height // 4))]
    shifts = data.draw(st.lists(st.floats(-60, 60), min_size=len(labelled), max_size=len(labelled)))
    predicted = [moved(lane, shift * width / 1640) + 0.14 for lane, shift in zip(labelled, shifts, strict=True)]
    draw_truth, draw_prediction = PLAIN[benchmark]
    masks, others = [draw_truth(lane) for lane in labelled], [draw_prediction(lane) for lane in predicted]
    wanted = [[(a & b).sum() / max((a | b).sum(), 1) for b in others] for a in masks]
    rules = BENCHMARKS[benchmark]
    canvas = (rules.canvas_height, rules.canvas_width)
    scale = np.array([canvas[1] / width, canvas[0] / height])
    drawn = [
        [draw_vertices(draw(lane * scale), *canvas, rules.lane_width_pixels) for lane in lanes]
        for draw, lanes in ((rules.draw_truth, labelled), (rules.draw_prediction, predicted))
    ]
    np.testing.assert_allclose(mask_ious(*drawn), wanted, atol=0.002)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_what_is_labelled_scores_one_in_any_order_of_lanes_and_direction(benchmark: str, data: st.DataObject) -> None:
    height, width = SIZES[benchmark]
    lanes = data.draw(lanes_in(height, width, highest=300))
    shuffled = [lane[::-1] if data.draw(st.booleans()) else lane for lane in data.draw(st.permutations(lanes))]
    figures = scored(benchmark, found(*shuffled), truth(benchmark, *lanes))
    assert figures[HEADLINE[benchmark]] == figures[f"{benchmark}_f1_75"] == 1.0
    assert counted(figures) == [len(lanes), 0, 0]
    assert figures[f"{benchmark}_mf1"] > (0.89 if benchmark == "llamas" else 0.999)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_shards_in_any_order_add_up_to_the_whole(data: st.DataObject) -> None:
    """Images of all benchmarks and of none, shared out over ranks of which some get nothing."""
    images = []
    for _ in range(data.draw(st.integers(1, 8))):
        benchmark = data.draw(st.sampled_from([*BENCHMARKS, None]))
        height, width = SIZES.get(benchmark or "", (590, 1640))
        lanes = data.draw(lanes_in(height, width, highest=300 if height > 600 else 150))
        kept = [
            moved(lane, data.draw(st.sampled_from([0.0, 12.0, 300.0]))) for lane in lanes if data.draw(st.booleans())
        ]
        images.append((found(*kept), truth(benchmark, *lanes)))
    whole = BenchmarkMetric()
    whole.update(*(list(side) for side in zip(*images, strict=True)))
    ranks = [BenchmarkMetric() for _ in range(3)]
    for prediction, labelled in data.draw(st.permutations(images)):
        ranks[data.draw(st.integers(0, 2))].update([prediction], [labelled])
    merged = BenchmarkMetric()
    for rank in data.draw(st.permutations(ranks)):
        merged.merge(rank.counts())
    assert merged.compute() == whole.compute() and merged.counts() == whole.counts()
    own = {labelled.benchmark for _, labelled in images} - {None}
    assert {name.partition("_")[0] for name in whole.compute()} == own


@pytest.mark.parametrize(
    ("benchmark", "apart", "matches"),
    [
        # A straight lane is 31 pixels wide. Pixels apart: shared columns / all columns.
        ("llamas", 10, True),  # 21 / 41 = .512
        ("llamas", 11, False),  # 20 / 42 = .476
        ("openlane", 16, True),  # 15 / 47 = .319
        ("openlane", 17, False),  # 14 / 48 = .292
        # 2560 / 224 = 11.43 pixels of the image are one of the canvas, where a lane is 7 wide.
        ("curvelanes", 2 * 2560 / 224, True),  # 5 / 9 = .556
        ("curvelanes", 3 * 2560 / 224, False),  # 4 / 10 = .4
    ],
)
def test_straight_lanes_apart_by_hand(benchmark: str, apart: float, matches: bool) -> None:
    """Lanes leave the image at both ends where they may, so that their round ends do not count."""
    height, width = SIZES[benchmark]
    top = 300 if benchmark == "llamas" else 0
    x = 100.5 * width / 224 if benchmark == "curvelanes" else 500.0
    lane = straight(x, height + 40, top - 40)
    other = moved(lane, apart) if benchmark != "llamas" else straight(x + apart + 0.5, height + 40, top)
    figures = scored(benchmark, found(other), truth(benchmark, lane))
    assert counted(figures) == ([1, 0, 0] if matches else [0, 1, 1])
    assert figures[HEADLINE[benchmark]] == float(matches) and figures[f"{benchmark}_f1_75"] == 0.0


@pytest.mark.parametrize(
    ("benchmark", "x", "other_x", "matches"),
    [
        # At the image's left border a lane at column x shows x + 16 of its 31 columns, the narrower one lies within:
        ("openlane", 14.0, -7.0, False),  # 9 / 30 is .3 exactly
        ("openlane", 14.0, -6.0, True),  # 10 / 30
        # Of its 7 columns on the small canvas x + 4, where a coordinate is cut towards 0:
        ("curvelanes", 2.5 * 2560 / 224, -1.5 * 2560 / 224, False),  # columns 2 and -1: 3 / 6 is .5 exactly
        ("curvelanes", 2.5 * 2560 / 224, -0.7 * 2560 / 224, True),  # columns 2 and 0: 4 / 6
    ],
)
def test_an_iou_at_the_threshold_itself_is_no_match(benchmark: str, x: float, other_x: float, matches: bool) -> None:
    bottom = SIZES[benchmark][0] + 40
    figures = scored(benchmark, found(straight(other_x, bottom, -40)), truth(benchmark, straight(x, bottom, -40)))
    assert counted(figures) == ([1, 0, 0] if matches else [0, 1, 1])


def test_llamas_labels_count_from_row_300_on() -> None:
    below = straight(500, 716, 300)
    same = scored("llamas", found(below), truth("llamas", below))
    # What lies above is neither drawn nor counted ...
    assert scored("llamas", found(below), truth("llamas", straight(500, 716, 200))) == same
    assert counted(same) == [1, 0, 0]
    # ... of a label; a prediction is drawn as it is: 417 rows of its 517 are the label's, its round end apart.
    longer = scored("llamas", found(straight(500, 716, 200)), truth("llamas", below))
    assert counted(longer) == [1, 0, 0] and longer["llamas_f1_75"] == 1.0
    assert counted(scored("llamas", found(straight(500, 716, -300)), truth("llamas", below))) == [1, 0, 0]
    assert counted(scored("llamas", found(straight(500, 1600, 200)), truth("llamas", straight(500, 500, 300)))) == [
        0,
        1,
        1,
    ]
    # Two rows make a lane: 300 and 301; one does not, and 299 and 298 do not either.
    assert counted(scored("llamas", found(), truth("llamas", straight(500, 301, 250)))) == [0, 0, 1]
    assert counted(scored("llamas", found(), truth("llamas", straight(500, 300, 250)))) == [0, 0, 0]
    assert counted(scored("llamas", found(), truth("llamas", straight(500, 299, 250)))) == [0, 0, 0]
    # Left of the image there is no label: x = -.4, which is column 0, counts, x = -.6 does not.
    assert counted(scored("llamas", found(), truth("llamas", straight(-0.4, 716, 300)))) == [0, 0, 1]
    assert counted(scored("llamas", found(), truth("llamas", straight(-0.6, 716, 300)))) == [0, 0, 0]


@pytest.mark.parametrize(
    ("benchmark", "points", "predictions"),
    [
        ("llamas", [], 0),
        ("llamas", [[5, 500]], 0),
        ("llamas", [[5, 500], [5, 500]], 1),
        ("curvelanes", [], 0),
        ("curvelanes", [[5, 500]], 1),
        ("openlane", [], 0),
        ("openlane", [[5, 500]], 0),
        ("openlane", [[5, 500], [5, 500], [6, 400]], 1),
    ],
)
def test_what_is_no_lane(benchmark: str, points: list[list[float]], predictions: int) -> None:
    lane = np.array(points, dtype=np.float64).reshape(-1, 2)
    figures = scored(benchmark, found(lane), truth(benchmark, straight(900, 700, 400)))
    assert counted(figures) == [0, predictions, 1]


@pytest.mark.parametrize("benchmark", ["llamas", "curvelanes"])
def test_a_point_twice_in_a_row_is_as_if_once(benchmark: str) -> None:
    lane = straight(900, 700, 400, lean=0.2)
    assert counted(scored(benchmark, found(np.repeat(lane, 2, axis=0)), truth(benchmark, lane))) == [1, 0, 0]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_another_image_size_gives_the_same_figures(benchmark: str) -> None:
    """Half as large an image holds half as large lanes; LLAMAS's row 300 is one of 717."""
    height, width = SIZES[benchmark]
    lanes = [straight(300, height - 1, 320, 0.2), straight(900, height - 1, 330)]
    predicted = [moved(lanes[0], 4), moved(lanes[1], 40)]
    figures = scored(benchmark, found(*predicted), truth(benchmark, *lanes))
    small = truth(benchmark, *(lane / 2 for lane in lanes), size=(height // 2, width // 2))
    assert scored(benchmark, found(*(lane / 2 for lane in predicted)), small) == figures
    assert counted(figures) == [1, 1, 1]
