"""How much each parameter of a search mattered, asked of the studies of a night."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from perception.errors import UserError
from sweeps.planning.plan import Plan, study_name
from sweeps.search.search import open_search
from sweeps.search.storage import choose_storage


def importances_of(folder: Path, plan: Plan, night: str, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Model → parameter → share, where a search has trials enough; the report says so where it has not.

    `folder` is that of the night's search.
    """
    found = {}
    for model in plan.models:
        if not model.space.parameters or model.population.size:
            continue
        try:
            storage = choose_storage(plan.search.storage, plan.search.url_variable, folder, os.environ)
            search = open_search(
                model.space,
                model.directions,
                storage,
                study_name(model),
                model.sampler,
                model.sampler_seed,
                night,
            )
        except UserError as error:
            say(f"{model.model}: {error}")
            continue
        with contextlib.closing(search):
            importance = search.importance()
        if importance.shares:
            found[model.model] = importance.shares
    return found
