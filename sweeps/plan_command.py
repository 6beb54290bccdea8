"""`plan FILE`: check a plan, and print what it would launch and cost before anything runs."""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

from sweeps.planning.cost import Cost, Group, Speed, estimate, measured_speeds
from sweeps.planning.host import check_here, slots_of
from sweeps.planning.plan import ModelPlan, Plan, load_plan, run_config, study_name
from sweeps.planning.space import describe
from sweeps.search.population import num_generations
from sweeps.search.pruning import brackets

WORDS = {"default": "repeats of its own configuration", "champion": "repeats of the best known one, once there is one"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="FILE", help="e.g. sweeps/plans/nightly.toml")
    parser.add_argument(
        "--root", type=Path, help="folder of all nights, whose records tell speeds; by default the plan's"
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0 for a plan that can be run; a mistake in it raises UserError."""
    plan = load_plan(options.plan)
    root = options.root or Path(plan.root)
    speeds: dict[tuple[str, int], Speed] = {}
    if (root / "records").is_dir():
        from sweeps.ledger.history import History

        speeds = measured_speeds(History(root).jobs(), plan.launcher)
    slots = slots_of(plan)
    print("\n".join(summary(plan, estimate(plan, speeds, slots, hours_to_end(plan, time.time())), slots)))
    check_here(plan)
    return 0


def hours_to_end(plan: Plan, now_utc: float) -> float | None:
    """Hours that a night begun now has, by deadline and max_minutes; None where neither is given."""
    ends = [plan.budget.max_minutes / 60] if plan.budget.max_minutes else []
    if plan.budget.deadline:
        hour, minute = map(int, plan.budget.deadline.split(":"))
        now = datetime.datetime.fromtimestamp(now_utc, datetime.UTC)
        seconds = (hour * 3600 + minute * 60 - (now.hour * 3600 + now.minute * 60 + now.second)) % 86_400
        ends.append((seconds or 86_400) / 3600)
    return min(ends, default=None)


def summary(plan: Plan, cost: Cost, num_slots: int | None) -> list[str]:
    """What a person reads, at most 110 columns wide where names are not longer than usual."""
    slots = f", {num_slots} slot{'s' if num_slots != 1 else ''}" if num_slots is not None else ""
    lines = [
        f"plan {plan.name}: launcher {plan.launcher}{slots}, image {plan.image or 'none'}, nights under {plan.root}",
        f"budget: {_budget(plan)}",
    ]
    shares = sum(model.share for model in plan.models)
    for model in plan.models:
        lines += ["", *_model_lines(model, model.share / shares)]
        groups = [group for group in cost.groups if group.model == model.model]
        lines += [_group_line(group) for group in groups]
        left_out = [group for group in cost.too_large if group.model == model.model]
        lines += [
            f"  left out: {group.kind} on {group.num_ranks} ranks, there are {num_slots} slots" for group in left_out
        ]
        if any(group.kind == "trial" and group.num_jobs == 0 for group in groups):
            lines.append("  note: repeats and scaling runs leave nothing of the budget for trials")
    lines.append("")
    jobs = "as many jobs as the budget allows" if cost.num_jobs is None else f"{cost.num_jobs:,} jobs"
    if cost.rank_hours is not None:
        price = plan.price_per_rank_hour
        money = f" that cost {cost.rank_hours * price:.2f}" if price is not None else ""
        lines.append(f"together: {jobs}, {cost.rank_hours:.2f} rank-hours{money}{_against(cost)}")
    else:
        known = sum(group.rank_hours or 0.0 for group in cost.groups)
        least = f", at least {known:.2f} rank-hours" if known else ""
        lines.append(f"together: {jobs}{least}{_against(cost)}; the rest of the cost is not known:")
        lines += [f"  {line}" for line in cost.unknown]
    return lines


def _budget(plan: Plan) -> str:
    budget = plan.budget
    parts = []
    if budget.max_jobs:
        parts.append(f"at most {budget.max_jobs:,} jobs")
    if budget.rank_hours:
        parts.append(f"{budget.rank_hours:g} rank-hours")
    if budget.deadline:
        parts.append(f"until {budget.deadline} UTC")
    if budget.max_minutes:
        parts.append(f"{budget.max_minutes:g} minutes")
    return ", ".join(parts) + ("" if budget.early_end else "; no early end")


def _against(cost: Cost) -> str:
    if cost.budget_rank_hours is None:
        return ""
    over = cost.rank_hours is not None and cost.rank_hours > cost.budget_rank_hours * 1.001
    return f"; the budget has {cost.budget_rank_hours:.2f} rank-hours" + (" and ends it before" if over else "")


def _model_lines(model: ModelPlan, share: float) -> list[str]:
    goals = ", ".join(f"{objective.direction} {objective.metric}" for objective in model.objectives)
    lines = [f"{model.model}: share {share:.0%}, priority {model.priority}, data {model.data}, {goals}"]
    for constraint in model.constraints:
        bound = (
            f"at most {constraint.at_most:g}" if constraint.at_most is not None else f"at least {constraint.at_least:g}"
        )
        lines.append(f"  constraint: {constraint.metric} {bound}")
    if model.target is not None:
        lines.append(f"  target: {model.target.metric} = {model.target.value:g}")
    if not model.space.parameters:
        return lines
    config = run_config(model, {})
    population, length = model.population, config.train.num_samples
    if population.size:
        lines.append(
            f"  population of {population.size}, {num_generations(population, length)} generations of "
            f"{population.samples_per_generation:,} samples; the worst {population.replaced_share:.0%} take over"
        )
    else:
        lines.append(f"  sampler {model.sampler}, study {study_name(model)}")
    lines += [f"  {parameter.name}: {describe(parameter)}" for parameter in model.space.parameters]
    if model.pruning.name == "median":
        lines.append(f"  pruning: median, from {model.pruning.min_samples:,} samples on")
    elif model.pruning.name != "none":
        for bracket in brackets(model.pruning, config.train.num_samples):
            rungs = ", ".join(f"{rung:,}" for rung in bracket.rungs)
            who = f"{bracket.num_trials} of a round of trials, " if model.pruning.name == "hyperband" else ""
            what = f"1 in {model.pruning.reduction_factor} goes on at {rungs} samples" if rungs else "none ends early"
            lines.append(f"  pruning: {model.pruning.name}, {who}{what}")
    for name in ("optim.warmup_samples", "optim.ema_decay_samples"):
        for parameter in model.space.parameters:
            if parameter.name == name and parameter.high > config.train.num_samples / 10:
                lines.append(
                    f"  note: {name} has no effect above a tenth of the run, {config.train.num_samples // 10:,}"
                )
    return lines


def _group_line(group: Group) -> str:
    count = "as many as fit" if group.num_jobs is None else f"{group.num_jobs:,}"
    ranks = f"{group.num_ranks} rank{'s' if group.num_ranks > 1 else ''}"
    samples = f"{group.whole_samples:,} samples"
    if group.num_samples != group.whole_samples:
        samples = f"at most {samples}, about {group.num_samples:,} expected"
    cost = "cost not known yet" if group.rank_hours is None else f"{group.rank_hours:.2f} rank-hours"
    if group.rank_hours is None and group.hours_each is not None:
        cost = f"{group.hours_each * group.num_ranks:.3f} rank-hours each"
    words = WORDS.get(group.kind, "")
    return f"  {group.kind:9}{count:>7} x {ranks}, {samples}: {cost}" + (f" ({words})" if words else "")
