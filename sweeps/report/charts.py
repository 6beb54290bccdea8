"""Charts as inline SVG of plain elements: their colours are the page's, so that they follow its light and dark scheme.

Written here rather than by a plotting library: a page holds some fifty of them, each a few kilobytes and a
millisecond, readable by a screen reader and told apart without colours (dashes and shapes).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from sweeps.report.axes import Scale, scale_of, tick_label, ticks
from sweeps.report.wording import count, number, visible

WIDTH = 400
HEIGHT = 258
NUM_COLOURS = 7
_CHARACTER = 7.0
"""Mean width of a character of the charts' text in a wide typeface: SVG has no layout of its own."""


@dataclass(frozen=True)
class Line:
    name: str
    """In the legend; empty: not there."""
    points: Sequence[tuple[float, float]]
    colour: int = 0
    """Of the palette, 0 to 6; also gives the shape of the dots. -1: the page's quiet grey."""
    has_line: bool = True
    has_dots: bool = True
    is_dashed: bool = False
    is_step: bool = False
    """Holds its value until the next point: a best so far."""
    intervals: Sequence[tuple[float, float, float]] = ()
    """(x, low, high), drawn as upright bars."""
    hints: Sequence[str] = ()
    """A text for each point, shown while the pointer rests on it."""


@dataclass(frozen=True)
class Band:
    """Of values of y, over the whole width."""

    name: str
    low: float
    high: float
    colour: int = 0


@dataclass(frozen=True)
class Mark:
    """An upright line at a value of x."""

    x: float
    text: str


@dataclass(frozen=True)
class _Frame:
    """The box that values are drawn into."""

    x: Scale
    y: Scale
    left: float
    top: float
    right: float
    bottom: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.left + self.x.share(x) * (self.right - self.left),
            self.bottom - self.y.share(y) * (self.bottom - self.top),
        )


def line_chart(
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    x_is_log: bool = False,
    y_is_log: bool = False,
    y_from_zero: bool = False,
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_format: Callable[[float], str] = tick_label,
) -> str:
    """Lines, dots or both over two axes. Points that are no numbers, or not above 0 on a logarithmic axis, are left
    out and counted under the title."""
    drawn = [[p for p in line.points if _can_draw(p, x_is_log, y_is_log)] for line in lines]
    dropped = sum(len(line.points) for line in lines) - sum(map(len, drawn))
    if not any(drawn):
        return _empty(title, "no points to draw")
    xs = [x for points in drawn for x, _ in points] + [mark.x for mark in marks]
    ys = [y for points in drawn for _, y in points] + [v for band in bands for v in (band.low, band.high)]
    ys += [v for line in lines for _, low, high in line.intervals for v in (low, high) if math.isfinite(v)]
    x_scale = scale_of(xs, is_log=x_is_log, margin=0.04)
    y_scale = scale_of(ys, is_log=y_is_log, from_zero=y_from_zero)
    y_labels = [(value, y_format(value)) for value in ticks(y_scale)]
    legend, top = _legend(
        [(line.name, line.colour, _kind_of(line)) for line in lines if line.name]
        + [(band.name, band.colour, "band") for band in bands if band.name]
    )
    left = 26 + _CHARACTER * max(len(text) for _, text in y_labels)
    frame = _Frame(x_scale, y_scale, left, top + 8, WIDTH - 10, HEIGHT - 40)
    parts = [legend, _y_axis(frame, y_labels, y_label), _x_axis(frame, x_ticks, x_label)]
    for band in bands:
        parts.append(_band(frame, band))
    for mark in marks:
        parts.append(_mark(frame, mark))
    for line, points in zip(lines, drawn, strict=True):
        parts.append(_line(frame, line, points))
    if dropped:
        description = f"{description} {count(dropped, 'point')} without a number left out."
    return _svg(title, description, WIDTH, HEIGHT, parts)


def stacked_bars(
    title: str,
    description: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    names: Sequence[str],
    form: Callable[[float], str] = number,
    full: float | None = None,
    mark: tuple[float, str] | None = None,
) -> str:
    """A lying bar a row, of parts in the order of `names`; its sum is written at its end.

    full: the axis' end; mark: an upright line at a value, with its name.
    """
    if not rows or not names:
        return _empty(title, "nothing to draw")
    totals = [sum(max(0.0, parts.get(name, 0.0)) for name in names) for _, parts in rows]
    texts = [form(total) for total in totals]
    end = full or max([*totals, mark[0] if mark else 0.0]) or 1.0
    legend, top = _legend([(name, index % NUM_COLOURS, "band") for index, name in enumerate(names)])
    left = 12 + _CHARACTER * min(24, max(len(label) for label, _ in rows))
    right = WIDTH - 14 - _CHARACTER * max(map(len, texts))
    height = top + 12 + 26 * len(rows) + (16 if mark else 0)
    pieces = [legend]
    if mark:
        x = left + (right - left) * min(1.0, mark[0] / end)
        pieces.append(f'<path class="mark" d="M{x:.1f},{top + 4:.1f}V{height - 16:.1f}"/>')
        pieces.append(_text(x, height - 4, mark[1], "end" if x > WIDTH / 2 else "start", "tick"))
    for index, ((label, parts), text) in enumerate(zip(rows, texts, strict=True)):
        y, x = top + 8 + 26 * index, left
        pieces.append(_text(left - 6, y + 13, _cut(label, 24), "end"))
        for position, name in enumerate(names):
            value = max(0.0, parts.get(name, 0.0))
            width = (right - left) * min(1.0, value / end)
            if width >= 0.05:
                hint = f"{label}: {name} {form(value)}"
                pieces.append(
                    f'<rect class="f{position % NUM_COLOURS}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="18">'
                    f"<title>{_safe(hint)}</title></rect>"
                )
            x += width
        pieces.append(_text(x + 5, y + 13, text))
    return _svg(title, description, WIDTH, height, pieces)


@dataclass(frozen=True)
class ParallelAxis:
    label: str
    scale: Scale
    tick_names: Sequence[tuple[float, str]] | None = None
    """Of choices: where each is on the scale. None: ticks of numbers."""


@dataclass(frozen=True)
class ParallelLine:
    values: Sequence[float | None]
    """One an axis; a line ends where one is None and goes on after it."""
    rank: str
    """best, good, rest or default: how it is drawn."""
    hint: str


def parallel_coordinates(
    title: str, description: str, axes: Sequence[ParallelAxis], lines: Sequence[ParallelLine]
) -> str:
    """One upright axis a parameter, one line a trial; the better ones over the others."""
    if len(axes) < 2 or not lines:
        return _empty(title, "fewer than two axes or no trials")
    top, bottom = 30.0, HEIGHT - 14.0
    step = (WIDTH - 100) / (len(axes) - 1)
    xs = [52 + index * step for index in range(len(axes))]
    pieces = []
    order = {"rest": 0, "good": 1, "default": 2, "best": 3}
    for line in sorted(lines, key=lambda line: order[line.rank]):
        runs: list[list[str]] = [[]]
        for x, axis, value in zip(xs, axes, line.values, strict=True):
            if value is None:
                runs.append([])
            else:
                runs[-1].append(f"{x:.1f},{bottom - axis.scale.share(value) * (bottom - top):.1f}")
        path = "".join(f"M{'L'.join(run)}" for run in runs if len(run) > 1)
        if path:
            pieces.append(f'<path class="p {line.rank}" d="{path}"><title>{_safe(line.hint)}</title></path>')
    for index, (x, axis) in enumerate(zip(xs, axes, strict=True)):
        pieces.append(f'<path class="axis" d="M{x:.1f},{top}V{bottom}"/>')
        # Names alternate in height, or neighbours would write over each other.
        width = int(1.9 * step / _CHARACTER) if len(axes) > 2 else 30
        anchor = "start" if index == 0 else "end" if index == len(axes) - 1 else "middle"
        pieces.append(
            _text(x + {"start": -36, "end": 46}.get(anchor, 0), 11 + 12 * (index % 2), _cut(axis.label, width), anchor)
        )
        names = axis.tick_names
        for value, text in names if names is not None else [(v, tick_label(v)) for v in ticks(axis.scale, 4)]:
            y = bottom - axis.scale.share(value) * (bottom - top)
            pieces.append(f'<path class="axis" d="M{x - 3:.1f},{y:.1f}h3"/>')
            pieces.append(_text(x - 5, y + 3.5, _cut(text, 9), "end", "tick halo"))
    return _svg(title, description, WIDTH, HEIGHT, pieces)


def sparkline(title: str, values: Sequence[float | None], width: int = 96, height: int = 22) -> str:
    """A series as small as a word: gaps where there is no value, a dot on the last one."""
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not known:
        return ""
    scale = scale_of([value for _, value in known], margin=0.1)
    step = (width - 8) / max(1, len(values) - 1)
    points = [(4 + index * step, height - 3 - scale.share(value) * (height - 6)) for index, value in known]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    last_x, last_y = points[-1]
    body = f'<path class="l s0" d="{path}"/>' if len(points) > 1 else ""
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{_safe(title)}"><title>{_safe(title)}</title>{body}'
        f'<circle class="f0" cx="{last_x:.1f}" cy="{last_y:.1f}" r="2.5"/></svg>'
    )


def _can_draw(point: tuple[float, float], x_is_log: bool, y_is_log: bool) -> bool:
    x, y = point
    return math.isfinite(x) and math.isfinite(y) and (x > 1e-300 or not x_is_log) and (y > 1e-300 or not y_is_log)


def _line(frame: _Frame, line: Line, points: Sequence[tuple[float, float]]) -> str:
    colour = "q" if line.colour < 0 else str(line.colour % NUM_COLOURS)
    places = [frame.at(x, y) for x, y in points]
    parts = []
    for x, low, high in line.intervals:
        if math.isfinite(low) and math.isfinite(high):
            (middle, bottom), (_, top) = frame.at(x, low), frame.at(x, high)
            path = f"M{middle:.1f},{bottom:.1f}V{top:.1f}M{middle - 4:.1f},{bottom:.1f}h8M{middle - 4:.1f},{top:.1f}h8"
            parts.append(f'<path class="l s{colour} thin" d="{path}"/>')
    if line.has_line and len(places) > 1:
        if line.is_step:
            path = f"M{places[0][0]:.1f},{places[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
        else:
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<path class="l s{colour}{" dash" if line.is_dashed else ""}" d="{path}"/>')
    if line.has_dots or len(places) == 1:
        hints = line.hints if len(line.hints) == len(points) == len(line.points) else [""] * len(points)
        for (x, y), hint in zip(places, hints, strict=True):
            parts.append(_dot(x, y, line.colour, hint))
    return "".join(parts)


def _dot(x: float, y: float, colour: int, hint: str = "") -> str:
    title = f"<title>{_safe(hint)}</title>" if hint else ""
    if colour < 0:
        return f'<circle class="fq" cx="{x:.1f}" cy="{y:.1f}" r="2.4">{title}</circle>'
    name = colour % NUM_COLOURS
    shape = name % 4
    if shape == 0:
        return f'<circle class="f{name}" cx="{x:.1f}" cy="{y:.1f}" r="3.2">{title}</circle>'
    path = {
        1: f"M{x - 3:.1f},{y - 3:.1f}h6v6h-6z",
        2: f"M{x:.1f},{y - 4:.1f}l4,7h-8z",
        3: f"M{x:.1f},{y - 4.2:.1f}l4.2,4.2l-4.2,4.2l-4.2,-4.2z",
    }[shape]
    return f'<path class="f{name}" d="{path}">{title}</path>'


def _band(frame: _Frame, band: Band) -> str:
    _, low = frame.at(frame.x.low, band.low)
    _, high = frame.at(frame.x.low, band.high)
    top, bottom = sorted((low, high))
    return (
        f'<rect class="f{band.colour % NUM_COLOURS} faint" x="{frame.left:.1f}" y="{top:.1f}" '
        f'width="{frame.right - frame.left:.1f}" height="{max(1.0, bottom - top):.1f}">'
        f"<title>{_safe(band.name)}</title></rect>"
    )


def _mark(frame: _Frame, mark: Mark) -> str:
    x, _ = frame.at(mark.x, frame.y.low)
    is_right = x > (frame.left + frame.right) / 2
    return f'<path class="mark" d="M{x:.1f},{frame.top:.1f}V{frame.bottom:.1f}"/>' + _text(
        x + (-4 if is_right else 4), frame.top + 10, mark.text, "end" if is_right else "start", "tick halo"
    )


def _y_axis(frame: _Frame, labels: Sequence[tuple[float, str]], name: str) -> str:
    parts = []
    for value, text in labels:
        _, y = frame.at(frame.x.low, value)
        parts.append(f'<path class="grid" d="M{frame.left:.1f},{y:.1f}H{frame.right:.1f}"/>')
        parts.append(_text(frame.left - 5, y + 3.5, text, "end", "tick"))
    middle = (frame.top + frame.bottom) / 2
    parts.append(
        f'<text class="name" text-anchor="middle" transform="translate(11,{middle:.1f}) rotate(-90)">'
        f"{_safe(_cut(name, 36))}</text>"
    )
    return "".join(parts)


def _x_axis(frame: _Frame, given: Sequence[tuple[float, str]] | None, name: str) -> str:
    labels = list(given) if given is not None else [(value, tick_label(value)) for value in ticks(frame.x, 6)]
    labels = [
        (v, text) for v, text in labels if frame.x.low * (1 - 1e-9) <= v <= frame.x.high + 1e-9 * abs(frame.x.high)
    ]
    parts = [f'<path class="axis" d="M{frame.left:.1f},{frame.bottom:.1f}H{frame.right:.1f}"/>']
    last_end = -math.inf
    # From the right, so that the newest night keeps its label where they would write over each other.
    begin = math.inf
    for value, text in sorted(labels, reverse=True):
        x, _ = frame.at(value, frame.y.low)
        half = _CHARACTER * len(text) / 2
        parts.append(f'<path class="axis" d="M{x:.1f},{frame.bottom:.1f}v4"/>')
        centre = min(x, WIDTH - 2 - half)
        if centre + half + 5 <= begin and centre - half >= last_end:
            parts.append(_text(centre, frame.bottom + 15, text, "middle", "tick"))
            begin = centre - half
    parts.append(_text((frame.left + frame.right) / 2, frame.bottom + 33, _cut(name, 60), "middle", "name"))
    return "".join(parts)


def _kind_of(line: Line) -> str:
    words = ["line" if line.has_line else "", "dashed" if line.is_dashed else "", "dot" if line.has_dots else ""]
    return " ".join(filter(None, words))


def _legend(entries: Sequence[tuple[str, int, str]]) -> tuple[str, float]:
    """(SVG, height) of (name, colour, kind) in rows above a chart; kind: band, or any of line, dashed, dot."""
    parts = []
    x, y = 6.0, 14.0
    for name, colour, kind in entries:
        shown = _cut(name, 44)
        width = 26 + _CHARACTER * len(shown) + 12
        if x + width > WIDTH and x > 6:
            x, y = 6.0, y + 16
        suffix = "q" if colour < 0 else str(colour % NUM_COLOURS)
        if kind == "band":
            parts.append(f'<rect class="f{suffix}" x="{x + 4:.1f}" y="{y - 9:.1f}" width="12" height="10"/>')
        elif "line" in kind:
            dash = " dash" if "dashed" in kind else ""
            parts.append(f'<path class="l s{suffix}{dash}" d="M{x:.1f},{y - 4:.1f}h20"/>')
        if "dot" in kind and "dashed" not in kind:
            parts.append(_dot(x + 10, y - 4, colour))
        parts.append(_text(x + 25, y, shown))
        x += width
    return "".join(parts), (y + 4 if entries else 2)


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{where}{kind}>{_safe(text)}</text>'


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def _safe(text: str) -> str:
    return escape(visible(text), quote=True)


def _empty(title: str, why: str) -> str:
    return f'<p class="empty" aria-label="{_safe(title)}">{_safe(why[:1].upper() + why[1:])}.</p>'


def _svg(title: str, description: str, width: int, height: float, parts: Sequence[str]) -> str:
    name = f"c{zlib.crc32(repr((title, description)).encode('utf-8', 'replace')):08x}"
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height:.0f}" role="img" aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{_safe(title)}</title><desc id="{name}d">{_safe(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )
