"""The morning report of a night: its figures from the records, written as one page, one JSON file and an exit code."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception.run_folder import write_atomic
from sweeps.record import JobRecord, NightRecord
from sweeps.report.accounts import Accounts, accounts_of
from sweeps.report.failures_view import FailuresView, failures_of
from sweeps.report.headline import exit_of, sentence_of
from sweeps.report.leaderboard import Board, board_of
from sweeps.report.next_night import Proposal, proposals_of
from sweeps.report.nodes_view import NodesView, nodes_of
from sweeps.report.plan_facts import ModelFacts, PlanFacts, facts_of, stated_direction
from sweeps.report.regressions_view import RegressionGroup, regressions_of
from sweeps.report.scaling_view import ScalingView, scaling_of
from sweeps.report.search_view import SearchView, search_of
from sweeps.report.targets_view import TargetLine, targets_of
from sweeps.report.wording import count, hour_unit

if TYPE_CHECKING:
    from sweeps.ledger.history import History

NUM_NIGHTS = 30
"""Of the history, this one included, that the page draws on."""
SCHEMA = 1


@dataclass(frozen=True)
class ReportPaths:
    html: Path
    json: Path
    headline: str
    """The sentence on top, for a notification."""


@dataclass(frozen=True)
class NightLine:
    """One night of the history, in a few figures."""

    night: str
    num_jobs: int
    num_done: int
    num_failed: int
    useful: float
    wasted: float


@dataclass(frozen=True)
class Report:
    """Every figure of the page."""

    schema: int
    night: str
    plan: str
    launcher: str
    num_slots: int
    hardware: str
    hour_unit: str
    """GPU-hours or rank-hours."""
    started_utc: float
    ended_utc: float | None
    closing: str
    num_controller_starts: int
    controller_cpu_seconds: float
    git_revisions: tuple[str, ...]
    images: tuple[str, ...]
    data_manifests: dict[str, tuple[str, ...]]
    """Model → hashes of what its jobs trained on."""
    headline: str
    exit_code: int
    exit_reason: str
    accounts: Accounts
    boards: tuple[Board, ...]
    scaling: ScalingView
    regressions: tuple[RegressionGroup, ...]
    """New ones first, then those seen on earlier nights and not mended since."""
    targets: tuple[TargetLine, ...]
    failures: FailuresView
    searches: tuple[SearchView, ...]
    nodes: NodesView
    proposals: tuple[Proposal, ...]
    nights: tuple[NightLine, ...]
    """Oldest first, this one last."""
    notes: tuple[str, ...]
    """Of the controller, and what this report had to go without."""


def write_report(
    folder: Path,
    night: NightRecord,
    jobs: Sequence[JobRecord],
    history: History,
    importances: Mapping[str, Mapping[str, float]] | None = None,
    num_nights: int = NUM_NIGHTS,
) -> tuple[ReportPaths, int]:
    """Write report.html and report.json into `folder`; returns where, and the exit code of the morning.

    The history may hold this night already or not: `jobs` count. importances: model → parameter → share, of the
    searches, where they are open; without them they are made from the records.
    """
    report = make_report(night, jobs, history, importances, num_nights)
    return write_report_files(folder, report), report.exit_code


def write_report_files(folder: Path, report: Report) -> ReportPaths:
    from sweeps.report.html import page_of

    paths = ReportPaths(folder / "report.html", folder / "report.json", report.headline)
    write_atomic(paths.json, json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    write_atomic(paths.html, page_of(report))
    return paths


def make_report(
    night: NightRecord,
    jobs: Sequence[JobRecord],
    history: History,
    importances: Mapping[str, Mapping[str, float]] | None = None,
    num_nights: int = NUM_NIGHTS,
) -> Report:
    """All figures of a night's report, from the records alone."""
    before, earlier = _earlier_nights(night, history, num_nights)
    earlier_jobs = [job for own in earlier.values() for job in own]
    facts = facts_of(night)
    accounts = accounts_of(night, jobs)
    models = sorted({job.model for job in jobs} | set(facts.models))
    boards = [_board(model, jobs, earlier_jobs, facts, night) for model in models]
    searches = {
        board.model: search
        for board in boards
        if (search := _search(board, jobs, (importances or {}).get(board.model), facts)) is not None
    }
    regressions = regressions_of(night.night, jobs, earlier_jobs, models)
    failures = failures_of(jobs, earlier, night.night, night.git_revision)
    nodes = nodes_of(jobs)
    exit_code, exit_reason = exit_of(accounts, regressions)
    price = facts.price_per_rank_hour
    return Report(
        schema=SCHEMA,
        night=night.night,
        plan=night.plan,
        launcher=night.launcher,
        num_slots=night.num_slots,
        hardware=night.hardware,
        hour_unit=hour_unit(night.hardware),
        started_utc=night.started_utc,
        ended_utc=night.ended_utc,
        closing=night.closing,
        num_controller_starts=night.num_controller_starts,
        controller_cpu_seconds=night.controller_cpu_seconds,
        git_revisions=_distinct([night.git_revision, *(job.git_revision for job in jobs)]),
        images=_distinct([night.image, *(job.image for job in jobs)]),
        data_manifests={m: _distinct(job.data_manifest for job in jobs if job.model == m) for m in models},
        headline=sentence_of(night, accounts, boards, regressions, failures),
        exit_code=exit_code,
        exit_reason=exit_reason,
        accounts=accounts,
        boards=tuple(boards),
        scaling=scaling_of(night.night, jobs, earlier_jobs),
        regressions=regressions,
        targets=targets_of([*earlier_jobs, *jobs], night.night, models, price),
        failures=failures,
        searches=tuple(searches.values()),
        nodes=nodes,
        proposals=proposals_of(boards, searches, facts, accounts, failures, nodes, regressions),
        nights=(*(_night_line(own, earlier[own.night]) for own in before), _night_line(night, jobs)),
        notes=(*night.notes, *_shortcomings(facts, boards, accounts, history)),
    )


def plain(value: Any) -> Any:
    """Dataclasses as mappings with their stated properties, and NaN and infinity as null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {**fields, **{name: plain(getattr(value, name)) for name in _STATED if hasattr(type(value), name)}}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


_STATED = ("mean", "standard_deviation", "is_better", "ratio_to_ideal", "num_done", "num_failed", "num_lost")
"""Properties of the dataclasses above that the page shows as figures."""


def _earlier_nights(
    night: NightRecord, history: History, num_nights: int
) -> tuple[list[NightRecord], dict[str, list[JobRecord]]]:
    """Nights before this one, oldest first, and their jobs by night."""
    known = [own for own in history.nights() if own.night != night.night and own.started_utc <= night.started_utc]
    before = sorted(known, key=lambda own: (own.started_utc, own.night))[-(num_nights - 1) :] if num_nights > 1 else []
    earlier: dict[str, list[JobRecord]] = {own.night: [] for own in before}
    if before:
        for job in history.jobs(nights=list(earlier)):
            earlier[job.night].append(job)
    return before, earlier


def _board(
    model: str, jobs: Sequence[JobRecord], earlier: Sequence[JobRecord], facts: PlanFacts, night: NightRecord
) -> Board:
    own = [job for job in jobs if job.model == model]
    known = facts.model(model)
    if not known.objective:
        objective = next((job.objective_name for job in own if job.objective_name), "")
        known = ModelFacts(objective, stated_direction(objective))
    return board_of(model, own, [job for job in earlier if job.model == model], known, night.champions.get(model, {}))


def _search(
    board: Board, jobs: Sequence[JobRecord], importance: Mapping[str, float] | None, facts: PlanFacts
) -> SearchView | None:
    logs = [name for name, parameter in facts.model(board.model).parameters.items() if parameter.log]
    own = [job for job in jobs if job.model == board.model]
    return search_of(board.model, own, board.objective_name, board.direction, importance, logs)


def _night_line(night: NightRecord, jobs: Sequence[JobRecord]) -> NightLine:
    accounts = accounts_of(night, jobs)
    return NightLine(
        night=night.night,
        num_jobs=accounts.num_jobs,
        num_done=accounts.num_done,
        num_failed=accounts.num_failed + accounts.num_lost,
        useful=accounts.useful,
        wasted=accounts.wasted,
    )


def _distinct(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))


def _shortcomings(facts: PlanFacts, boards: Sequence[Board], accounts: Accounts, history: History) -> list[str]:
    """What the report had to go without, in lines for people."""
    lines = list(history.left_out)
    if facts.problem:
        lines.append(f"Ranges and directions of the search are not known: {facts.problem}")
    for board in boards:
        if not board.has_stated_direction and board.entries:
            lines.append(f"{board.model}: larger {board.objective_name} was taken to be better")
    if accounts.num_inconsistent:
        records = count(accounts.num_inconsistent, "record")
        lines.append(f"{records} with more time wasted than allocated, or less than none; cut to it")
    return lines
