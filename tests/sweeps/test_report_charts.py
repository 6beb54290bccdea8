"""Charts: well-formed, inside their box, with sensible ticks, and the text in them escaped."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.report.axes import Scale, scale_of, tick_label, ticks
from sweeps.report.charts import (
    HEIGHT,
    WIDTH,
    Band,
    Line,
    Mark,
    ParallelAxis,
    ParallelLine,
    line_chart,
    parallel_coordinates,
    sparkline,
    stacked_bars,
)
from sweeps.report.wording import count, duration, hour_unit, number, signed, visible

values = st.floats(-1e9, 1e9, allow_nan=False)
anything = st.floats(allow_nan=True, allow_infinity=True)


def numbers_of(svg: str) -> list[float]:
    root = ET.fromstring(svg)
    found = []
    for element in root.iter():
        for name in ("cx", "cy", "x", "y", "width", "height"):
            if name in element.attrib:
                found.append(float(element.attrib[name]))
    return found


@given(st.lists(st.tuples(anything, anything), max_size=20), st.booleans(), st.booleans(), st.text(max_size=20))
def test_any_points_make_a_well_formed_chart(points: list[tuple[float, float]], x: bool, y: bool, name: str) -> None:
    points = [(a, b) for a, b in points if not (abs(a) > 1e200 or abs(b) > 1e200)]
    svg = line_chart(name, name, name, name, [Line(name, points, 0)], x_is_log=x, y_is_log=y)
    root = ET.fromstring(svg)
    drawable = [
        p for p in points if all(map(math.isfinite, p)) and (p[0] > 1e-300 or not x) and (p[1] > 1e-300 or not y)
    ]
    if not drawable:
        assert root.tag == "p"
        return
    dots = list(root.iter("circle"))
    # One more in the legend.
    assert len(dots) == len(drawable) + bool(name)
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= WIDTH and 0 <= float(dot.attrib["cy"]) <= HEIGHT


def test_points_stand_where_the_axes_say() -> None:
    svg = line_chart("t", "d", "x", "y", [Line("", [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)], 0)])
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in ET.fromstring(svg).iter("circle")]
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert x0 < x1 and y0 > y1, "y grows upwards"
    assert x2 == pytest.approx((x0 + x1) / 2, abs=0.1) and y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    labels = {
        element.text: element for element in ET.fromstring(svg).iter("text") if element.get("text-anchor") == "end"
    }
    assert float(labels["1"].attrib["y"]) == pytest.approx(y1 + 3.5, abs=0.1)


def test_points_without_a_number_are_left_out_and_counted() -> None:
    svg = line_chart("t", "d.", "x", "y", [Line("", [(0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf)], 0)])
    assert "d. 2 points without a number left out." in svg and svg.count("<circle") == 2


def test_text_in_a_chart_is_escaped() -> None:
    bad = '</svg><script>alert("x")</script>\u202e'
    svg = line_chart(
        bad, bad, bad, bad, [Line(bad, [(0, 1), (1, 2)], 1, hints=[bad, bad])], [Band(bad, 1, 2)], [Mark(0.5, bad)],
        x_ticks=[(0, bad), (1, "b")],
    )  # fmt: skip
    for chart in (
        svg,
        stacked_bars(bad, bad, [(bad, {bad: 1.0})], [bad]),
        sparkline(bad, [1.0, 2.0]),
        parallel_coordinates(
            bad, bad, [ParallelAxis(bad, Scale(0, 1), [(0.5, bad)])] * 2, [ParallelLine([0, 1], "best", bad)]
        ),
    ):
        assert "<script" not in chart and "\u202e" not in chart
        ET.fromstring(chart)


@given(values, values, st.booleans())
def test_ticks_lie_on_the_scale_and_are_told_apart(a: float, b: float, is_log: bool) -> None:
    if is_log:
        a, b = abs(a) + 1e-6, abs(b) + 1e-6
    scale = scale_of([a, b], is_log=is_log)
    found = ticks(scale)
    assert 2 <= len(found) <= 15 and found == sorted(set(found))
    room = 1e-6 * max(abs(scale.low), abs(scale.high))
    assert scale.low - room <= found[0] and found[-1] <= scale.high + room
    assert scale.low <= min(a, b) <= max(a, b) <= scale.high


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0.311, 0.329, ["0.315", "0.32", "0.325"]),
        (0.0, 120_000.0, ["0", "25k", "50k", "75k", "100k"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [tick_label(value) for value in ticks(Scale(low, high))] == labels


def test_bars_are_as_long_as_their_values() -> None:
    svg = stacked_bars("t", "d", [("a", {"x": 1.0, "y": 3.0}), ("b", {"x": 2.0})], ["x", "y"])
    bars = [
        float(r.attrib["width"]) for r in ET.fromstring(svg).iter("rect") if r.find("{*}title") is not None or len(r)
    ]
    assert bars[1] == pytest.approx(3 * bars[0], abs=0.2) and bars[2] == pytest.approx(2 * bars[0], abs=0.2)


def test_a_line_of_parallel_axes_breaks_where_a_value_is_missing() -> None:
    axes = [ParallelAxis(name, Scale(0, 1)) for name in "abcd"]
    svg = parallel_coordinates("t", "d", axes, [ParallelLine([0.1, None, 0.2, 0.3], "best", "one")])
    path = next(p for p in ET.fromstring(svg).iter("path") if "best" in p.attrib["class"])
    assert path.attrib["d"].count("M") == 1 and path.attrib["d"].count("L") == 1


def test_a_small_chart_is_what_it_was() -> None:
    """Recorded text: a change here is a change of every chart."""
    svg = sparkline("three nights", [1.0, None, 3.0])
    assert svg == (
        '<svg class="spark" viewBox="0 0 96 22" width="96" height="22" role="img" aria-label="three nights">'
        '<title>three nights</title><path class="l s0" d="M4.0,17.7L92.0,4.3"/>'
        '<circle class="f0" cx="92.0" cy="4.3" r="2.5"/></svg>'
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1,234"), (0.01234, "0.0123"), (-2.5, "−2.50"), (1e-7, "1e−07"), (math.nan, "–"), (None, "–"),
     (12, "12.0"), (999.96, "1,000"), (1e6, "1,000,000")],
)  # fmt: skip
def test_numbers_read_well(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-4, 1e14))
def test_a_number_says_what_it_is(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3)
    assert signed(value).startswith("+")


def test_words() -> None:
    assert [count(n, "job") for n in (0, 1, 2, 1234)] == ["no jobs", "1 job", "2 jobs", "1,234 jobs"]
    assert [duration(s) for s in (0.5, 59, 61, 3661, 90_000)] == [
        "0.5 s",
        "59 s",
        "1 min 1 s",
        "1 h 1 min",
        "25 h 0 min",
    ]
    assert hour_unit("8 x NVIDIA H100") == "GPU-hours" and hour_unit("AMD EPYC 9B14, 2 cores") == "rank-hours"
    assert visible("a\u202eb\u0000c🚗é") == "a\\u202eb\\u0000c🚗é"
    assert not re.search("[\u202a-\u202e]", visible("".join(map(chr, range(0x2020, 0x2070)))))
