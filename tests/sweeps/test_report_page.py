"""The report's page: nothing from outside is taken for markup, nothing is fetched, and empty nights say so."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.record import JobRecord, NightRecord
from sweeps.report import write_report
from sweeps.report.html import SCRIPT
from sweeps.report.terminal import COLUMNS, summary_of
from sweeps.report.wording import visible
from tests.sweeps.made_up_nights import Planted, empty_night, history, job_of, keep
from tests.sweeps.page_reader import Element, read_page

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</title></style></pre><h1>gone</h1>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt;",
    "lane\u202egnp.exe\u2066 \u200f\u0000\u001b[31m",
    "🚗🛑 Straße 交通 \udce9",
    "javascript:alert(3)",
)
HIDDEN = "\u202e\u2066\u200f\u0000\u001b\udce9"


def report(root: Path, night: NightRecord, jobs: list[JobRecord], kept: Any = None) -> tuple[str, Element, int]:
    paths, code = write_report(root, night, jobs, kept if kept is not None else keep(root, []))
    text = paths.html.read_text(encoding="utf-8")
    json.loads(paths.json.read_text(encoding="utf-8"))
    return text, read_page(text), code


def assert_safe(text: str, page: Element) -> None:
    """One script, which is ours and allowed by its digest alone; no handler; nothing from elsewhere."""
    scripts = page.all("script")
    assert [script.raw for script in scripts] == [SCRIPT]
    for element in page.walk():
        assert element.tag in TAGS.split(), element.tag
        assert not [name for name in element.attributes if name.startswith("on") or name in ("src", "srcset", "style")]
        assert element.attributes.get("href", "#").startswith("#")
    assert "url(" not in text and "@import" not in text
    policy = next(m for m in page.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"].startswith("default-src 'none'; ")
    assert not set(HIDDEN) & set(text)


TAGS = """
document html head meta title style script body header main section footer nav div h1 h2 h3 p a b bdi span br code pre
dl dt dd ul li table thead tbody tr th td figure figcaption details summary button svg desc g path rect circle text
"""


def hostile_job(night: NightRecord, index: int, text: str) -> JobRecord:
    failed = index % 2 == 0
    return job_of(
        night,
        f"job {index} {text}",
        kind="trial" if index % 3 else "scaling",
        model=f"model {text}",
        config_hash=text,
        parameters={text: text, "optim.lr": 0.001 * (index + 1)},
        status="failed" if failed else "finished",
        failure="code" if failed else None,
        failure_signature=text,
        cause=text,
        log_tail=f"first\n{text}\nlast",
        objective=0.5 + 0.01 * index,
        objective_name=text,
        images_per_second=10.0 + index,
        checkpoint_path=text,
        checkpoint_sha256=text,
        command=text,
        image=text,
        git_revision=text,
        data_manifest=text,
        hardware=text,
        run_folder=text.replace("\x00", ""),
        nodes=(text,),
        target_metric=text,
        target_value=0.5,
        target_seconds=12.0,
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_is_text_on_the_page(text: str, tmp_path: Path) -> None:
    night = dataclasses.replace(
        empty_night(),
        plan=text,
        hardware=text,
        image=text,
        git_revision=text,
        closing=text,
        notes=(text,),
        launcher=text,
    )
    jobs = [hostile_job(night, index, text) for index in range(12)]
    kept = keep(tmp_path, [])
    raw, page, _ = report(tmp_path, night, jobs, kept)
    assert_safe(raw, page)
    shown = visible(text)
    tails = [pre.raw for pre in page.by_id("failures").all("pre")]
    assert tails and all(shown in tail for tail in tails)
    assert shown in [code.raw for code in page.by_id("models").all("code")]
    assert " ".join(shown.split()) in page.by_id("nodes").text


@given(st.lists(st.text(max_size=30), min_size=4, max_size=4))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_safe(tmp_path: Path, texts: list[str]) -> None:
    night = dataclasses.replace(empty_night(), notes=tuple(texts))
    raw, page, _ = report(tmp_path, night, [hostile_job(night, index, text) for index, text in enumerate(texts)])
    assert_safe(raw, page)


def test_a_night_without_any_job_says_so_in_every_part(tmp_path: Path) -> None:
    raw, page, code = report(tmp_path, empty_night(), [])
    assert code == 1 and "no job succeeded" in page.by_id("exit-code").text
    assert page.by_id("headline").text == "The night ran no job at all."
    for part in ("night", "models", "scaling", "regressions", "targets", "failures", "search", "nodes"):
        assert page.by_id(part).all("p", class_="empty"), part
    assert_safe(raw, page)


def test_one_job_alone(tmp_path: Path) -> None:
    night = empty_night()
    _, page, code = report(tmp_path, night, [job_of(night, "lane-small-0001")])
    assert code == 0
    assert "the default was not run" in page.by_id("models").text
    assert page.by_id("headline").text.endswith("its one job ended well.")
    assert "No scaling run has been measured." in page.by_id("scaling").text
    assert "No earlier night to compare with." in page.by_id("regressions").text


def test_a_night_in_which_everything_failed(tmp_path: Path) -> None:
    night = dataclasses.replace(empty_night(), ended_utc=empty_night().started_utc + 600)
    jobs = [
        job_of(night, f"job-{index}", status="failed", failure="data", failure_signature="no such shard",
               objective=None, rank_seconds_wasted=100.0)
        for index in range(6)
    ]  # fmt: skip
    _, page, code = report(tmp_path, night, jobs)
    assert code == 1
    assert page.by_id("headline").text.startswith("No run was trained to its end with a figure;")
    assert "6 of 6 jobs failed (100 %: data 6)" in page.by_id("headline").text
    assert "6 ×" in page.by_id("failures").text
    assert "mend “no such shard” first" in page.by_id("next").text


def test_lost_preempted_cancelled_and_strange_jobs_are_all_counted(tmp_path: Path) -> None:
    night = dataclasses.replace(empty_night(), num_planned=9)
    statuses = ("finished", "lost", "preempted", "cancelled", "answered", "something new")
    jobs = [job_of(night, f"job-{status}", status=status) for status in statuses]
    _, page, code = report(tmp_path, night, jobs)
    shown = {tile.all("span")[0].text: tile.all("b")[0].text for tile in page.all("div", class_="tile")}
    assert code == 0
    wanted = {
        "lost without a result": "1",
        "preempted, to go on": "1",
        "cut off by the end": "1",
        "answered from a record": "1",
        "of another status": "1",
        "planned, not started": "3",
    }
    assert wanted.items() <= shown.items()


def test_a_model_without_scaling_runs_is_named(tmp_path: Path) -> None:
    nights = history(2, 80, planted=Planted(), num_nodes=4)
    night, jobs = nights[-1]
    jobs = [job for job in jobs if job.model != "sign" or job.kind != "scaling"]
    kept = keep(tmp_path, [(nights[0][0], [job for job in nights[0][1] if job.model != "sign"])])
    _, page, _ = report(tmp_path, night, jobs, kept)
    assert "Without scaling runs: sign." in page.by_id("scaling").text


def test_scaling_of_an_earlier_night_is_shown_as_such(tmp_path: Path) -> None:
    nights = history(2, 80, planted=Planted(), num_nodes=4)
    night, jobs = nights[-1]
    kept = keep(tmp_path, nights[:1])
    _, page, _ = report(tmp_path, night, [job for job in jobs if job.kind != "scaling"], kept)
    assert page.by_id("scaling").text.count(f"measured in night {nights[0][0].night}") == 2


def test_a_plan_of_another_version_costs_its_ranges_alone(tmp_path: Path) -> None:
    night = dataclasses.replace(empty_night(), plan_text='name = "x"\nfrom_the_future = 1\n')
    jobs = [
        job_of(night, f"t{index}", objective=0.1 * index, parameters={"optim.lr": 0.1 * index}) for index in range(3)
    ]
    _, page, _ = report(tmp_path, night, jobs)
    assert "Ranges and directions of the search are not known" in page.by_id("night").text
    assert page.all("table", class_="leaderboard")[0].rows()[0][2] == "0.2000"


def test_a_night_that_still_runs_says_so(tmp_path: Path) -> None:
    night = empty_night()
    _, page, _ = report(tmp_path, night, [job_of(night, "a")])
    assert page.by_id("headline").text.startswith("The night is still running;")


def test_a_best_value_at_the_end_of_its_range_is_told_to_be_widened(tmp_path: Path) -> None:
    night = empty_night()
    jobs = [job_of(night, f"t{i}", objective=0.1 * i, parameters={"optim.lr": 1e-3 * 2**i / 3.3}) for i in range(6)]
    _, page, _ = report(tmp_path, night, jobs)
    assert "lane-small : widen optim.lr: upper end 0.03" in page.by_id("next").text
    assert "stands at the upper end of 0.0001 … 0.01" in page.by_id("next").text


def test_learning_curves_come_from_the_run_folders(tmp_path: Path) -> None:
    night = empty_night()
    jobs = []
    for index in range(4):
        folder = tmp_path / f"run-{index}"
        folder.mkdir()
        lines = [
            json.dumps({"step": step, "samples": 8 * step, "validation/culane_f1_50": 0.01 * step * index})
            for step in range(10, 60, 10)
        ]
        (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "loss": 1.0}', '{"half": ']))
        status = "pruned" if index < 2 else "finished"
        jobs.append(job_of(night, f"t{index}", status=status, run_folder=str(folder), objective=0.1 * index))
    jobs.append(job_of(night, "gone", run_folder=str(tmp_path / "none")))
    _, page, _ = report(tmp_path, night, jobs)
    figures = {f.all("figcaption")[0].text: f for f in page.by_id("search").all("figure")}
    curves = figures["Learning curves"]
    assert len([path for path in curves.all("path", class_="l") if path.attributes["d"].count("L") == 4]) == 4
    assert "1 without metrics.jsonl on this machine" in curves.text


def test_every_chart_has_a_title_a_description_and_its_own_name(tmp_path: Path) -> None:
    nights = history(4, 90, planted=Planted(slower_data=0.2), num_nodes=4)
    _, page, _ = report(tmp_path, *nights[-1], keep(tmp_path, nights[:-1]))
    charts = page.all("svg", class_="chart")
    assert len(charts) > 20
    for chart in charts:
        title, description = (chart.all(tag)[0] for tag in ("title", "desc"))
        names = chart.attributes["aria-labelledby"].split()
        assert names == [title.attributes["id"], description.attributes["id"]]
        assert title.text and description.text
    names = [chart.attributes["aria-labelledby"] for chart in charts]
    assert len(set(names)) == len(names)


def test_written_again_it_is_the_same(tmp_path: Path) -> None:
    nights = history(3, 80, num_nodes=4)
    kept = keep(tmp_path, nights)
    first, _, _ = report(tmp_path, *nights[-1], kept)
    again, _, _ = report(tmp_path, *nights[-1], kept)
    assert first == again


def test_later_nights_do_not_change_an_earlier_report(tmp_path: Path) -> None:
    nights = history(3, 80, num_nodes=4)
    before, _, _ = report(tmp_path, *nights[1], keep(tmp_path / "two", nights[:2]))
    after, _, _ = report(tmp_path, *nights[1], keep(tmp_path / "three", nights))
    assert before == after


def test_the_terminal_summary_fits(tmp_path: Path) -> None:
    from sweeps.report import make_report

    nights = history(5, 90, planted=Planted(slower_data=0.15, bad_node="dgx01", share_failing=0.2), num_nodes=4)
    made = make_report(*nights[-1], keep(tmp_path, nights))
    summary = summary_of(made)
    assert max(map(len, summary.splitlines())) <= COLUMNS
    flat = " ".join(summary.split())
    assert made.headline in flat
    assert "new regressions: lane-small on 8 ranks: scaling factor" in flat and "waiting for data" in flat
    assert flat.endswith("exit code 1: 1 new regression")
    for group in made.failures.groups[:5]:
        assert f"{group.num_jobs} × {group.failure}" in flat
    hostile = dataclasses.replace(made, headline=f"a{HOSTILE[4]}")
    assert not set(HIDDEN) & set(summary_of(hostile))


@pytest.mark.slow
@pytest.mark.services
def test_a_thousand_jobs_by_thirty_nights(tmp_path: Path) -> None:
    planted = Planted(slower_data=0.1, bad_node="dgx03")
    nights = history(30, 1000, planted=planted)
    kept = keep(tmp_path, nights)
    wall, processor = time.perf_counter(), time.process_time()
    paths, code = write_report(tmp_path, *nights[-1], kept)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    text = paths.html.read_text(encoding="utf-8")
    page = read_page(text)
    print(f"{wall:.1f} s, {processor:.1f} s of processor time, {len(text.encode()) / 1e6:.2f} MB")
    # Processor time: what else runs on the machine is none of the report's.
    assert processor < 20 and len(text.encode()) < 5e6 and code == 1
    assert len(page.all("svg", class_="chart")) > 20
    assert [group.all("b")[0].text for group in page.by_id("regressions").all("div", class_="regression")] == [
        "lane-small"
    ]


def test_no_colour_is_written_outside_the_style_sheet(tmp_path: Path) -> None:
    """Or it would not follow the light and the dark scheme."""
    nights = history(2, 80, num_nodes=4)
    text, _, _ = report(tmp_path, *nights[-1], keep(tmp_path, nights))
    body = text[text.index("<body>") :]
    assert not re.search(r'(fill|stroke|color)="', body)


def test_pruned_trials_far_from_the_others_stand_at_the_edge_and_are_counted(tmp_path: Path) -> None:
    night = empty_night()
    jobs = [job_of(night, f"t{index}", trial=index, objective=0.7 + 0.01 * index) for index in range(5)]
    jobs += [job_of(night, f"p{index}", trial=9 + index, status="pruned", objective=0.1) for index in range(2)]
    _, page, _ = report(tmp_path, night, jobs)
    figure = next(f for f in page.by_id("search").all("figure") if f.all("figcaption")[0].text == "Trials in order")
    assert "2 pruned trials beyond the axis, drawn at its edge." in figure.text
    labels = [float(text.text) for text in figure.all("text", class_="tick") if "." in text.text]
    assert labels and min(labels) > 0.6


def test_what_was_picked_and_run_again_is_called_confirmed(tmp_path: Path) -> None:
    night = dataclasses.replace(empty_night(), champions={"lane-small": {"optim.lr": 0.1}})
    own: list[tuple[str, str, dict[str, float], float]] = [
        ("default", "d", {}, 0.50),
        ("champion", "c", {"optim.lr": 0.1}, 0.55),
        ("champion", "x", {"optim.lr": 0.2}, 0.60),
    ]
    jobs = [
        job_of(night, f"{name}{seed}", kind=kind, config_hash=name, parameters=parameters, seed=seed,
               objective=value + 0.001 * seed)
        for kind, name, parameters, value in own
        for seed in range(3)
    ]  # fmt: skip
    _, page, _ = report(tmp_path, night, jobs)
    rows = page.all("table", class_="leaderboard")[0].rows()
    assert [row[1] for row in rows] == ["x confirmed", "c champion", "d default"]
    assert "make configuration x the champion" in page.by_id("next").text
    assert "repeat it" not in page.by_id("next").text


def test_time_to_accuracy_names_the_holder_and_the_price(tmp_path: Path) -> None:
    first, second = empty_night("2026-11-29"), empty_night("2026-11-30", empty_night().started_utc + 86_400)
    second = dataclasses.replace(second, plan_text=f"price_per_rank_hour = 2.0\n{second.plan_text}")
    aim: dict[str, Any] = {"target_metric": "culane_f1_50", "target_value": 0.8, "num_ranks": 4, "target_samples": 9000}
    slow = job_of(first, "slow", target_seconds=900.0, **aim)
    jobs = [job_of(second, "fast", target_seconds=450.0, **aim), job_of(second, "never", **aim)]
    _, page, _ = report(tmp_path, second, jobs, keep(tmp_path, [(first, [slow])]))
    (row,) = page.by_id("targets").all("table")[0].rows()
    assert row[0] == "lane-small CULane F1@50 0.8" and row[2] == "4"
    assert row[3] == "7 min 30 s" and row[4] == "9,000"
    assert row[5] == "0.5" and row[6] == "1.00", "450 s on 4 ranks at 2 a rank-hour"
    assert row[7] == "2026-11-30, fast new record" and row[8] == "2 of 3 runs"
