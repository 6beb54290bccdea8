"""python -m pipelines COMMAND …; each command is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import sys

from perception.errors import UserError

COMMANDS = {
    "train": "train a model: python -m pipelines train lane-small --data generated --ranks 2",
    "evaluate": "official metrics of prediction files: python -m pipelines evaluate lane --predictions P --labels L",
    "show-config": "print a model's complete configuration: python -m pipelines show-config lane",
    "bench": "measure throughput on one rank, on all, and on independent processes",
    "tune": "find the fastest settings of the all-reduce layer for a model on this host: python -m pipelines tune lane",
    "doctor": "what this machine has for training, and what to do about what is missing",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipelines", description="Per-model training commands.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the command at hand is imported, and no torch before it runs: --help answers at once.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            _module(name).add_arguments(subparser)
    options = parser.parse_args(arguments)
    return int(_module(options.command).run(options))


def _module(command: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"pipelines.{command.replace('-', '_')}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (UserError, KeyboardInterrupt) as error:
        if sys.excepthook.__module__ == "perception.distributed.failure":
            raise  # A rank: its hook records why it ended, and ends without waiting for the others.
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
