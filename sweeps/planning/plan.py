"""What a night is to do: a typed plan, read from a commented TOML file; sweeps/plans/nightly.toml shows every field.

Every name is checked when the plan is read: models, fields of their configurations, metrics, samplers.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perception.config import RunConfig
from perception.errors import UserError
from pipelines.configs import named_config, with_options
from sweeps.night.failure_rules import FailureRule
from sweeps.planning.space import SearchSpace, assignments

Direction = Literal["maximize", "minimize"]
Sampler = Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
PrunerName = Literal["none", "asha", "median", "hyperband"]
JobKind = Literal["trial", "champion", "default", "scaling"]

METRICS: dict[str, dict[str, Direction]] = {
    "lane": {
        "culane_f1_50": "maximize",
        "culane_f1_75": "maximize",
        "culane_mf1": "maximize",
        "tusimple_accuracy": "maximize",
        "tusimple_fp": "minimize",
        "tusimple_fn": "minimize",
        "tusimple_f1": "maximize",
    },
    "sign": {
        "ap50_class_agnostic": "maximize",
        "ap50_superclass": "maximize",
        "ap50": "maximize",
        "ap": "maximize",
    },
}
"""A task → the metrics of its result.json that can be searched for, and which way is better."""

FIGURES: dict[str, Direction] = {
    "images_per_second": "maximize",
    "seconds": "minimize",
    "num_parameters": "minimize",
    "latency_seconds": "minimize",
    "target_seconds": "minimize",
    "target_samples": "minimize",
}
"""Other figures of result.json, of every task."""

EVALUATIONS_TO_TARGET = 20
"""In a run that notes its time to accuracy, where nothing else says when to evaluate."""


@dataclass(frozen=True)
class Objective:
    """What a search makes better. The first one of a model is what is pruned by."""

    metric: str
    """Of METRICS or FIGURES."""
    direction: Direction
    """Where the plan leaves it out: as METRICS and FIGURES have it."""


@dataclass(frozen=True)
class Constraint:
    """A trial that breaks it is kept, but is no answer."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None

    def excess(self, value: float) -> float:
        """Above 0 where it is broken."""
        if self.at_most is not None:
            return value - self.at_most
        assert self.at_least is not None
        return self.at_least - value


@dataclass(frozen=True)
class Pruning:
    """Which trials are ended early; resources are samples seen."""

    name: PrunerName = "none"
    min_samples: int = 0
    """First rung; a trial is compared there, and at each multiple by reduction_factor below num_samples."""
    reduction_factor: int = 3
    """asha, hyperband: one in so many goes on from a rung to the next."""
    min_trials: int = 4
    """median: nothing is ended before so many have passed the same rung."""


@dataclass(frozen=True)
class Scaling:
    """Short runs for the scaling factor: the model's own configuration on several numbers of ranks."""

    ranks: tuple[int, ...] = ()
    """E.g. [1, 2, 4, 8, 16]. Empty: none."""
    ranks_per_node: int = 8
    """More ranks than these take several nodes; the trials' own ranks_per_node plays no part."""
    repeats: int = 1
    num_samples_per_rank: int = 2000
    """Length; the batch of each rank is the same on all numbers of ranks."""

    def shape(self, ranks: int) -> tuple[int, int]:
        """(nodes, ranks on each of them) of the run on so many ranks."""
        per_node = min(ranks, self.ranks_per_node)
        return math.ceil(ranks / per_node), per_node


@dataclass(frozen=True)
class Target:
    """Every run of the model notes at which evaluation it first reached this, and goes on. Where no metric of the
    evaluation is searched for (but target_seconds, say), it ends there.
    """

    metric: str
    """Of METRICS, and one of which more is better."""
    value: float


@dataclass(frozen=True)
class Population:
    """Population-based training instead of independent trials: the worst take over checkpoints of the best."""

    size: int = 0
    """Members; 0: none."""
    samples_per_generation: int = 0
    """Each member trains so long, then they are compared."""
    replaced_share: float = 0.25
    """So many of the worst take over from as many of the best."""


@dataclass(frozen=True)
class ModelPlan:
    """What is done for one model."""

    model: str
    """As `python -m pipelines train` names it, e.g. lane-small."""
    objectives: tuple[Objective, ...]
    space: SearchSpace
    """Empty: only repeats and scaling runs."""
    data: str = "generated"
    format: str = ""
    """Of a folder; empty: what lies in it tells."""
    num_samples: int = 0
    """Length of a whole trial in samples seen, over all ranks; 0: the model's own."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    share: float = 1.0
    """Of the night's rank-hours, against the shares of the other models."""
    priority: int = 0
    """Where slots are scarce the higher goes first, whatever its share."""
    max_trials: int = 0
    """0: as many as the budget allows."""
    constraints: tuple[Constraint, ...] = ()
    sampler: Sampler = "tpe"
    sampler_seed: int = 0
    pruning: Pruning = Pruning()
    seeds: tuple[int, ...] = (0,)
    """A trial trains under the first; repeats under the others in turn, then under numbers that follow the last."""
    default_repeats: int = 3
    """Runs of the model's own configuration (with the overrides below) under several seeds."""
    champion_repeats: int = 3
    """Of the best known configuration of past nights: their spread, and the one above, is the noise band."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Dotted name → value, for every run of this model."""
    scaling: Scaling = Scaling()
    target: Target | None = None
    population: Population = Population()
    time_limit_minutes: float = 1440.0
    """A job that takes longer is stopped."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def ends_at_target(self) -> bool:
        """A run that went on would cost time and tell nothing; where accuracy is searched for it must go on."""
        return self.target is not None and all(objective.metric in FIGURES for objective in self.objectives)

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(objective.direction for objective in self.objectives)


@dataclass(frozen=True)
class Budget:
    """The night ends at whichever comes first; at least one is given."""

    max_jobs: int = 0
    """All kinds together; 0: no such bound."""
    rank_hours: float = 0.0
    """Slots (GPUs) times the hours for which they are held; 0: no such bound."""
    deadline: str = ""
    """By the clock, UTC, e.g. "07:00": the next time that it is so late after the begin."""
    max_minutes: float = 0.0
    """Since the begin; 0: no such bound."""
    early_end: bool = True
    """End a model's search when what is left of its budget cannot improve its best by more than the noise."""


@dataclass(frozen=True)
class LocalSettings:
    """Of the launcher "local"."""

    slots: int = 0
    """Ranks that run at once; 0: the GPUs, or else the cores."""


@dataclass(frozen=True)
class SlurmSettings:
    """Of the launcher "slurm"."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gpus_per_node: int = 0
    """Asked for with --gpus-per-node; 0: one a rank is taken for granted and none asked for."""
    cpus_per_rank: int = 0
    """0: Slurm's own."""
    grace_seconds: int = 120
    """Before a job is killed it is told so long ahead, to write a checkpoint."""
    container: Literal["", "pyxis", "docker"] = ""
    """How the image is run on the nodes; empty: no image."""
    options: tuple[str, ...] = ()
    """More options of sbatch, as they are, e.g. ["--constraint=h100"]."""


@dataclass(frozen=True)
class SearchSettings:
    """Where the search keeps its trials."""

    storage: Literal["journal", "postgresql"] = "journal"
    """journal: a file in the night's folder, for one controller. postgresql: shared by several."""
    url_variable: str = "SWEEPS_STORAGE_URL"
    """Environment variable that holds the URL of the database: no password stands in a plan."""


@dataclass(frozen=True)
class Retries:
    """What is done about jobs that fail."""

    max_attempts: int = 3
    """Of one job, the first included; going on after a preemption is none."""
    give_up_after: int = 5
    """So many jobs fail in the same way before any succeeded: the night ends and says so."""


@dataclass(frozen=True)
class Retention:
    """What is kept on the disk."""

    disk_gib: float = 0.0
    """Of all nights together; the oldest checkpoints go first, champions' never. 0: no bound."""
    min_free_gib: float = 2.0
    """No job is started with less free."""
    keep_failed_checkpoints: bool = False


@dataclass(frozen=True)
class Notify:
    """Who is told in the morning."""

    url_variables: tuple[str, ...] = ()
    """Environment variables that hold Apprise URLs: they contain secrets, so no URL stands in a plan."""
    only_problems: bool = False
    """Nothing is sent after a night without regressions and failures."""


@dataclass(frozen=True)
class Plan:
    """One night's work."""

    name: str
    models: tuple[ModelPlan, ...]
    budget: Budget
    launcher: Literal["local", "slurm"] = "local"
    image: str = ""
    """Container image of the jobs, by name of containers/ or as a reference; empty: they run on the host."""
    root: str = "nights"
    """Folder of all nights, records and champions; --root has the last word."""
    price_per_rank_hour: float | None = None
    """For the cost to a target, in whatever money; None: not known."""
    local: LocalSettings = LocalSettings()
    slurm: SlurmSettings = SlurmSettings()
    search: SearchSettings = SearchSettings()
    retries: Retries = Retries()
    retention: Retention = Retention()
    notify: Notify = Notify()
    failures: tuple[FailureRule, ...] = ()
    """[[failures]]: words in a log that tell of a failure, and what to do; they go before the built-in table."""
    text: str = ""
    """The file as it was read."""
    path: str = ""

    def model(self, name: str) -> ModelPlan:
        return next(model for model in self.models if model.model == name)


def load_plan(path: Path) -> Plan:
    """Read and check a plan. Raises UserError with one line that names file, field and cure."""
    from sweeps.planning.plan_text import parse_plan

    try:
        # Some editors begin a file with a mark.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{path}: cannot be read ({reason}); sweeps/plans/nightly.toml is an example") from None
    return parse_plan(text, str(path))


def run_config(
    plan: ModelPlan, parameters: Mapping[str, Any], seed: int = 0, num_samples: int = 0, num_ranks: int = 0
) -> RunConfig:
    """The configuration that a job trains. Raises UserError where values do not go together."""
    settings = job_assignments(plan, parameters, seed, num_samples, num_ranks)
    return with_options(named_config(plan.model), plan.data, None, settings)


def job_assignments(
    plan: ModelPlan, parameters: Mapping[str, Any], seed: int = 0, num_samples: int = 0, num_ranks: int = 0
) -> list[str]:
    """What a job sets by --set: overrides, length, seed, evaluations at the rungs, then its parameters.

    `num_samples` 0: a whole trial's; `num_ranks` 0: the plan's.
    """
    fixed = dict(plan.overrides)
    if plan.format:
        fixed["data.format"] = plan.format
    if num_samples or plan.num_samples:
        fixed["train.num_samples"] = num_samples or plan.num_samples
    fixed["train.seed"] = seed
    merged = {**fixed, **parameters}
    # Shorter runs, those of scaling, are not compared on the way.
    first = plan.pruning.min_samples if plan.pruning.name != "none" and not num_samples else 0
    if plan.target is not None and not (plan.ends_at_target or first or num_samples):
        own = named_config(plan.model).train
        if not own.evaluate_every_steps:
            first = max(1, (plan.num_samples or own.num_samples) // EVALUATIONS_TO_TARGET)
    if first and "train.evaluate_every_steps" not in merged:
        config = with_options(named_config(plan.model), plan.data, None, assignments(merged))
        batch = config.train.global_batch_on(num_ranks or plan.num_ranks)
        # Rounded up, so that each multiple of the first rung is passed by one more evaluation.
        merged["train.evaluate_every_steps"] = math.ceil(first / batch)
    return assignments(merged)


def training_argv(
    plan: ModelPlan,
    parameters: Mapping[str, Any],
    run_folder: Path,
    seed: int = 0,
    num_samples: int = 0,
    num_ranks: int = 0,
    python: Sequence[str] = (sys.executable,),
) -> tuple[str, ...]:
    """The job's command, without its number of ranks, which is the launcher's to give."""
    argv = [*python, "-m", "pipelines", "train", plan.model, "--out", str(run_folder), "--resume-if-possible"]
    argv += ["--data", plan.data]
    if plan.target is not None and plan.ends_at_target and not num_samples:
        argv += ["--target", f"{plan.target.metric}={json.dumps(plan.target.value)}"]
    for setting in job_assignments(plan, parameters, seed, num_samples, num_ranks):
        argv += ["--set", setting]
    return tuple(argv)


def repeat_seed(plan: ModelPlan, repeat: int) -> int:
    """Seed of the repeat of that number, from 0, of a default or champion run: never the trials' own."""
    others = plan.seeds[1:]
    return others[repeat] if repeat < len(others) else max(plan.seeds) + 1 + repeat - len(others)


def figure(result: Mapping[str, Any], name: str) -> float | None:
    """A figure of METRICS or FIGURES in what result.json holds; None where it is missing or not finite."""
    places = {
        "images_per_second": ("throughput", "images_per_second"),
        "seconds": ("seconds",),
        "num_parameters": ("model", "num_parameters"),
        "latency_seconds": ("model", "latency_seconds"),
        "target_seconds": ("target", "reached_seconds"),
        "target_samples": ("target", "reached_samples"),
    }
    value: Any = result
    for part in places.get(name, ("metrics", name)):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < float("inf") else None


def study_name(plan: ModelPlan) -> str:
    """Of the model's study: trials that can be compared share it, over plans and nights, where the storage does.

    It holds the hash of the space and of whatever else values depend on; how many are run, and where, plays no part.
    """
    described = {
        "objectives": [[objective.metric, objective.direction] for objective in plan.objectives],
        "constraints": [[row.metric, row.at_most, row.at_least] for row in plan.constraints],
        "data": [plan.data, plan.format],
        "length": plan.num_samples,
        "ranks": plan.num_ranks,
        "seed": plan.seeds[0],
        "overrides": sorted(assignments(plan.overrides)),
    }
    if plan.target is not None and any(objective.metric.startswith("target_") for objective in plan.objectives):
        described["target"] = [plan.target.metric, plan.target.value]
    digest = hashlib.sha256(json.dumps(described, separators=(",", ":")).encode()).hexdigest()[:8]
    return f"{plan.model}-{plan.space.hash()}-{digest}"
