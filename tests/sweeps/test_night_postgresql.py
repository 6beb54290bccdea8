"""Two controllers on two plans at once, over one root and one PostgreSQL database."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from sweeps.ledger.history import History
from sweeps.night.night import find_nights
from sweeps.night.state import NightState
from tests.sweeps.test_night import command, environment, state_of, write_plan
from tests.sweeps.test_search_postgresql import PASSWORD, url
from tests.sweeps.waiting import end, wait_until

pytestmark = pytest.mark.services
__all__ = ["url"]
NUM_TRIALS, NUM_BEFORE_THE_KILL = 10, 5


def test_two_plans_at_once_share_a_database_and_one_is_killed(url: str, tmp_path: Path) -> None:
    """The first is killed while both have results and running jobs; none of them can end before the gates open."""
    root = tmp_path / "nights"
    names = ("one", "two")
    gates = {name: tmp_path / f"gate-{name}" for name in names}
    plans = {name: write_plan(tmp_path, name=name, max_trials=NUM_TRIALS) for name in names}
    for name in names:
        gates[name].mkdir()
        plans[name].write_text(plans[name].read_text() + '\n[search]\nstorage = "postgresql"\n')

    def night(name: str) -> NightState | None:
        found = [each for each in find_nights(root) if each.plan_name == name] if root.is_dir() else []
        return state_of(root, found[0].folder.name) if found else None

    def standing() -> dict[str, tuple[int, int]]:
        """Results, and jobs that are out, of each night."""
        states = {name: night(name) for name in names}
        return {name: (len(state.records), len(state.out)) if state else (0, 0) for name, state in states.items()}

    with contextlib.ExitStack() as stack:

        def begin(name: str, *more: str) -> subprocess.Popen[str]:
            # Each has the slots of a host for itself: both are to run at the same time.
            shared = {**environment(0.2), "SWEEPS_STORAGE_URL": url, "STAND_IN_GATE": str(gates[name])}
            shared["STAND_IN_HOST"] = str(tmp_path / f"seats-{name}")
            words = command("nightly", plans[name], "--root", root, *more)
            process = subprocess.Popen(words, env=shared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(end, process)
            return process

        # Also where the test fails: what waits at a gate ends by itself.
        stack.callback(lambda: [(gate / "open").touch() for gate in gates.values()])
        first = begin("one")
        # The first night of all makes the tables.
        wait_until(lambda: standing()["one"] == (0, 4), "4 jobs out in the first night", standing, first)
        second = begin("two")
        for gate in gates.values():
            for number in range(NUM_BEFORE_THE_KILL):
                (gate / f"token-{number}").touch()
        wait_until(
            lambda: all(results == NUM_BEFORE_THE_KILL and out == 4 for results, out in standing().values()),
            f"{NUM_BEFORE_THE_KILL} results and 4 jobs out in both nights",
            standing,
            first,
            second,
        )
        first.kill()
        first.communicate()
        first = begin("one", "--resume")
        for gate in gates.values():
            (gate / "open").touch()
        outs = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), "\n".join(outs)
    assert "took over" in outs[0], outs[0]
    numbers = []
    for found in find_nights(root):
        state = state_of(root, found.folder.name)
        trials = [record for record in state.records if record.kind == "trial"]
        assert found.is_closed and len(trials) == NUM_TRIALS
        assert state.num_controller_starts == (2 if found.plan_name == "one" else 1)
        assert {record.status for record in trials} <= {"finished", "answered"}
        numbers += [record.trial for record in trials]
    # Trials of one study have numbers of their own, whichever controller asked for them.
    assert len(set(numbers)) == 2 * NUM_TRIALS
    assert len(History(root).nights()) == 2
    written = [path for path in root.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert not written and not any(PASSWORD in out for out in outs)
    # Controllers alone need the URL: jobs do not see it.
    seen = [path.read_text().split() for path in root.glob("*/jobs/*/variables.txt")]
    assert seen and all("STAND_IN_GATE" in names and "SWEEPS_STORAGE_URL" not in names for names in seen)


def test_sqlite_is_refused_in_one_line(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text() + '\n[search]\nstorage = "postgresql"\n')
    done = subprocess.run(
        command("nightly", plan, "--root", tmp_path / "nights"),
        env={**os.environ, **environment(0.1), "SWEEPS_STORAGE_URL": "sqlite:///trials.db"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "SQLite is locked when several write to it" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not find_nights(tmp_path / "nights")
