"""Controllers killed wherever they can be, in virtual time: nothing is lost, and nothing is done twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.job import Job
from sweeps.night.state import SUCCESSES
from tests.sweeps.fake_launcher import Behaviour, FakeLauncher, Killed
from tests.sweeps.night_cases import PRUNING, Case, by_kind, case, make_plan, records_of


def hard_night(folder: Path) -> Case:
    """Small, and with some of everything: pruning, failures, preemption, duplicates, repeats of the best."""

    def behave(job: Job) -> Behaviour:
        number = int(job.name.rsplit("-", 1)[1].split(".")[0])
        first = job.name.endswith(".1")
        ending = {4: "preempted", 5: "node_fail", 6: "nan"}.get(number, "finished") if first else "finished"
        value = 0.1 * (number % 7)
        curve = () if first and number in (4, 5) else ((100, value), (300, value))
        return Behaviour(seconds=6 + number % 3, ending=ending, value=value, curve=curve)

    plan = make_plan({"max_trials": 7, "more": PRUNING, "champion_repeats": 1})
    night = case(folder, plan, behave, slots=2)
    assert isinstance(night.launcher, FakeLauncher)
    night.launcher.nodes = ("node0", "node1", "node2")
    night.searches["lane-small"].fixed = [{"optim.lr": 1e-3}, {"optim.lr": 4e-3}, {"optim.lr": 1e-3}]
    return night


def check_whole(night: Case) -> None:
    """Every configuration that was asked for has exactly one result, and no attempt was started twice."""
    assert isinstance(night.launcher, FakeLauncher)
    submissions = night.launcher.submissions
    assert len(submissions) == len(set(submissions))
    state = night.state()
    assert not state.out and not state.num_waiting and not state.num_twins
    assert all(job.record is not None for job in state.jobs.values())
    search = night.searches["lane-small"]
    trials = Counter(record.trial for record in state.records if record.kind == "trial")
    assert trials == dict.fromkeys(search.asked, 1)
    assert set(search.told) == set(search.asked)
    keys = Counter((r.config_hash, r.seed, r.num_ranks) for r in state.records if r.status in SUCCESSES)
    assert set(keys.values()) == {1}
    assert by_kind(state.records) == {"default": 2, "trial": 7, "champion": 1}
    # A job is started again only for a reason that is written down.
    for job in state.jobs.values():
        assert len(job.attempts) == sum(f".{job.name}." in name for name in submissions)


def test_a_hard_night_without_any_kill(tmp_path: Path) -> None:
    night = hard_night(tmp_path)
    assert night.drive()
    check_whole(night)
    statuses = Counter(record.status for record in records_of(night))
    assert statuses["answered"] == 1 and statuses["diverged"] == 1 and statuses["pruned"] >= 1


@pytest.mark.slow
def test_a_controller_killed_at_any_place_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    """Every place where the controller touches journal, search or launcher: before it, after it, in the middle."""
    whole = hard_night(tmp_path / "whole")
    whole.drive()
    num_places = whole.switch.num_passed
    assert num_places > 150
    for place in range(0, num_places, 5):
        night = hard_night(tmp_path / str(place))
        night.switch.at = place
        with pytest.raises(Killed):
            night.drive()
        assert night.drive()
        check_whole(night)


@pytest.mark.slow
@given(places=st.lists(st.integers(0, 90), min_size=2, max_size=8))
@settings(max_examples=15, deadline=None)
def test_any_number_of_kills_loses_nothing(places: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    night = hard_night(tmp_path_factory.mktemp("kills"))
    for place in places:
        night.switch.num_passed, night.switch.at = 0, place
        try:
            if night.drive():
                break
        except Killed:
            continue
    night.switch.at = None
    assert night.drive()
    check_whole(night)


def test_a_suggestion_that_was_never_written_down_is_run(tmp_path: Path) -> None:
    night = case(tmp_path)
    lost = night.searches["lane-small"].ask()
    assert lost is not None
    night.drive()
    trials = [record for record in records_of(night) if record.kind == "trial"]
    assert len(trials) == 6 and lost.parameters in [record.parameters for record in trials]


def test_what_the_launcher_has_and_the_journal_does_not_is_cancelled(tmp_path: Path) -> None:
    night = case(tmp_path)
    night.launcher.submit(Job("2026-11-30.stray-0001.1", ("true",), tmp_path / "stray"))
    night.drive()
    assert any("stray-0001" in note for note in night.state().notes)
