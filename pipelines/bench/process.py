"""`bench process`: one process of one variant of `bench scaling`, which starts it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from perception.config import from_json
from perception.distributed.environment import rank_environment
from perception.errors import UserError
from perception.run_folder import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("output", type=Path)


def run(options: argparse.Namespace) -> int:
    return measure(options.config, options.seconds, options.output)


def measure(config_path: Path, seconds: float, output: Path) -> int:
    from perception.distributed import failure

    folder = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    failure.install(Path(folder) if folder else None, rank_environment(os.environ).rank)
    from perception.throughput import measure_throughput

    parent = os.getppid()

    def wait_for_start() -> None:
        signal_file = os.environ.get("ROADFUSE_BENCH_START")
        output.with_suffix(".ready").touch()
        while signal_file and not Path(signal_file).exists():
            if os.getppid() != parent:
                raise UserError("the measurement was ended from outside")
            time.sleep(0.01)

    config = from_json(config_path.read_text(), str(config_path))
    rate, is_first = measure_throughput(config, seconds, wait_for_start)
    if is_first:
        write_json(output, {"images_per_second": rate})
    return 0
