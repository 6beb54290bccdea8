"""The page's pictures: which chart is drawn from which figures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.ledger.change_points import Regression
from sweeps.report.build import Report
from sweeps.report.charts import (
    Band,
    Line,
    Mark,
    line_chart,
    sparkline,
    stacked_bars,
)
from sweeps.report.headline import metric_name, quantity_name
from sweeps.report.leaderboard import NUM_ENTRIES, Board
from sweeps.report.regressions_view import RegressionGroup
from sweeps.report.scaling_view import LOST_NAMES, SEVEN_OF_EIGHT, ScalingSeries, lost_parts
from sweeps.report.wording import hours, number, percent, score

GREY = -1
DEFAULT_COLOUR = 1
"""Of everything that is the default's, on all charts."""
BEST_COLOUR = 2


@dataclass(frozen=True)
class Figure:
    title: str
    svg: str
    note: str = ""


def night_figures(report: Report) -> list[Figure]:
    """Where the rank-hours went, this night and over the history."""
    accounts, unit = report.accounts, report.hour_unit
    figures = []
    if accounts.allocated > 0:
        rows = [("useful", {"useful": accounts.useful})]
        rows += [(cause, {"wasted": value}) for cause, value in accounts.wasted_by_cause.items()]
        by_kind = ", ".join(f"{kind} {hours(value)}" for kind, value in accounts.useful_by_kind.items())
        chart = stacked_bars(
            f"Where the {unit} went", f"{unit} by use and cause of waste", rows, ["useful", "wasted"], hours
        )
        figures.append(Figure(f"Where the {unit} went", chart, f"Useful by kind of job: {by_kind}." if by_kind else ""))
    if len(report.nights) > 1:
        ticks = night_ticks([night.night for night in report.nights])
        lines = [
            Line("useful", [(i, n.useful / 3600) for i, n in enumerate(report.nights)], 0),
            Line("wasted", [(i, n.wasted / 3600) for i, n in enumerate(report.nights)], 3, is_dashed=True),
        ]
        chart = line_chart(
            f"{unit} night by night",
            f"Useful and wasted {unit} of {len(report.nights)} nights",
            "night",
            unit,
            lines,
            y_from_zero=True,
            x_ticks=ticks,
        )
        figures.append(Figure(f"{unit} night by night", chart))
    return figures


def board_figures(board: Board) -> list[Figure]:
    """The best configurations against the noise band, and the best night by night."""
    name = metric_name(board.objective_name)
    figures = []
    bands = default_band(board)
    # Those below the first ten would press the others together.
    shown = [entry for entry in board.entries if entry.rank <= NUM_ENTRIES]
    if board.entries:
        runs = [(float(e.rank), value) for e in shown for value in e.values]
        hints = [f"{e.rank}: {e.config_hash[:12]} {score(value)}" for e in shown for value in e.values]
        means = [(float(e.rank), e.mean) for e in shown]
        default_rank = [(float(e.rank), e.mean) for e in shown if e.kind == "default"]
        lines = [
            Line("a run", runs, GREY, has_line=False, hints=hints),
            Line("mean", means, 0, has_line=False, hints=[f"{e.rank}: {score(e.mean)}" for e in shown]),
        ]
        if default_rank:
            lines.append(Line("the default", default_rank, DEFAULT_COLOUR, has_line=False))
        chart = line_chart(
            f"{board.model}: best configurations",
            f"{name} of the {len(shown)} best configurations, by rank",
            "rank",
            name,
            lines,
            bands,
            x_ticks=[(float(e.rank), str(e.rank)) for e in shown],
        )
        figures.append(Figure("Best configurations against the noise band", chart))
    if board.front:
        second = next(iter(board.entries[0].others))
        groups = [("dominated", GREY, False), ("not dominated", BEST_COLOUR, True)]
        lines = [
            Line(
                label,
                [(x, y) for _, y, x, is_on in board.front if is_on == wanted],
                colour,
                has_line=False,
                hints=[
                    f"{config[:12]}: {number(x)}, {score(y)}" for config, y, x, is_on in board.front if is_on == wanted
                ],
            )
            for label, colour, wanted in groups
        ]
        chart = line_chart(
            f"{board.model}: two objectives",
            f"{name} against {metric_name(second)} of {len(board.front)} configurations",
            metric_name(second),
            name,
            [line for line in lines if line.points],
        )
        figures.append(Figure("Two objectives", chart))
    if len(board.history) > 1:
        best = [(float(i), night.best) for i, night in enumerate(board.history)]
        default = [(float(i), night.default) for i, night in enumerate(board.history) if night.default is not None]
        lines = [
            Line("best of the night", best, BEST_COLOUR, hints=[f"{n.night}: {score(n.best)}" for n in board.history])
        ]
        if default:
            lines.append(Line("default", default, DEFAULT_COLOUR, is_dashed=True))
        chart = line_chart(
            f"{board.model}: night by night",
            f"{name} of the best configuration and of the default over {len(board.history)} nights",
            "night",
            name,
            lines,
            x_ticks=night_ticks([night.night for night in board.history]),
        )
        figures.append(Figure("Night by night", chart))
    return figures


def default_band(board: Board) -> list[Band]:
    if board.default is None:
        return []
    spread = board.noise.standard_deviation if board.noise is not None else 0.0
    name = (
        f"default {score(board.default.mean)} ± {score(spread)}" if spread else f"default {score(board.default.mean)}"
    )
    return [Band(name, board.default.mean - spread, board.default.mean + spread, DEFAULT_COLOUR)]


def scaling_figures(series: ScalingSeries) -> list[Figure]:
    """Throughput against ranks, what is lost, and the scaling factor night by night."""
    where = f"{series.model} on {series.hardware}" if series.hardware else series.model
    figures = []
    rows = series.rows
    one = next((row for row in rows if row.num_ranks == 1), None)
    ranks = [row.num_ranks for row in rows]
    lines = [
        Line(
            "measured (median, interval)",
            [(row.num_ranks, row.images_per_second) for row in rows],
            0,
            intervals=[
                (row.num_ranks, row.low * one.images_per_second, row.high * one.images_per_second)
                for row in rows
                if one is not None and row.low is not None and row.high is not None and row.num_ranks > 1
            ],
            hints=[f"{row.num_ranks} ranks: {number(row.images_per_second)} images/s" for row in rows],
        )
    ]
    if one is not None and len(rows) > 1:
        ends = (1, max(ranks))
        ideal = [(n, n * one.images_per_second) for n in ends]
        lines.append(Line("ideal", ideal, GREY, has_dots=False, is_dashed=True))
        lines.append(Line("7 of 8", [(n, SEVEN_OF_EIGHT * n * one.images_per_second) for n in ends], 2, has_dots=False))
    is_log = len(ranks) > 1 and max(ranks) >= 16
    chart = line_chart(
        f"{where}: throughput",
        f"Images a second on {', '.join(map(str, ranks))} ranks, with the ideal line and seven eighths of it",
        "ranks",
        "images/s",
        lines,
        x_is_log=is_log,
        y_is_log=is_log,
        y_from_zero=not is_log,
        x_ticks=[(n, str(n)) for n in sorted(set(ranks))],
    )
    figures.append(Figure("Throughput against ranks", chart, "Both axes are logarithmic." if is_log else ""))
    lost = [(f"{row.num_ranks} ranks", lost_parts(row)) for row in rows if row.num_ranks > 1 and row.lost]
    if lost:
        chart = stacked_bars(
            f"{where}: what is missing to the ideal",
            "Shares of a step lost, by cause, a bar a number of ranks",
            lost,
            list(LOST_NAMES.values()),
            lambda share: percent(share, 1),
            mark=(1 - SEVEN_OF_EIGHT, "7 of 8"),
        )
        figures.append(Figure("What is missing to the ideal", chart))
    if len(series.history) > 1 and series.top is not None:
        top = series.top
        factors = [(float(i), float(row.scaling_factor or 0.0)) for i, row in enumerate(series.history)]
        intervals = [
            (float(i), row.low, row.high)
            for i, row in enumerate(series.history)
            if row.low is not None and row.high is not None
        ]
        goal = SEVEN_OF_EIGHT * top.num_ranks
        last = float(len(series.history) - 1)
        chart = line_chart(
            f"{where}: scaling factor over nights",
            f"Scaling factor on {top.num_ranks} ranks over {len(series.history)} nights",
            "night",
            f"scaling factor on {top.num_ranks} ranks",
            [
                Line("scaling factor", factors, 0, intervals=intervals),
                Line(f"7 of 8: {number(goal)}", [(0.0, goal), (last, goal)], 2, has_dots=False, is_dashed=True),
            ],
            x_ticks=night_ticks([row.night for row in series.history]),
        )
        figures.append(Figure("Night by night", chart))
    return figures


def regression_figures(group: RegressionGroup) -> list[Figure]:
    """The leading series, and the next that show another quantity."""
    shown: dict[str, Regression] = {}
    for regression in (group.lead, *group.others):
        shown.setdefault(regression.series.quantity, regression)
    return [_regression_figure(regression) for regression in shown.values()]


def _regression_figure(regression: Regression) -> Figure:
    """The series with its level before and after."""
    series = regression.series
    nights = [point.night for point in series.points]
    first = nights.index(regression.first_night) if regression.first_night in nights else len(nights) - 1
    quantity = quantity_name(series.quantity)
    title = f"{series.model}: {quantity}" + (f" on {series.num_ranks} ranks" if series.num_ranks > 1 else "")
    lines = [
        Line(
            quantity,
            [(float(i), point.value) for i, point in enumerate(series.points)],
            0,
            hints=[f"{point.night}: {number(point.value, 4)}" for point in series.points],
        ),
        _level(f"before: {number(regression.before)}", 2, 0.0, max(0.0, first - 1.0), regression.before),
        _level(f"since: {number(regression.after)}", 3, float(first), len(nights) - 1.0, regression.after),
    ]
    chart = line_chart(
        title,
        f"{quantity} of {len(nights)} nights; worse since {regression.first_night}",
        "night",
        quantity,
        lines,
        marks=[Mark(first - 0.5, "worse since")] if first > 0 else (),
        x_ticks=night_ticks(nights),
    )
    return Figure(title, chart, regression.rule)


def _level(name: str, colour: int, first: float, last: float, value: float) -> Line:
    return Line(name, [(first, value), (last, value)], colour, has_dots=False, is_dashed=True)


def night_ticks(nights: Sequence[str]) -> list[tuple[float, str]]:
    """A label a night, without the year where all share it; the chart leaves out what does not fit."""
    years = {night[:5] for night in nights}
    is_dated = len(years) == 1 and all(night[:4].isdigit() and night[4:5] == "-" for night in nights)
    return [(float(i), night[5:] if is_dated else night) for i, night in enumerate(nights)]


def board_sparkline(board: Board) -> str:
    return sparkline(f"{board.model}: best of {len(board.history)} nights", [night.best for night in board.history])


def counts_sparkline(title: str, counts: Sequence[int]) -> str:
    return sparkline(title, [float(count) for count in counts]) if len(counts) > 1 else ""
