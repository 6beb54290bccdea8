"""Population-based training as a search: what is asked next follows from the night's state alone, so it needs no
storage of its own, and a restarted controller asks for the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.night.ingest import read_result
from sweeps.night.planned_jobs import run_folder_of
from sweeps.night.state import SUCCESSES, JobState, NightState
from sweeps.night.trials import Outcome, Suggested
from sweeps.planning.plan import ModelPlan, figure
from sweeps.search.population import Finished, Next, first_generation, next_generation, num_generations

CHECKPOINT, LENGTH = "train.initial_checkpoint", "train.num_samples"


@dataclass(frozen=True)
class MemberSuggestion:
    number: int
    """generation * members + member."""
    parameters: Mapping[str, Any]


class PopulationSearch:
    """One model's population; each trial is one generation of one member."""

    def __init__(self, plan: ModelPlan, state: NightState, known: Sequence[Mapping[str, Any]] = ()) -> None:
        """`known`: configurations that the first members begin with."""
        self._plan, self._state = plan, state
        self._first = first_generation(
            plan.population, plan.space, plan.sampler_seed, [dict(sample) for sample in known]
        )
        self._num_generations = num_generations(plan.population, plan.num_samples)

    def can_ask(self) -> bool:
        """False while every member's next generation waits for one that is under way."""
        return self._next() is not None or self._num_planned() == self._plan.population.size * self._num_generations

    def ask(self) -> Suggested | None:
        following = self._next()
        if following is None:
            return None
        number = following.generation * self._plan.population.size + following.member
        parameters = {**following.parameters, LENGTH: self._plan.population.samples_per_generation}
        if following.initial_checkpoint:
            parameters[CHECKPOINT] = following.initial_checkpoint
        return MemberSuggestion(number, parameters)

    def report(self, number: int, num_samples: int, value: float) -> None:
        """Members are compared at the end of their generations only."""

    def tell(
        self,
        number: int,
        values: Sequence[float] | None,
        outcome: Outcome,
        excesses: Mapping[str, float] | None = None,
    ) -> Outcome:
        """Nothing to keep: the night's state has it."""
        return outcome

    def running(self) -> Sequence[Suggested]:
        return ()

    def close(self) -> None:
        """It has no storage."""

    def _trials(self) -> dict[int, JobState]:
        return {
            job.planned.trial: job
            for job in self._state.jobs.values()
            if job.planned.model == self._plan.model and job.planned.trial is not None
        }

    def _num_planned(self) -> int:
        return self._state.num_trials.get(self._plan.model, 0)

    def _next(self) -> Next | None:
        trials = self._trials()
        for first in self._first:
            if first.member not in trials:
                return first
        size = self._plan.population.size
        ended = {number: job for number, job in sorted(trials.items()) if job.record is not None}
        for number, job in ended.items():
            generation = number // size
            if generation + 1 < self._num_generations and number + size not in trials:
                everyone = [self._finished(other, one) for other, one in ended.items()]
                direction = self._plan.objectives[0].direction
                return next_generation(
                    self._plan.population,
                    self._plan.space,
                    direction,
                    self._plan.sampler_seed,
                    self._finished(number, job),
                    everyone,
                )
        return None

    def _finished(self, number: int, job: JobState) -> Finished:
        generation, member = divmod(number, self._plan.population.size)
        folder = run_folder_of(job.planned)
        value = None
        if job.record is not None and job.record.status in SUCCESSES:
            value = figure(read_result(folder).values, self._plan.objectives[0].metric)
        parameters = {name: v for name, v in job.planned.parameters.items() if name not in (CHECKPOINT, LENGTH)}
        return Finished(member, generation, parameters, value, str(folder))
