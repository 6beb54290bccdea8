"""The proposed next night: a few stated rules over what this night found, each proposal with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.report.accounts import Accounts
from sweeps.report.failures_view import FailuresView
from sweeps.report.headline import regression_words
from sweeps.report.leaderboard import Board, better_of
from sweeps.report.nodes_view import NodesView
from sweeps.report.noise import repeats_needed
from sweeps.report.plan_facts import ModelFacts, PlanFacts
from sweeps.report.regressions_view import RegressionGroup
from sweeps.report.search_view import SearchView
from sweeps.report.wording import count, joined, number, percent, score

EDGE = 0.05
"""A value so near an end of its range, as a share of the range, stands at its edge."""
NUM_QUIET_NIGHTS = 5
FAILING_SHARE = 0.1
MIN_TRIALS_TO_LEAVE_OUT = 50
MIN_SECONDS_FOR_UTILISATION = 1800.0
IMPORTANT = 0.02
"""A parameter that explains less than this of the objective's variance matters little."""


@dataclass(frozen=True)
class Proposal:
    model: str
    """Empty: of the whole night."""
    action: str
    reason: str
    is_urgent: bool = False


def proposals_of(
    boards: Sequence[Board],
    searches: Mapping[str, SearchView],
    facts: PlanFacts,
    accounts: Accounts,
    failures: FailuresView,
    nodes: NodesView,
    regressions: Sequence[RegressionGroup],
) -> tuple[Proposal, ...]:
    """Urgent ones first, then in the order of the models."""
    found = [*_of_regressions(regressions), *_of_nodes(nodes), *_of_failures(accounts, failures)]
    for board in boards:
        search = searches.get(board.model)
        found += _of_board(board)
        found += _of_ranges(board, facts.model(board.model))
        if search is not None:
            found += _of_search(search)
    found += _of_budget(accounts)
    return tuple(sorted(found, key=lambda proposal: not proposal.is_urgent))


def _of_regressions(regressions: Sequence[RegressionGroup]) -> list[Proposal]:
    return [
        Proposal(
            group.model,
            "compare with the revision before"
            if group.lead.series.is_accuracy
            else "repeat its scaling runs on the revision before and on this one",
            f"{regression_words(group)} since night {group.first_night}",
            is_urgent=True,
        )
        for group in regressions
    ]


def _of_nodes(nodes: NodesView) -> list[Proposal]:
    return [
        Proposal("", f"take {health.node} out until it has been looked at", joined(health.remarks), is_urgent=True)
        for health in nodes.nodes
        if health.remarks
    ]


def _of_failures(accounts: Accounts, failures: FailuresView) -> list[Proposal]:
    found = []
    for group in failures.groups:
        if accounts.num_jobs and group.num_jobs >= max(2, FAILING_SHARE * accounts.num_jobs):
            found.append(
                Proposal(
                    joined(group.models, 2),
                    f"mend “{group.signature[:100]}” first",
                    f"{group.num_jobs} of {accounts.num_jobs} jobs ended in it ({group.failure})",
                    is_urgent=True,
                )
            )
    return found


def _of_board(board: Board) -> list[Proposal]:
    best = board.best
    if best is None:
        return []
    if board.default is None:
        return [
            Proposal(board.model, "run the default under three seeds", "without it nothing can be said to be better")
        ]
    if board.noise is None:
        return [Proposal(board.model, "run the default under three seeds", "no two runs differ by their seed alone")]
    if board.noise.standard_deviation <= 0:
        return [Proposal(board.model, "train longer", "all repeats have the same figure: nothing can be told apart")]
    found = []
    against = next((e for e in board.entries if e.against_default is not None), None)
    comparison = against.against_default if against is not None else None
    if board.is_better and against is not None:
        better = better_of(board.entries)
        if better is not None and better.kind in ("trial", "confirmed"):
            again = "" if better.kind == "confirmed" else " and repeat it under three seeds"
            action = f"make configuration {better.config_hash[:12]} the champion{again}"
            found.append(Proposal(board.model, action, f"it is better than the default ({board.verdict_reason})"))
    elif comparison is not None and comparison.needed is not None and comparison.difference > 0:
        repeats = repeats_needed(board.noise, comparison.difference, 1)
        reason = (
            f"the best is better by {score(comparison.difference)}, but {score(comparison.needed)} are needed "
            f"at a spread of {score(board.noise.standard_deviation)}"
        )
        if repeats is None:
            found.append(Proposal(board.model, "train longer or search elsewhere rather than repeat", reason))
        else:
            runs = max(repeats, 2)
            action = f"repeat the best and the default under {count(runs, 'seed')} each"
            found.append(Proposal(board.model, action, f"{reason}; so many repeats would decide it"))
    if board.num_nights_without_gain >= NUM_QUIET_NIGHTS:
        reason = f"{board.num_nights_without_gain} nights without a gain above the spread"
        found.append(Proposal(board.model, "halve its share, or give it another space", reason))
    return found


def _of_ranges(board: Board, facts: ModelFacts) -> list[Proposal]:
    best = board.best
    if best is None or best.kind == "default":
        return []
    found = []
    for name, value in sorted(best.parameters.items()):
        parameter = facts.parameters.get(name)
        if parameter is None or parameter.kind == "choice" or not parameter.contains(value):
            continue
        position = parameter.position(value)
        if parameter.step:
            position = 0.0 if value <= parameter.low else 1.0 if value >= parameter.high else 0.5
        if EDGE < position < 1 - EDGE:
            continue
        is_low = position <= EDGE
        end, side = (parameter.low, "lower") if is_low else (parameter.high, "upper")
        wider: Any = (
            (end / 3 if is_low else 3 * end)
            if parameter.log
            else end + ((parameter.low - parameter.high) / 2 if is_low else (parameter.high - parameter.low) / 2)
        )
        if parameter.kind == "int":
            wider = round(wider)
        span = f"{number(parameter.low)} … {number(parameter.high)}"
        reason = f"the best value {number(value)} stands at the {side} end of {span}"
        found.append(Proposal(board.model, f"widen {name}: {side} end {number(wider)}", reason))
    return found


def _of_search(search: SearchView) -> list[Proposal]:
    found = []
    if len(search.importance) > 1 and search.outcomes.get("finished", 0) >= MIN_TRIALS_TO_LEAVE_OUT:
        idle = [name for name, value in search.importance.items() if value < IMPORTANT]
        if idle and len(idle) < len(search.importance):
            reason = f"each explains less than {percent(IMPORTANT)} of the objective's variance"
            found.append(Proposal(search.model, f"leave {joined(idle)} out of the space", reason))
    num_pruned, num_done = search.outcomes.get("pruned", 0), search.outcomes.get("finished", 0)
    if num_pruned >= 8 and num_done * 20 <= num_pruned:
        reason = f"{num_done} of {search.num_trials} trials were trained to the end"
        found.append(Proposal(search.model, "prune later or with a smaller reduction factor", reason))
    return found


def _of_budget(accounts: Accounts) -> list[Proposal]:
    found = []
    if accounts.num_not_started:
        reason = f"{accounts.num_not_started} of {accounts.num_planned} planned jobs were not started"
        found.append(Proposal("", "give the night more time, or plan fewer jobs", reason))
    # In a short night what one job takes to start decides it.
    is_long = (accounts.makespan_seconds or 0.0) >= MIN_SECONDS_FOR_UTILISATION
    if is_long and accounts.utilisation is not None and accounts.utilisation < 0.7:
        reason = f"the night took {number(1 / accounts.utilisation)} times as long as its lower bound"
        found.append(Proposal("", "start the longest jobs first, or look for idle slots", reason))
    return found
