"""python -m sweeps COMMAND …; each command is a module with `add_arguments` and `run`."""

from __future__ import annotations

import sys
from types import ModuleType

from pipelines.commands import command_module, run_command, run_program

COMMANDS = {
    "plan": "check a plan, and print what it would launch and cost: python -m sweeps plan sweeps/plans/nightly.toml",
    "nightly": "run a night: jobs by the plan, then the morning's report: python -m sweeps nightly PLAN",
    "status": "how a night stands, or stood: python -m sweeps status --watch",
    "report": "write a night's report again, and print its summary: python -m sweeps report --night 2026-11-30",
    "scaling": "the scaling factor by night, and its regressions: python -m sweeps scaling --model lane",
    "targets": "time to accuracy, and who holds the records: python -m sweeps targets",
}

_MODULES = {"plan": "plan_command", "report": "report_command", "targets": "targets_command"}
"""Of the commands whose module has another name."""


def main(arguments: list[str]) -> int:
    return run_command("sweeps", "Nightly sweeps of training jobs.", COMMANDS, _MODULES, arguments)


def module_of(command: str) -> ModuleType:
    """With its `add_arguments` and `run`."""
    return command_module("sweeps", _MODULES, command)


if __name__ == "__main__":
    sys.exit(run_program(main))
