"""python -m pipelines COMMAND …; each command is a module with `add_arguments` and `run`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from perception.errors import UserError
from pipelines.commands import command_module, run_command, run_program

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
    return run_command("pipelines", "Per-model training commands.", COMMANDS, _MODULES, arguments)


def in_image(arguments: list[str]) -> None:
    """`--image NAME COMMAND ...`: the same command in a container, by another program: nothing of it is imported."""
    if len(arguments) < 3:
        example = "python -m pipelines --image lane train lane-small --out DIR"
        raise UserError(f"--image: give an image and a command: {example}")
    argv = [sys.executable, "-m", "containers", "run", f"--image={arguments[1]}", "--"]
    os.execv(sys.executable, [*argv, "python", "-m", "pipelines", *arguments[2:]])


def module_of(command: str) -> ModuleType:
    """With its `add_arguments` and `run`."""
    return command_module("pipelines", _MODULES, command)


if __name__ == "__main__":
    sys.exit(run_program(main))
