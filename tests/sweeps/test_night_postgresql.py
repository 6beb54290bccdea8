"""Two controllers on two plans at once, over one root and one PostgreSQL database."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sweeps.ledger.history import History
from sweeps.night.night import find_nights
from tests.sweeps.test_night import command, environment, num_lines, state_of, wait_for, write_plan
from tests.sweeps.test_search_postgresql import PASSWORD, url

pytestmark = pytest.mark.services
__all__ = ["url"]


def test_two_plans_at_once_share_a_database_and_one_is_killed(url: str, tmp_path: Path) -> None:
    root = tmp_path / "nights"
    shared = {**environment(1.0), "SWEEPS_STORAGE_URL": url}
    plans = [write_plan(tmp_path, name=name, max_trials=10) for name in ("one", "two")]
    for plan in plans:
        plan.write_text(plan.read_text() + '\n[search]\nstorage = "postgresql"\n')

    def begin(plan: Path, *more: str) -> subprocess.Popen[str]:
        words = command("nightly", plan, "--root", root, *more)
        return subprocess.Popen(words, env=shared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first, second = begin(plans[0]), begin(plans[1])
    wait_for(lambda: root.is_dir() and len(find_nights(root)) == 2)
    journal = next(night.folder.journal for night in find_nights(root) if night.plan_name == "one")
    wait_for(lambda: num_lines(journal) >= 30)
    first.kill()
    first.communicate()
    first = begin(plans[0], "--resume")
    outs = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), "\n".join(outs)
    for night in find_nights(root):
        state = state_of(root, night.folder.name)
        trials = [record for record in state.records if record.kind == "trial"]
        assert night.is_closed and len(trials) == 10
        assert {record.status for record in trials} <= {"finished", "answered"}
        # Trials of one study have numbers of their own, whichever controller asked for them.
        assert len({record.trial for record in trials}) == 10
    numbers = [
        r.trial for one in find_nights(root) for r in state_of(root, one.folder.name).records if r.kind == "trial"
    ]
    assert len(set(numbers)) == 20
    assert len(History(root).nights()) == 2
    written = [path for path in root.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert not written and not any(PASSWORD in out for out in outs)


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
