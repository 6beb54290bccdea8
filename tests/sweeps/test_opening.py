"""What a search begins with: trials of past nights, the champion, or the suggestions of a night that is replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from perception.errors import UserError
from sweeps.ledger.history import History
from sweeps.night.events import NightOpened
from sweeps.night.journal import Journal
from sweeps.night.opening import open_model_search
from sweeps.night.planned_jobs import planner
from sweeps.night.replay import check_replay, enqueue, suggestions_of
from sweeps.planning.plan import Plan
from sweeps.planning.plan_text import parse_plan
from sweeps.record import JobRecord, NightRecord
from sweeps.search.search import Search
from tests.sweeps.night_cases import make_plan

NIGHT = NightRecord("2026-11-30", "test", "", "local", 2, "fake", "", "", 100.0)
CONSTRAINT = '[[models.constraints]]\nmetric = "seconds"\nat_most = 30'


def past_job(plan: Plan, number: int, **fields: Any) -> JobRecord:
    model = plan.models[0]
    parameters = {"optim.lr": 1e-3 * (number + 1)}
    plans = planner(model, Path("/jobs"))
    values: dict[str, Any] = {
        "kind": "trial",
        "status": "finished",
        "trial": number,
        "parameters": parameters,
        "space_hash": model.space.hash(),
        "config_hash": plans.config_hash(plans.trial(number, parameters)),
        "objective_name": "culane_f1_50",
        "objective": 0.1 * number,
        "metrics": {"culane_f1_50": 0.1 * number},
        "num_parameters": 1000 - number,
        "seconds": 20.0 + 5 * number,
        **fields,
    }
    return JobRecord("2026-11-29", f"lane-small-{number:04d}", "test", "lane-small", **values)


def opened(folder: Path, plan: Plan, jobs: list[JobRecord], night: NightRecord = NIGHT) -> tuple[Search, list[str]]:
    history, said = History(folder), []
    history.append_night(dataclasses.replace(NIGHT, night="2026-11-29", started_utc=1.0, ended_utc=2.0), jobs)
    comparable = planner(plan.models[0], folder / "jobs").is_comparable
    search = open_model_search(folder / "search.log", plan, plan.models[0], night, history, comparable, said.append)
    return search, said


def test_a_search_begins_with_the_whole_comparable_trials_of_past_nights(tmp_path: Path) -> None:
    plan = make_plan({"sampler": "tpe"})
    jobs = [past_job(plan, number) for number in range(4)]
    jobs += [
        past_job(plan, 5, status="pruned"),
        past_job(plan, 6, space_hash="another"),
        past_job(plan, 7, kind="default"),
    ]
    jobs += [past_job(plan, 8, config_hash="of other settings"), past_job(plan, 9, metrics={}, objective=None)]
    search, said = opened(tmp_path, plan, jobs)
    assert said == ["lane-small: the search begins with 4 trials of past nights"]
    rows = search.trials()
    assert [(row.state, row.values) for row in rows] == [("complete", (0.1 * number,)) for number in range(4)]
    assert rows[2].note == "lane-small-0002 of night 2026-11-29"
    # Opened again, after a kill, it learns nothing twice.
    assert len(opened(tmp_path, plan, jobs)[0].trials()) == 4


def test_every_objective_and_constraint_of_past_trials_is_learnt(tmp_path: Path) -> None:
    plan = make_plan({"metric": 'culane_f1_50", "num_parameters', "more": CONSTRAINT})
    jobs = [past_job(plan, number) for number in range(4)]
    jobs += [past_job(plan, 5, num_parameters=None), past_job(plan, 6, seconds=None)]
    search, _ = opened(tmp_path, plan, jobs)
    rows = search.trials()
    assert [row.values for row in rows] == [(0.1 * number, 1000.0 - number) for number in range(4)]
    assert [row.feasible for row in rows] == [True, True, True, False]
    assert [row.number for row in search.front()] == [2]
    suggestion = search.ask()
    assert suggestion is not None
    assert search.tell(suggestion.number, [0.9, 10.0], "complete", {"seconds": -1.0}) == "complete"


def test_the_champion_is_tried_first_and_once(tmp_path: Path) -> None:
    plan = make_plan()
    night = dataclasses.replace(NIGHT, champions={"lane-small": {"optim.lr": 2e-3}})
    search, _ = opened(tmp_path, plan, [], night)
    first = search.ask()
    assert first is not None and first.parameters == {"optim.lr": 2e-3}
    search, _ = opened(tmp_path, plan, [], night)
    second = search.ask()
    assert second is not None and second.parameters != {"optim.lr": 2e-3}


def log_of(folder: Path, plan: Plan, learning_rates: list[float]) -> Path:
    """The journal of a night that suggested these, as its controller writes it."""
    plans = planner(plan.models[0], folder / "jobs")
    journal = Journal(folder / "journal.jsonl")
    events = [plans.job(plans.trial(n, {"optim.lr": lr}), n + 1, "", 1.0) for n, lr in enumerate(learning_rates)]
    repeat = plans.job(plans.repeats("default", {})[0], 99, "", 1.0)
    journal.append([NightOpened(1.0, NIGHT), repeat, *reversed(events)])
    journal.close()
    return journal.path


def test_a_nights_log_is_replayed_in_its_order(tmp_path: Path) -> None:
    plan = make_plan({"sampler": "tpe"})
    # The third was answered from the record of the first then, and is again.
    rates = [2e-3, 5e-4, 2e-3, 7e-3]
    suggestions = suggestions_of(log_of(tmp_path, plan, rates))
    assert suggestions == {"lane-small": [{"optim.lr": rate} for rate in rates]}
    said: list[str] = []
    for _ in range(2):  # Also where it was cut short and is said again.
        enqueue(suggestions, plan, tmp_path / "search.log", "2026-11-30", said.append)
    search, _ = opened(tmp_path, plan, [], dataclasses.replace(NIGHT, champions={"lane-small": {"optim.lr": 1e-3}}))
    asked = [search.ask() for _ in range(5)]
    assert [one.parameters["optim.lr"] for one in asked if one] == [*rates, 1e-3]
    assert said[0] == "lane-small: 4 suggestions of 2026-11-30 come first"


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    plan = make_plan()
    suggestions = suggestions_of(log_of(tmp_path, plan, [2e-3, 0.5]))
    said: list[str] = []
    enqueue(suggestions, plan, tmp_path / "search.log", "n", said.append)
    assert said == ["lane-small: 1 suggestions of n come first; 1 are of another space: left out"]
    with pytest.raises(UserError, match=r"--replay n: has no suggestions for sign"):
        check_replay(make_plan({"model": "sign", "metric": "ap50"}), suggestions, "n")
    shared = parse_plan(plan.text + '\n[search]\nstorage = "postgresql"\n', "plan.toml")
    with pytest.raises(UserError, match=r"--replay n: is for search.storage = journal"):
        check_replay(shared, suggestions, "n")
