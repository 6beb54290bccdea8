"""A launcher, a clock and a search in memory, for tests of the controller: hours of a night pass in a moment.

Nothing is trained: a fake job writes the files that a real one would, with made-up figures.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.job import Job, JobStatus
from sweeps.night.trials import Outcome
from sweeps.planning.space import SearchSpace
from sweeps.search.search import Suggestion


class Killed(BaseException):
    """What a SIGKILL would be: nothing of the controller runs after it."""


@dataclass
class KillSwitch:
    """Kills the controller at the n-th place where it touches the world; None: never."""

    at: int | None = None
    num_passed: int = 0

    def passed(self) -> None:
        self.num_passed += 1
        if self.at is not None and self.num_passed > self.at:
            self.at = None
            raise Killed


@dataclass
class FakeClock:
    time: float = 1_800_000_000.0
    step_seconds: float = 1.0
    num_waits: int = 0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.num_waits += 1
        assert self.num_waits < 200_000, "the night does not end"
        self.time += self.step_seconds


@dataclass(frozen=True)
class Behaviour:
    """What a start of a job does."""

    seconds: float = 20.0
    ending: str = "finished"
    """A status of result.json, or: crash (exit code 1 and no result), truncated, nan, vanish (lost), node_fail.
    deaf: it never ends, whatever it is told."""
    value: float = 0.5
    curve: Sequence[tuple[int, float]] = ()
    """(samples, value) of evaluations, at equal distances in time."""
    log: str = ""
    checkpoint_seconds: float = 5.0
    """A checkpoint is written so often; a step a second."""


@dataclass
class _Run:
    job: Job
    behaviour: Behaviour
    status: JobStatus
    began: float = 0.0
    num_evaluated: int = 0
    begun_step: int = 0
    cancelled: bool = False


@dataclass
class FakeLauncher:
    """Keeps its jobs when a controller dies; every name is started at most once, or the test fails."""

    clock: FakeClock
    slots: int = 4
    behave: Callable[[Job], Behaviour] = field(default=lambda job: Behaviour())
    switch: KillSwitch = field(default_factory=KillSwitch)
    name: str = "local"
    nodes: Sequence[str] = ("node0",)
    runs: dict[str, _Run] = field(default_factory=dict)
    submissions: list[str] = field(default_factory=list)
    """Names in the order in which they were taken."""
    excluded: set[str] = field(default_factory=set)
    most_running: int = 0

    def num_slots(self) -> int:
        return self.slots

    def num_nodes(self) -> int:
        return len(self.nodes)

    def hardware(self) -> str:
        return "4 x fake"

    def submit(self, job: Job) -> str:
        return self.submit_many([job])[0]

    def submit_many(self, jobs: Sequence[Job]) -> list[str]:
        self.switch.passed()
        for job in jobs:
            if job.name not in self.runs:
                self.submissions.append(job.name)
                job.run_folder.mkdir(parents=True, exist_ok=True)
                status = JobStatus(job.name, str(len(self.runs)), "pending")
                self.runs[job.name] = _Run(job, self.behave(job), status)
            # In the middle of a batch too.
            self.switch.passed()
        return [self.runs[job.name].status.id for job in jobs]

    def poll(self) -> dict[str, JobStatus]:
        self.advance()
        return {name: run.status for name, run in self.runs.items() if run.status.reason != "vanished"}

    def cancel(self, name: str) -> None:
        self.switch.passed()
        self.runs[name].cancelled = True

    def adopt(self, prefix: str) -> dict[str, JobStatus]:
        return {name: status for name, status in self.poll().items() if name.startswith(prefix)}

    def exclude(self, nodes: Sequence[str]) -> None:
        self.excluded |= set(nodes)

    def close(self) -> None:
        pass

    def advance(self) -> None:
        """To the clock's time: jobs end, evaluate, obey; what waits begins."""
        now = self.clock.time
        for run in self.runs.values():
            if run.status.state == "running":
                self._look_after(run, now)
            elif run.status.state == "pending" and run.cancelled:
                run.status = _replaced(run.status, state="ended", reason="CANCELLED", ended_utc=now)
        free = self.slots - sum(run.job.num_ranks for run in self.runs.values() if run.status.state == "running")
        for run in self.runs.values():
            if run.status.state == "pending" and run.job.num_ranks <= free:
                free -= run.job.num_ranks
                run.began = now
                node = next(node for node in self.nodes if node not in self.excluded)
                run.begun_step = _newest_step(run.job.run_folder)
                (run.job.run_folder / "result.json").unlink(missing_ok=True)
                run.status = _replaced(run.status, state="running", started_utc=now, nodes=(node,), num_starts=1)
        running = sum(run.job.num_ranks for run in self.runs.values() if run.status.state == "running")
        self.most_running = max(self.most_running, running)

    def _look_after(self, run: _Run, now: float) -> None:
        folder, behaviour = run.job.run_folder, run.behaviour
        elapsed = min(now - run.began, behaviour.seconds)
        run.status = _replaced(run.status, allocated_seconds=now - run.began)
        due = len(behaviour.curve) if elapsed >= behaviour.seconds else _num_due(behaviour, elapsed)
        for samples, value in behaviour.curve[run.num_evaluated : due]:
            row = {"step": samples, "samples": samples, "seconds": elapsed, "validation/culane_f1_50": value}
            _append(folder / "metrics.jsonl", json.dumps(row) + "\n")
        run.num_evaluated = max(run.num_evaluated, due)
        if not behaviour.curve:
            _append(folder / "metrics.jsonl", json.dumps({"step": run.begun_step + int(elapsed), "loss": 1.0}) + "\n")
        saved = run.begun_step + int(elapsed // behaviour.checkpoint_seconds * behaviour.checkpoint_seconds)
        if saved > run.begun_step:
            checkpoints = folder / "checkpoints"
            checkpoints.mkdir(exist_ok=True)
            (checkpoints / f"step-{saved:08d}.json").write_text("{}")
        if behaviour.ending == "deaf":
            return
        if run.cancelled:
            self._end(run, "preempted")
        elif (folder / "control.json").exists():
            self._end(run, "pruned")
        elif elapsed >= behaviour.seconds:
            self._end(run, behaviour.ending)

    def _end(self, run: _Run, ending: str) -> None:
        folder = run.job.run_folder
        exit_code: int | None = {"finished": 0, "pruned": 0, "target_reached": 0, "preempted": 75}.get(ending, 1)
        reason = f"exit code {exit_code}"
        if ending in ("finished", "pruned", "target_reached", "preempted", "diverged", "failed", "nan"):
            value = float("nan") if ending == "nan" else run.behaviour.value
            status = "finished" if ending == "nan" else ending
            write_result(folder, status, value, run.status.allocated_seconds)
            os.utime(folder / "result.json", (self.clock.time, self.clock.time))
            exit_code = 0 if ending == "nan" else exit_code
        elif ending == "truncated":
            (folder / "result.json").write_text('{"status": "finished", "metr')
            exit_code = 0
        elif ending == "node_fail":
            exit_code, reason = None, "NODE_FAIL"
        elif ending == "vanish":
            exit_code, reason = None, "vanished"
        if run.behaviour.log:
            _append(folder / "job.log", run.behaviour.log)
        state = "lost" if ending == "vanish" else "ended"
        run.status = _replaced(run.status, state=state, exit_code=exit_code, reason=reason, ended_utc=self.clock.time)


@dataclass
class FakeSearch:
    """Draws at random; its trials outlive the controller, as a storage on the disk does."""

    space: SearchSpace
    switch: KillSwitch = field(default_factory=KillSwitch)
    seed: int = 0
    fixed: list[Mapping[str, Any]] = field(default_factory=list)
    """Suggestions to begin with."""
    asked: dict[int, Suggestion] = field(default_factory=dict)
    told: dict[int, tuple[Outcome, tuple[float, ...]]] = field(default_factory=dict)
    reports: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    excesses: dict[int, Mapping[str, float]] = field(default_factory=dict)
    most: int | None = None
    """Suggestions, as of a grid."""

    def ask(self) -> Suggestion | None:
        self.switch.passed()
        number = len(self.asked)
        if self.most is not None and number >= self.most:
            return None
        drawn = self.space.draw(random.Random(f"{self.seed}/{number}"))
        suggestion = Suggestion(number, dict(self.fixed[number]) if number < len(self.fixed) else drawn)
        self.asked[number] = suggestion
        self.switch.passed()
        return suggestion

    def report(self, number: int, num_samples: int, value: float) -> None:
        assert number in self.asked and number not in self.told
        self.reports.setdefault(number, []).append((num_samples, value))

    def tell(
        self,
        number: int,
        values: Sequence[float] | None,
        outcome: Outcome,
        excesses: Mapping[str, float] | None = None,
    ) -> Outcome:
        self.switch.passed()
        told = (outcome, tuple(values or ()))
        assert number in self.asked
        assert self.told.setdefault(number, told) == told, "told twice, and not the same"
        self.excesses[number] = dict(excesses or {})
        self.switch.passed()
        return outcome

    def close(self) -> None:
        pass

    def running(self) -> list[Suggestion]:
        return [suggestion for number, suggestion in self.asked.items() if number not in self.told]


def write_result(folder: Path, status: str, value: float, seconds: float) -> None:
    content = {
        "status": status,
        "cause": "",
        "metrics": {"culane_f1_50": value, "tusimple_fp": value},
        "throughput": {"images_per_second": 50.0, "scaling_factor": None},
        "lost_scaling": {"data": 0.1, "exposed_allreduce": 0.0, "straggler": 0.0},
        "checkpoint": {"path": None, "sha256": None, "weights_sha256": None},
        "seconds": seconds,
        "samples": 100,
    }
    temporary = folder / f".result.{os.getpid()}"
    temporary.write_text(json.dumps(content))
    temporary.replace(folder / "result.json")


def _num_due(behaviour: Behaviour, elapsed: float) -> int:
    every = behaviour.seconds / (len(behaviour.curve) + 1)
    return min(len(behaviour.curve), int(elapsed / every))


def _newest_step(folder: Path) -> int:
    steps = [int(path.stem.removeprefix("step-")) for path in folder.glob("checkpoints/step-*.json")]
    return max(steps, default=0)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _replaced(status: JobStatus, **changes: Any) -> JobStatus:
    import dataclasses

    return dataclasses.replace(status, **changes)
