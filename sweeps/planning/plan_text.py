"""From the text of a plan to a checked `Plan`; every mistake is one line that names file, field and cure."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from perception.config import RunConfig, flatten
from perception.errors import UserError, nearest
from pipelines.configs import CONFIGS, named_config, with_options
from sweeps.night.failure_rules import rule_from_plan
from sweeps.planning import plan as plans
from sweeps.planning.plan import FIGURES, METRICS, ModelPlan, Plan
from sweeps.planning.space import SearchSpace, as_value, assignments, check_sampler, parameter_from

_Table = TypeVar("_Table")

RESERVED = {
    "task": "the model decides it",
    "name": "the model decides it",
    "data.source": "write data = ... at the model",
    "data.format": "write format = ... at the model",
    "train.num_samples": "write num_samples = ... at the model",
    "train.seed": "write seeds = [...] at the model",
    "train.initial_checkpoint": "population-based training sets it",
    "train.target_metric": "write [models.target]",
    "train.target_value": "write [models.target]",
    "distributed.num_ranks": "write num_nodes and ranks_per_node at the model",
}
"""Fields of a configuration that a plan sets in another way."""

_SWITCHES = {"pruning": "name", "population": "size", "scaling": "ranks"}
"""A model's table → the field that turns it on."""

_PARAMETER_FIELDS = {"low", "high", "log", "step", "choices", "grid_points"}


def parse_plan(text: str, path: str) -> Plan:
    """Raises UserError for the first mistake."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists without end
        raise UserError(f"{path}: not TOML: {error}") from None
    _refuse_secrets(table, path)
    models = table.pop("models", [])
    if not isinstance(models, list) or not all(isinstance(row, dict) for row in models):
        raise UserError(f"{path}: models must be tables: write [[models]]")
    rows = table.pop("failures", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: failures must be tables: write [[failures]]")
    rules = tuple(rule_from_plan(row, f"{path}: failures[{index}]") for index, row in enumerate(rows))
    for name in ("text", "path"):
        if name in table:
            raise UserError(f"{path}: field {name} is unknown")
    if "budget" not in table:
        raise UserError(f"{path}: [budget] is missing: give max_jobs, rank_hours, deadline or max_minutes")
    plan = build(Plan, {**table, "models": [], "text": text, "path": path}, path, "")
    _check_night(plan, path)
    built = tuple(_model(row, index, path, plan.launcher) for index, row in enumerate(models))
    if not built:
        raise UserError(f"{path}: [[models]] is missing: nothing to do; models are {', '.join(CONFIGS)}")
    names = [model.model for model in built]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: model {name} stands twice: a second plan may search another space")
    for model in built:
        if model.sampler == "grid" and plan.search.storage != "journal":
            raise UserError(f"{path}: models.{model.model}.sampler = grid is for search.storage = journal only")
    return dataclasses.replace(plan, models=built, failures=rules)


def build(cls: type[_Table], table: Mapping[str, Any], where: str, prefix: str) -> _Table:
    """A dataclass from a table: names, types and what must be there. `prefix`: how fields are called in messages."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in table:
        if name not in fields:
            raise UserError(f"{where}: field {prefix}{name} is unknown{nearest(name, fields)}")
    for name, f in fields.items():
        if name not in table and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: field {prefix}{name} is missing")
    return cls(**{name: _convert(hints[name], value, where, prefix + name) for name, value in table.items()})


def _convert(hint: Any, value: Any, where: str, name: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} must be a table of fields, not {value!r}")
        return build(hint, value, where, f"{name}.")
    if typing.get_origin(hint) is typing.Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            raise UserError(f'{where}: {name} = "{shown}" is unknown{nearest(str(shown), allowed)}')
        return value
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list):
            raise UserError(f"{where}: {name} must be a list, not {value!r}")
        return tuple(_convert(item, part, where, name) for part in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
        words = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
        raise UserError(f"{where}: {name} must be {words.get(hint.__name__, hint.__name__)}, not {value!r}")
    if hint in (int, float) and not (math.isfinite(value) and value >= 0):
        raise UserError(f"{where}: {name} = {value}: must be finite and not negative")
    return value


def _check_night(plan: Plan, where: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}", plan.name):
        raise UserError(f'{where}: name = "{plan.name}": must be of letters, digits and dashes, at most 40')
    budget = plan.budget
    if not (budget.max_jobs or budget.rank_hours or budget.deadline or budget.max_minutes):
        raise UserError(f"{where}: [budget] bounds nothing: give max_jobs, rank_hours, deadline or max_minutes")
    if budget.deadline and not re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", budget.deadline):
        raise UserError(f'{where}: budget.deadline = "{budget.deadline}": write hours and minutes, UTC, e.g. "07:00"')
    if plan.retries.max_attempts < 1 or plan.retries.give_up_after < 1:
        raise UserError(f"{where}: retries.max_attempts and retries.give_up_after: must be at least 1")
    for name, variable in [
        ("search.url_variable", plan.search.url_variable),
        *(("notify.url_variables", variable) for variable in plan.notify.url_variables),
    ]:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise UserError(f"{where}: {name} names an environment variable: letters, digits and underscores")
    if plan.slurm.container and not plan.image:
        raise UserError(f"{where}: slurm.container = {plan.slurm.container}, but no image is given: write image = ...")
    if plan.image and plan.launcher == "slurm" and not plan.slurm.container:
        raise UserError(f'{where}: image = "{plan.image}": slurm.container is missing: write "pyxis" or "docker" there')


def _refuse_secrets(table: Mapping[str, Any], where: str) -> None:
    """Before anything else reads them, and without repeating them."""

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for part, inner in value.items():
                walk(inner, f"{name}.{part}" if name else part)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, name)
        elif isinstance(value, str):
            if re.search(r"://[^/\s@:]*:[^/\s@]+@", value):
                raise UserError(
                    f"{where}: {name} holds a password: put the URL into an environment variable and name that in "
                    "search.url_variable or notify.url_variables"
                )
            if value.startswith("sqlite") and name.startswith("search"):
                raise UserError(
                    f"{where}: {name}: SQLite is locked when several write to it: take journal for one controller, "
                    "postgresql for several"
                )
            if name == "search.storage" and "://" in value:
                raise UserError(
                    f"{where}: {name}: write postgresql, and give the URL in the environment variable that "
                    "search.url_variable names"
                )

    walk(table, "")


def _model(row: dict[str, Any], index: int, path: str, launcher: str) -> ModelPlan:
    if not isinstance(row.get("model"), str):
        raise UserError(f"{path}: models, number {index + 1}: field model is missing; one of {', '.join(CONFIGS)}")
    name = row["model"]
    prefix = f"models.{name}."
    try:
        config = named_config(name)
    except UserError as error:
        raise UserError(f"{path}: models, number {index + 1}: {error}") from None
    if config.name != name:
        raise UserError(f"{path}: models, number {index + 1}: give a model by name, not a file: {', '.join(CONFIGS)}")
    own = {key: value for key, value in row.items() if key not in ("space", "overrides", "objectives", "constraints")}
    objectives = _objectives(row.get("objectives"), config.task, path, prefix)
    overrides = _dotted(row.get("overrides", {}), path, f"{prefix}overrides", lambda value: not isinstance(value, dict))
    # Checked before the space: its defaults are those of the model with the overrides laid over it.
    _check_names(overrides, config, path, f"{prefix}overrides")
    data = own.get("data", "generated")
    base = _overlaid(config, data, overrides, f"{path}: {prefix}overrides")
    space = _space(row.get("space", {}), base, data, overrides, path, f"{prefix}space")
    constraints = _constraints(row.get("constraints", []), config.task, path, prefix)
    model = build(ModelPlan, {**own, "objectives": [], "space": {"parameters": []}}, path, prefix)
    for section, field in _SWITCHES.items():
        if row.get(section) and field not in row[section]:
            raise UserError(f"{path}: {prefix}{section}.{field} is missing: without it the table does nothing")
    model = dataclasses.replace(
        model,
        objectives=objectives,
        space=space,
        overrides={key: as_value(value) for key, value in overrides.items()},
        constraints=constraints,
    )
    _check_model(model, base, path, prefix, launcher)
    return model


def _objectives(value: Any, task: str, path: str, prefix: str) -> tuple[plans.Objective, ...]:
    first = next(iter(METRICS[task]))
    if not isinstance(value, list) or not value:
        raise UserError(f'{path}: {prefix}objectives is missing: e.g. objectives = ["{first}"]')
    found = []
    for item in value:
        table = {"metric": item} if isinstance(item, str) else item
        if not isinstance(table, dict) or not isinstance(table.get("metric"), str):
            raise UserError(f'{path}: {prefix}objectives: give names, e.g. "{first}", or tables with metric, direction')
        usual = _check_metric(table["metric"], task, path, f"{prefix}objectives")
        found.append(build(plans.Objective, {"direction": usual, **table}, path, f"{prefix}objectives."))
    if len({objective.metric for objective in found}) < len(found):
        raise UserError(f"{path}: {prefix}objectives: a metric stands twice")
    return tuple(found)


def _constraints(value: Any, task: str, path: str, prefix: str) -> tuple[plans.Constraint, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{path}: {prefix}constraints must be tables: write [[models.constraints]]")
    found = [build(plans.Constraint, item, path, f"{prefix}constraints.") for item in value]
    for constraint in found:
        _check_metric(constraint.metric, task, path, f"{prefix}constraints")
        if (constraint.at_most is None) == (constraint.at_least is None):
            raise UserError(f"{path}: {prefix}constraints.{constraint.metric}: give either at_most or at_least")
    return tuple(found)


def _check_metric(name: str, task: str, path: str, field: str) -> plans.Direction:
    known = {**METRICS[task], **FIGURES}
    if name not in known:
        raise UserError(f'{path}: {field}: metric "{name}" is unknown to task {task}{nearest(name, known)}')
    return known[name]


def _dotted(table: Any, path: str, field: str, is_leaf: typing.Callable[[Any], bool]) -> dict[str, Any]:
    """Dotted names, whether they were written in quotes or not."""
    if not isinstance(table, dict):
        raise UserError(f"{path}: {field} must be a table")
    found: dict[str, Any] = {}
    for name, value in table.items():
        if is_leaf(value) or not isinstance(value, dict):
            found[name] = value
        else:
            found.update({f"{name}.{rest}": inner for rest, inner in _dotted(value, path, field, is_leaf).items()})
    return found


def _check_names(names: Mapping[str, Any], config: RunConfig, path: str, field: str) -> None:
    known = flatten(config)
    for name in names:
        if name in RESERVED:
            raise UserError(f"{path}: {field}.{name}: {RESERVED[name]}")
        if name not in known:
            hint = nearest(name, known)
            if not hint.startswith("; did"):
                leaves = [full for full in known if full.split(".")[-1] == name.split(".")[-1]]
                listed = f"; `python -m pipelines show-config {config.name}` lists all names"
                hint = f'; did you mean "{leaves[0]}"?' if leaves else listed
            raise UserError(f"{path}: {field}.{name}: no such field of {config.name}{hint}")


def _overlaid(config: RunConfig, data: Any, values: Mapping[str, Any], where: str) -> RunConfig:
    try:
        return with_options(config, data if isinstance(data, str) else None, None, assignments(values))
    except (UserError, TypeError) as error:
        raise UserError(f"{where}: {str(error).removeprefix('--set ')}") from None


def _space(
    table: Any, config: RunConfig, data: Any, overrides: Mapping[str, Any], path: str, field: str
) -> SearchSpace:
    rows = _dotted(table, path, field, lambda value: isinstance(value, dict) and bool(_PARAMETER_FIELDS & set(value)))
    _check_names(rows, config, path, field)
    known = flatten(config)
    parameters = []
    for name, row in sorted(rows.items()):
        where = f"{path}: {field}.{name}"
        if name in overrides:
            raise UserError(f"{where}: stands under overrides too: leave one out")
        if not isinstance(row, dict):
            raise UserError(
                f"{where} must be a table: low and high, or choices; to fix a value, put it under overrides"
            )
        parameters.append(parameter_from(name, row, known[name], where))
    space = SearchSpace(tuple(parameters))
    base = named_config(config.name)
    for parameter in space.parameters:
        for value in parameter.choices or (parameter.at(0.0), parameter.at(1.0)):
            _overlaid(base, data, {**overrides, parameter.name: value}, f"{path}: {field}")
    for place in (0.0, 1.0):
        corner = {parameter.name: parameter.at(place) for parameter in space.parameters}
        _overlaid(base, data, {**overrides, **corner}, f"{path}: {field}, all parameters at one end")
    return space


def _check_model(model: ModelPlan, config: RunConfig, path: str, prefix: str, launcher: str) -> None:
    def refuse(field: str, cure: str) -> typing.NoReturn:
        raise UserError(f"{path}: {prefix}{field}: {cure}")

    if launcher == "local" and model.data != "generated" and not Path(model.data).is_dir():
        refuse("data", f'"{model.data}" is no folder; give one, or generated')
    if model.share <= 0:
        refuse("share", "must be above 0")
    if model.num_nodes < 1 or model.ranks_per_node < 1:
        refuse("num_nodes, ranks_per_node", "must be at least 1")
    if launcher == "local" and model.num_nodes > 1:
        refuse("num_nodes", f"{model.num_nodes} nodes need launcher = slurm")
    if not model.seeds or len(set(model.seeds)) < len(model.seeds):
        refuse("seeds", "give at least one, each once")
    if model.time_limit_minutes <= 0:
        refuse("time_limit_minutes", "must be above 0")
    if model.max_trials and not model.space.parameters:
        refuse("max_trials", "nothing is searched: give [models.space]")
    if model.champion_repeats + model.default_repeats == 0 and model.space.parameters:
        refuse("default_repeats", "must be above 0, or nothing tells a better configuration from noise")
    if model.target is not None:
        direction = _check_metric(model.target.metric, config.task, path, f"{prefix}target")
        if model.target.metric in FIGURES or direction == "minimize":
            allowed = [name for name, direction in METRICS[config.task].items() if direction == "maximize"]
            refuse("target.metric", f"must be a metric of the evaluation that rises: {', '.join(allowed)}")
        if not 0 < model.target.value <= 1:
            refuse("target.value", f"{model.target.value:g} is never reached: metrics are from 0 to 1, e.g. 0.7")
    used = [*(row.metric for row in model.objectives), *(row.metric for row in model.constraints)]
    aimed = [name for name in used if name.startswith("target_")]
    if aimed and model.target is None:
        refuse("target", f"is missing, which {aimed[0]} is the time to: give [models.target]")
    check_sampler(model.sampler, model.space, len(model.objectives), f"{path}: {prefix}sampler")
    _check_pruning(model, model.num_samples or config.train.num_samples, refuse)
    _check_scaling(model, launcher, refuse)
    _check_population(model, model.num_samples or config.train.num_samples, refuse)


def _check_pruning(model: ModelPlan, num_samples: int, refuse: typing.Callable[[str, str], typing.NoReturn]) -> None:
    pruning = model.pruning
    if pruning.name == "none":
        return
    if not 0 < pruning.min_samples < num_samples:
        refuse("pruning.min_samples", f"must be above 0 and below the {num_samples:,} samples of a whole trial")
    if pruning.reduction_factor < 2:
        refuse("pruning.reduction_factor", "must be at least 2")
    if pruning.min_trials < 2:
        refuse("pruning.min_trials", "must be at least 2")
    if model.objectives[0].metric in FIGURES:
        refuse(
            "pruning", f"the first objective, {model.objectives[0].metric}, is not evaluated on the way: name = none"
        )


def _check_scaling(model: ModelPlan, launcher: str, refuse: typing.Callable[[str, str], typing.NoReturn]) -> None:
    ranks, per_node = model.scaling.ranks, model.scaling.ranks_per_node
    if not ranks:
        return
    if sorted(set(ranks)) != list(ranks) or ranks[0] != 1:
        refuse("scaling.ranks", "must begin with 1, which the others are compared with, and rise")
    if min(model.scaling.repeats, model.scaling.num_samples_per_rank, per_node) < 1:
        refuse("scaling.repeats, scaling.num_samples_per_rank, scaling.ranks_per_node", "must be at least 1")
    for count in ranks:
        if count > per_node and count % per_node:
            refuse("scaling.ranks", f"{count} ranks do not fill nodes of {per_node} (scaling.ranks_per_node)")
        if count > per_node and launcher == "local":
            refuse("scaling.ranks", f"{count} ranks on nodes of {per_node} are several nodes: launcher = slurm")


def _check_population(model: ModelPlan, num_samples: int, refuse: typing.Callable[[str, str], typing.NoReturn]) -> None:
    population = model.population
    if not population.size:
        return
    if not model.num_samples:
        refuse("num_samples", "give it with a population: the generations of all its members follow from it")
    if population.size < 4:
        refuse("population.size", "must be at least 4, or 0 for none")
    if not 0 < population.replaced_share <= 0.5:
        refuse("population.replaced_share", "must be above 0 and at most 0.5")
    if not 0 < population.samples_per_generation <= num_samples // 2:
        refuse("population.samples_per_generation", f"must be above 0 and at most half of the {num_samples:,} samples")
    if not model.space.parameters:
        refuse("population", "nothing is searched: give [models.space]")
    if model.pruning.name != "none":
        refuse("pruning.name", "must be none with a population, which replaces its worst itself")
    if len(model.objectives) > 1:
        refuse("objectives", "a population compares by one")
    if model.target is not None:
        refuse("target", "not with a population: its runs begin with trained weights, so their times tell nothing")
