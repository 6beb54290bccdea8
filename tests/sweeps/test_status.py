"""`status`: what a person sees of a night, from its journal alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps.job import Job
from sweeps.night.journal import read_journal
from sweeps.night.state import NightState, fold
from sweeps.status import run, summary
from tests.sweeps.fake_launcher import Behaviour, FakeClock, FakeLauncher
from tests.sweeps.night_cases import PRUNING, Case, make_plan
from tests.sweeps.test_controller_kills import hard_night

ROOT = Path(__file__).resolve().parents[2]


def texts_along(night: Case) -> list[list[str]]:
    """The summary after each event of the journal."""
    events = read_journal(night.journal)
    return [summary(fold(events[:number]), night.clock.time, number % 2 == 0) for number in range(1, len(events) + 1)]


def test_at_every_moment_of_a_night_it_fits_80_columns(tmp_path: Path) -> None:
    night = hard_night(tmp_path)
    night.drive()
    texts = texts_along(night)
    assert len(texts) > 60
    for lines in texts:
        assert all(len(line) <= 80 for line in lines)
        assert lines[0].startswith("night 2026-11-30 of plan test")
    last = "\n".join(texts[-1])
    assert re.search(r"jobs +10 planned: 10 done", last)
    assert re.search(r"done .*finished.*pruned", last) and "1 diverged" in last and "1 answered" in last
    assert re.search(r"lane-small culane_f1_50 +0\.\d+ +0\.\d+ +[+-]0\.\d+ +7 +0  lane-small-00\d\d", last)
    assert "failures" in last and "attempts failed or were preempted, and the jobs went on" in last


def test_it_says_what_runs_and_what_of_the_budget_is_left(tmp_path: Path) -> None:
    clock = FakeClock()
    plan = make_plan({"more": PRUNING, "max_trials": 30}, budget="rank_hours = 2")
    night = Case(tmp_path, plan, FakeLauncher(clock, 4, lambda job: Behaviour(seconds=50)), clock, deadline_seconds=900)
    night.drive()
    events = read_journal(night.journal)
    moment = NightState()
    for event in events:
        moment.apply(event)
        if moment.records and sum(job.is_running for job in moment.out.values()) == 4:
            break
    now = night.began_utc + 100
    text = "\n".join(summary(moment, now, False))
    assert "4 running" in text and re.search(r"about \d+ more jobs of the mean length fit", text)
    assert re.search(r"rank-hours +0\.\d\d used of 2\.00 \(\d+%\)", text)
    assert "deadline" in text and "left" in text
    assert "no controller runs" in text


def test_where_less_is_better_the_best_is_the_least(tmp_path: Path) -> None:
    clock = FakeClock()
    plan = make_plan({"metric": "tusimple_fp"})
    values = {3: 0.2, 4: 0.1, 5: 0.3}

    def behave(job: Job) -> Behaviour:
        return Behaviour(value=values.get(int(job.name.rsplit("-", 1)[1].split(".")[0]), 0.4))

    night = Case(tmp_path, plan, FakeLauncher(clock, 4, behave), clock)
    night.drive()
    text = "\n".join(summary(night.state(), clock.time, True))
    assert re.search(r"lane-small tusimple_fp +0\.1 +0\.4 +-0\.3 +6 +0  lane-small-0004", text)


def test_what_breaks_a_constraint_is_not_the_best(tmp_path: Path) -> None:
    clock = FakeClock()
    more = '[[models.constraints]]\nmetric = "tusimple_fp"\nat_most = 0.5'
    values = {3: 0.9, 4: 0.5, 5: 0.4}

    def behave(job: Job) -> Behaviour:
        return Behaviour(value=values.get(int(job.name.rsplit("-", 1)[1].split(".")[0]), 0.1))

    night = Case(tmp_path, make_plan({"more": more}), FakeLauncher(clock, 4, behave), clock)
    night.drive()
    text = "\n".join(summary(night.state(), clock.time, True))
    assert re.search(r"lane-small culane_f1_50 +0\.5 .*lane-small-0004", text)


def test_the_command_shows_the_newest_night_and_names_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night = hard_night(tmp_path / "2026-11-30")
    night.drive()
    assert run(_options(tmp_path)) == 0
    assert "night 2026-11-30 of plan test" in capsys.readouterr().out
    with pytest.raises(UserError, match=r'--night 2026-11-31: is not in .*did you mean "2026-11-30"'):
        run(_options(tmp_path, night="2026-11-31"))
    with pytest.raises(UserError, match="holds no night"):
        run(_options(tmp_path / "none"))


def test_it_reads_while_a_line_is_half_written(tmp_path: Path) -> None:
    night = hard_night(tmp_path / "2026-11-30")
    night.drive()
    with night.journal.open("ab") as file:
        file.write(b'{"event": "Noted", "ut')
    done = subprocess.run(
        [sys.executable, "-m", "sweeps", "status", "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "10 planned" in done.stdout


def _options(root: Path, night: str = "", watch: bool = False):  # type: ignore[no-untyped-def]
    import argparse

    return argparse.Namespace(root=root, night=night, watch=watch)
