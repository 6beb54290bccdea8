"""Accuracy against latency: what a plan may ask of it, what a search learns, and what the morning's board shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps.night.champions import is_allowed
from sweeps.night.ingest import answered_record, make_record, read_result
from sweeps.planning.plan import Constraint, Objective
from sweeps.planning.plan_text import parse_plan
from sweeps.record import figure_of, job_from_row, to_row
from sweeps.report import write_report
from tests.sweeps.made_up_nights import empty_night, job_of, keep
from tests.sweeps.night_cases import make_plan
from tests.sweeps.page_reader import read_page
from tests.sweeps.test_ingest import GOOD, NIGHT, write
from tests.sweeps.test_ingest import job_of as ended_job
from tests.sweeps.test_opening import opened, past_job

LIMIT = '[[models.constraints]]\nmetric = "latency_seconds"\nat_most = 0.02'
PLAN = make_plan({"metric": 'culane_f1_50", "latency_seconds', "more": LIMIT, "sampler": "tpe"})
MODEL = PLAN.models[0]


def test_a_plan_asks_for_little_of_it_and_bounds_it() -> None:
    assert MODEL.objectives == (Objective("culane_f1_50", "maximize"), Objective("latency_seconds", "minimize"))
    assert MODEL.constraints == (Constraint("latency_seconds", at_most=0.02),)
    with pytest.raises(UserError, match='metric "latency_second" is unknown to task lane; did you mean "latency_sec'):
        parse_plan(PLAN.text.replace("latency_seconds", "latency_second"), "plan.toml")


def test_a_search_makes_a_front_of_what_keeps_the_bound(tmp_path: Path) -> None:
    # Accuracy rises with the number; the third is dominated, the last breaks the bound, of one nothing is known.
    figures = {0: 0.010, 1: 0.012, 2: 0.018, 3: 0.015, 4: 0.030, 5: None}
    jobs = [past_job(PLAN, number, latency_seconds=value) for number, value in figures.items()]
    search, said = opened(tmp_path, PLAN, jobs)
    assert said == ["lane-small: the search begins with 5 trials of past nights"]
    rows = search.trials()
    assert [(row.values[1], row.feasible) for row in rows if row.values] == [
        (value, value <= 0.02) for value in figures.values() if value is not None
    ]
    assert [row.number for row in search.front()] == [0, 1, 3]
    # Which configurations a night may begin with.
    assert [is_allowed(job, MODEL) for job in jobs] == [True, True, True, True, False, True]


def test_a_finished_run_without_it_is_no_success_of_a_plan_that_searches_for_it(tmp_path: Path) -> None:
    job = ended_job(tmp_path)
    write(tmp_path, GOOD)
    result = read_result(tmp_path, MODEL)
    assert result.status == "finished"
    record = make_record(NIGHT, MODEL, job, "finished", "", result.values, tmp_path, None)
    assert figure_of(record, "latency_seconds") == 0.0125
    assert figure_of(answered_record(NIGHT, job, record), "latency_seconds") == 0.0125
    write(tmp_path, {**GOOD, "model": {"num_parameters": 7}})
    result = read_result(tmp_path, MODEL)
    assert (result.status, result.cause) == ("failed", "result.json has no figure latency_seconds")
    # Ended early it has none and needs none.
    write(tmp_path, {**GOOD, "status": "pruned", "model": {"num_parameters": 7, "latency_seconds": None}})
    assert read_result(tmp_path, MODEL).status == "pruned"


def test_a_record_of_before_is_read_and_not_judged() -> None:
    old = to_row(past_job(PLAN, 0))
    del old["latency_seconds"]
    record = job_from_row(old, "records")
    assert record.latency_seconds is None and is_allowed(record, MODEL)


def test_the_morning_shows_it_with_its_unit(tmp_path: Path) -> None:
    night = replace(empty_night(), plan_text=PLAN.text, ended_utc=2e9)
    figures = {"a": (0.9, 0.0150), "b": (0.8, 0.0125), "c": (0.7, 0.0140), "broken": (0.95, 0.0300), "old": (0.6, None)}
    jobs = [
        job_of(night, name, config_hash=name, objective=accuracy, latency_seconds=latency)
        for name, (accuracy, latency) in figures.items()
    ]
    paths, _ = write_report(tmp_path, night, jobs, keep(tmp_path, [(night, jobs)]))
    table = next(
        table for table in read_page(paths.html.read_text()).all("table") if "latency in seconds an image" in table.text
    )
    headings = [heading.text for heading in table.all("th")]
    shown = {row[1].split()[0]: row[headings.index("latency in seconds an image")] for row in table.rows()}
    assert shown == {"a": "0.015 front", "b": "0.0125 front", "c": "0.014", "old": "–"}
