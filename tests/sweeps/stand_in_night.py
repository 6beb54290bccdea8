"""`python -m sweeps` with stand-ins in place of training runs: for tests that start and kill real controllers.

Its controllers share the host's slots with those of the same test only: by the folder STAND_IN_HOST, or one beside the
root of the nights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from perception.errors import UserError
from sweeps.__main__ import main
from sweeps.launchers import local
from sweeps.night import planned_jobs

STAND_IN = Path(__file__).with_name("stand_in.py")
_training_argv = planned_jobs.training_argv


def stand_in_argv(*arguments, **named):  # type: ignore[no-untyped-def]
    """The same command, with the stand-in where `-m pipelines` was."""
    python, *rest = _training_argv(*arguments, **named)
    assert rest[:2] == ["-m", "pipelines"]
    return (python, "-I", "-S", str(STAND_IN), *rest[2:])


def host_folder(words: list[str]) -> Path:
    root = Path(words[words.index("--root") + 1]) if "--root" in words else Path()
    return Path(os.environ.get("STAND_IN_HOST") or root.absolute().parent / "seats")


if __name__ == "__main__":
    planned_jobs.training_argv = stand_in_argv
    local.HOST_FOLDER = host_folder(sys.argv)
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
