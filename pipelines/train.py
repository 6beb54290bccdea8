"""`train MODEL`: one command a model; starts the ranks on this host, or joins those a launcher started."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from pathlib import Path

from perception.config import RunConfig
from perception.distributed.environment import RankEnvironment, rank_environment
from perception.errors import UserError
from perception.run_folder import RunFolder, write_json
from pipelines.commands import outlive_readers
from pipelines.configs import CONFIGS, named_config, with_options

PROGRAM = (sys.executable, "-m", "pipelines")
"""What a rank executes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=f"one of {', '.join(CONFIGS)}, or a config.json; not with --resume")
    parser.add_argument("--data", help="generated (the default), or the folder of a data set in its official layout")
    parser.add_argument("--format", help="of the folder, e.g. gtsdb or culane; by default what lies in it tells")
    parser.add_argument("--ranks", type=int, help="processes on this host, by default as many as the run had, else 1")
    parser.add_argument("--engine", help="horovod, torch, solo or auto (the default)")
    parser.add_argument("--out", type=Path, help="run folder; by default runs/MODEL-TIME")
    resuming = parser.add_mutually_exclusive_group()
    resuming.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in --out")
    resuming.add_argument(
        "--resume-if-possible", action="store_true", help="the same where --out holds one, else begin; for restarts"
    )
    parser.add_argument(
        "--elastic-min-ranks", type=int, metavar="M", help="ranks may die, leave and come back while M are left"
    )
    parser.add_argument("--commit-every-steps", type=int, metavar="K", help="for --set train.checkpoint_every_steps=K")
    parser.add_argument(
        "--measure-scaling", action="store_true", help="first compare one rank, all, and independent ones"
    )
    parser.add_argument(
        "--target", metavar="NAME=VALUE", help="end when the validation reaches it, e.g. f1=0.8; tells time to accuracy"
    )
    parser.add_argument("--trace-steps", type=int, metavar="N", help="write trace.json of N steps of every rank")
    parser.add_argument("--tuned", action="store_true", help="take the settings that `tune` found for this case")
    parser.add_argument("--tuned-from", type=Path, metavar="FILE", help="the same, from what `tune --out FILE` wrote")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="e.g. --set optim.lr=3e-4")


def run(options: argparse.Namespace) -> int:
    """Exit code 0 finished, 75 preempted with a checkpoint, 2 a user's mistake, 1 a crash."""
    outlive_readers()
    place = rank_environment(os.environ)
    if options.commit_every_steps is not None:
        options.set = [*options.set, f"train.checkpoint_every_steps={options.commit_every_steps}"]
    if options.format is not None:
        options.set = [f"data.format={options.format}", *options.set]
    if options.trace_steps is not None:
        options.set = [*options.set, f"train.trace_steps={options.trace_steps}"]
    config = _configure(options)
    ranks = options.ranks if options.ranks is not None else max(1, config.distributed.num_ranks)
    _check_ranks(options, place, ranks)
    if options.target is not None:
        options.set = [*options.set, *target_assignments(options.target, config, max(ranks, place.size))]
        config = _configure(options)
    if options.tuned or options.tuned_from is not None:
        config = _with_tuned(options, config, place, ranks)
    resume = options.resume or options.resume_if_possible
    folder = options.out or Path("runs") / f"{config.name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    if place.size > 1:
        return _train_as_rank(config, folder, resume, place.rank)
    _check_folder(folder, resume)
    if options.measure_scaling and resume:
        print("--measure-scaling is for new runs: the figures of this one's start are kept", flush=True)
    elif options.measure_scaling:
        from pipelines.bench.scaling import measure_scaling

        write_json(RunFolder(folder).scaling, measure_scaling(config, ranks, folder))
    if ranks == 1:
        return _train_as_rank(config, folder, resume, 0)
    if options.elastic_min_ranks is not None:
        return _train_elastically(options, config, folder, ranks)
    return _launch(options, config, folder, ranks)


TARGET_NAMES = {"f1": "culane_f1_50", "accuracy": "tusimple_accuracy", "ap50": "ap50", "ap": "ap"}
"""Short names of metrics that a run may aim at."""
EVALUATIONS_TO_TARGET = 20


def target_assignments(text: str, config: RunConfig, ranks: int) -> list[str]:
    """`--target NAME=VALUE` as settings; where none say when to evaluate, twenty times in the run."""
    name, separator, value = (part.strip() for part in text.partition("="))
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not separator or not math.isfinite(number):
        raise UserError(f"--target {text}: write it as NAME=VALUE, e.g. f1=0.8")
    assignments = [f"train.target_metric={TARGET_NAMES.get(name, name)}", f"train.target_value={number}"]
    if not config.train.evaluate_every_steps:
        steps = config.train.num_samples / config.train.global_batch_on(ranks)
        assignments.append(f"train.evaluate_every_steps={max(1, round(steps / EVALUATIONS_TO_TARGET))}")
    return assignments


def _check_ranks(options: argparse.Namespace, place: RankEnvironment, ranks: int) -> None:
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be 1 or more")
    if place.size > 1 and options.ranks not in (None, 1, place.size):
        raise UserError(f"--ranks {ranks}, but {place.launcher} started {place.size} ranks: leave --ranks out")
    if options.measure_scaling and (place.size > 1 or ranks == 1):
        raise UserError("--measure-scaling goes with --ranks of at least 2 that this command starts")
    least = options.elastic_min_ranks
    if least is not None and place.size > 1:
        raise UserError(
            f"--elastic-min-ranks, but {place.launcher} started the ranks: let it start them again (torchrun "
            "--max-restarts, sbatch --requeue) and give --resume-if-possible instead"
        )
    if least is not None and not 1 <= least <= ranks:
        raise UserError(f"--elastic-min-ranks {least}: must be from 1 to --ranks, {ranks}")
    if least is not None and ranks == 1:
        raise UserError("--elastic-min-ranks goes with --ranks of at least 2")
    if options.resume_if_possible and options.out is None:
        raise UserError("--resume-if-possible needs --out: the run folder to go on with")


def _configure(options: argparse.Namespace) -> RunConfig:
    if options.resume:
        if options.out is None:
            raise UserError("--resume needs --out: the run folder to go on with")
        stored = RunFolder(options.out).config
        if not stored.is_file():
            raise UserError(f"{stored}: not found; --resume goes on with a run folder made by train")
        config = named_config(str(stored))
        if options.model not in (None, config.name):
            raise UserError(f'model "{options.model}": leave it out with --resume, {stored} is of {config.name}')
    elif options.model is None:
        raise UserError(f"give a model: {', '.join(CONFIGS)}")
    else:
        config = named_config(options.model)
    return with_options(config, options.data, options.engine, options.set)


def _with_tuned(options: argparse.Namespace, config: RunConfig, place: RankEnvironment, ranks: int) -> RunConfig:
    """Lay what `tune` found under the user's --set, and say what it was."""
    from pipelines.tuned_settings import tuned_assignments

    assignments, line = tuned_assignments(options, config, place, ranks)
    if place.rank == 0:
        print(line, flush=True)
    options.set = [*assignments, *options.set]
    return _configure(options)


def _check_folder(folder: Path, resume: bool) -> None:
    """Before ranks are started: the same check that rank 0 makes."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        # TensorBoard's writer, for one, fails on such a path.
        raise UserError(f"--out {folder}: is not UTF-8; give another") from None
    if not resume and RunFolder(folder).config.exists():
        raise UserError(f"{folder}: holds a run already; add --resume to go on with it, or give another --out")


def _train_as_rank(config: RunConfig, folder: Path, resume: bool, rank: int) -> int:
    from perception.distributed import failure

    variable = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    failure.install(Path(variable) if variable else None, rank)
    from perception.training_run import run_training

    return run_training(config, folder, resume)


def _rank_argv(options: argparse.Namespace, folder: Path, resume_if_possible: bool) -> list[str]:
    argv = [*PROGRAM, "train"]
    argv += [options.model] if options.model else []
    argv += ["--out", str(folder)]
    # What was chosen is not passed on: ranks choose alike, and config.json keeps what the user asked for.
    argv += ["--engine", options.engine] if options.engine is not None else []
    argv += ["--data", options.data] if options.data is not None else []
    argv += ["--resume"] if options.resume else []
    argv += ["--resume-if-possible"] if resume_if_possible and not options.resume else []
    for assignment in options.set:
        argv += ["--set", assignment]
    return argv


def _train_elastically(options: argparse.Namespace, config: RunConfig, folder: Path, ranks: int) -> int:
    from pipelines.elastic import train_elastically

    train = config.train
    if not train.global_batch:
        # Of the run, whose number of ranks is known if it was begun already.
        begun_with = (options.resume and config.distributed.num_ranks) or ranks
        global_batch = train.batch_size_per_rank * begun_with * train.accumulation
        options.set = [*options.set, f"train.global_batch={global_batch}"]

    def argv(ranks: int, first: bool) -> list[str]:
        command = _rank_argv(options, folder, options.resume_if_possible or not first)
        # A rank alone must not start those that the run had before.
        return [*command, "--ranks", "1"] if ranks == 1 else command

    return train_elastically(argv, config.distributed, folder, ranks, options.elastic_min_ranks)


def _launch(options: argparse.Namespace, config: RunConfig, folder: Path, ranks: int) -> int:
    from perception.distributed.choice import choose_launch
    from pipelines.launch import launch_ranks

    engine, transport = choose_launch(config.distributed, ranks)
    run_folder = RunFolder(folder)
    argv = _rank_argv(options, folder, options.resume_if_possible)
    code = launch_ranks(argv, ranks, engine, transport, os.environ, run_folder.failures)
    if code not in (0, 75) and not run_folder.result.exists() and run_folder.config.exists():
        # Of a rank that vanished; one that raised wrote its own.
        cause = f"exit code {code}; see ranks/ in the run folder"
        write_json(run_folder.result, {"status": "failed", "cause": cause, "metrics": {}})
    return code
