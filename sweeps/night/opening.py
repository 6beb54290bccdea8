"""Opens a model's search for a night: its storage, what past nights know, and the champion as the first trial."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.night.champions import ENDED_WELL
from sweeps.planning.plan import ModelPlan, Plan, study_name
from sweeps.record import JobRecord, NightRecord, figure_of
from sweeps.search.storage import choose_storage

if TYPE_CHECKING:
    from sweeps.ledger.history import History
    from sweeps.search.search import Search

MOST_LEARNED = 200
"""Trials of past nights that a search begins with: the newest."""
CHAMPION_NOTE = "champion of past nights"


def open_model_search(
    journal: Path,
    plan: Plan,
    model: ModelPlan,
    night: NightRecord,
    history: History,
    is_comparable: Callable[[JobRecord], bool],
    say: Callable[[str], None],
) -> Search:
    """A study that is begun learns the whole trials of past nights of an equal space."""
    from sweeps.search.search import open_search

    storage = choose_storage(plan.search.storage, plan.search.url_variable, journal, os.environ)
    name = study_name(model)
    search = open_search(
        model.space,
        model.directions,
        storage,
        name,
        model.sampler,
        model.sampler_seed,
        constraints=[constraint.metric for constraint in model.constraints],
        # Over one database nights of two roots may have one name.
        owner=f"{night.night}, begun at {night.started_utc:.6f}",
    )
    for line in search.repairs:
        say(line)
    if not search.trials() and model.sampler != "grid":
        learned = _learn(search, model, history, is_comparable)
        if learned:
            say(f"{model.model}: the search begins with {learned} trials of past nights")
    champion = night.champions.get(model.model)
    if champion:
        # Under a note of this night, so that it is once asked for however often the search is opened.
        search.enqueue(champion, f"{CHAMPION_NOTE}, for {night.night}")
    return search


def _learn(search: Search, model: ModelPlan, history: History, is_comparable: Callable[[JobRecord], bool]) -> int:
    """Only whole runs that are comparable in all but their parameters."""
    known: dict[str, tuple[dict[str, object], list[float], dict[str, float], str]] = {}
    for job in history.jobs(model=model.model, nights=60):
        if job.kind != "trial" or job.space_hash != model.space.hash() or job.status not in ENDED_WELL:
            continue
        values = [figure_of(job, objective.metric) for objective in model.objectives]
        figures = [(constraint, figure_of(job, constraint.metric)) for constraint in model.constraints]
        excesses = {constraint.metric: constraint.excess(value) for constraint, value in figures if value is not None}
        whole = [value for value in values if value is not None]
        is_whole = len(whole) == len(values) and len(excesses) == len(figures)
        if is_whole and not model.space.problem(job.parameters) and is_comparable(job):
            known[job.config_hash] = (job.parameters, whole, excesses, f"{job.job} of night {job.night}")
    for parameters, whole, excesses, where in list(known.values())[-MOST_LEARNED:]:
        search.learn(parameters, whole, where, excesses)
    return min(len(known), MOST_LEARNED)
