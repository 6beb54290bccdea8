"""From run folders to records: what counts as a result, and what is told of a run that left none."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.job import JobStatus
from sweeps.night.events import AttemptEnded
from sweeps.night.ingest import (
    Progress,
    answered_record,
    make_record,
    progress_of,
    read_result,
    reproduce_command,
    wasted_share,
)
from sweeps.night.planned_jobs import planner
from sweeps.night.state import Attempt, JobState
from sweeps.planning.plan import Objective, Target
from sweeps.record import NightRecord
from tests.sweeps.night_cases import make_plan

MODEL = make_plan().models[0]
NIGHT = NightRecord("2026-11-30", "test", "", "local", 2, "2 x fake", "image@sha256:1", "rev", 100.0)
GOOD: dict[str, Any] = {
    "status": "finished",
    "cause": "",
    "metrics": {"culane_f1_50": 0.75, "per_class/stop": 1.0},
    "throughput": {"images_per_second": 61.5, "scaling_factor": 1.9, "ratio_to_limit": None},
    "lost_scaling": {"data": 0.1, "exposed_allreduce": None, "straggler": 0.02},
    "checkpoint": {"path": "checkpoints/step-00000100.pt", "sha256": "aa", "weights_sha256": "bb"},
    "seconds": 12.5,
    "samples": 900,
    "model": {"num_parameters": 1_341_458, "latency_seconds": 0.0125},
    "target": {"metric": "culane_f1_50", "value": 0.7, "reached_seconds": 9.0, "reached_samples": 700},
}


def job_of(folder: Path, ranks: int = 1) -> JobState:
    plans = planner(MODEL, folder)
    request = dataclasses.replace(plans.trial(4, {"optim.lr": 2e-3}), ranks_per_node=ranks)
    return JobState(plans.job(request, 7, "", 100.0))


def write(folder: Path, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "result.json").write_text(text)


@pytest.mark.parametrize(
    ("content", "status", "cause"),
    [
        (None, "none", "there is no result.json"),
        ("", "none", "truncated or is not JSON"),
        (json.dumps(GOOD)[:-30], "none", "truncated or is not JSON"),
        ("[]", "none", "no status that is known"),
        ({"status": "triumphant"}, "none", "no status that is known"),
        ({**GOOD, "status": "failed", "cause": "disk full"}, "failed", "disk full"),
        ({**GOOD, "metrics": {}}, "failed", "no figure culane_f1_50"),
        ({**GOOD, "metrics": {"culane_f1_50": "0.5"}}, "failed", "no figure culane_f1_50"),
        ({**GOOD, "metrics": {"culane_f1_50": float("nan")}}, "diverged", "culane_f1_50 is nan"),
        ({**GOOD, "metrics": {"culane_f1_50": float("inf")}}, "diverged", "culane_f1_50 is inf"),
        ({**GOOD, "status": "pruned", "cause": "asha", "metrics": {}}, "pruned", "asha"),
        (GOOD, "finished", ""),
    ],
)
def test_a_result_is_what_the_file_says_and_holds(content: Any, status: str, cause: str, tmp_path: Path) -> None:
    if content is not None:
        write(tmp_path, content)
    result = read_result(tmp_path, MODEL)
    assert result.status == status and cause in result.cause


@given(text=st.text(max_size=40) | st.binary(max_size=40))
def test_no_content_of_the_file_is_a_crash(text: str | bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "result.json").write_bytes(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    assert read_result(folder, MODEL).status == "none"


def test_a_record_holds_what_the_run_said(tmp_path: Path) -> None:
    job = job_of(tmp_path, ranks=2)
    folder = tmp_path / job.name
    write(folder, GOOD)
    environment = {
        "git": {"revision": "0123"},
        "image_digest": "sha256:9",
        "data": {"train": {"manifest_sha256_sum": "a" * 64}, "validation": {"manifest_sha256_sum": "b" * 64}},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    job.attempts = [Attempt(1, "n.j.1", 101.0, id="5")]
    status = JobStatus("n.j.1", "5", "ended", "exit code 0", 0, ("node3",), 102.0, 122.0, 20.0, 1)
    ended = AttemptEnded(122.0, job.name, 1, "conclude", rank_seconds_allocated=40.0)
    aim = dataclasses.replace(MODEL, target=Target("culane_f1_50", 0.7))
    record = make_record(NIGHT, aim, job, "finished", "", GOOD, folder, ended, latest=status)
    assert (record.objective_name, record.objective) == ("culane_f1_50", 0.75)
    assert (record.num_parameters, record.latency_seconds) == (1_341_458, 0.0125)
    assert record.metrics == {"culane_f1_50": 0.75, "per_class/stop": 1.0}
    assert record.lost_scaling == {"data": 0.1, "straggler": 0.02}
    assert (record.images_per_second, record.scaling_factor, record.seconds, record.samples) == (61.5, 1.9, 12.5, 900)
    assert record.checkpoint_path == str(folder / "checkpoints/step-00000100.pt")
    assert (record.target_seconds, record.target_samples) == (9.0, 700)
    assert (record.git_revision, record.image) == ("0123", "sha256:9")
    assert record.data_manifest == "a" * 16 + "+" + "b" * 16
    assert (record.submitted_utc, record.started_utc, record.ended_utc) == (101.0, 102.0, 122.0)
    assert (record.nodes, record.num_ranks, record.num_attempts, record.num_starts) == (("node3",), 2, 1, 1)
    assert (record.rank_seconds_allocated, record.rank_seconds_wasted) == (40.0, 0.0)
    assert (record.trial, record.parameters, record.seed) == (4, {"optim.lr": 2e-3}, 0)


def test_a_run_that_goes_on_past_its_target_notes_when_it_reached_it(tmp_path: Path) -> None:
    aim = dataclasses.replace(MODEL, target=Target("culane_f1_50", 0.5))
    job = job_of(tmp_path)
    write(tmp_path, {**GOOD, "target": None})
    rows = [{"samples": 300 * n, "seconds": 4.0 * n, "validation/culane_f1_50": 0.25 * n} for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = read_result(tmp_path, aim).values
    record = make_record(NIGHT, aim, job, "finished", "", values, tmp_path, None)
    assert (record.objective, record.target_seconds, record.target_samples) == (0.75, 8.0, 600)
    assert (record.target_metric, record.target_value) == ("culane_f1_50", 0.5)
    # Of a run that was cut short to measure its speed nothing is said.
    short = JobState(dataclasses.replace(job.planned, kind="scaling"))
    record = make_record(NIGHT, aim, short, "finished", "", values, tmp_path, None)
    assert (record.target_metric, record.target_seconds) == ("", None)


def test_a_target_that_is_searched_for_and_never_reached_is_no_failure(tmp_path: Path) -> None:
    timed = dataclasses.replace(
        MODEL, target=Target("culane_f1_50", 0.9), objectives=(Objective("target_seconds", "minimize"),)
    )
    write(tmp_path, {**GOOD, "target": {"metric": "culane_f1_50", "value": 0.9, "reached_seconds": None}})
    found = read_result(tmp_path, timed)
    assert (found.status, found.cause) == ("pruned", "culane_f1_50 never reached 0.9")


def test_a_run_that_left_nothing_makes_a_record_too(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.attempts = [Attempt(1, "n.j.1", 101.0, id="5")]
    ended = AttemptEnded(122.0, job.name, 1, "give_up", "code", "ValueError: <n>", "", 20.0, 5.0)
    record = make_record(NIGHT, MODEL, job, "failed", "ValueError", {}, tmp_path / job.name, ended, "x" * 9000)
    assert (record.failure, record.failure_signature, len(record.log_tail)) == ("code", "ValueError: <n>", 4000)
    assert record.objective is None and record.images_per_second is None and record.started_utc is None
    # It led to no result: all of it is wasted.
    assert (record.rank_seconds_allocated, record.rank_seconds_wasted) == (20.0, 20.0)


def test_an_answered_record_spends_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    folder = tmp_path / job.name
    write(folder, GOOD)
    source = make_record(NIGHT, MODEL, job, "finished", "", GOOD, folder, None)
    record = answered_record(NIGHT, job, dataclasses.replace(source, job="lane-small-0002", rank_seconds_allocated=9.0))
    assert (record.status, record.objective, record.rank_seconds_allocated) == ("answered", 0.75, 0.0)
    assert "lane-small-0002" in record.cause and record.run_folder == ""


def test_the_command_that_reproduces_is_whole_and_for_a_shell(tmp_path: Path) -> None:
    command = reproduce_command(job_of(tmp_path, ranks=2).planned)
    words = shlex.split(command)
    assert words[:5] == ["python", "-m", "pipelines", "train", "lane-small"]
    assert "--out" not in words and "--resume-if-possible" not in words and str(tmp_path) not in command
    assert words[-2:] == ["--ranks", "2"] and "optim.lr=0.002" in words and "train.num_samples=900" in words
    from pipelines.train import add_arguments

    parser = __import__("argparse").ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(words[4:]).ranks == 2


def test_progress_is_of_the_newest_checkpoint_and_line(tmp_path: Path) -> None:
    assert progress_of(tmp_path) == Progress(0, 0)
    (tmp_path / "checkpoints").mkdir()
    for step in (50, 100):
        (tmp_path / "checkpoints" / f"step-{step:08d}.json").write_text("{}")
    (tmp_path / "checkpoints" / ".step-00000150.json.12").write_text("{}")
    assert progress_of(tmp_path) == Progress(100, 100)
    lines = [json.dumps({"step": step}) for step in range(10, 131, 10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 14')
    assert progress_of(tmp_path) == Progress(130, 100)


@given(begun=st.integers(0, 1000), done=st.integers(0, 1000), lost=st.integers(0, 1000))
def test_the_wasted_share_is_of_the_steps_since_the_start(begun: int, done: int, lost: int) -> None:
    last = begun + done
    kept = max(0, last - lost)
    share = wasted_share(begun, Progress(last, kept))
    assert 0 <= share <= 1
    if done:
        assert share == pytest.approx(min(1.0, (last - kept) / done))
    else:
        assert share == 1.0
