"""What a plan's jobs are made of: names, commands, and the hash by which equal configurations are known."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.config import flatten
from pipelines.configs import named_config, with_options
from sweeps.job import Job
from sweeps.night.events import JobPlanned
from sweeps.planning.plan import ModelPlan, repeat_seed, training_argv
from sweeps.record import JobRecord, Kind

_SEED = "train.seed"
_LENGTH = "train.num_samples"


@dataclass(frozen=True)
class Request:
    """A run that is wanted, before it has a name."""

    kind: Kind
    parameters: Mapping[str, Any]
    seed: int
    trial: int | None = None
    num_nodes: int = 1
    ranks_per_node: int = 1
    num_samples: int = 0
    """0: a whole trial's."""


@dataclass(frozen=True)
class Planner:
    """Turns requests of one model into jobs of one night."""

    plan: ModelPlan
    jobs_folder: Path
    """Absolute: run folders lie in it."""
    defaults: Mapping[str, Any]
    """Dotted name → value of the model's own configuration on the plan's data."""

    def config_hash(self, request: Request) -> str:
        """Sixteen hex digits of what is trained: model, data, and every setting that is not the model's own.

        The seed is not in it. Scaling runs have the same one on every number of ranks, and never that of a trial.
        """
        settings = {**self.plan.overrides, **request.parameters}
        changed = {
            name: value
            for name, value in settings.items()
            if name not in (_SEED, _LENGTH) and json.dumps(value) != json.dumps(self.defaults.get(name))
        }
        described = {
            "model": self.plan.model,
            "data": self.plan.data,
            "format": self.plan.format,
            "settings": changed,
            "length": "scaling" if request.kind == "scaling" else self.num_samples(request),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    def num_samples(self, request: Request) -> int:
        own = request.parameters.get(_LENGTH) or self.defaults[_LENGTH]
        if _LENGTH in request.parameters:
            return int(own)
        return int(request.num_samples or self.plan.num_samples or own)

    def job(self, request: Request, number: int, same_as: str, utc: float) -> JobPlanned:
        """The event by which the request becomes a job; `number` counts the model's jobs."""
        name = job_name(self.plan.model, number)
        ranks = request.num_nodes * request.ranks_per_node
        argv = training_argv(
            self.plan, request.parameters, self.jobs_folder / name, request.seed, request.num_samples, ranks
        )
        # The ledger compares the throughput of like with like: it must know what the plan set.
        shown = self.plan.overrides if request.kind == "scaling" else request.parameters
        return JobPlanned(
            utc=utc,
            job=name,
            model=self.plan.model,
            kind=request.kind,
            argv=argv,
            config_hash=self.config_hash(request),
            trial=request.trial,
            parameters=dict(shown),
            space_hash=self.plan.space.hash() if request.kind == "trial" else "",
            seed=request.seed,
            num_nodes=request.num_nodes,
            ranks_per_node=request.ranks_per_node,
            priority=self.plan.priority,
            num_samples=self.num_samples(request),
            same_as=same_as,
        )

    def is_comparable(self, record: JobRecord) -> bool:
        """A past run whose figures a trial with its parameters could be held against: all else was the same."""
        return self.config_hash(self.trial(0, record.parameters)) == record.config_hash

    def trial(self, trial: int, parameters: Mapping[str, Any]) -> Request:
        plan = self.plan
        return Request("trial", parameters, plan.seeds[0], trial, plan.num_nodes, plan.ranks_per_node)

    def repeats(self, kind: Kind, parameters: Mapping[str, Any]) -> list[Request]:
        """Of the model's own configuration, or of the best known one."""
        plan = self.plan
        count = plan.default_repeats if kind == "default" else plan.champion_repeats
        return [
            Request(kind, parameters, repeat_seed(plan, repeat), None, plan.num_nodes, plan.ranks_per_node)
            for repeat in range(count)
        ]

    def scaling(self, num_slots: int, num_nodes: int) -> tuple[list[Request], list[int]]:
        """Runs on each number of ranks, and those numbers that are more than there are slots.

        Where there is one node only, all ranks are on it.
        """
        scaling = self.plan.scaling
        requests, too_many = [], []
        for ranks in scaling.ranks:
            if ranks > num_slots:
                too_many.append(ranks)
                continue
            nodes, per_node = scaling.shape(ranks) if num_nodes > 1 else (1, ranks)
            for repeat in range(scaling.repeats):
                requests.append(
                    Request(
                        "scaling",
                        {},
                        repeat_seed(self.plan, repeat),
                        num_nodes=nodes,
                        ranks_per_node=per_node,
                        num_samples=ranks * scaling.num_samples_per_rank,
                    )
                )
        return requests, too_many


def planner(plan: ModelPlan, jobs_folder: Path) -> Planner:
    assignments = [f"data.format={plan.format}"] if plan.format else []
    return Planner(plan, jobs_folder, flatten(with_options(named_config(plan.model), plan.data, None, assignments)))


def job_name(model: str, number: int) -> str:
    """E.g. lane-small-0017; letters, digits and dashes only: a dot ends it in the names that launchers are given."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model)
    return f"{plain}-{number:04d}"


def is_of_night(name: str, night: str) -> bool:
    """Whether a launcher's name is of this night: that of night 2026-11-30.2 begins with `2026-11-30.` too."""
    return re.fullmatch(re.escape(night) + r"\.[A-Za-z0-9-]+-\d{4,}\.\d+", name) is not None


def attempt_name(night: str, job: str, attempt: int) -> str:
    return f"{night}.{job}.{attempt}"


def launcher_job(planned: JobPlanned, name: str, plan: ModelPlan, image: str, excluded_nodes: tuple[str, ...]) -> Job:
    """The attempt of that name, as the launcher takes it."""
    return Job(
        name=name,
        argv=planned.argv,
        run_folder=run_folder_of(planned),
        num_nodes=planned.num_nodes,
        ranks_per_node=planned.ranks_per_node,
        time_limit_seconds=60.0 * plan.time_limit_minutes,
        priority=planned.priority,
        image=image,
        excluded_nodes=excluded_nodes,
    )


def run_folder_of(planned: JobPlanned) -> Path:
    return Path(planned.argv[planned.argv.index("--out") + 1])
