"""Time to accuracy: who is ranked with whom, who holds the record, and what it cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps import targets_command
from sweeps.ledger.history import History
from sweeps.ledger.targets import best_of_model, records, why_no_run
from sweeps.record import JobRecord
from tests.sweeps.test_history import DAY, night_record


def run_record(night: str, job: str, seconds: float | None, **fields: Any) -> JobRecord:
    values: dict[str, Any] = {
        "plan": "nightly",
        "model": "lane-small",
        "kind": "trial",
        "status": "target_reached" if seconds is not None else "finished",
        "num_ranks": 8,
        "hardware": "8 x NVIDIA H100",
        "target_metric": "culane_f1_50",
        "target_value": 0.8,
        "target_seconds": seconds,
        "target_samples": None if seconds is None else int(seconds * 1000),
        "command": f"python -m pipelines train lane-small --ranks 8 --set train.seed={len(job)}",
        **fields,
    }
    return JobRecord(night, job, **values)


def test_the_fastest_holds_the_record_and_its_history_is_kept() -> None:
    jobs = [
        run_record("2026-11-29", "c", 90.0),
        run_record("2026-11-28", "a", 120.0),
        run_record("2026-11-28", "b", None),
        run_record("2026-11-30", "d", 90.0),
        run_record("2026-11-30", "e", 100.0),
        run_record("2026-12-01", "f", 60.0),
    ]
    (record,) = records(jobs, price_per_rank_hour=3.0)
    assert [entry.job for entry in record.entries] == ["f", "c", "d", "e", "a"]
    assert [entry.job for entry in record.history] == ["a", "c", "f"], "an equal time takes no record"
    assert record.holder is not None and record.holder_before is not None
    assert (record.holder.job, record.holder_before.job, record.num_runs) == ("f", "c", 6)
    holder = record.holder
    assert (holder.seconds, holder.samples, holder.rank_hours) == (60.0, 60_000, pytest.approx(8 / 60))
    assert holder.cost == pytest.approx(0.4) and holder.command.startswith("python -m pipelines train lane-small")


def test_within_a_night_the_one_that_ended_first_held_it_first() -> None:
    jobs = [run_record("n", "a", 50.0, ended_utc=20.0), run_record("n", "b", 60.0, ended_utc=10.0)]
    (record,) = records(jobs)
    assert [entry.job for entry in record.history] == ["b", "a"]


def test_an_unknown_price_stays_unknown_and_none_is_free() -> None:
    jobs = [run_record("n", "a", 50.0)]
    assert [record.entries[0].cost for record in records(jobs)] == [None]
    assert [record.entries[0].cost for record in records(jobs, 0.0)] == [0.0]


def test_only_what_can_be_compared_is_ranked_together() -> None:
    same = run_record("n", "a", 50.0, data_manifest="1+2")
    others: list[dict[str, Any]] = [
        {"model": "lane"},
        {"target_metric": "tusimple_accuracy"},
        {"target_value": 0.9},
        {"hardware": "8 x NVIDIA A100"},
        {"num_ranks": 4},
        {"data_manifest": "1+3"},
    ]
    jobs = [same, *(dataclasses.replace(same, **other) for other in others)]
    jobs.append(dataclasses.replace(same, data_manifest="9+2", image="sha256:2", git_revision="ab", seed=3))
    assert sorted(len(record.entries) for record in records(jobs)) == [1] * len(others) + [2]


def test_a_target_that_nobody_reached_has_no_holder() -> None:
    (record,) = records([run_record("n", "a", None)])
    assert record.holder is None and record.num_runs == 1 and record.history == ()
    assert record.to_json()["holder"] is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"status": "pruned"}, "ended as pruned before it could reach its target"),
        ({"status": "failed"}, "ended as failed before it could reach its target"),
        ({"status": ""}, "ended as unknown before it could reach its target"),
        ({"status": "pruned", "target_seconds": 5.0}, None),
        ({"status": "answered", "target_seconds": 5.0}, "answered by the record of an equal run"),
        ({"target_metric": ""}, "has no target"),
        ({"target_value": None}, "has no target"),
        ({"target_seconds": float("nan")}, "has no valid time to its target"),
        ({"target_seconds": -1.0}, "has no valid time to its target"),
    ],
)
def test_which_runs_count(fields: dict[str, Any], reason: str | None) -> None:
    job = dataclasses.replace(run_record("n", "a", None), **fields)
    assert why_no_run(job) == reason
    assert len(records([job])) == (reason is None)


def test_the_fastest_and_the_cheapest_over_all_numbers_of_ranks() -> None:
    jobs = [run_record("n", "eight", 100.0), run_record("n", "one", 500.0, num_ranks=1)]
    fastest, cheapest = best_of_model(records(jobs))["lane-small", "culane_f1_50", 0.8]
    assert (fastest.job, cheapest.job) == ("eight", "one")
    assert targets_command.lines_of(records(jobs), None)[-4:-1] == [
        "lane-small, culane_f1_50 0.8 over all hardware and numbers of ranks:",
        "  fastest 100.0 s, 100000 samples, 0.2222 rank-hours (eight of night n) on 8 ranks of 8 x NVIDIA H100",
        "  cheapest 500.0 s, 500000 samples, 0.1389 rank-hours (one of night n) on 1 rank of 8 x NVIDIA H100",
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.floats(0.1, 1e6)), max_size=20))
def test_a_record_is_only_ever_beaten(runs: list[tuple[int, float | None]]) -> None:
    jobs = [run_record(f"2026-11-1{night}", f"job-{place}", time) for place, (night, time) in enumerate(runs)]
    times = [time for _, time in runs if time is not None]
    for record in records(jobs):
        assert record.num_runs == len(runs) and len(record.entries) == len(times)
        assert [entry.seconds for entry in record.entries] == sorted(times)
        held = [entry.seconds for entry in record.history]
        assert held == sorted(set(held), reverse=True)
        if times:
            assert held[-1] == min(times) and record.history[-1] == record.holder
        json.dumps(record.to_json())


# --- The command


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    targets_command.add_arguments(parser)
    return targets_command.run(parser.parse_args(words))


def two_nights(root: Path, plan_text: str = "") -> None:
    history = History(root)
    history.append_night(night_record("2026-11-29", DAY, plan_text=plan_text), [run_record("2026-11-29", "a", 120.0)])
    jobs = [
        run_record("2026-11-30", "b", 90.0),
        run_record("2026-11-30", "c", None),
        run_record("2026-11-30", "d", None, status="failed"),
        run_record("2026-11-30", "e", None, num_ranks=1),
        JobRecord("2026-11-30", "f", "nightly", "sign", "trial", status="finished"),
    ]
    history.append_night(night_record("2026-11-30", 2 * DAY, plan_text="not [ toml"), jobs)


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_nights(tmp_path, "price_per_rank_hour = 2.5\n")
    assert run("--root", str(tmp_path), "--json", str(tmp_path / "targets.json")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "lane-small, culane_f1_50 0.8 on 1 rank of 8 x NVIDIA H100:",
        "  0 of 1 runs reached it",
        "lane-small, culane_f1_50 0.8 on 8 ranks of 8 x NVIDIA H100:",
        "  record 90.0 s, 90000 samples, 0.2 rank-hours, cost 0.5 (b of night 2026-11-30); 2 of 3 runs reached it",
        "  before it 120.0 s, 120000 samples, 0.2667 rank-hours, cost 0.6667 (a of night 2026-11-29): "
        "25.0 % faster now",
        "  python -m pipelines train lane-small --ranks 8 --set train.seed=1",
        "costs at 2.5 a rank-hour",
        "1 run left out: ended as failed before it could reach its target",
        f"wrote {tmp_path / 'targets.json'}",
    ]
    values = json.loads((tmp_path / "targets.json").read_text())
    assert values["price_per_rank_hour"] == 2.5
    assert [target["num_reached"] for target in values["targets"]] == [0, 2]
    assert run("--root", str(tmp_path), "--price", "10") == 0
    assert "cost 2 (b of" in capsys.readouterr().out


def test_without_a_price_costs_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_nights(tmp_path)
    assert run("--root", str(tmp_path)) == 0
    output = capsys.readouterr().out
    assert "cost " not in output and "costs are unknown: give --price, or price_per_rank_hour in the plan" in output
    assert run("--root", str(tmp_path), "--model", "sign") == 0
    assert capsys.readouterr().out == "no run had a target; a plan's [models.target] gives one\n"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="records: holds no night's jobs"):
        run("--root", str(tmp_path))
    two_nights(tmp_path)
    with pytest.raises(UserError, match='did you mean "sign"'):
        run("--root", str(tmp_path), "--model", "sing")
    for price in ("-1", "nan", "inf"):
        with pytest.raises(UserError, match=r"--price .*: must be 0 or more"):
            run("--root", str(tmp_path), "--price", price)
    with pytest.raises(UserError, match="make it first"):
        run("--root", str(tmp_path), "--json", str(tmp_path / "none" / "targets.json"))
