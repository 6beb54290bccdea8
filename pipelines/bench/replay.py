"""`bench replay PROFILE`: recorded computing, real all-reduce, so that schedules of many ranks can be compared here.

Each rank waits for the recorded times of an accelerator where it would compute, which takes no core. Variants of
the settings run in turn, round by round, so that what else the host does falls on all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception.config import DistributedConfig, RunConfig, override
from perception.cores import available_cores
from perception.distributed.failure import EXIT_PREEMPTED
from perception.errors import UserError
from perception.run_folder import check_folder_of, write_json
from perception.scaling.profile import StepProfile, read_profile, scaled, write_profile

if TYPE_CHECKING:
    from perception.replay import ReplayedSteps

BUSY_SHARE = 0.9
"""Busy cores above which waiting ranks no longer wake in time."""
LAG_SHARE = 0.05
"""Mean lag, as a share of the recorded step, above which the schedule was not kept."""


@dataclass(frozen=True)
class Variant:
    name: str
    distributed: DistributedConfig


@dataclass(frozen=True)
class Plan:
    """What every rank process of a replay does with each variant."""

    profile: StepProfile
    ranks: int
    steps: int
    jitter_fraction: float
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="PROFILE.json|NAME",
        help="a step recorded by `bench record`; or a model that `bench predict` knows, at that command's estimate",
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--node", default="dgx-h100", metavar="TYPE", help="of an estimate; as in `bench predict`")
    parser.add_argument("--batch", type=int, metavar="B", help="of an estimate: images of one GPU's step")
    parser.add_argument("--precision", choices=("amp", "fp32"), default="amp", help="of an estimate")
    parser.add_argument(
        "--images-per-second", type=float, metavar="R", help="stretch the step so that one rank of --node reaches R"
    )
    parser.add_argument("--engine", help="horovod, torch or auto")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="for all variants")
    parser.add_argument(
        "--compare",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="a variant with these settings, e.g. --compare distributed.bucket_mib=4; give it once for each",
    )
    parser.add_argument("--steps", type=int, default=50, help="measured steps of each variant in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slowdown",
        type=float,
        default=1.0,
        metavar="F",
        help="multiply all recorded times by F: this host reduces far more slowly than GPUs over NVLink do, so at the "
        "true pace there is little but all-reduce to see",
    )
    parser.add_argument(
        "--jitter-fraction",
        type=float,
        default=0.0,
        metavar="J",
        help="standard deviation of a rank's step, as a share of it (log-normal)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(options: argparse.Namespace) -> int:
    _check(options)
    profile, compute = _profile(options)
    if options.slowdown != 1:
        profile = scaled(profile, profile.images_per_second / options.slowdown, profile.device)
    variants = _variants(options.engine, options.set, options.compare, options.ranks)
    plan = Plan(profile, options.ranks, options.steps, options.jitter_fraction, options.seed)
    _check_memory(plan)
    print(f"REPLAY: compute is {compute}, the all-reduce is real on this host")
    print(_described(plan, variants, options.slowdown, options.rounds), flush=True)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        measured = measure_variants(plan, variants, options.rounds, Path(folder))
    rows = [summary(plan, variant, rounds) for variant, rounds in zip(variants, measured, strict=True)]
    print("\n".join(_table(rows, plan)), flush=True)
    if options.json is not None:
        profile_figures = {name: value for name, value in dataclasses.asdict(profile).items() if name != "gradients"}
        settings = {"ranks": plan.ranks, "rounds": options.rounds, "steps": plan.steps, "slowdown": options.slowdown}
        settings |= {"jitter_fraction": plan.jitter_fraction, "seed": plan.seed, "cores": available_cores()}
        write_json(
            options.json, {"replay": True, "compute": compute, "profile": profile_figures, **settings, "variants": rows}
        )
    return 0


def measure_variants(plan: Plan, variants: Sequence[Variant], rounds: int, folder: Path) -> list[list[ReplayedSteps]]:
    """Replay every variant once a round, in turn; by variant, then by round. Files go to `folder`.

    Turns in a row that differ in their buckets only share their processes, which are what takes long to start.
    """
    measured: list[list[ReplayedSteps]] = [[] for _ in variants]
    turns = [index for _ in range(rounds) for index in range(len(variants))]
    for _, group in groupby(turns, lambda index: _connection(variants[index].distributed)):
        indices = list(group)
        for index, steps in zip(indices, _launch(plan, [variants[index] for index in indices], folder), strict=True):
            measured[index].append(steps)
    return measured


def summary(plan: Plan, variant: Variant, rounds: Sequence[ReplayedSteps]) -> dict[str, Any]:
    """Figures of one variant: means over ranks, then medians over the steps of all rounds, in seconds."""
    recorded = plan.profile.step_seconds
    by_round = [_by_step(replayed.step_seconds) for replayed in rounds]
    step = [seconds for each in by_round for seconds in each]
    wait = [seconds for replayed in rounds for seconds in _by_step(replayed.wait_seconds)]
    straggler = [seconds for replayed in rounds for seconds in _by_step(replayed.straggler_seconds)]
    step_seconds = statistics.median(step)
    return {
        "variant": variant.name,
        "distributed": dataclasses.asdict(variant.distributed),
        "recorded_step_seconds": recorded,
        "step_seconds": step_seconds,
        "step_seconds_by_round": [statistics.median(each) for each in by_round],
        "exposed_seconds": statistics.median(w - s for w, s in zip(wait, straggler, strict=True)),
        "straggler_seconds": statistics.median(straggler),
        "other_seconds": statistics.median(s - recorded - w for s, w in zip(step, wait, strict=True)),
        "scaling_factor": plan.ranks * recorded / step_seconds,
        "mean_lag_seconds": statistics.mean(lag for replayed in rounds for lag in _by_step(replayed.lag_seconds)),
        "max_lag_seconds": max(lag for replayed in rounds for lags in replayed.max_lag_seconds for lag in lags),
        "rank_cores": statistics.mean(replayed.rank_cores for replayed in rounds),
        "host_cpu_share": statistics.mean(replayed.host_cpu_share for replayed in rounds),
    }


def _by_step(values: list[list[float]]) -> list[float]:
    return [statistics.mean(ranks) for ranks in zip(*values, strict=True)]


def _check(options: argparse.Namespace) -> None:
    if options.ranks < 2 or options.steps < 1 or options.rounds < 1:
        raise UserError("bench replay needs --ranks of at least 2, --steps and --rounds of at least 1")
    if not (math.isfinite(options.slowdown) and options.slowdown > 0):
        raise UserError(f"--slowdown {options.slowdown}: must be a number above 0, e.g. 10")
    if not 0 <= options.jitter_fraction < 1:
        raise UserError(f"--jitter-fraction {options.jitter_fraction}: must be in [0, 1), e.g. 0.05")
    check_folder_of("--json", options.json)
    for assignment in [*options.set, *(each for variant in options.compare for each in variant)]:
        if not assignment.strip().startswith("distributed."):
            raise UserError(f"{assignment}: a replay has no settings but those of distributed.*")


def _profile(options: argparse.Namespace) -> tuple[StepProfile, str]:
    """(the step to replay, what it is: a recording or an estimate, and of what)."""
    from perception.scaling.links import cluster
    from pipelines.bench.predict import profile_for

    node = cluster(options.node).node
    profile, source = profile_for(options, node)
    if source == f"recorded on {profile.device}":
        return profile, f"a recording ({profile.device})"
    kind = "a recording" if options.model.endswith(".json") else "an estimate"
    return profile, f"{kind} ({profile.device}; {source})"


def _variants(
    engine: str | None, common: Sequence[str], compared: Sequence[Sequence[str]], ranks: int
) -> list[Variant]:
    """The settings to compare, with engine and transport resolved: what cannot be started is told before measuring."""
    from perception.distributed.choice import choose_launch

    def variant(name: str, distributed: DistributedConfig) -> Variant:
        engine, transport = choose_launch(distributed, ranks)
        return Variant(name, dataclasses.replace(distributed, engine=engine, transport=transport))

    base = [*([f"distributed.engine={engine}"] if engine else []), *common]
    # The task and its settings play no part in a replay.
    config = override(RunConfig(task="lane", name="replay"), base)
    if not compared:
        return [variant(" ".join(base) or "default settings", config.distributed)]
    return [variant(" ".join(settings), override(config, settings).distributed) for settings in compared]


def _connection(config: DistributedConfig) -> DistributedConfig:
    """The settings that cannot change within one process: all but those of a model's buckets."""
    default = DistributedConfig()
    return dataclasses.replace(config, first_bucket_mib=default.first_bucket_mib, bucket_mib=default.bucket_mib)


def _check_memory(plan: Plan) -> None:
    import psutil

    # Parameters, buckets and the gradients that are handed out.
    needed = 3 * plan.profile.gradient_bytes * plan.ranks
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"{plan.ranks} ranks of {plan.profile.model} need {needed / 2**30:.1f} GiB, this host has "
            f"{available / 2**30:.1f} GiB left: take fewer --ranks or a smaller model"
        )


def _launch(plan: Plan, variants: Sequence[Variant], folder: Path) -> list[ReplayedSteps]:
    """Start the ranks for these turns, whose connection settings are equal."""
    from perception.replay import ReplayedSteps
    from pipelines.launch import launch_ranks

    engine, transport = variants[0].distributed.engine, variants[0].distributed.transport
    profile, job, output = folder / "profile.json", folder / "job.json", folder / "replayed.json"
    write_profile(profile, plan.profile)
    write_json(
        job,
        {
            "turns": [dataclasses.asdict(variant) for variant in variants],
            "steps": plan.steps,
            "jitter_fraction": plan.jitter_fraction,
            "seed": plan.seed,
        },
    )
    argv = [sys.executable, "-m", "pipelines.bench.replay", str(profile), str(job), str(output)]
    code = launch_ranks(argv, plan.ranks, engine, transport, os.environ, folder / "failures")
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code in (128 + signal.SIGTERM, 128 + signal.SIGUSR2):
        raise SystemExit(EXIT_PREEMPTED)
    if code != 0:
        raise UserError(f"replaying {plan.ranks} ranks failed with exit code {code}; its message is above")
    return [ReplayedSteps(**turn) for turn in json.loads(output.read_text())]


def replay_rank(profile_path: Path, job_path: Path, output: Path) -> None:
    """What each rank process does: all turns one after another; the first rank writes what was measured."""
    from perception.distributed import failure
    from perception.distributed.environment import rank_environment

    failures = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    failure.install(Path(failures) if failures else None, rank_environment(os.environ).rank)
    from perception.distributed import connect
    from perception.replay import replay_steps

    profile, job = read_profile(profile_path), json.loads(job_path.read_text())
    variants = [Variant(turn["name"], DistributedConfig(**turn["distributed"])) for turn in job["turns"]]
    communicator = connect(variants[0].distributed)
    measured = []
    for number, variant in enumerate(variants):
        steps = replay_steps(
            profile,
            communicator,
            variant.distributed,
            job["steps"],
            jitter_fraction=job["jitter_fraction"],
            seed=job["seed"] + number,
        )
        measured.append(steps)
        if communicator.is_first:
            print(f"  {variant.name}: {statistics.median(steps.step_seconds[0]) * 1e3:.2f} ms a step", flush=True)
        # A reducer and its hooks hold each other: the next turn needs its memory.
        gc.collect()
    if communicator.is_first:
        write_json(output, [dataclasses.asdict(steps) for steps in measured])
    communicator.barrier()
    communicator.shutdown()


def _described(plan: Plan, variants: Sequence[Variant], slowdown: float, rounds: int) -> str:
    profile = plan.profile
    pace = f", all times x {slowdown:g} by --slowdown" if slowdown != 1 else ""
    jitter = f", jitter {plan.jitter_fraction:.1%}" if plan.jitter_fraction else ""
    engines = sorted({f"{each.distributed.engine}/{each.distributed.transport}" for each in variants})
    return (
        f"{profile.model}, {profile.precision}, batch {profile.batch_size_per_rank} a rank{pace}: forward "
        f"{profile.forward_seconds * 1e3:.2f} ms, backward {profile.backward_seconds * 1e3:.2f} ms, optimizer "
        f"{profile.optimizer_seconds * 1e3:.2f} ms; {len(profile.gradients)} gradients of "
        f"{profile.gradient_bytes / 1e6:.1f} MB{jitter}\n{plan.ranks} ranks on {available_cores()} cores over "
        f"{', '.join(engines)}, {rounds} rounds of {plan.steps} steps"
    )


def _table(rows: Sequence[dict[str, Any]], plan: Plan) -> list[str]:
    width = max(len("variant"), *(len(row["variant"]) for row in rows))
    lines = [
        f"{'variant':{width}}  step ms (rounds)          exposed  straggler  other  scaling factor  "
        "lag ms mean / max  busy cores: ranks, host",
    ]
    for row in rows:
        low, high = min(row["step_seconds_by_round"]) * 1e3, max(row["step_seconds_by_round"]) * 1e3
        step = f"{row['step_seconds'] * 1e3:.2f} ({low:.2f}-{high:.2f})"
        lines.append(
            f"{row['variant']:{width}}  {step:24}  {row['exposed_seconds'] * 1e3:7.2f}  "
            f"{row['straggler_seconds'] * 1e3:9.2f}  {row['other_seconds'] * 1e3:5.2f}  "
            f"{row['scaling_factor']:6.2f} of {plan.ranks:<4}  {row['mean_lag_seconds'] * 1e3:9.2f} / "
            f"{row['max_lag_seconds'] * 1e3:<6.2f}  {row['rank_cores']:.2f}, {row['host_cpu_share']:.0%}"
        )
    return lines + _hints(rows, plan.profile.step_seconds)


def _hints(rows: Sequence[dict[str, Any]], recorded_step_seconds: float) -> list[str]:
    """What makes this replay say little, of the recorded device or of which variant is best."""
    hints = []
    busiest = max(rows, key=lambda row: float(row["host_cpu_share"]))
    if busiest["host_cpu_share"] > BUSY_SHARE:
        hints.append(
            f"careful: the host's cores were busy {busiest['host_cpu_share']:.0%} of the time (ranks: "
            f"{busiest['rank_cores']:.2f} cores), so ranks wait for a core and not only for the all-reduce; take fewer "
            "--ranks, a higher --slowdown, or a quieter host"
        )
    late = max(row["mean_lag_seconds"] for row in rows) / recorded_step_seconds
    if late > LAG_SHARE:
        hints.append(
            f"careful: gradients were late by {late:.0%} of a recorded step on average: the host cannot keep this "
            "schedule; give a higher --slowdown"
        )
    best = min(rows, key=lambda row: float(row["step_seconds"]))
    slowest_of_best = max(best["step_seconds_by_round"])
    close = [row["variant"] for row in rows if row is not best and min(row["step_seconds_by_round"]) <= slowest_of_best]
    if close:
        hints.append(f"careful: the rounds do not tell {best['variant']} from {', '.join(close)}: their ranges overlap")
    return hints


if __name__ == "__main__":
    replay_rank(*map(Path, sys.argv[1:4]))
