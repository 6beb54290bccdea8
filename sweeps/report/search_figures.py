"""Pictures of a search: trials in order, parameters, what mattered, learning curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from sweeps.report.axes import Scale, scale_of, tick_label
from sweeps.report.charts import Line, ParallelAxis, ParallelLine, line_chart, parallel_coordinates, stacked_bars
from sweeps.report.figures import BEST_COLOUR, GREY, Figure, default_band
from sweeps.report.headline import metric_name
from sweeps.report.leaderboard import Board
from sweeps.report.search_view import SearchView, TrialPoint
from sweeps.report.wording import count, percent, score

NUM_DRAWN_TRIALS = 500
NUM_PARALLEL_AXES = 5
NUM_SLICES = 3


def search_figures(search: SearchView, board: Board) -> list[Figure]:
    """Of one model's search, those that its trials allow."""
    name = metric_name(search.objective_name)
    sign = -1 if search.direction == "minimize" else 1
    drawn = drawn_trials(search.trials, sign)
    chart, num_beyond = _history_chart(search, board, drawn, name)
    notes = []
    if num_beyond:
        notes.append(f"{count(num_beyond, 'pruned trial')} beyond the axis, drawn at its edge.")
    if len(drawn) < len(search.trials):
        notes.append(f"{len(drawn)} of {len(search.trials)} trials drawn, the best among them.")
    figures = [Figure("Trials in order", chart, " ".join(notes))]
    known = [trial for trial in drawn if trial.objective is not None and trial.outcome == "finished"]
    if search.importance:
        rows = [(short_parameter(p), {"variance explained": v}) for p, v in list(search.importance.items())[:8]]
        chart = stacked_bars(
            f"{search.model}: what mattered",
            "Importance of each parameter",
            rows,
            ["variance explained"],
            percent,
            full=max(1e-9, *search.importance.values()),
        )
        figures.append(Figure("What mattered", chart))
    for parameter in search.varied[:NUM_SLICES]:
        figure = _slice(search, board, known, parameter, name)
        if figure is not None:
            figures.append(figure)
    axes = search.varied[:NUM_PARALLEL_AXES]
    if len(axes) >= 2 and len(known) >= 3:
        chart = _parallel(search, known, axes, name, sign)
        figures.append(Figure("Parameters of the trials", chart, "Green: the best tenth. A line is a trial."))
    if search.curves:
        figures.append(Figure("Learning curves", _curves_chart(search, name), search.curves_note))
    return figures


def drawn_trials(trials: Sequence[TrialPoint], sign: int) -> list[TrialPoint]:
    """At most NUM_DRAWN_TRIALS in their order: the best fifth of them, the rest evenly."""
    if len(trials) <= NUM_DRAWN_TRIALS:
        return list(trials)
    order = sorted(
        range(len(trials)),
        key=lambda index: (trials[index].objective is None, -sign * (trials[index].objective or 0.0)),
    )
    kept = set(order[: NUM_DRAWN_TRIALS // 5])
    others = [index for index in range(len(trials)) if index not in kept]
    room = NUM_DRAWN_TRIALS - len(kept)
    kept.update(others[index * len(others) // room] for index in range(room))
    return [trials[index] for index in sorted(kept)]


def short_parameter(name: str) -> str:
    return name.removeprefix("train.")


def _history_chart(search: SearchView, board: Board, drawn: Sequence[TrialPoint], name: str) -> tuple[str, int]:
    """(SVG, pruned trials drawn at the edge)."""
    place = {id(trial): float(index + 1) for index, trial in enumerate(search.trials)}
    groups = {
        "trained to the end": [t for t in drawn if t.outcome in ("finished", "answered")],
        "pruned": [t for t in drawn if t.outcome == "pruned"],
    }
    low, high = _shown_range([float(t.objective) for t in groups["trained to the end"] if t.objective is not None])
    lines = []
    num_beyond = 0
    for (label, own), colour in zip(groups.items(), (0, GREY), strict=True):
        own = [trial for trial in own if trial.objective is not None]
        points = [(place[id(t)], min(high, max(low, float(t.objective or 0.0)))) for t in own]
        num_beyond += sum(not low <= float(t.objective or 0.0) <= high for t in own)
        if points:
            hints = [f"{t.job}: {score(t.objective)}" for t in own]
            lines.append(Line(label, points, colour, has_line=False, hints=hints))
    best = [(place[id(t)], t.best_so_far) for t in drawn if t.best_so_far is not None]
    if best:
        lines.append(Line("best so far", best, BEST_COLOUR, has_dots=False, is_step=True))
    chart = line_chart(
        f"{search.model}: trials in order",
        f"{name} of {search.num_trials} trials and the best so far",
        "trial, in order of suggestion",
        name,
        lines,
        default_band(board),
    )
    return chart, num_beyond


def _shown_range(values: Sequence[float]) -> tuple[float, float]:
    """Of an axis on which whole trials are told apart: what was pruned early may lie far from them."""
    if len(values) < 3:
        return -math.inf, math.inf
    room = max(max(values) - min(values), 1e-9)
    return min(values) - room / 2, max(values) + room / 2


def _slice(search: SearchView, board: Board, known: Sequence[TrialPoint], parameter: str, name: str) -> Figure | None:
    own = [trial for trial in known if parameter in trial.parameters]
    values = [trial.parameters[parameter] for trial in own]
    if len(own) < 3:
        return None
    positions, scale, names = _positions(values, parameter in search.log_parameters)
    points = [(x, float(t.objective or 0.0)) for x, t in zip(positions, own, strict=True)]
    hints = [f"{t.job}: {value} → {score(t.objective)}" for t, value in zip(own, values, strict=True)]
    chart = line_chart(
        f"{search.model}: {parameter}",
        f"{name} against {parameter} of {len(own)} trials",
        short_parameter(parameter),
        name,
        [Line("", points, 0, has_line=False, hints=hints)],
        default_band(board),
        x_is_log=scale.is_log,
        x_ticks=names,
    )
    return Figure(f"{short_parameter(parameter)}", chart)


def _parallel(search: SearchView, known: Sequence[TrialPoint], names: Sequence[str], objective: str, sign: int) -> str:
    axes, columns = [], []
    for name in names:
        own = [trial.parameters.get(name) for trial in known]
        positions, scale, labels = _positions(
            [value for value in own if value is not None], name in search.log_parameters
        )
        places = iter(positions)
        columns.append([None if value is None else next(places) for value in own])
        axes.append(ParallelAxis(short_parameter(name).split(".")[-1], scale, labels))
    scores = [float(trial.objective or 0.0) for trial in known]
    axes.append(ParallelAxis(objective, scale_of(scores)))
    ranked = sorted(scores, key=lambda value: -sign * value)
    top, good = ranked[max(0, len(ranked) // 10 - 1)], statistics.median(scores)
    lines = []
    for index, trial in enumerate(known):
        value = scores[index]
        rank = "best" if sign * value >= sign * top else "good" if sign * value >= sign * good else "rest"
        row = [column[index] for column in columns]
        lines.append(ParallelLine([*row, value], rank, f"{trial.job}: {score(value)}"))
    return parallel_coordinates(
        f"{search.model}: parameters of the trials", f"{len(known)} trials over {len(names)} parameters", axes, lines
    )


def _positions(values: Sequence[Any], is_log: bool) -> tuple[list[float], Scale, list[tuple[float, str]] | None]:
    """Where values stand on an axis of their own: numbers as they are, or by their
    logarithm; anything else by place in a list, with its names."""
    if values and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        numbers = [float(value) for value in values]
        is_log = is_log and min(numbers) > 0
        distinct = sorted(set(numbers))
        names = [(value, tick_label(value)) for value in distinct] if len(distinct) <= 5 else None
        return numbers, scale_of(numbers, is_log=is_log), names
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    distinct_texts = sorted(set(texts))
    positions = [float(distinct_texts.index(text)) for text in texts]
    return (
        positions,
        scale_of([*positions, -0.5, len(distinct_texts) - 0.5], margin=0.0),
        [(float(index), text) for index, text in enumerate(distinct_texts)],
    )


def _curves_chart(search: SearchView, name: str) -> str:
    lines = []
    named: set[str] = set()
    for curve in search.curves:
        is_pruned = curve.outcome == "pruned"
        label = "pruned" if is_pruned else "trained to the end"
        colour = GREY if is_pruned else 0
        lines.append(Line("" if label in named else label, curve.points, colour, has_dots=False, is_dashed=is_pruned))
        named.add(label)
    lines.sort(key=lambda line: line.colour)
    return line_chart(
        f"{search.model}: learning curves",
        f"{name} against samples seen, of {len(search.curves)} trials",
        "samples seen",
        name,
        lines,
    )
