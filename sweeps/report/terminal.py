"""The report's summary for a terminal, in 96 columns of plain text."""

from __future__ import annotations

import textwrap

from sweeps.report.build import Report
from sweeps.report.headline import metric_name
from sweeps.report.leaderboard import Board, better_of
from sweeps.report.regressions_view import RegressionGroup
from sweeps.report.wording import (
    clock,
    count,
    duration,
    hours,
    joined,
    number,
    percent,
    score,
    short,
    signed_score,
    visible,
)

COLUMNS = 96
NUM_LINES = 5
"""Of regressions, failures and proposals each; the page has them all."""


def summary_of(report: Report) -> str:
    """Headline, best of each model, regressions, failures, proposals."""
    accounts = report.accounts
    ended = clock(report.ended_utc) if report.ended_utc is not None else "now"
    lines = [
        f"night {report.night} of plan {report.plan}: {clock(report.started_utc)} to {ended} UTC"
        + (f", {report.closing}" if report.closing else ""),
        "",
        report.headline,
        "",
        f"jobs       planned {accounts.num_planned}; "
        + (", ".join(f"{name} {amount}" for name, amount in accounts.outcomes.items()) or "none with a record")
        + (f", not started {accounts.num_not_started}" if accounts.num_not_started else ""),
        f"{report.hour_unit:<10} allocated {hours(accounts.allocated)}, useful {hours(accounts.useful)}, "
        f"wasted {hours(accounts.wasted)}" + _wasted(report),
    ]
    if accounts.makespan_seconds is not None:
        lines.append(
            f"time       {duration(accounts.makespan_seconds)}; lower bound {duration(accounts.lower_bound_seconds)} "
            f"({percent(accounts.utilisation, 1)}), slots held {percent(accounts.filled, 1)}"
        )
    for board in report.boards:
        lines += ["", *_board(board)]
    for series in report.scaling.series:
        top = series.top
        if top is not None:
            when = "" if series.is_tonight else f" (night {series.night})"
            lines.append(
                f"scaling    {series.model}: {number(top.scaling_factor)} on {top.num_ranks} ranks, "
                f"{percent(top.ratio_to_ideal, 1)} of the ideal{when}"
            )
    fresh = [_regression(group) for group in report.regressions if group.is_new]
    standing = [_regression(group) for group in report.regressions if not group.is_new]
    lines += ["", *_some("new regressions", fresh, "no new regression")]
    if standing:
        lines += _some("not mended yet", standing, "")
    failures = [
        f"{group.num_jobs} × {group.failure}: {group.signature[:120]} ({joined(group.models, 2)}"
        + (", new" if group.is_new else f", since {group.first_night}")
        + ")"
        for group in report.failures.groups
    ]
    lines += ["", *_some("failures", failures, "no failure")]
    lines += [
        "",
        *_some("next night", [_proposal(p.model, p.action, p.reason) for p in report.proposals], "the same again"),
    ]
    lines += ["", f"exit code {report.exit_code}: {report.exit_reason}"]
    return "\n".join(_wrapped(visible(line)) for line in lines)


def _board(board: Board) -> list[str]:
    name = metric_name(board.objective_name)
    best = board.best
    if best is None:
        return [f"{board.model}: {board.verdict_reason}"]
    default = "default not run"
    if board.default is not None:
        spread = f" ± {score(board.noise.standard_deviation)}" if board.noise is not None else ""
        default = f"default {score(board.default.mean)}{spread}"
    champion = f", champion {score(board.champion.mean)}" if board.champion is not None else ""
    change = ""
    if board.change_since_last_night is not None:
        change = f", {signed_score(board.sign * board.change_since_last_night)} since night {board.last_night}"
    verdict = {
        "better": "better than the default beyond the noise",
        "worse": "nothing better than the default",
        "not beyond noise": "not better beyond the noise",
        "unknown": "not known",
    }[board.verdict]
    lines = [
        f"{board.model}: {name} {score(best.mean)} ({default}{champion}{change})",
        f"  {verdict} ({board.verdict_reason})",
    ]
    shown = better_of(board.entries) or best
    settings = " ".join(f"{key}={_setting(value)}" for key, value in sorted(shown.parameters.items()))
    lines.append(f"  {short(shown.config_hash)} {shown.job}: {settings or 'as the model has it'}")
    return lines


def _wasted(report: Report) -> str:
    causes = [f"{cause} {hours(seconds)}" for cause, seconds in report.accounts.wasted_by_cause.items()]
    return f" ({joined(causes, 3)})" if causes else ""


def _regression(group: RegressionGroup) -> str:
    return group.lead.text() + (f"; {count(len(group.others), 'other series', 'other series')}" if group.others else "")


def _proposal(model: str, action: str, reason: str) -> str:
    return f"{model + ': ' if model else ''}{action}, because {reason}"


def _some(title: str, entries: list[str], none: str) -> list[str]:
    if not entries:
        return [none]
    lines = [f"{title}:", *(f"  {entry}" for entry in entries[:NUM_LINES])]
    if len(entries) > NUM_LINES:
        lines.append(f"  and {len(entries) - NUM_LINES} more on the page")
    return lines


def _setting(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _wrapped(line: str) -> str:
    if len(line) <= COLUMNS:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return "\n".join(textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False))
