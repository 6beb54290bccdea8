"""Figures of the morning report against an independent count over the records that it is made from."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.record import JobRecord, NightRecord
from sweeps.report import ReportPaths, make_report, write_report
from sweeps.report.accounts import OUTCOMES, accounts_of
from sweeps.report.build import Report
from tests.sweeps.made_up_nights import Planted, empty_night, history, job_of, keep
from tests.sweeps.page_reader import Element, read_page

Written = tuple[Report, Element, dict[str, Any], NightRecord, list[JobRecord]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of the last of five nights of 90 jobs, one node bad and the loader slow in the last."""
    root = tmp_path_factory.mktemp("nights")
    nights = history(5, 90, seed=3, planted=Planted(slower_data=0.15, bad_node="dgx03", share_failing=0.1), num_nodes=8)
    kept = keep(root, nights)
    night, jobs = nights[-1]
    paths, code = write_report(root, night, jobs, kept)
    assert isinstance(paths, ReportPaths) and code == 1
    report = make_report(night, jobs, kept)
    return report, read_page(paths.html.read_text()), json.loads(paths.json.read_text()), night, jobs


def tiles(page: Element) -> dict[str, str]:
    return {tile.all("span")[0].text: tile.all("b")[0].text for tile in page.by_id("night").all("div", class_="tile")}


def test_the_page_counts_jobs_as_the_records_do(written: Written) -> None:
    _, page, figures, night, jobs = written
    statuses = Counter(job.status for job in jobs)
    shown = tiles(page)
    assert shown["planned"] == f"{night.num_planned} jobs"
    assert shown["done, trained to the end"] == str(statuses["finished"])
    assert shown["pruned"] == str(statuses["pruned"])
    assert shown["failed"] == str(statuses["failed"]) and statuses["failed"] > 3
    assert sum(figures["accounts"]["outcomes"].values()) == len(jobs)


def test_the_hours_of_the_page_are_those_of_the_records(written: Written) -> None:
    _, page, figures, night, jobs = written
    allocated = math.fsum(job.rank_seconds_allocated for job in jobs)
    wasted = math.fsum(job.rank_seconds_wasted for job in jobs)
    shown = tiles(page)
    assert float(shown["GPU-hours allocated"]) == pytest.approx(allocated / 3600, rel=5e-3)
    assert float(shown["GPU-hours wasted"]) == pytest.approx(wasted / 3600, rel=5e-3)
    useful = next(value for name, value in shown.items() if name.startswith("GPU-hours useful"))
    assert float(useful) == pytest.approx((allocated - wasted) / 3600, rel=5e-3)
    accounts = figures["accounts"]
    assert accounts["allocated"] == pytest.approx(allocated) and accounts["wasted"] == pytest.approx(wasted)
    causes = accounts["wasted_by_cause"]
    assert math.fsum(causes.values()) == pytest.approx(wasted)
    hardware = math.fsum(job.rank_seconds_wasted for job in jobs if job.failure == "hardware")
    assert causes["hardware"] == pytest.approx(hardware) and hardware > 0
    begin = min(job.submitted_utc for job in jobs if job.submitted_utc is not None)
    makespan = max(job.ended_utc for job in jobs if job.ended_utc is not None) - begin
    longest = max(job.rank_seconds_allocated / job.num_ranks for job in jobs)
    bound = max(allocated / night.num_slots, longest)
    assert accounts["utilisation"] == pytest.approx(bound / makespan)
    assert shown["utilisation against the lower bound"] == f"{100 * bound / makespan:.1f} %"


def test_the_leaderboard_ranks_means_over_seeds(written: Written) -> None:
    report, page, figures, _, jobs = written
    tables = {table.attributes["data-model"]: table for table in page.all("table", class_="leaderboard")}
    for model in ("lane-small", "sign"):
        means: dict[str, list[float]] = {}
        for job in jobs:
            if job.model == model and job.kind != "scaling" and job.status == "finished" and job.objective is not None:
                means.setdefault(job.config_hash, []).append(job.objective)
        expected = sorted(((statistics.mean(values), name) for name, values in means.items()), reverse=True)[:10]
        rows = tables[model].rows()
        assert [row[1].split()[0] for row in rows[:10]] == [name[:12] for _, name in expected]
        assert [row[2] for row in rows[:10]] == [f"{mean:.4f}" for mean, _ in expected]
        assert "default" in [row[1].split()[-1] for row in rows], "it is shown wherever it ranks"
        board = next(board for board in figures["boards"] if board["model"] == model)
        assert board["num_configurations"] == len(means)
        best = next(job for job in jobs if job.job == board["entries"][0]["job"])
        card = page.by_id("models").text
        assert best.checkpoint_path in card and best.checkpoint_sha256 in card
        commands = [element.all("code")[0].raw for element in page.by_id("models").all("div", class_="command")]
        assert best.command in commands
        default = [job.objective for job in jobs if job.model == model and job.kind == "default" and job.objective]
        difference = expected[0][0] - statistics.mean(default)
        assert board["entries"][0]["against_default"]["difference"] == pytest.approx(difference)
        assert rows[0][4] == f"+{difference:.4f}" and rows[0][6] == "yes"
    assert {board.verdict for board in report.boards} == {"better"}


def test_at_a_glance_each_model_shows_its_best_its_scaling_what_got_worse_and_what_failed(written: Written) -> None:
    report, page, figures, _, jobs = written
    cards = {card.all("b")[0].text: card for card in page.by_id("glance").all("div", class_="card")}
    assert list(cards) == [board["model"] for board in figures["boards"]] == ["lane-small", "sign"]
    for board, series in zip(figures["boards"], figures["scaling"]["series"], strict=True):
        best, scaling, worse, failed = (line.text for line in cards[board["model"]].all("dd"))
        entry = board["entries"][0]
        assert f"{entry['mean']:.4f} , default {board['default']['mean']:.4f}" in best
        assert all(f"{name.split('.')[-1]}=" in best for name in entry["parameters"])
        assert f"{series['rows'][-1]['scaling_factor']:.2f} on 8 ranks" in scaling and "since night" in scaling
        assert ("waiting for data" in worse and "new" in worse) == (board["model"] == "lane-small")
        group = next(group for group in report.failures.groups if board["model"] in group.models)
        assert f"{group.num_jobs} × {group.failure}" in failed and group.signature[:120] in failed
    assert sum(job.status == "failed" for job in jobs) == report.failures.num_failures


def test_the_scaling_table_shows_medians(written: Written) -> None:
    _, page, _, _, jobs = written
    section = page.by_id("scaling")
    models = [heading.text.split(":")[0] for heading in section.all("h3")]
    assert models == ["lane-small", "sign"]
    for model, table in zip(models, section.all("table"), strict=True):
        medians = {
            ranks: statistics.median(
                job.images_per_second
                for job in jobs
                if (job.model, job.kind, job.num_ranks) == (model, "scaling", ranks) and job.images_per_second
            )
            for ranks in (1, 2, 4, 8)
        }
        for row in table.rows():
            ranks = int(row[0])
            assert float(row[2].replace(",", "")) == pytest.approx(medians[ranks], rel=1e-3)
            assert float(row[3]) == pytest.approx(medians[ranks] / medians[1], rel=1e-2)
            assert row[5] == f"{100 * medians[ranks] / medians[1] / ranks:.1f} %"


def test_a_planted_slow_loader_is_one_regression_with_its_cause(written: Written) -> None:
    report, page, figures, night, _ = written
    assert [group.model for group in report.regressions] == ["lane-small"]
    card = page.by_id("regressions").all("div", class_="regression")[0]
    assert "waiting for data" in card.text and "new" in card.text and card.all("svg")
    assert figures["regressions"][0]["cause"] == "data"
    assert "1 new regression: lane-small scaling factor on 8 ranks −" in page.by_id("headline").text
    assert report.exit_code == 1 and "1 new regression" in page.by_id("exit-code").text
    first = report.proposals[0]
    assert first.is_urgent and first.model == "lane-small" and night.night in first.reason


def test_failures_are_grouped_and_counted(written: Written) -> None:
    _, page, figures, night, jobs = written
    failed = [job for job in jobs if job.status == "failed"]
    groups = Counter(job.failure_signature for job in failed)
    cards = page.by_id("failures").all("div", class_="failure")
    shown = {card.all("code")[0].raw: int(card.all("b")[0].text.split()[0]) for card in cards}
    assert shown == dict(groups) and list(shown.values()) == sorted(groups.values(), reverse=True)
    for card in cards:
        signature = card.all("code")[0].raw
        own = sorted((job for job in failed if job.failure_signature == signature), key=lambda job: job.ended_utc or 0)
        assert card.all("pre")[0].raw.strip("\n") == own[0].log_tail.strip("\n")
    first = {group["signature"]: group["first_night"] for group in figures["failures"]["groups"]}
    assert set(first) == set(groups) and all(name <= night.night for name in first.values())


def test_the_bad_node_is_named(written: Written) -> None:
    report, page, _, _, jobs = written
    rows = page.by_id("nodes").all("table")[0].rows()
    assert rows[0][0] == "dgx03" and "jobs failed on it" in rows[0][1]
    assert int(rows[0][2]) == sum("dgx03" in job.nodes for job in jobs)
    assert [health.node for health in report.nodes.nodes if health.remarks] == ["dgx03"]
    assert any("take dgx03 out" in proposal.action for proposal in report.proposals)


def test_json_holds_what_the_page_says_and_only_json(written: Written) -> None:
    report, page, figures, _, _ = written
    assert figures["headline"] == report.headline == page.by_id("headline").text
    assert figures["exit_code"] == report.exit_code
    assert set(figures) == {field.name for field in dataclasses.fields(Report)}


def test_values_that_are_no_numbers_become_null(tmp_path: Path) -> None:
    night = empty_night()
    jobs = [job_of(night, "a", objective=math.nan, images_per_second=math.inf, metrics={"culane_f1_50": math.nan})]
    paths, _ = write_report(tmp_path, night, jobs, keep(tmp_path, []))

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    json.loads(paths.json.read_text(), parse_constant=refuse)
    assert "nan" not in read_page(paths.html.read_text()).by_id("models").text.lower().split()


STATUSES = [*OUTCOMES, "target_reached", "diverged", "something new", ""]
FAILURES = [None, "out_of_memory", "preempted", "code", "node"]
job_rows = st.lists(
    st.tuples(
        st.sampled_from(STATUSES),
        st.sampled_from(FAILURES),
        st.floats(0, 1e6),
        st.floats(0, 1),
        st.sampled_from(["trial", "default", "champion", "scaling"]),
        st.floats(0, 1e5),
    ),
    max_size=30,
)


@given(job_rows)
@settings(max_examples=150, deadline=None)
def test_accounts_add_up(rows: list[tuple[Any, ...]]) -> None:
    night = empty_night()
    jobs = [
        job_of(night, f"job-{index}", status=status, failure=failure, kind=kind, rank_seconds_allocated=allocated,
               rank_seconds_wasted=share * allocated, started_utc=begin, ended_utc=begin + 10)
        for index, (status, failure, allocated, share, kind, begin) in enumerate(rows)
    ]  # fmt: skip
    accounts = accounts_of(night, jobs)
    assert accounts.allocated == pytest.approx(math.fsum(job.rank_seconds_allocated for job in jobs))
    assert accounts.useful + accounts.wasted == pytest.approx(accounts.allocated)
    assert math.fsum(accounts.wasted_by_cause.values()) == pytest.approx(accounts.wasted)
    assert math.fsum(accounts.useful_by_kind.values()) == pytest.approx(accounts.useful, abs=1e-6)
    assert math.fsum(accounts.allocated_by_model.values()) == pytest.approx(accounts.allocated)
    assert sum(accounts.outcomes.values()) == len(jobs) == accounts.num_jobs
    assert accounts.num_inconsistent == 0


def test_a_record_that_wastes_more_than_it_had_is_cut_and_said(tmp_path: Path) -> None:
    night = empty_night()
    jobs = [job_of(night, "a", rank_seconds_allocated=10.0, rank_seconds_wasted=25.0)]
    report = make_report(night, jobs, keep(tmp_path, []))
    assert (report.accounts.allocated, report.accounts.useful, report.accounts.wasted) == (10.0, 0.0, 10.0)
    assert "1 record with more time wasted than allocated, or less than none; cut to it" in report.notes
