"""`scaling`: the scaling factor of each model as its nights measured it, what is lost, and what got worse."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from perception.errors import UserError, nearest
from perception.run_folder import check_folder_of, write_json
from sweeps.ledger.change_points import CAUSE_TEXTS, Regression, regressions
from sweeps.ledger.history import History
from sweeps.ledger.ledger import LOST, ScalingRow, latest_rows, left_out, row_before, scaling_table
from sweeps.ledger.scaling_text import curve
from sweeps.record import JobRecord

CHART_SUFFIXES = (".png", ".svg")
SHOWN_NOTES = 3
_HEADER = ("ranks", "images/s", "scaling factor", "of ideal", "data", "all-reduce", "stragglers", "compute", "change")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path("nights"), help="folder of all nights (default: nights)")
    parser.add_argument("--model", help="only this model, e.g. lane-small")
    parser.add_argument("--nights", type=int, default=30, metavar="N", help="compare the last N nights (default 30)")
    parser.add_argument("--chart", type=Path, metavar="FILE.png|svg", help="draw the curves there too, by night")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")


def run(options: argparse.Namespace) -> int:
    """0; 1 where the newest night holds a new regression."""
    _check(options)
    history = History(options.root)
    jobs = history.jobs(nights=options.nights)
    for line in left_out_nights(history):
        print(line)
    if not jobs:
        raise UserError(f"{history.folder}: holds no night's jobs; run `python -m sweeps nightly PLAN`, or give --root")
    jobs = jobs_of_model(jobs, options.model)
    rows, found = scaling_table(jobs), regressions(jobs)
    for line in table(rows):
        print(line)
    for reason, count in left_out(jobs).items():
        print(f"{count} scaling run{'s' if count > 1 else ''} left out: {reason}")
    for line in regression_lines(found):
        print(line)
    if options.json is not None:
        write_json(options.json, to_json(rows, found, left_out(jobs), history.left_out))
        print(f"wrote {options.json}")
    if options.chart is not None:
        if rows:
            from sweeps.ledger.scaling_chart import draw

            draw(rows, options.chart)
            print(f"wrote {options.chart}: night {', '.join(sorted({row.night for row in latest_rows(rows)}))}")
        else:
            print(f"{options.chart}: not drawn, as no scaling run is recorded")
    return 1 if any(regression.is_new for regression in found) else 0


def left_out_nights(history: History) -> list[str]:
    """Notes about nights that could not be read; the first few in full."""
    lines = [f"note: {line}" for line in history.left_out]
    more = len(lines) - SHOWN_NOTES
    return lines if more <= 0 else [*lines[:SHOWN_NOTES], f"note: {more} more nights left out like these"]


def jobs_of_model(jobs: Sequence[JobRecord], model: str | None) -> list[JobRecord]:
    """UserError, with the nearest right name, where no job is of that model."""
    if model is None:
        return list(jobs)
    models = {job.model for job in jobs}
    if model not in models:
        raise UserError(f"--model {model}: no job of the nights compared is of it{nearest(model, models)}")
    return [job for job in jobs if job.model == model]


def table(rows: Sequence[ScalingRow]) -> list[str]:
    """Of each series its newest night, with its curve; `rows` are in the order of `scaling_table`."""
    if not rows:
        return ["no scaling run is recorded; a plan's [models.scaling] asks for them"]
    lines: list[str] = []
    by_series: dict[tuple[str, str, str, str], list[ScalingRow]] = {}
    for row in latest_rows(rows):
        by_series.setdefault(row.series, []).append(row)
    for newest in by_series.values():
        cells = [_HEADER, *(_cells(row, row_before(rows, row)) for row in newest)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
        if lines:
            lines.append("")
        lines.append(title(newest[0]))
        for line in cells:
            lines.append("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        lines += _remarks(newest, [row_before(rows, row) for row in newest])
        lines += curve(newest)
    return lines


def title(row: ScalingRow) -> str:
    parts = [row.hardware or "unknown hardware", f"image {row.image[:19]}" if row.image else "no image"]
    parts += [f"settings {row.configuration}"] if row.configuration else []
    return f"{row.model}, night {row.night} ({', '.join(parts)})"


def regression_lines(found: Iterable[Regression]) -> list[str]:
    """What has one cause since one night stands together."""
    together: dict[tuple[object, ...], list[Regression]] = {}
    for regression in found:
        series = regression.series
        place = (series.model, series.hardware, series.image, series.configuration)
        key = (*place, regression.first_night, regression.is_new, regression.cause)
        together.setdefault(key, []).append(regression)
    lines = []
    for some in together.values():
        first = some[0]
        kind = "new regression" if first.is_new else "known regression"
        causes = [f"cause: {CAUSE_TEXTS[first.cause]}"] if first.cause else []
        differences = dict.fromkeys(difference for regression in some for difference in regression.differences)
        lines.append(
            "; ".join([f"{kind}: {first.series.model} since night {first.first_night}", *causes, *differences])
        )
        for regression in some:
            rise = regression.rises.get(regression.cause)
            took = "" if rise is None else f", {100 * rise:+.1f} % of a step"
            lines.append(f"  {regression.figures()}{took}; noise {_noise(regression)}, {regression.rule}")
    return lines or ["no regression"]


def to_json(
    rows: Sequence[ScalingRow], found: Sequence[Regression], not_counted: dict[str, int], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "rows": [row.to_json() for row in rows],
        "regressions": [regression.to_json() for regression in found],
        "left_out": not_counted,
        "notes": list(notes),
    }


def _check(options: argparse.Namespace) -> None:
    if options.nights < 1:
        raise UserError(f"--nights {options.nights}: must be 1 or more")
    if options.chart is not None and options.chart.suffix not in CHART_SUFFIXES:
        raise UserError(f"--chart {options.chart}: the name must end in {' or '.join(CHART_SUFFIXES)}")
    check_folder_of("--chart", options.chart)
    check_folder_of("--json", options.json)


def _cells(row: ScalingRow, before: ScalingRow | None) -> tuple[str, ...]:
    factor = "1" if row.num_ranks == 1 else "unknown"
    if row.num_ranks > 1 and row.scaling_factor is not None:
        factor = f"{row.scaling_factor:.2f}"
        factor += f" [{row.low:.2f}, {row.high:.2f}]" if row.low is not None and row.high is not None else ""
    ratio = row.ratio_to_ideal
    alone = row.num_ranks == 1
    lost = [
        # Not -0.0.
        "" if alone or name not in row.lost else f"{round(100 * row.lost[name], 1) + 0.0:.1f} %"
        for name in LOST
    ]
    change = "" if before is None else f"{100 * (row.images_per_second / before.images_per_second - 1):+.1f} %"
    ranks = f"{row.num_ranks}" if row.num_nodes == 1 else f"{row.num_ranks} on {row.num_nodes} nodes"
    return (
        ranks,
        f"{row.images_per_second:.1f}",
        factor,
        "" if ratio is None or alone else f"{100 * ratio:.1f} %",
        *lost,
        change,
    )


def _remarks(rows: Sequence[ScalingRow], before: Sequence[ScalingRow | None]) -> list[str]:
    """What the columns mean, and what could not be said."""
    remarks = []
    confidences = sorted({row.confidence for row in rows if row.num_ranks > 1 and row.confidence is not None})
    if confidences:
        least = " to ".join(f"{100 * value:.0f}" for value in (confidences[:1] + confidences[1:][-1:]))
        remarks.append(f"  intervals by rank sums over runs, {least} % confidence")
    if any(row.num_ranks > 1 and row.scaling_factor is not None and row.low is None for row in rows):
        remarks.append("  no interval where each number of ranks ran once: give scaling.repeats of the plan 3 or more")
    if any(row.scaling_factor is None for row in rows):
        remarks.append("  scaling factor unknown: nothing ran on one rank; add 1 to scaling.ranks of the plan")
    if any(row.lost for row in rows if row.num_ranks > 1):
        remarks.append("  data to compute: what is missing to the ideal, by cause")
    nights = sorted({row.night for row in before if row is not None})
    if nights:
        remarks.append(f"  change of images/s since night {', '.join(nights)}")
    return remarks


def _noise(regression: Regression) -> str:
    share = 100 * regression.noise
    return f"{share:.1f} %" if regression.series.is_ratio else f"{share:.2f} points"
