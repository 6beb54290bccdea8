"""`targets`: time to accuracy by model, hardware and number of ranks, and who holds the record."""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from perception.errors import UserError
from perception.run_folder import check_folder_of, write_json
from sweeps.ledger.history import History
from sweeps.ledger.targets import TargetEntry, TargetKey, TargetRecord, best_of_model, records, why_no_run
from sweeps.record import NightRecord
from sweeps.scaling import jobs_of_model, left_out_nights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path("nights"), help="folder of all nights (default: nights)")
    parser.add_argument("--model", help="only this model, e.g. lane-small")
    parser.add_argument(
        "--price", type=float, metavar="P", help="of a rank-hour (GPU-hour); default: price_per_rank_hour of the plan"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")


def run(options: argparse.Namespace) -> int:
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise UserError(f"--price {options.price}: must be 0 or more")
    check_folder_of("--json", options.json)
    history = History(options.root)
    jobs = history.jobs()
    for line in left_out_nights(history):
        print(line)
    if not jobs:
        raise UserError(f"{history.folder}: holds no night's jobs; run `python -m sweeps nightly PLAN`, or give --root")
    jobs = jobs_of_model(jobs, options.model)
    price = options.price if options.price is not None else price_of(history.nights())
    found = records(jobs, price)
    for line in lines_of(found, price):
        print(line)
    left_out = Counter(reason for job in jobs if job.target_metric and (reason := why_no_run(job)))
    for reason, count in left_out.items():
        print(f"{count} run{'s' if count > 1 else ''} left out: {reason}")
    if options.json is not None:
        write_json(options.json, {"price_per_rank_hour": price, "targets": [record.to_json() for record in found]})
        print(f"wrote {options.json}")
    return 0


def price_of(nights: Sequence[NightRecord]) -> float | None:
    """Of a rank-hour, as the newest plan that gives one has it."""
    for night in reversed(nights):
        try:
            price = tomllib.loads(night.plan_text).get("price_per_rank_hour")
        except tomllib.TOMLDecodeError:
            continue
        if isinstance(price, (int, float)) and not isinstance(price, bool):
            return float(price)
    return None


def lines_of(found: Sequence[TargetRecord], price: float | None) -> list[str]:
    """What the command prints; the terminal summary of a night too."""
    if not found:
        return ["no run had a target; a plan's [models.target] gives one"]
    lines = []
    for record in found:
        key = record.key
        lines.append(f"{key.model}, {key.metric} {key.value:g}{_ranks(key)}:")
        reached = f"{len(record.entries)} of {record.num_runs} runs reached it"
        if record.holder is None:
            lines.append(f"  {reached}")
            continue
        lines.append(f"  record {_entry(record.holder)}; {reached}")
        if record.holder_before is not None:
            saved = 1 - record.holder.seconds / record.holder_before.seconds
            lines.append(f"  before it {_entry(record.holder_before)}: {100 * saved:.1f} % faster now")
        if record.holder.command:
            lines.append(f"  {record.holder.command}")
    places = Counter((record.key.model, record.key.metric, record.key.value) for record in found if record.entries)
    for place, (fastest, cheapest) in best_of_model(found).items():
        if places[place] > 1:
            model, metric, value = place
            lines.append(f"{model}, {metric} {value:g} over all hardware and numbers of ranks:")
            lines += [
                f"  fastest {_entry(fastest)}{_ranks(fastest.key)}",
                f"  cheapest {_entry(cheapest)}{_ranks(cheapest.key)}",
            ]
    if price is None:
        lines.append("costs are unknown: give --price, or price_per_rank_hour in the plan")
    else:
        lines.append(f"costs at {price:g} a rank-hour")
    return lines


def _ranks(key: TargetKey) -> str:
    return f" on {key.num_ranks} rank{'s' if key.num_ranks > 1 else ''} of {key.hardware or 'unknown hardware'}"


def _entry(entry: TargetEntry) -> str:
    parts = [f"{entry.seconds:.1f} s"]
    parts += [f"{entry.samples} samples"] if entry.samples is not None else []
    parts.append(f"{entry.rank_hours:.4g} rank-hours")
    parts += [f"cost {entry.cost:.4g}"] if entry.cost is not None else []
    return f"{', '.join(parts)} ({entry.job} of night {entry.night})"
