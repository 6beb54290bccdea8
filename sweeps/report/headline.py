"""What a person should know first: one sentence, and whether the morning's exit code is 0."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.record import NightRecord
from sweeps.report.accounts import Accounts
from sweeps.report.failures_view import FailuresView
from sweeps.report.leaderboard import Board, better_of
from sweeps.report.regressions_view import RegressionGroup
from sweeps.report.wording import count, joined, percent, score, signed_percent, signed_score

METRIC_NAMES = {
    "culane_f1_50": "CULane F1@50",
    "culane_f1_75": "CULane F1@75",
    "culane_mf1": "CULane mF1",
    "tusimple_accuracy": "TuSimple accuracy",
    "tusimple_fp": "TuSimple FP",
    "tusimple_fn": "TuSimple FN",
    "tusimple_f1": "TuSimple F1",
    "ap50_class_agnostic": "AP50 regardless of class",
    "ap50_superclass": "AP50 over superclasses",
    "ap50": "AP50",
    "ap": "AP",
    "images_per_second": "images/s",
    "seconds": "seconds of training",
    "num_parameters": "parameters",
    "latency_seconds": "latency in seconds an image",
    "target_seconds": "seconds to the target",
    "target_samples": "samples to the target",
}


CAUSE_WORDS = {
    "data": "waiting for data",
    "exposed_allreduce": "all-reduce in the open",
    "straggler": "waiting for the slowest rank",
    "compute": "computing",
}


def quantity_name(quantity: str) -> str:
    """Of a series that is followed over nights."""
    return {
        "images_per_second": "images/s",
        "scaling_factor": "scaling factor",
        "share_data": "share of a step waiting for data",
        "share_exposed_allreduce": "share of a step in all-reduce",
        "share_straggler": "share of a step waiting for the slowest rank",
    }.get(quantity, metric_name(quantity))


def metric_name(metric: str) -> str:
    return METRIC_NAMES.get(metric, metric)


def sentence_of(
    night: NightRecord,
    accounts: Accounts,
    boards: Sequence[Board],
    regressions: Sequence[RegressionGroup],
    failures: FailuresView,
) -> str:
    if not accounts.num_jobs:
        return "The night ran no job at all."
    parts = [_gain(boards), _regressions(regressions), _failures(accounts, failures)]
    if night.ended_utc is None:
        parts.insert(0, "the night is still running")
    text = "; ".join(part for part in parts if part)
    # The first letter of a model's name stays as it is written.
    return f"{text}." if text.split(" ", 1)[0] in {board.model for board in boards} else f"{text[0].upper()}{text[1:]}."


def _gain(boards: Sequence[Board]) -> str:
    gains = []
    for board in boards:
        entry = better_of(board.entries)
        if entry is not None and entry.against_default is not None:
            comparison = entry.against_default
            strength = comparison.difference / comparison.needed if comparison.needed else float("inf")
            gains.append((strength, board, entry))
    if not gains:
        searched = [board for board in boards if board.entries]
        if not searched:
            return "no run was trained to its end with a figure"
        if all(board.verdict == "unknown" for board in searched):
            return "whether anything got better is not known, for want of repeats"
        return "no configuration is better than its default beyond the noise"
    gains.sort(key=lambda gain: (-gain[0], gain[1].model))
    _, board, entry = gains[0]
    assert board.default is not None and entry.against_default is not None
    text = (
        f"{board.model} is better than its default beyond the noise: {metric_name(board.objective_name)} "
        f"{score(board.default.mean)} → {score(entry.mean)} "
        f"({signed_score(board.sign * entry.against_default.difference)})"
    )
    others = [other.model for _, other, _ in gains[1:]]
    return f"{text}, and so {'is' if len(others) == 1 else 'are'} {joined(others, 3)}" if others else text


def _regressions(regressions: Sequence[RegressionGroup]) -> str:
    fresh = [group for group in regressions if group.is_new]
    standing = f"{len(regressions) - len(fresh)} not mended yet" if len(regressions) > len(fresh) else ""
    if not fresh:
        return f"no new regression, {standing}" if standing else "no new regression"
    worst = max(fresh, key=lambda group: (group.lead.series.is_ratio, abs(group.lead.change)))
    largest = ", the largest" if len(fresh) > 1 else ""
    return f"{count(len(fresh), 'new regression')}{largest}: {regression_words(worst)}" + (
        f"; {standing}" if standing else ""
    )


def regression_words(group: RegressionGroup) -> str:
    """What got worse by how much, in a few words."""
    lead = group.lead
    series = lead.series
    where = f" on {count(series.num_ranks, 'rank')}" if not series.is_accuracy else ""
    change = signed_percent(lead.change) if series.is_ratio else signed_score(lead.change)
    cause = f" ({CAUSE_WORDS.get(group.cause, group.cause)})" if group.cause else ""
    return f"{series.model} {quantity_name(series.quantity)}{where} {change}{cause}"


def _failures(accounts: Accounts, failures: FailuresView) -> str:
    if not failures.num_failures:
        return (
            f"all {count(accounts.num_jobs, 'job')} ended well" if accounts.num_jobs > 1 else "its one job ended well"
        )
    classes = [f"{name} {amount}" for name, amount in failures.num_by_class.items()]
    share = percent(failures.num_failures / accounts.num_jobs)
    return f"{failures.num_failures} of {count(accounts.num_jobs, 'job')} failed ({share}: {joined(classes, 3)})"


def exit_of(accounts: Accounts, regressions: Sequence[RegressionGroup]) -> tuple[int, str]:
    """(exit code, why)."""
    succeeded = sum(accounts.outcomes.get(name, 0) for name in ("finished", "pruned", "answered"))
    if not succeeded:
        return 1, "no job succeeded"
    num_new = sum(group.is_new for group in regressions)
    return (1, count(num_new, "new regression")) if num_new else (0, "no new regression, and jobs succeeded")
