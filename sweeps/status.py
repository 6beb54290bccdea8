"""`status`: how a night stands, live, or how it stood; read from its journal alone, in 80 columns."""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perception.errors import UserError, nearest

if TYPE_CHECKING:
    from sweeps.night.state import JobState, NightState
    from sweeps.planning.plan import ModelPlan
    from sweeps.record import JobRecord

WIDTH = 80
WATCH_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path("nights"), help="folder of all nights (default: nights)")
    parser.add_argument("--night", default="", help="its name, e.g. 2026-11-30 (default: the newest)")
    parser.add_argument("--watch", action="store_true", help="show it anew every two seconds until the night ends")


def run(options: argparse.Namespace) -> int:
    from sweeps.night.journal import JournalReader
    from sweeps.night.night import NightLock, find_nights
    from sweeps.night.state import NightState

    nights = find_nights(options.root)
    if not nights:
        raise UserError(f"{options.root}: holds no night; give the --root that nightly was given")
    names = [found.folder.name for found in nights]
    name = options.night or names[-1]
    if name not in names:
        raise UserError(f"--night {name}: is not in {options.root}{nearest(name, names)}")
    folder = nights[names.index(name)].folder
    reader = JournalReader(folder.journal)
    state = NightState()
    lock = NightLock(options.root, nights[names.index(name)].plan_name)
    while True:
        for event in reader.read():
            state.apply(event)
        text = "\n".join(summary(state, time.time(), lock.is_held()))
        if options.watch and sys.stdout.isatty():
            # Home, and clear to the end: nothing flickers.
            print(f"\x1b[H\x1b[J{text}", flush=True)
        else:
            print(text, flush=True)
        if not options.watch or state.closed is not None:
            return 0
        time.sleep(WATCH_SECONDS)
        if not sys.stdout.isatty():
            print(flush=True)


def summary(state: NightState, now_utc: float, is_driven: bool) -> list[str]:
    """Lines of at most 80 columns. is_driven: a controller of its plan lives."""
    night = state.closed or state.night
    if night is None:
        return ["a night that has just been begun"]
    lines = [f"night {night.night} of plan {night.plan}, {night.launcher}, {night.num_slots} slots"]
    if state.closed is not None and night.ended_utc is not None:
        took = _duration(night.ended_utc - night.started_utc)
        lines.append(f"ended {_clock(night.ended_utc)} UTC after {took}: {night.closing}")
    else:
        lines.append(f"since {_clock(night.started_utc)} UTC, {_duration(now_utc - night.started_utc)}")
        if night.deadline_utc is not None:
            left = night.deadline_utc - now_utc
            ends = f"{_duration(left)} left" if left > 0 else "reached"
            lines[-1] += f"; deadline {_clock(night.deadline_utc)} UTC, {ends}"
        if state.closing:
            lines.append(f"closing: {state.closing}")
        if not is_driven:
            lines.append("no controller runs: its jobs go on; take it up with `nightly PLAN --resume`")
    lines += ["", *_job_lines(state, now_utc), "", *_model_lines(state)]
    failures = _failure_lines(state)
    lines += ["", *failures] if failures else []
    if state.notes:
        lines += ["", "notes", *(f"  {note}" for note in state.notes[-5:])]
    return [_cut(line) for line in lines]


def _job_lines(state: NightState, now_utc: float) -> list[str]:
    night = state.closed or state.night
    assert night is not None
    states = Counter(
        job.live.status.state if job.live is not None and job.live.status is not None else "submitted"
        for job in state.out.values()
    )
    done = Counter(record.status for record in state.records)
    parts = [f"{states[name]} {name}" for name in ("running", "pending", "submitted", "lost") if states[name]]
    parts += [f"{state.num_waiting} waiting"] if state.num_waiting else []
    parts += [f"{state.num_twins} to be answered"] if state.num_twins else []
    parts += [f"{sum(done.values())} done"]
    lines = [f"jobs        {len(state.jobs)} planned: {', '.join(parts)}"]
    if done:
        lines.append(f"done        {', '.join(f'{count} {name}' for name, count in done.most_common())}")
    ended = sum(state.rank_seconds.values())
    running = sum(
        max(0.0, now_utc - job.live.status.started_utc) * job.planned.num_ranks
        for job in state.out.values()
        if job.is_running and job.live is not None and job.live.status is not None and job.live.status.started_utc
    )
    wasted = sum(record.rank_seconds_wasted for record in state.records)
    used = f"rank-hours  {(ended + running) / 3600:.2f} used"
    if night.budget_rank_seconds:
        share = (ended + running) / night.budget_rank_seconds
        used += f" of {night.budget_rank_seconds / 3600:.2f} ({share:.0%})"
    lines.append(f"{used}, {wasted / 3600:.2f} wasted")
    more = _more_jobs(state, now_utc)
    if more is not None:
        lines.append(f"            about {more} more jobs of the mean length fit before the deadline")
    return lines


def _more_jobs(state: NightState, now_utc: float) -> int | None:
    """By what jobs took on average so far; None where nothing is known or nothing bounds it."""
    night = state.night
    whole = [record.rank_seconds_allocated for record in state.records if record.rank_seconds_allocated > 0]
    if night is None or night.deadline_utc is None or not whole or state.closing:
        return None
    left = max(0.0, night.deadline_utc - now_utc) * max(1, night.num_slots)
    return math.floor(left / statistics.fmean(whole))


def _model_lines(state: NightState) -> list[str]:
    from sweeps.night.champions import ENDED_WELL, is_allowed

    rows = [("model and metric", "best", "default", "change", "trials", "out", "best job")]
    by_model: dict[str, list[JobRecord]] = defaultdict(list)
    for record in state.records:
        by_model[record.model].append(record)
    out = Counter(job.planned.model for job in state.out.values())
    plans = _plans(state)
    models = dict.fromkeys([*state.num_planned, *by_model])
    for model in models:
        scored = [record for record in by_model[model] if record.objective is not None and record.status in ENDED_WELL]
        plan = plans.get(model)
        sign = -1 if plan is not None and plan.directions[0] == "minimize" else 1
        defaults = [record.objective for record in scored if record.kind == "default" and record.objective is not None]
        trials = [record for record in scored if record.kind in ("trial", "champion")]
        # What breaks a constraint is no answer.
        trials = [record for record in trials if plan is None or is_allowed(record, plan)]
        best = max(trials, key=lambda record: sign * (record.objective or 0.0), default=None)
        mean = statistics.fmean(defaults) if defaults else None
        value = best.objective if best is not None else None
        change = value - mean if value is not None and mean is not None else None
        metric = next((record.objective_name for record in scored), "")
        figures = (_figure(value), _figure(mean), _figure(change, "+"))
        counts = (f"{state.num_trials.get(model, 0)}", f"{out[model]}")
        rows.append((f"{model} {metric}", *figures, *counts, best.job if best is not None else ""))
    width = max(len(row[0]) for row in rows)
    return [
        f"{name:{width}} {value:>7} {mean:>7} {change:>7} {trials:>6} {out:>3}  {job}".rstrip()
        for name, value, mean, change, trials, out, job in rows
    ]


def _plans(state: NightState) -> dict[str, ModelPlan]:
    """Model → what the night's plan says of it; {} where this version cannot read it."""
    from sweeps.planning.plan_text import parse_plan

    night = state.night
    if night is None or not night.plan_text:
        return {}
    try:
        plan = parse_plan(night.plan_text, "plan.toml")
    except UserError:
        return {}
    return {model.model: model for model in plan.models}


def _failure_lines(state: NightState) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for record in state.records:
        if record.failure is not None or record.status in ("failed", "lost", "diverged"):
            groups[record.failure or record.status, record.failure_signature or record.cause].append(record.job)
    ordered: Sequence[tuple[tuple[str, str], list[str]]] = sorted(groups.items(), key=lambda item: -len(item[1]))
    lines = [f"  {len(jobs)} x {failure}: {signature} ({jobs[0]})" for (failure, signature), jobs in ordered[:8]]
    retried = sum(_num_retries(job) for job in state.jobs.values())
    if retried:
        lines.append(f"  {retried} attempts failed or were preempted, and the jobs went on")
    return ["failures", *lines] if lines else []


def _num_retries(job: JobState) -> int:
    return sum(
        1
        for attempt in job.attempts
        if attempt.ended is not None and attempt.ended.action in ("resume", "retry", "retry_elsewhere")
    )


def _figure(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{3 if sign else 4}g}"


def _clock(utc: float) -> str:
    return f"{datetime.datetime.fromtimestamp(utc, datetime.UTC):%H:%M:%S}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _cut(line: str) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in line)
    return plain if len(plain) <= WIDTH else plain[: WIDTH - 1] + "…"
