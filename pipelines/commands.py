"""`python -m PROGRAM COMMAND ...`: each command is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType


def command_module(program: str, modules: Mapping[str, str], command: str) -> ModuleType:
    """`modules`: of the commands whose module has another name."""
    return importlib.import_module(f"{program}.{modules.get(command, command.replace('-', '_'))}")


def run_command(
    program: str, description: str, commands: Mapping[str, str], modules: Mapping[str, str], arguments: Sequence[str]
) -> int:
    """Parse and run; `commands`: name -> summary. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the command at hand is imported, and nothing heavy before it runs: --help answers at once.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in commands.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == chosen:
            command_module(program, modules, name).add_arguments(subparser)
    options = parser.parse_args(arguments)
    return int(command_module(program, modules, options.command).run(options))
