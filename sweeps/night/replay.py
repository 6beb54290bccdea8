"""An earlier night's suggestions, enqueued in their order: its journal is the log from which a search is replayed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perception.errors import UserError
from sweeps.night.journal import read_journal
from sweeps.night.state import fold
from sweeps.planning.plan import Plan, study_name
from sweeps.search.storage import Storage


def suggestions_of(journal: Path) -> dict[str, list[dict[str, Any]]]:
    """Model → what was suggested, in order of the trials, those answered from a record too."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for job in fold(read_journal(journal)).jobs.values():
        if job.planned.kind == "trial" and job.planned.trial is not None:
            found[job.planned.model].append((job.planned.trial, dict(job.planned.parameters)))
    return {model: [row for _, row in sorted(rows, key=lambda one: one[0])] for model, rows in found.items()}


def check_replay(plan: Plan, suggestions: Mapping[str, object], night: str) -> None:
    """Raise UserError where nothing of it could be replayed under this plan."""
    if plan.search.storage != "journal":
        raise UserError(f"--replay {night}: is for search.storage = journal: another night could take its suggestions")
    replayed = [model.model for model in plan.models if model.space.parameters and not model.population.size]
    if not suggestions.keys() & set(replayed):
        raise UserError(f"--replay {night}: has no suggestions for {', '.join(replayed) or 'any model of this plan'}")


def enqueue(
    suggestions: Mapping[str, list[dict[str, Any]]], plan: Plan, journal: Path, night: str, say: Callable[[str], None]
) -> None:
    """Into the storage of a night that is about to begin: they are asked for before anything else."""
    from sweeps.search.search import open_search

    for model in plan.models:
        rows = suggestions.get(model.model, [])
        if not rows or not model.space.parameters:
            continue
        if model.population.size:
            say(f"{model.model}: {len(rows)} suggestions are not replayed: a population's follow from its results")
            continue
        fitting = [row for row in rows if not model.space.problem(row)]
        names = [constraint.metric for constraint in model.constraints]
        search = open_search(
            model.space,
            model.directions,
            Storage(journal=journal),
            study_name(model),
            model.sampler,
            model.sampler_seed,
            constraints=names,
        )
        with contextlib.closing(search):
            for number, row in enumerate(fitting):
                search.enqueue(row, f"replay of {night}, number {number}")
        left_out = f"; {len(rows) - len(fitting)} are of another space: left out" if len(fitting) < len(rows) else ""
        say(f"{model.model}: {len(fitting)} suggestions of {night} come first{left_out}")
