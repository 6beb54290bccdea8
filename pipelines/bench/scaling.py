"""`bench scaling MODEL`: throughput on one rank, on all, and on as many independent processes.

Independent processes share the machine but say nothing to each other: they are the limit
that a perfect all-reduce layer would reach here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from perception.config import RunConfig, from_json, to_json
from perception.cores import available_cores
from perception.distributed.failure import EXIT_PREEMPTED
from perception.errors import UserError
from perception.run_folder import check_folder_of, write_json
from pipelines.configs import CONFIGS, named_config, with_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"one of {', '.join(CONFIGS)}, or a config.json")
    parser.add_argument("--data", help="generated (the default), or the folder of a data set")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engine", help="horovod, torch or auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured time of each variant in each round")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")


def run(options: argparse.Namespace) -> int:
    if options.ranks < 2 or options.rounds < 1 or options.seconds <= 0:
        raise UserError("bench scaling needs --ranks of at least 2, --rounds of at least 1 and --seconds above 0")
    check_folder_of("--json", options.json)
    config = with_options(named_config(options.model), options.data, options.engine, options.set)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        figures = measure_scaling(config, options.ranks, Path(folder), options.rounds, options.seconds)
    if options.json is not None:
        write_json(options.json, figures)
    return 0


def measure_scaling(
    config: RunConfig, ranks: int, folder: Path, rounds: int = 2, seconds: float = 6.0
) -> dict[str, Any]:
    """Run the variants in turn, `rounds` times, and print and return medians of images/s and their ratios.

    Every process has the compute threads that a rank has. Files go to `folder`/scaling.
    """
    from perception.distributed.choice import choose_launch

    # Asked first: a wrong choice ends the command now and not after the first variant.
    choose_launch(config.distributed, ranks)
    folder = folder / "scaling"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); give another by --out") from None
    solo = dataclasses.replace(config, distributed=dataclasses.replace(config.distributed, engine="solo"))
    threads = max(1, available_cores() // ranks)
    paths = {}
    for name, variant in {"solo": solo, "ranks": config}.items():
        train = dataclasses.replace(variant.train, num_threads_per_rank=variant.train.num_threads_per_rank or threads)
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(to_json(dataclasses.replace(variant, train=train)))
    rows: dict[str, list[float]] = {"one rank": [], f"{ranks} ranks": [], f"{ranks} independent processes": []}
    one, together, independent = rows
    print(f"measuring throughput: {rounds} rounds of {', '.join(rows)}, {seconds:.0f} s each", flush=True)
    with stopped_well():
        _measure_rounds(rows, paths, config, ranks, rounds, seconds, folder)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    scaling_factor, ratio = medians[together] / medians[one], medians[together] / medians[independent]
    for name, value in medians.items():
        print(f"  {name:26} {value:8.1f} images/s", flush=True)
    print(f"  scaling factor {scaling_factor:.2f} of {ranks}; {ratio:.0%} of the machine's limit", flush=True)
    return {
        "ranks": ranks,
        "rounds": rounds,
        "seconds": seconds,
        "images_per_second": medians,
        "images_per_second_by_round": rows,
        "scaling_factor": scaling_factor,
        "ratio_to_limit": ratio,
    }


def _measure_rounds(
    rows: dict[str, list[float]],
    paths: dict[str, Path],
    config: RunConfig,
    ranks: int,
    rounds: int,
    seconds: float,
    folder: Path,
) -> None:
    one, together, independent = rows
    for number in range(rounds):
        # All ranks first: what is missing of the generated scenes is then rendered by all of them.
        rows[together].append(_ranks(paths["ranks"], config, ranks, seconds, folder))
        rows[one].append(_independent(paths["solo"], 1, seconds, folder))
        rows[independent].append(_independent(paths["solo"], ranks, seconds, folder))
        print(f"  round {number + 1}: " + ", ".join(f"{name} {rows[name][-1]:.1f}" for name in rows), flush=True)


@contextmanager
def stopped_well() -> Iterator[None]:
    """SIGTERM and USR2 end the measuring processes and the command by exit code 75: nothing is lost, start it again."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(EXIT_PREEMPTED)

    numbers = (signal.SIGTERM, signal.SIGUSR2)
    earlier = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier, strict=True):
            signal.signal(number, handler)


def _independent(config: Path, count: int, seconds: float, folder: Path) -> float:
    """Sum of images/s of `count` processes that run at the same time; they wait for each other to start."""
    outputs = [folder / f"process{number}.json" for number in range(count)]
    start = folder / "start"
    start.unlink(missing_ok=True)
    for output in outputs:
        output.unlink(missing_ok=True)
        output.with_suffix(".ready").unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PERCEPTION_FAILURE_FOLDER"}
    environment["ROADFUSE_BENCH_START"] = str(start)
    environment.setdefault("OMP_NUM_THREADS", str(json.loads(config.read_text())["train"]["num_threads_per_rank"]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pipelines", "bench", "process", str(config), str(seconds), str(output)],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for output in outputs
    ]
    try:
        while not all(output.with_suffix(".ready").exists() for output in outputs):
            if any(process.poll() not in (None, 0) for process in processes):
                raise UserError("a measuring process failed; its message is above")
            time.sleep(0.05)
        start.touch()
        for process in processes:
            if process.wait() != 0:
                raise UserError("a measuring process failed; its message is above")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return sum(float(json.loads(output.read_text())["images_per_second"]) for output in outputs)


def _ranks(config_path: Path, config: RunConfig, ranks: int, seconds: float, folder: Path) -> float:
    from perception.distributed.choice import choose_launch
    from pipelines.launch import launch_ranks

    engine, transport = choose_launch(config.distributed, ranks)
    resolved = dataclasses.replace(
        from_json(config_path.read_text(), str(config_path)),
        distributed=dataclasses.replace(config.distributed, engine=engine, transport=transport),
    )
    path, output = folder / "launched.json", folder / "throughput.json"
    path.write_text(to_json(resolved))
    argv = [sys.executable, "-m", "pipelines", "bench", "process", str(path), str(seconds), str(output)]
    code = launch_ranks(argv, ranks, engine, transport, os.environ, folder / "failures")
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code in (EXIT_PREEMPTED, 128 + signal.SIGTERM, 128 + signal.SIGUSR2):
        raise SystemExit(EXIT_PREEMPTED)
    if code != 0:
        raise UserError(f"measuring {ranks} ranks failed with exit code {code}; its message is above")
    return float(json.loads(output.read_text())["images_per_second"])
