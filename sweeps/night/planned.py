"""Jobs are planned: the night's fixed ones at its begin, trials as they are suggested."""

from __future__ import annotations

from collections.abc import Sequence

from perception.errors import UserError
from sweeps.night.events import JobPlanned, Noted
from sweeps.night.planned_jobs import Request
from sweeps.night.run import NightRun
from sweeps.night.state import JobState


def plan_repeats(run: NightRun, num_slots: int) -> None:
    """The night's fixed jobs: the model's own configuration and the champion under several seeds, and scaling runs.

    Only what the journal lacks is planned, so that a start that was cut short is made up for.
    """
    known = {key_of(job.planned) for job in run.state.jobs.values() if job.planned.kind != "trial"}
    for model in run.plan.models:
        planner = run.planners[model.model]
        if model.num_ranks > num_slots > 0:
            raise UserError(
                f"{run.plan.path}: model {model.model}: {model.num_nodes} nodes of {model.ranks_per_node} ranks are "
                f"more than the {num_slots} slots there are; give fewer"
            )
        requests = planner.repeats("default", {})
        champion = run.night.champions.get(model.model)
        if champion:
            requests += planner.repeats("champion", champion)
        scaling, too_many = planner.scaling(num_slots, run.launcher.num_nodes())
        requests += scaling
        note = f"{model.model}: no scaling runs on {', '.join(map(str, too_many))} ranks: there are {num_slots} slots"
        if too_many and note not in run.state.notes:
            run.record(Noted(run.clock.now(), note))
        missing = [request for request in requests if request_key(run, model.model, request) not in known]
        if run.limits.max_jobs is not None:
            room = max(0, run.limits.max_jobs - run.state.num_jobs)
            if len(missing) > room:
                left_out = len(missing) - room
                text = f"{model.model}: {left_out} repeats and scaling runs are left out: budget.max_jobs"
                run.record(Noted(run.clock.now(), text))
                missing = missing[:room]
        add_jobs(run, model.model, missing)


def add_jobs(run: NightRun, model: str, requests: Sequence[Request]) -> list[JobState]:
    """Plan them under the next names of the model."""
    number = run.state.num_planned.get(model, 0)
    now = run.clock.now()
    events = [run.planners[model].job(request, number + place, "", now) for place, request in enumerate(requests, 1)]
    run.record(*events)
    return [run.state.jobs[event.job] for event in events]


def add_trial(run: NightRun, model: str, suggestion_number: int, parameters: dict[str, object]) -> JobState:
    """Plan a suggestion; one of a configuration that is known is to be answered, not run."""
    planner = run.planners[model]
    request = planner.trial(suggestion_number, parameters)
    same_as = run.state.first_of_configuration.get(planner.config_hash(request), "")
    event = planner.job(request, run.state.num_planned.get(model, 0) + 1, same_as, run.clock.now())
    run.record(event)
    return run.state.jobs[event.job]


def key_of(planned: JobPlanned) -> tuple[object, ...]:
    return planned.model, planned.kind, planned.config_hash, planned.seed, planned.num_ranks


def request_key(run: NightRun, model: str, request: Request) -> tuple[object, ...]:
    ranks = request.num_nodes * request.ranks_per_node
    return model, request.kind, run.planners[model].config_hash(request), request.seed, ranks
