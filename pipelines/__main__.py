"""python -m pipelines COMMAND …; each command is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from perception.errors import UserError

COMMANDS = {
    "train": "train a model: python -m pipelines train lane-small --data generated --ranks 2",
    "evaluate": "official metrics of prediction files: python -m pipelines evaluate sign --predictions P --labels L",
    "data": "look at a data set before training on it: python -m pipelines data check FOLDER",
    "predict": "lanes or signs in an image, a folder, a list or a video: python -m pipelines predict RUN INPUT",
    "export": "an ONNX file that runs without torch, checked: python -m pipelines export lane RUN --int8",
    "trace": "from an exported file back to code, data and configuration: python -m pipelines trace FILE",
    "show-config": "print a model's complete configuration: python -m pipelines show-config lane",
    "bench": "measure throughput on one rank, on all, and on independent processes",
    "tune": "find the fastest settings of the all-reduce layer for a model on this host: python -m pipelines tune lane",
    "doctor": "what this machine has for training, and what to do about what is missing",
}

_MODULES = {"data": "data_check"}
"""Of the commands whose module has another name."""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--image"]:
        in_image(arguments)
    parser = argparse.ArgumentParser(prog="python -m pipelines", description="Per-model training commands.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the command at hand is imported, and no torch before it runs: --help answers at once.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module_of(name).add_arguments(subparser)
    options = parser.parse_args(arguments)
    return int(module_of(options.command).run(options))


def in_image(arguments: list[str]) -> None:
    """`--image NAME COMMAND ...`: the same command in a container, by another program: nothing of it is imported."""
    if len(arguments) < 3:
        example = "python -m pipelines --image lane train lane-small --out DIR"
        raise UserError(f"--image: give an image and a command: {example}")
    argv = [sys.executable, "-m", "containers", "run", f"--image={arguments[1]}", "--"]
    os.execv(sys.executable, [*argv, "python", "-m", "pipelines", *arguments[2:]])


def module_of(command: str):  # type: ignore[no-untyped-def]
    """With its `add_arguments` and `run`."""
    return importlib.import_module(f"pipelines.{_MODULES.get(command, command.replace('-', '_'))}")


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
