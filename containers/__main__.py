"""python -m containers COMMAND …; each command is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from types import ModuleType

from containers.errors import ContainerError

COMMANDS = {
    "build": "make this project's images on this machine: python -m containers build all --registry REGISTRY --push",
    "push": "bring images to a registry: python -m containers push lane --registry REGISTRY",
    "pull": "get an image, to the bit: python -m containers pull lane",
    "run": "run a training command in its image: python -m containers run lane --out DIR -- train --ranks 2",
    "list": "images here and in a registry, with sizes, ages and digests",
    "lock": "pin a name to an image by its digest: python -m containers lock lane REFERENCE",
    "prune": "remove images that nothing needs any more; shows what it would do, --apply does it",
    "login": "give a registry's key, in NGC's manner: python -m containers login nvcr.io",
    "save": "write pinned images to a file for a machine without network: python -m containers save lane FILE",
    "load": "read them there, checked against the lock file: python -m containers load FILE",
}

_MODULES = {"list": "listing", "lock": "lock_command", "save": "bundle", "load": "bundle_load"}
"""Of the commands whose module has another name."""


def main(arguments: list[str]) -> int:
    arguments, command_line = _split(arguments)
    parser = argparse.ArgumentParser(prog="python -m containers", description="Images to train in: made, pinned, run.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the command at hand is imported: --help answers at once.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary)
        if name == chosen:
            module_of(name).add_arguments(subparser)
    options = parser.parse_args(arguments)
    module = module_of(options.command)
    if command_line is not None and not getattr(module, "TAKES_COMMAND", False):
        raise ContainerError(f"{options.command}: takes no command after --")
    options.command_line = tuple(command_line or ())
    return int(module.run(options))


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """At the first --: what follows is another program's, to the letter."""
    if "--" not in arguments:
        return arguments, None
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def module_of(command: str) -> ModuleType:
    """With its `add_arguments` and `run`."""
    return importlib.import_module(f"containers.{_MODULES.get(command, command)}")


def _end() -> int:
    try:
        try:
            return main(sys.argv[1:])
        except ContainerError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        finally:
            sys.stdout.flush()  # At the interpreter's own end an error could not be caught any more.
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has left (`... | head -1`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(_end())
