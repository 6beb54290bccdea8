"""`show-config MODEL`: the complete configuration as it would be used, as JSON."""

from __future__ import annotations

import argparse

from perception.config import to_json
from pipelines.configs import CONFIGS, named_config, with_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"one of {', '.join(CONFIGS)}, or a config.json")
    parser.add_argument("--data", help="generated, or the folder of a data set")
    parser.add_argument("--engine", help="horovod, torch, solo or auto")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="e.g. --set optim.lr=3e-4")


def run(options: argparse.Namespace) -> int:
    print(to_json(with_options(named_config(options.model), options.data, options.engine, options.set)), end="")
    return 0
