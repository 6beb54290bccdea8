"""What is kept on the disk, and what goes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.night.events import NightOpened, to_row
from sweeps.night.retention import Kept, apply_retention, over_budget, protected_folders, useless
from sweeps.planning.plan import Retention
from sweeps.record import JobRecord, NightRecord

MIB = 2**20


def record(root: Path, night: str, job: str, status: str, ended: float, kind: str = "trial", mib: int = 1) -> JobRecord:
    folder = root / night / "jobs" / job
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000100.pt").write_bytes(b"x" * (mib * MIB))
    (folder / "checkpoints" / "step-00000100.json").write_text("{}")
    (folder / "result.json").write_text("{}")
    made = JobRecord(night, job, "demo", "lane", "trial", status=status, run_folder=str(folder), ended_utc=ended)
    return dataclasses.replace(made, kind=kind)  # type: ignore[arg-type]


def kept_jobs(root: Path) -> set[str]:
    return {path.parent.parent.name for path in root.glob("*/jobs/*/checkpoints/*.pt")}


def test_checkpoints_of_pruned_failed_and_scaling_runs_go_and_nothing_else_of_them(tmp_path: Path) -> None:
    jobs = [
        record(tmp_path, "n1", "finished", "finished", 1),
        record(tmp_path, "n1", "pruned", "pruned", 2),
        record(tmp_path, "n1", "failed", "failed", 3),
        record(tmp_path, "n1", "lost", "lost", 4),
        record(tmp_path, "n1", "cancelled", "cancelled", 5),
        record(tmp_path, "n1", "scaling", "finished", 6, kind="scaling"),
    ]
    removal = apply_retention(tmp_path, Retention(), jobs, [], [])
    assert kept_jobs(tmp_path) == {"finished"}
    assert removal.num_jobs == 5 and removal.num_bytes == pytest.approx(5 * MIB, rel=0.01)
    assert len(list(tmp_path.glob("*/jobs/*/result.json"))) == 6
    # Again: there is nothing left to do.
    assert apply_retention(tmp_path, Retention(), jobs, [], []).num_jobs == 0


def test_failed_ones_stay_where_the_plan_says_so(tmp_path: Path) -> None:
    jobs = [record(tmp_path, "n1", "failed", "failed", 1), record(tmp_path, "n1", "pruned", "pruned", 2)]
    apply_retention(tmp_path, Retention(keep_failed_checkpoints=True), jobs, [], [])
    assert kept_jobs(tmp_path) == {"failed"}


def test_over_the_budget_the_oldest_go_first_and_champions_never(tmp_path: Path) -> None:
    past = [record(tmp_path, "n1", f"old{n}", "finished", n) for n in range(4)]
    jobs = [record(tmp_path, "n2", f"new{n}", "finished", 10 + n) for n in range(3)]
    removal = apply_retention(tmp_path, Retention(disk_gib=4.1 / 1024), jobs, past, [past[0].run_folder])
    assert kept_jobs(tmp_path) == {"old0", "new0", "new1", "new2"}
    assert removal.num_jobs == 3 and not removal.problems
    assert "checkpoints of 3 jobs removed" in removal.line()


def test_champions_that_alone_are_too_large_are_said(tmp_path: Path) -> None:
    jobs = [record(tmp_path, "n1", "best", "finished", 1, mib=3), record(tmp_path, "n1", "other", "finished", 2)]
    removal = apply_retention(tmp_path, Retention(disk_gib=1 / 1024), jobs, [], [jobs[0].run_folder])
    assert kept_jobs(tmp_path) == {"best"}
    assert "disk_gib" in removal.problems[0]


PLAN = """
name = "{name}"
[budget]
max_jobs = 9
[[models]]
model = "lane"
objectives = ["culane_f1_50"]
num_samples = 900
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
"""


def night_of(name: str, plan: str, text: str = PLAN) -> NightRecord:
    return NightRecord(name, plan, text.format(name=plan), "local", 2, "fake", "", "", 0.0)


def test_champions_of_every_plan_of_the_root_are_protected_and_nights_that_run(tmp_path: Path) -> None:
    past = [
        dataclasses.replace(
            record(tmp_path, night, job, "finished", number, kind=kind),
            plan=plan,
            objective_name="culane_f1_50",
            objective=value,
            config_hash=job,
        )
        for number, (night, plan, job, kind, value) in enumerate(
            [
                ("n1", "demo", "best", "trial", 0.9),
                ("n1", "demo", "worse", "trial", 0.5),
                ("n2", "other", "others", "trial", 0.7),
                ("n2", "other", "others_worse", "trial", 0.6),
                ("n3", "old", "picked", "champion", 0.3),
                ("n3", "old", "tried", "trial", 0.4),
                ("n4", "demo", "newest", "trial", 0.8),
            ]
        )
    ]
    nights = [
        night_of("n1", "demo"),
        night_of("n2", "other"),
        night_of("n3", "old", "not TOML"),
        night_of("n4", "demo"),
    ]
    record(tmp_path, "n5", "running", "", 99)
    (tmp_path / "n5" / "journal.jsonl").write_text(json.dumps(to_row(NightOpened(0.0, night_of("n5", "other")))) + "\n")
    protected = protected_folders(tmp_path, nights, past)
    apply_retention(tmp_path, Retention(disk_gib=1e-6), [], past, protected)
    assert kept_jobs(tmp_path) == {"best", "newest", "others", "picked", "running"}


def test_a_job_that_was_answered_has_no_folder() -> None:
    assert useless([JobRecord("n", "j", "p", "m", "trial", status="answered")], Retention()) == []


@given(
    sizes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20), st.booleans()), max_size=30),
    budget=st.integers(1, 2000),
)
def test_no_more_goes_than_must(sizes: list[tuple[int, int, bool]], budget: int) -> None:
    kept = [Kept(Path(str(n)), size, float(ended), champion) for n, (size, ended, champion) in enumerate(sizes)]
    going = over_budget(kept, budget)
    total, freed = sum(one.num_bytes for one in kept), sum(one.num_bytes for one in going)
    assert not any(one.is_protected for one in going)
    others = [one for one in kept if not one.is_protected and one.num_bytes and one not in going]
    assert total - freed <= budget or not others
    if going:
        assert total - freed + going[-1].num_bytes > budget
        assert all(one.ended_utc >= going[-1].ended_utc for one in others)
    assert over_budget(kept, 0) == []
