"""Opens a model's search for a night: its storage, what past nights know, and the champion as the first trial."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.night.champions import ENDED_WELL
from sweeps.planning.plan import ModelPlan, Plan, study_name
from sweeps.record import JobRecord, NightRecord
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
    """A study that is begun learns the whole trials of past nights of an equal space, where it has one objective."""
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
        owner=night.night,
    )
    for line in search.repairs:
        say(line)
    if not search.trials() and len(model.objectives) == 1 and not model.constraints and model.sampler != "grid":
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
    known: dict[str, tuple[dict[str, object], float, str]] = {}
    for job in history.jobs(model=model.model, nights=60):
        if job.kind != "trial" or job.space_hash != model.space.hash() or job.status not in ENDED_WELL:
            continue
        fits = job.objective_name == model.objectives[0].metric and not model.space.problem(job.parameters)
        if job.objective is not None and fits and is_comparable(job):
            known[job.config_hash] = (job.parameters, job.objective, f"{job.job} of night {job.night}")
    for parameters, value, where in list(known.values())[-MOST_LEARNED:]:
        search.learn(parameters, [value], where)
    return min(len(known), MOST_LEARNED)
