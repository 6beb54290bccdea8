"""The scaling curves as a picture: throughput against ranks with the ideal and the seven-of-eight line, what is lost,
and the share of the ideal night by night. Matplotlib is imported when it is drawn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perception.errors import UserError
from sweeps.ledger.ledger import LOST, ScalingRow, latest_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SERIES = 8
"""Of one picture; the first by name."""
SEVEN_OF_EIGHT = 7 / 8
COLOURS = {"data": "#0072b2", "exposed_allreduce": "#e69f00", "straggler": "#cc79a7", "compute": "#999999"}
"""Told apart by the colour-blind too (Okabe and Ito)."""
NAMES = {"data": "data", "exposed_allreduce": "all-reduce", "straggler": "stragglers", "compute": "compute"}
_CURVE, _LINE = "#0072b2", "#555555"
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw(rows: Sequence[ScalingRow], path: Path) -> None:
    """One line of three pictures a series; `rows` are in the order of `scaling_table`. UserError on a full disk."""
    import matplotlib
    from matplotlib.figure import Figure

    by_series: dict[tuple[str, str, str, str], list[ScalingRow]] = {}
    for row in rows:
        by_series.setdefault(row.series, []).append(row)
    shown = list(by_series.values())[:MAX_SERIES]
    # Names are text, not formulas; the same figures give the same file.
    with matplotlib.rc_context({"text.parse_math": False, "svg.hashsalt": "roadfuse", "font.size": 9}):
        figure = Figure(figsize=(13, 3.9 * len(shown)), layout="constrained")
        axes = figure.subplots(len(shown), 3, squeeze=False, width_ratios=(1.2, 1, 1.2))
        for number, series in enumerate(shown):
            newest = latest_rows(series)
            _draw_throughput(axes[number][0], newest)
            _draw_lost(axes[number][1], newest)
            _draw_nights(axes[number][2], series)
        if len(by_series) > len(shown):
            figure.suptitle(f"the first {len(shown)} of {len(by_series)} series; give --model for others")
        temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
        try:
            figure.savefig(temporary, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
            temporary.replace(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); give another --chart") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _draw_throughput(axes: Axes, rows: Sequence[ScalingRow]) -> None:
    """Scaled by one rank's throughput where that is known, so that intervals of the factor can be shown."""
    first = rows[0]
    axes.set_title(f"{first.model}, {first.night}\n{_shortened(first.hardware)}")
    ranks = [row.num_ranks for row in rows]
    one = next((row.images_per_second for row in rows if row.num_ranks == 1), None)
    if one is not None:
        ends = [1, max(ranks)]
        axes.plot(ends, [one * end for end in ends], color=_LINE, linewidth=1, label="ideal")
        seven = [one * SEVEN_OF_EIGHT * end for end in ends]
        axes.plot(ends, seven, color=_LINE, linewidth=1, linestyle="--", label="seven of eight")
        known = [row for row in rows if row.low is not None and row.high is not None and row.num_ranks > 1]
        for row in known:
            assert row.low is not None and row.high is not None
            axes.plot([row.num_ranks] * 2, [one * row.low, one * row.high], color=_CURVE, linewidth=5, alpha=0.3)
    axes.plot(ranks, [row.images_per_second for row in rows], "o-", color=_CURVE, label="measured")
    for row in rows:
        if row.ratio_to_ideal is not None and row.num_ranks > 1:
            axes.annotate(
                f"{row.scaling_factor:.2f}",
                (row.num_ranks, row.images_per_second),
                xytext=(6, -12),
                textcoords="offset points",
            )
    if max(ranks) > 4:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlim(0.9, max(ranks) * 1.5)
    else:
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.8, max(ranks) + 0.4)
    axes.set_xticks(sorted(set(ranks)), [str(number) for number in sorted(set(ranks))])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("images/s")
    axes.legend(loc="upper left", frameon=False)


def _draw_lost(axes: Axes, rows: Sequence[ScalingRow]) -> None:
    axes.set_title("missing to the ideal, by cause")
    rows = [row for row in rows if row.lost and row.num_ranks > 1]
    if not rows:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    places = range(len(rows))
    above, below = [0.0] * len(rows), [0.0] * len(rows)
    for cause in LOST:
        shares = [100 * row.lost[cause] for row in rows]
        # What is won, by noise or by caches, stands below the line.
        bottoms = [high if share >= 0 else low for share, high, low in zip(shares, above, below, strict=True)]
        axes.bar(places, shares, bottom=bottoms, color=COLOURS[cause], label=NAMES[cause], width=0.6)
        above = [high + max(0.0, share) for high, share in zip(above, shares, strict=True)]
        below = [low + min(0.0, share) for low, share in zip(below, shares, strict=True)]
    axes.axhline(0, color=_LINE, linewidth=0.8)
    axes.axhline(100 * (1 - SEVEN_OF_EIGHT), color=_LINE, linewidth=1, linestyle="--", label="seven of eight")
    axes.set_xticks(list(places), [str(row.num_ranks) for row in rows])
    axes.set_xlim(-0.7, max(2, len(rows)) - 0.3)
    axes.set_xlabel("ranks")
    axes.set_ylabel("% of a step")
    axes.set_ylim(top=max(100 * (1 - SEVEN_OF_EIGHT) * 1.8, max(above) * 1.5))
    axes.legend(loc="upper left", frameon=False, ncols=2)


def _draw_nights(axes: Axes, rows: Sequence[ScalingRow]) -> None:
    axes.set_title("share of the ideal, night by night")
    nights = list(dict.fromkeys(row.night for row in rows))
    place = {night: number for number, night in enumerate(nights)}
    lowest = 100.0
    numbers = sorted({(row.num_ranks, row.num_nodes) for row in rows if row.num_ranks > 1})
    for number, colour in zip(numbers, _LINES * len(numbers), strict=False):
        points = [
            (place[row.night], 100 * row.ratio_to_ideal)
            for row in rows
            if (row.num_ranks, row.num_nodes) == number and row.ratio_to_ideal is not None
        ]
        if points:
            lowest = min(lowest, *(share for _, share in points))
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, color=colour, label=_ranks(*number))
    axes.axhline(100, color=_LINE, linewidth=1)
    axes.axhline(100 * SEVEN_OF_EIGHT, color=_LINE, linewidth=1, linestyle="--")
    step = max(1, len(nights) // 6)
    axes.set_xticks(range(0, len(nights), step), nights[::step], rotation=30, ha="right")
    axes.set_ylabel("% of ideal")
    axes.set_ylim(bottom=max(0.0, min(60.0, lowest - 15)))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower left", frameon=False, ncols=2)


def _ranks(num_ranks: int, num_nodes: int) -> str:
    return f"{num_ranks} ranks" if num_nodes == 1 else f"{num_ranks} ranks, {num_nodes} nodes"


def _shortened(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
