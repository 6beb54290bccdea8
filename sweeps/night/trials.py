"""One model's trials between the search, which suggests and is told, and the night, which runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sweeps.night.ingest import Result
from sweeps.night.metrics_tail import MetricsTail
from sweeps.night.planned_jobs import run_folder_of
from sweeps.night.state import JobState
from sweeps.planning.plan import ModelPlan, figure
from sweeps.search.pruning import Decision, decide

Outcome = Literal["complete", "pruned", "failed", "diverged"]
MOST_REPEATED_SUGGESTIONS = 20
"""So many in a row that were all tried before: the space is exhausted, or the search has settled."""

OF_THE_CONFIGURATION = ("out_of_memory", "time_limit", "not_finite")
"""Failures that an equal configuration would most likely meet again."""


class Suggested(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


class Search(Protocol):
    """What is used of `search.Search`; tests put another in its place."""

    def ask(self) -> Suggested | None:
        """None: there will never be anything to try any more."""

    def report(self, number: int, num_samples: int, value: float) -> None: ...

    def tell(
        self,
        number: int,
        values: Sequence[float] | None,
        outcome: Outcome,
        excesses: Mapping[str, float] | None = None,
    ) -> Outcome: ...

    def running(self) -> Sequence[Suggested]: ...

    def close(self) -> None: ...


class NoSearch:
    """Of a model that is only repeated and measured."""

    def ask(self) -> Suggested | None:
        return None

    def report(self, number: int, num_samples: int, value: float) -> None:
        return None

    def tell(
        self,
        number: int,
        values: Sequence[float] | None,
        outcome: Outcome,
        excesses: Mapping[str, float] | None = None,
    ) -> Outcome:
        return outcome

    def running(self) -> Sequence[Suggested]:
        return ()

    def close(self) -> None:
        return None


@dataclass
class ModelTrials:
    plan: ModelPlan
    search: Search
    can_ask: Callable[[], bool] = lambda: True
    """A search can always be asked; members of a population wait for their own last generation."""
    num_repeated: int = 0
    """Suggestions in a row that had been tried before."""
    tails: dict[str, MetricsTail] = field(default_factory=dict)
    """Running job → what is read of its evaluations."""
    curves: dict[int, dict[int, float]] = field(default_factory=dict)
    """Trial → samples → value, of every trial that has reported; what pruning compares."""

    @property
    def is_adaptive(self) -> bool:
        """What is asked depends on what was told: asking early would be asking blindly."""
        return self.plan.sampler in ("tpe", "gp", "cmaes") or self.plan.population.size > 0

    def measured(self, job: JobState) -> list[tuple[int, float]]:
        """Evaluations of a running trial that are new."""
        if self.plan.pruning.name == "none" or not self.plan.objectives or job.planned.kind != "trial":
            return []
        tail = self.tails.get(job.name)
        if tail is None:
            known = job.measured[-1][0] if job.measured else -1
            metrics = run_folder_of(job.planned) / "metrics.jsonl"
            tail = self.tails[job.name] = MetricsTail(metrics, self.plan.objectives[0].metric, known)
        return list(tail.read())

    def learn(self, job: JobState) -> None:
        """Of a job from the journal: what its trial had reported."""
        if job.planned.trial is not None and job.planned.kind == "trial" and job.measured:
            self.curves[job.planned.trial] = dict(job.measured)

    def report(self, job: JobState, samples: int, value: float) -> Decision:
        """Tell the search of an evaluation, and decide what becomes of the trial after it."""
        number = job.planned.trial
        assert number is not None
        self.curves.setdefault(number, {})[samples] = value
        self.search.report(number, samples, value)
        direction = self.plan.objectives[0].direction
        return decide(self.plan.pruning, direction, job.planned.num_samples, number, self.curves)

    def tell(self, job: JobState, result: Result) -> None:
        """How the trial ended; `result` is of the run itself, or of the equal one that answers it.

        May be said again: a controller that was killed cannot know whether it was.
        """
        record = job.record
        assert record is not None
        self.tails.pop(job.name, None)
        if record.trial is None or record.kind != "trial":
            return
        values = [figure(result.values, objective.metric) for objective in self.plan.objectives]
        whole = [value for value in values if value is not None]
        excesses = {}
        for constraint in self.plan.constraints:
            found = figure(result.values, constraint.metric)
            if found is not None:
                excesses[constraint.metric] = constraint.excess(found)
        ending = result.status if record.status == "answered" else record.status
        outcome: Outcome = "failed"
        if ending in ("finished", "target_reached") and len(whole) == len(values):
            outcome = "complete"
        elif ending in ("pruned", "diverged"):
            outcome = "pruned" if ending == "pruned" else "diverged"
        elif record.failure in OF_THE_CONFIGURATION:
            # As what diverged: samplers that learn keep away from there, where a failure alone would tell them nothing.
            outcome = "diverged"
        self.search.tell(record.trial, whole if outcome == "complete" else None, outcome, excesses)
