"""What a search says of its trials: plain rows, no Optuna."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sweeps.planning.space import Sample

Outcome = Literal["complete", "pruned", "failed", "diverged"]
State = Literal["waiting", "running", "complete", "pruned", "failed", "diverged"]


@dataclass(frozen=True)
class Suggestion:
    """What to try next."""

    number: int
    """Of the trial in its study."""
    parameters: Sample
    note: str = ""
    """Why it was enqueued; empty: the sampler's own."""


@dataclass(frozen=True)
class TrialRow:
    """A trial as the study keeps it."""

    number: int
    parameters: Sample
    state: State
    values: tuple[float, ...] | None = None
    """Of a complete trial, one an objective."""
    curve: dict[int, float] = field(default_factory=dict)
    """Samples → value of the first objective, as reported on the way; only where there is one objective."""
    excesses: dict[str, float] = field(default_factory=dict)
    """Constraint → how far it is broken; none above 0: the trial is an answer."""
    owner: str = ""
    note: str = ""
    started_utc: float | None = None
    ended_utc: float | None = None

    @property
    def feasible(self) -> bool:
        return all(excess <= 0 for excess in self.excesses.values())


@dataclass(frozen=True)
class Importance:
    """Share of each parameter in reaching the best tenth, from PED-ANOVA; `reason` says why there is none."""

    shares: dict[str, float]
    num_trials: int
    reason: str = ""
