"""Whole nights of real controller processes over the local launcher, with stand-ins in place of training runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps.ledger.history import History
from sweeps.night.journal import read_journal
from sweeps.night.night import OVERRAN, NightLock, find_nights, new_folder
from sweeps.night.state import NightState, fold

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
name = "{name}"
[budget]
{budget}
early_end = false
[local]
slots = {slots}
[retention]
min_free_gib = {min_free_gib}
[[models]]
model = "lane-small"
objectives = ["culane_f1_50"]
num_samples = 900
max_trials = {max_trials}
default_repeats = 2
champion_repeats = 1
sampler = "random"
{pruning}
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
"""
PRUNING = '[models.pruning]\nname = "asha"\nmin_samples = 200\n'


def write_plan(folder: Path, name: str = "test", budget: str = "max_minutes = 10", slots: int = 4,
               max_trials: int = 8, pruning: str = "", min_free_gib: float = 0.0) -> Path:  # fmt: skip
    path = folder / f"{name}.toml"
    path.write_text(
        PLAN.format(
            name=name, budget=budget, slots=slots, max_trials=max_trials, pruning=pruning, min_free_gib=min_free_gib
        )
    )
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tests/sweeps/stand_in_night.py"), *map(str, arguments)]


def environment(seconds: float) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "STAND_IN_SECONDS": str(seconds)}


def nightly(root: Path, plan: Path, *more: str, seconds: float = 0.3) -> tuple[int, str, str]:
    done = subprocess.run(
        command("nightly", plan, "--root", root, *more),
        env=environment(seconds),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def start(root: Path, plan: Path, *more: str, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("nightly", plan, "--root", root, *more),
        env=environment(seconds),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def state_of(root: Path, night: str | None = None) -> NightState:
    nights = find_nights(root)
    folder = next(one.folder for one in nights if night in (None, one.folder.name))
    return fold(read_journal(folder.journal))


def wait_for(condition, timeout_seconds: float = 120) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def check_whole(root: Path, num_trials: int) -> NightState:
    """Every configuration has one result, every attempt was started once, nothing is left running."""
    state = state_of(root)
    assert state.closed is not None and not state.out and not state.num_waiting and not state.num_twins
    records = state.records
    assert len(records) == len(state.jobs) == len({record.job for record in records})
    assert Counter(record.kind for record in records) == {"trial": num_trials, "default": 2, "champion": 1}
    # A number can be missing: of a trial whose controller was killed while the search was still drawing its values.
    assert set(Counter(r.trial for r in records if r.kind == "trial").values()) == {1}
    for job in state.jobs.values():
        if job.record is None or job.record.status == "answered":
            continue
        folder = Path(job.record.run_folder)
        starts = (folder / "starts.txt").read_text().splitlines()
        assert len(starts) == len(job.attempts) == job.record.num_attempts
        assert json.loads((folder / "result.json").read_text())["status"] == job.record.status
        process = int(starts[-1].split()[0])
        assert not Path(f"/proc/{process}").exists()
    accounts = [(record.rank_seconds_allocated, record.rank_seconds_wasted) for record in records]
    assert all(0 <= wasted <= allocated for allocated, wasted in accounts)
    return state


@pytest.mark.slow
def test_a_night_from_the_plan_to_the_report_and_again(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, pruning=PRUNING)
    code, out, errors = nightly(root, plan)
    assert (code, errors) == (0, ""), out
    check_whole(root, 8)
    night = find_nights(root)[0].folder
    assert (night.path / "report.html").is_file() and (night.path / "report.json").is_file()
    history = History(root)
    assert [one.night for one in history.nights()] == [night.name]
    assert len(history.jobs()) == 11 and history.nights()[0].closing.startswith("all is done")
    assert history.nights()[0].plan_text == plan.read_text() == night.plan.read_text()
    # Run again after its end, it says so and writes the report anew; nothing is run.
    before = night.journal.read_bytes()
    (night.path / "report.html").unlink()
    code, out, _ = nightly(root, plan, "--night", night.name)
    assert code == 0 and "has ended already" in out and (night.path / "report.html").is_file()
    assert night.journal.read_bytes() == before and len(History(root).nights()) == 1
    # The next night begins from what this one found, under a name of its own.
    code, out, _ = nightly(root, plan)
    second = find_nights(root)[1].folder
    assert code == 0 and second.name == f"{night.name}.2" and "champion so far" in out
    state = state_of(root, second.name)
    assert state.night is not None and "optim.lr" in state.night.champions["lane-small"]
    assert "the search begins with" in out


@pytest.mark.slow
def test_a_controller_killed_ten_times_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, max_trials=24, pruning=PRUNING, slots=6)
    generator, kills = random.Random(11), 0
    process = start(root, plan, seconds=1.5)
    wait_for(lambda: root.is_dir() and find_nights(root))
    journal = find_nights(root)[0].folder.journal
    for _ in range(10):
        # After so many more events, wherever it is then.
        due = num_lines(journal) + generator.randint(1, 14)
        wait_for(lambda due=due, process=process: num_lines(journal) >= due or process.poll() is not None)
        time.sleep(generator.uniform(0, 0.1))
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        kills += 1
        process = start(root, plan, "--resume", seconds=1.5)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert kills >= 8, f"the night ended after {kills} kills"
    state = check_whole(root, 24)
    assert state.num_controller_starts >= 9
    assert {record.status for record in state.records} <= {"finished", "pruned", "answered"}
    assert len(find_nights(root)) == 1


@pytest.mark.slow
def test_stopped_by_a_signal_it_goes_on_with_the_jobs_that_ran(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, max_trials=4)
    process = start(root, plan, seconds=3)
    wait_for(lambda: root.is_dir() and find_nights(root) and len(state_of(root).out) == 4)
    process.terminate()
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 75 and "again with --resume" in out
    assert all(Path(f"/proc/{pid}").exists() for pid in _running(root))
    code, out, _ = nightly(root, plan, "--resume")
    assert code == 0 and "took over 4 jobs" in out
    state = check_whole(root, 4)
    assert all(record.num_attempts == 1 for record in state.records if record.status != "answered")


@pytest.mark.slow
def test_a_night_goes_on_by_the_plan_it_began_with(tmp_path: Path) -> None:
    """Another space in the meantime neither breaks the search nor mixes two spaces in one night."""
    root, plan = tmp_path / "nights", write_plan(tmp_path, max_trials=4)
    process = start(root, plan, seconds=2)
    wait_for(lambda: root.is_dir() and find_nights(root) and len(state_of(root).out) == 4)
    process.kill()
    process.communicate()
    plan.write_text(
        plan.read_text().replace('"optim.lr"', '"optim.weight_decay"').replace("max_trials = 4", "max_trials = 40")
    )
    code, out, _ = nightly(root, plan, "--resume")
    assert code == 0 and "has changed since the night began" in out
    state = check_whole(root, 4)
    assert all(set(r.parameters) == {"optim.lr"} for r in state.records if r.kind == "trial")


@pytest.mark.slow
def test_a_second_interrupt_ends_the_jobs_and_they_go_on_later(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, max_trials=2)
    process = start(root, plan, seconds=60)
    wait_for(lambda: root.is_dir() and find_nights(root) and len(_running(root)) == 4)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 75 and "jobs were asked to end" in out, out
    assert not _running(root)
    code, out, _ = nightly(root, plan, "--resume", seconds=1)
    assert code == 0, out
    state = check_whole(root, 2)
    assert sum(record.num_attempts == 2 for record in state.records) == 4
    assert {record.status for record in state.records} == {"finished"}


@pytest.mark.slow
def test_at_the_deadline_everything_ends_with_a_checkpoint(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, budget="max_minutes = 0.2")
    code, out, _ = nightly(root, plan, seconds=60)
    state = state_of(root)
    assert state.closed is not None and state.closed.closing == "deadline reached"
    assert Counter(record.status for record in state.records) == {"cancelled": 4}
    for record in state.records:
        result = json.loads((Path(record.run_folder) / "result.json").read_text())
        assert result["status"] == "preempted" and record.rank_seconds_wasted == record.rank_seconds_allocated > 0
    assert not _running(root)
    # No job succeeded.
    assert code == 1, out


@pytest.mark.slow
def test_a_night_that_overran_is_closed_and_reported_by_the_next(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, max_trials=2)
    process = start(root, plan, seconds=100)
    wait_for(lambda: root.is_dir() and find_nights(root) and len(_running(root)) == 4)
    process.kill()
    process.communicate()
    left = _running(root)
    code, out, _ = nightly(root, plan)
    assert code == 0, out
    assert "was never closed" in out and "an earlier controller ended without letting go of its lock" in out
    first, second = find_nights(root)
    assert first.is_closed and second.is_closed
    state = state_of(root, first.folder.name)
    assert state.closed is not None and state.closed.closing == OVERRAN
    assert {record.status for record in state.records} == {"cancelled"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    assert (first.folder.path / "report.html").is_file()
    assert History(root).nights()[0].closing == OVERRAN


@pytest.mark.slow
def test_two_nights_of_one_plan_exclude_each_other_and_two_plans_do_not(tmp_path: Path) -> None:
    root, plan = tmp_path / "nights", write_plan(tmp_path, max_trials=1)
    process = start(root, plan, seconds=3)
    wait_for(lambda: root.is_dir() and find_nights(root))
    code, out, errors = nightly(root, plan)
    assert code == 2 and out == ""
    assert errors.startswith("error: ") and f"process {process.pid} on" in errors and len(errors.splitlines()) == 1
    other = write_plan(tmp_path, name="other", max_trials=1)
    code, out, _ = nightly(root, other)
    assert code == 0, out
    process.communicate(timeout=200)
    assert process.returncode == 0
    assert sorted(night.plan_name for night in find_nights(root)) == ["other", "test"]
    assert len(History(root).nights()) == 2


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_night_goes_on_with_room(small_disk: Path, tmp_path: Path) -> None:
    root, plan = small_disk / "nights", write_plan(tmp_path, max_trials=3)
    process = start(root, plan, seconds=2)
    wait_for(lambda: root.is_dir() and find_nights(root) and len(_running(root)) == 4)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(b"x" * 1024):
            pass
    out, _ = process.communicate(timeout=200)
    last = out.splitlines()[-1]
    assert process.returncode == 2 and last.startswith("error: "), out
    assert "No space left" in last or "free" in last
    filler.unlink()
    wait_for(lambda: not _running(root))
    code, out, errors = nightly(root, plan, "--resume")
    assert code in (0, 1), out + errors
    state = state_of(root)
    assert state.closed is not None and len(state.records) == len(state.jobs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.toml",), "none.toml: cannot be read"),
        (("PLAN", "--resume"), "--resume: there is no night of this plan yet"),
        (("PLAN", "--night", "../x"), "--night ../x: use letters"),
        (("PLAN", "--night", "x", "--resume"), "--resume --night x: no such night"),
        (("PLAN", "--replay", "x"), "--replay x: no such night"),
        (("PLAN", "--replay", "x", "--resume"), "--replay: begins a night, --resume goes on with one"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    given = [str(plan) if word == "PLAN" else word for word in arguments]
    code, out, errors = nightly(tmp_path / "nights", Path(given[0]), *given[1:])
    assert (code, out) == (2, "") and errors.startswith("error: ") and words in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_a_scheduler_that_is_away_at_the_start_leaves_no_night(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(
        plan.read_text()
        .replace('name = "test"', 'name = "test"\nlauncher = "slurm"')
        .replace("[local]\nslots = 4\n", "")
    )
    away = {**environment(0.1), "SLURM_CONF": str(tmp_path / "none.conf")}
    done = subprocess.run(
        command("nightly", plan, "--root", tmp_path / "nights"),
        env=away,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: no night was begun: "), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not find_nights(tmp_path / "nights")
    assert [path.name for path in (tmp_path / "nights").iterdir()] == [".lock-test"]


def test_a_lock_of_a_process_that_died_is_told_apart(tmp_path: Path) -> None:
    first = NightLock(tmp_path, "a plan/with signs")
    assert first.take() == ""
    with pytest.raises(UserError, match=rf"process {os.getpid()} on"):
        NightLock(tmp_path, "a plan/with signs").take()
    NightLock(tmp_path, "another").take()
    assert NightLock(tmp_path, "a plan/with signs").is_held() and not NightLock(tmp_path, "a third").is_held()
    first.release()
    assert not NightLock(tmp_path, "a plan/with signs").is_held()
    assert NightLock(tmp_path, "a plan/with signs").take() == ""


def test_nights_are_named_by_their_utc_date_and_counted(tmp_path: Path) -> None:
    late = 1_796_083_199.0  # 2026-11-30 23:59:59 UTC
    assert new_folder(tmp_path, "", late).name == "2026-11-30"
    assert new_folder(tmp_path, "", late).name == "2026-11-30"[:10] + ".2"
    assert new_folder(tmp_path, "", late + 1).name == "2026-12-01"
    assert new_folder(tmp_path, "by-hand_1", late).name == "by-hand_1"
    with pytest.raises(UserError, match="--night records"):
        new_folder(tmp_path, "records", late)


def _running(root: Path) -> list[int]:
    """Process ids of stand-ins that live."""
    found = []
    for path in root.glob("*/jobs/*/starts.txt"):
        for line in path.read_text().splitlines():
            process = int(line.split()[0])
            try:
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"stand_in.py") for word in words):
                found.append(process)
    return found
