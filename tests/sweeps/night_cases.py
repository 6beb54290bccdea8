"""Nights for tests of the controller: plans, and the parts put together over a fake launcher and a fake search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.launchers.launcher import Launcher
from sweeps.night.budget import Limits
from sweeps.night.clock import StopSignals
from sweeps.night.controller import Controller
from sweeps.night.events import NightOpened
from sweeps.night.failures import classify
from sweeps.night.journal import Journal, read_journal
from sweeps.night.planned_jobs import planner
from sweeps.night.run import NightRun
from sweeps.night.state import NightState, fold
from sweeps.night.trials import ModelTrials, NoSearch, Search
from sweeps.planning.plan import Plan
from sweeps.planning.plan_text import parse_plan
from sweeps.record import JobRecord, NightRecord
from tests.sweeps.fake_launcher import Behaviour, FakeClock, FakeLauncher, FakeSearch, KillSwitch

MODEL = """
[[models]]
model = "{model}"
objectives = ["{metric}"]
num_samples = 900
share = {share}
priority = {priority}
max_trials = {max_trials}
default_repeats = {default_repeats}
champion_repeats = {champion_repeats}
ranks_per_node = {ranks_per_node}
sampler = "{sampler}"
{more}
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
"""
PRUNING = """
[models.pruning]
name = "asha"
min_samples = 100
reduction_factor = 3
"""
DEFAULTS: dict[str, Any] = {
    "model": "lane-small",
    "metric": "culane_f1_50",
    "share": 1.0,
    "priority": 0,
    "max_trials": 6,
    "default_repeats": 2,
    "champion_repeats": 2,
    "ranks_per_node": 1,
    "sampler": "random",
    "more": "",
}


def make_plan(
    *models: Mapping[str, Any], budget: str = "max_jobs = 1000", more: str = "", early_end: str = "false"
) -> Plan:
    """One of lane-small where no model is given; fields as in DEFAULTS."""
    text = f'name = "test"\n{more}\n[budget]\nearly_end = {early_end}\n{budget}\n[retention]\nmin_free_gib = 0.0\n'
    for model in models or ({},):
        text += MODEL.format(**{**DEFAULTS, **model})
    return parse_plan(text, "plan.toml")


@dataclass
class Case:
    """A night of a plan on a fake launcher, whose controllers may be killed and started again."""

    folder: Path
    plan: Plan
    launcher: Launcher
    clock: FakeClock
    switch: KillSwitch = field(default_factory=KillSwitch)
    deadline_seconds: float | None = None
    """After the begin."""
    champions: dict[str, dict[str, Any]] = field(default_factory=dict)
    searches: dict[str, FakeSearch] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    stop: StopSignals = field(default_factory=StopSignals)
    began_utc: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began_utc = self.clock.time
        for model in self.plan.models:
            self.searches.setdefault(model.model, FakeSearch(model.space, self.switch))

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def state(self) -> NightState:
        return fold(read_journal(self.journal))

    def take_up(self) -> NightRun:
        """As another process would: everything is read from the disk."""
        journal = _KillableJournal(self.journal, self.switch)
        state = fold(read_journal(self.journal))
        if state.night is None:
            deadline = None if self.deadline_seconds is None else self.began_utc + self.deadline_seconds
            budget = self.plan.budget
            night = NightRecord(
                "2026-11-30", "test", self.plan.text, "local", self.launcher.num_slots(), "fake", "", "", self.began_utc
            )
            import dataclasses

            night = dataclasses.replace(
                night,
                deadline_utc=deadline,
                budget_rank_seconds=budget.rank_hours * 3600 or None,
                champions=self.champions,
            )
            journal.append([NightOpened(self.clock.now(), night)])
            state.apply(NightOpened(self.clock.now(), night))
        assert state.night is not None
        searches: dict[str, Search] = dict(self.searches)
        return NightRun(
            night=state.night,
            plan=self.plan,
            folder=self.folder,
            state=state,
            journal=journal,
            launcher=self.launcher,
            trials={m.model: ModelTrials(m, searches.get(m.model, NoSearch())) for m in self.plan.models},
            planners={m.model: planner(m, self.folder / "jobs") for m in self.plan.models},
            limits=Limits(self.plan.budget.max_jobs or None, state.night.budget_rank_seconds, state.night.deadline_utc),
            clock=self.clock,
            say=self.said.append,
        )

    def drive(self) -> bool:
        """One controller, until the night has ended, it is stopped, or it is killed (Killed is raised)."""
        run = self.take_up()
        try:
            return Controller(run, classify, self.stop).drive()
        finally:
            run.journal.close()


class _KillableJournal(Journal):
    """Dies before a line, after half of it, or after it is on the disk."""

    def __init__(self, path: Path, switch: KillSwitch) -> None:
        super().__init__(path)
        self._switch = switch

    def append(self, events):  # type: ignore[no-untyped-def]
        if not events:
            return
        self._switch.passed()
        before = self.path.stat().st_size
        super().append(events)
        try:
            self._switch.passed()
        except BaseException:
            # Half of what was to be written has reached the disk.
            with self.path.open("r+b") as file:
                file.truncate(before + (self.path.stat().st_size - before) // 2)
            raise
        self._switch.passed()


def case(folder: Path, plan=None, behave=None, slots: int = 4, **more) -> Case:  # type: ignore[no-untyped-def]
    clock, switch = FakeClock(), KillSwitch()
    launcher = FakeLauncher(clock, slots, behave or (lambda job: Behaviour()), switch)
    return Case(folder, plan or make_plan(), launcher, clock, switch, **more)


def by_kind(records: list[JobRecord]) -> Counter[str]:
    return Counter(record.kind for record in records)


def records_of(night: Case) -> list[JobRecord]:
    return night.state().records
