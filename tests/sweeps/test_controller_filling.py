"""In which order free slots and queues are filled, over a fake launcher in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.job import Job
from tests.sweeps.fake_launcher import Behaviour, FakeLauncher
from tests.sweeps.night_cases import Case, case, make_plan, records_of


@dataclass
class Watched(FakeLauncher):
    """Like Slurm it is given more than it has slots for; notes what it is given together, and when."""

    name: str = "slurm"
    night: Case | None = None
    calls: list[tuple[float, int, list[str]]] = field(default_factory=list)
    """Time, configurations drawn so far, names."""

    def submit_many(self, jobs: Sequence[Job]) -> list[str]:
        assert self.night is not None
        drawn = sum(len(search.asked) for search in self.night.searches.values())
        self.calls.append((self.clock.time, drawn, [job.name for job in jobs]))
        return super().submit_many(jobs)


def watched(night: Case) -> Watched:
    fake = night.launcher
    assert isinstance(fake, FakeLauncher)
    night.launcher = Watched(fake.clock, fake.slots, fake.behave, fake.switch, night=night)
    return night.launcher


def test_free_slots_are_filled_before_the_rest_is_drawn_up(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 40, "champion_repeats": 0}), slots=4)
    launcher = watched(night)
    assert night.drive()
    (began, drawn, first), (then, all_drawn, rest) = launcher.calls
    assert (len(first), drawn) == (4, 2), "two repeats of the default and two trials for four slots"
    assert (len(rest), all_drawn) == (38, 40)
    assert began == then, "and all of it in one turn"
    assert len(records_of(night)) == 42


def test_what_waits_begins_with_the_longest_by_samples_then_by_what_was_seen(tmp_path: Path) -> None:
    """sign has more samples, and turns out to be much shorter; what was given to the launcher stays as it is."""

    def behave(job: Job) -> Behaviour:
        return Behaviour(seconds=10 if ".sign-" in job.name else 40)

    sign = {"model": "sign", "metric": "images_per_second", "sampler": "tpe", "max_trials": 20, "default_repeats": 1}
    plan = make_plan({"sampler": "tpe", "max_trials": 20, "default_repeats": 1}, sign)
    longer = dataclasses.replace(plan.model("sign"), num_samples=1800)
    plan = dataclasses.replace(plan, models=(plan.model("lane-small"), longer))
    night = case(tmp_path, plan, behave, slots=6)
    night.searches["sign"].space = plan.models[0].space
    launcher = watched(night)
    assert night.drive()
    mixed = [["sign" in name for name in names] for _, _, names in launcher.calls]
    mixed = [are_sign for are_sign in mixed if len(set(are_sign)) == 2]
    assert len(mixed) >= 3
    assert mixed[0] == sorted(mixed[0], reverse=True), "more samples first"
    assert mixed[-1] == sorted(mixed[-1]), "more seconds first"
