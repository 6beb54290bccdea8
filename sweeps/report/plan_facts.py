"""What the report takes from a night's plan: objectives with their direction, and the ranges that were searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perception.errors import UserError
from sweeps.record import NightRecord

if TYPE_CHECKING:
    from sweeps.planning.plan import Constraint
    from sweeps.planning.space import Parameter


@dataclass(frozen=True)
class ModelFacts:
    objective: str = ""
    direction: str = ""
    """maximize or minimize; empty: not known."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """Dotted name → range; empty: not known."""
    others: tuple[tuple[str, str], ...] = ()
    """Further objectives with their directions."""
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True)
class PlanFacts:
    models: Mapping[str, ModelFacts] = field(default_factory=dict)
    price_per_rank_hour: float | None = None
    problem: str = ""
    """Why the plan could not be read, where it could not: the report goes without what it tells."""

    def model(self, name: str) -> ModelFacts:
        return self.models.get(name, ModelFacts())


def facts_of(night: NightRecord) -> PlanFacts:
    """Of the plan's text as the night was run by it."""
    if not night.plan_text.strip():
        return PlanFacts(problem="the record of the night holds no plan")
    from sweeps.planning.plan_text import parse_plan

    try:
        plan = parse_plan(night.plan_text, f"plan of night {night.night}")
    except UserError as error:
        return PlanFacts(problem=str(error))
    models = {
        model.model: ModelFacts(
            objective=model.objectives[0].metric if model.objectives else "",
            direction=model.objectives[0].direction if model.objectives else "",
            parameters={parameter.name: parameter for parameter in model.space.parameters},
            others=tuple((objective.metric, objective.direction) for objective in model.objectives[1:]),
            constraints=model.constraints,
        )
        for model in plan.models
    }
    return PlanFacts(models, plan.price_per_rank_hour)


def stated_direction(metric: str) -> str:
    """Of a metric that every version knows; empty for another."""
    from sweeps.planning.plan import FIGURES, METRICS

    for directions in (*METRICS.values(), FIGURES):
        if metric in directions:
            return directions[metric]
    return ""
