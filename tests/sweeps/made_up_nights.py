"""Nights that never were, for tests alone: plausible records of many jobs, drawn from a seed.

Two models are searched over three parameters each with a known best value, a third is only measured. The objective
falls off around the best value with the stated spread; throughput is drawn around a stated scaling curve.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.record import Failure, JobRecord, Kind, NightRecord

SECONDS_PER_DAY = 86_400
FIRST_NIGHT_UTC = 1_793_397_600.0
"""2026-10-30 22:00 UTC."""
SPREAD = 0.006
HARDWARE = "8 x NVIDIA H100 80GB"
IMAGE = "sha256:" + hashlib.sha256(b"image").hexdigest()

PLAN = """
name = "nightly"
launcher = "slurm"
[budget]
rank_hours = 4000.0
[[models]]
model = "lane-small"
num_samples = 40000
[[models.objectives]]
metric = "culane_f1_50"
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
[models.space."optim.ema_decay_samples"]
low = 100
high = 10000
log = true
[models.space."optim.warmup_samples"]
low = 0
high = 4000
[[models]]
model = "sign"
num_samples = 30000
[[models.objectives]]
metric = "ap50_class_agnostic"
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
[models.space."optim.weight_decay"]
low = 1e-4
high = 1e-1
log = true
[models.space."optim.warmup_samples"]
low = 0
high = 4000
"""

FAILURES: tuple[tuple[Failure, str, str], ...] = (
    ("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate N GiB", "optim step"),
    ("collective_timeout", "Watchdog caught collective operation timeout: ALLREDUCE ran for N ms", "all-reduce"),
    ("hardware", "NVRM: Xid (PCI:<address>): N, uncorrectable ECC error", "kernel log"),
    ("data", "shard <path>: sha256 differs from the manifest's", "loader"),
    ("code", "KeyError: 'lanes'", "perception/tasks.py"),
    ("node", "node failed while the job ran", "scheduler"),
)


@dataclass(frozen=True)
class Planted:
    """What is wrong in the newest night."""

    slower_data: float = 0.0
    """Share of a step on many ranks that waiting for data takes more."""
    bad_node: str = ""
    """Half the jobs there fail by its hardware."""
    share_failing: float = 0.03
    gain: float = 0.05
    """By which the best configuration of each model is above the default."""


def history(
    num_nights: int, num_jobs: int, seed: int = 0, planted: Planted | None = None, num_nodes: int = 64
) -> list[tuple[NightRecord, list[JobRecord]]]:
    """Oldest first; what is planted is in the last."""
    planted = planted or Planted()
    quiet = Planted(gain=planted.gain)
    return [
        night_of(index, num_jobs, seed, planted if index == num_nights - 1 else quiet, num_nodes)
        for index in range(num_nights)
    ]


def night_of(
    index: int, num_jobs: int, seed: int, planted: Planted, num_nodes: int = 64
) -> tuple[NightRecord, list[JobRecord]]:
    generator = random.Random(f"{seed}/{index}")
    begin = FIRST_NIGHT_UTC + index * SECONDS_PER_DAY
    name = _date(begin)
    revision = hashlib.sha1(f"{seed}/{index // 2}".encode()).hexdigest()
    jobs: list[JobRecord] = []
    free = [begin] * num_nodes
    for number in range(num_jobs):
        place = min(range(num_nodes), key=lambda node: free[node])
        job = _job(generator, name, number, num_jobs, revision, planted, f"dgx{place:02d}", free[place], begin)
        free[place] = float(job.ended_utc or free[place]) + 2
        jobs.append(job)
    night = NightRecord(
        night=name,
        plan="nightly",
        plan_text=PLAN,
        launcher="slurm",
        num_slots=8 * num_nodes,
        hardware=HARDWARE,
        image=IMAGE,
        git_revision=revision,
        started_utc=begin,
        ended_utc=max((float(job.ended_utc or begin) for job in jobs), default=begin),
        closing="budget spent",
        num_planned=num_jobs + num_jobs // 100,
        controller_cpu_seconds=0.03 * num_jobs,
        budget_rank_seconds=4000 * 3600.0,
        champions={"lane-small": {"optim.lr": 2e-3, "optim.ema_decay_samples": 1000, "optim.warmup_samples": 800}},
    )
    return night, jobs


def empty_night(name: str = "2026-11-30", begin: float = FIRST_NIGHT_UTC) -> NightRecord:
    return NightRecord(
        night=name,
        plan="nightly",
        plan_text=PLAN,
        launcher="local",
        num_slots=2,
        hardware="2 cores",
        image="",
        git_revision="",
        started_utc=begin,
    )


def job_of(night: NightRecord, job: str, **changes: Any) -> JobRecord:
    """A finished trial of lane-small, but for the changes."""
    plain = JobRecord(
        night=night.night,
        job=job,
        plan=night.plan,
        model="lane-small",
        kind="trial",
        config_hash=hashlib.sha256(repr(job).encode("utf-8", "replace")).hexdigest(),
        status="finished",
        objective_name="culane_f1_50",
        objective=0.5,
        started_utc=night.started_utc,
        submitted_utc=night.started_utc,
        ended_utc=night.started_utc + 100.0,
        num_attempts=1,
        num_starts=1,
        rank_seconds_allocated=100.0,
        hardware=night.hardware,
    )
    return dataclasses.replace(plain, **changes)


def _job(
    generator: random.Random,
    night: str,
    number: int,
    num_jobs: int,
    revision: str,
    planted: Planted,
    node: str,
    free: float,
    begin: float,
) -> JobRecord:
    kinds = _kinds(num_jobs)
    kind, model, ranks = kinds[number] if number < len(kinds) else _TRIALS[number % 2]
    parameters, position = _parameters(generator, model) if kind == "trial" else ({}, 0.0)
    if kind == "champion":
        parameters = {"optim.lr": 2e-3, "optim.ema_decay_samples": 1000, "optim.warmup_samples": 800}
    metric = {"lane-small": "culane_f1_50", "sign": "ap50_class_agnostic"}.get(model, "")
    default = {"lane-small": 0.78, "sign": 0.86}.get(model, 0.0)
    value = default + planted.gain * (1 - position) if kind == "trial" else default
    value += 0.02 if kind == "champion" else 0.0
    value += generator.gauss(0, SPREAD)
    status, failure, signature, where = "finished", None, "", ""
    if kind == "trial" and position > 1.6 and generator.random() < 0.8:
        status, value = "pruned", value - 0.2 * generator.random()
    if node == planted.bad_node and generator.random() < 0.5:
        failure, signature, where = FAILURES[2]
    elif kind != "scaling" and generator.random() < planted.share_failing:
        failure, signature, where = generator.choice(FAILURES)
    if failure is not None:
        status = "failed"
    seconds = generator.uniform(900, 1500) * (0.35 if status == "pruned" else 0.5 if failure else 1.0)
    speed, lost = _throughput(generator, model, ranks, planted.slower_data)
    config = hashlib.sha256(json.dumps([model, kind if not parameters else "", parameters]).encode()).hexdigest()
    attempts = 2 if failure is None and generator.random() < 0.04 else 1
    allocated = ranks * seconds * (1.3 if attempts > 1 else 1.0)
    sets = " ".join(f"--set {key}={setting}" for key, setting in parameters.items())
    return JobRecord(
        night=night,
        job=f"{model}-{number:04d}",
        plan="nightly",
        model=model,
        kind=kind,
        trial=number if kind == "trial" else None,
        config_hash=config,
        space_hash="5f0c" if kind == "trial" else "",
        parameters=parameters,
        seed=number if kind in ("default", "champion", "scaling") else 0,
        num_nodes=max(1, ranks // 8),
        num_ranks=ranks,
        launcher="slurm",
        hardware=HARDWARE,
        image=IMAGE,
        git_revision=revision,
        data_manifest=hashlib.sha256(model.encode()).hexdigest(),
        status=status,
        cause=signature,
        failure=failure,
        failure_signature=signature,
        log_tail=f"step 812\n  in {where}\n{signature.replace('N', str(generator.randrange(99)))}\n" if failure else "",
        objective_name=metric,
        objective=value if metric and kind != "scaling" and failure is None else None,
        metrics={metric: value} if metric and failure is None else {},
        images_per_second=speed if failure is None else None,
        lost_scaling=lost if failure is None else {},
        seconds=seconds,
        samples=40_000,
        checkpoint_path=f"nights/{night}/jobs/{model}-{number:04d}/checkpoints/best.pt" if status == "finished" else "",
        checkpoint_sha256=hashlib.sha256(f"{night}{number}".encode()).hexdigest() if status == "finished" else "",
        command=f"python -m pipelines train {model} --ranks {ranks} {sets}".strip(),
        submitted_utc=begin,
        started_utc=free,
        ended_utc=free + allocated / ranks,
        num_attempts=attempts,
        num_starts=attempts,
        nodes=(node,),
        rank_seconds_allocated=allocated,
        rank_seconds_wasted=allocated if failure else allocated - ranks * seconds,
    )


_MODELS = ("lane-small", "sign")
_TRIALS: tuple[tuple[Kind, str, int], ...] = (("trial", "lane-small", 8), ("trial", "sign", 8))


def _kinds(num_jobs: int) -> list[tuple[Kind, str, int]]:
    """Repeats and scaling runs come first; a small night has fewer of them."""
    repeats = 4 if num_jobs >= 40 else 2
    kinds: list[tuple[Kind, str, int]] = []
    for model in _MODELS:
        kinds += [("default", model, 8)] * repeats
    kinds += [("champion", "lane-small", 8)] * repeats
    if num_jobs >= 60:
        for model in _MODELS:
            kinds += [("scaling", model, ranks) for ranks in (1, 2, 4, 8) for _ in range(3)]
    return kinds


def _parameters(generator: random.Random, model: str) -> tuple[dict[str, Any], float]:
    """A sample, and how far it is from the best one in decades."""
    rate = 10 ** generator.uniform(-4, -2)
    second = "optim.ema_decay_samples" if model == "lane-small" else "optim.weight_decay"
    low, high = (2, 4) if model == "lane-small" else (-4, -1)
    other = 10 ** generator.uniform(low, high)
    best_rate, best_other = (3e-3, 1000.0) if model == "lane-small" else (9.8e-3, 1e-2)
    distance = abs(math.log10(rate / best_rate)) + 0.4 * abs(math.log10(other / best_other))
    if model == "lane-small":
        other = round(other)
    return {"optim.lr": rate, second: other, "optim.warmup_samples": generator.randrange(4001)}, 1.2 * distance


def _throughput(generator: random.Random, model: str, ranks: int, slower_data: float) -> tuple[float, dict[str, float]]:
    one = {"lane-small": 640.0, "sign": 410.0}.get(model, 500.0)
    shares = {
        "data": 0.01,
        "exposed_allreduce": 0.006 * math.log2(2 * ranks),
        "straggler": 0.004 * math.log2(2 * ranks),
    }
    if ranks == 1:
        shares = {"data": 0.01, "exposed_allreduce": 0.0, "straggler": 0.0}
    elif slower_data and model == "lane-small":
        shares["data"] += slower_data
    speed = ranks * one * (1 - sum(shares.values())) / 0.99 * generator.gauss(1, 0.006)
    return speed, {name: share * generator.gauss(1, 0.03) for name, share in shares.items()}


def _date(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def keep(root: Any, nights: Sequence[tuple[NightRecord, list[JobRecord]]]) -> Any:
    """A `History` under a folder that holds these nights."""
    from sweeps.ledger.history import History

    kept = History(root)
    for night, jobs in nights:
        kept.append_night(night, jobs)
    return kept
