"""`python -m sweeps` with stand-ins in place of training runs: for tests that start and kill real controllers."""

from __future__ import annotations

import sys
from pathlib import Path

from perception.errors import UserError
from sweeps.__main__ import main
from sweeps.night import planned_jobs

STAND_IN = Path(__file__).with_name("stand_in.py")
_training_argv = planned_jobs.training_argv


def stand_in_argv(*arguments, **named):  # type: ignore[no-untyped-def]
    """The same command, with the stand-in where `-m pipelines` was."""
    python, *rest = _training_argv(*arguments, **named)
    assert rest[:2] == ["-m", "pipelines"]
    return (python, "-I", "-S", str(STAND_IN), *rest[2:])


if __name__ == "__main__":
    planned_jobs.training_argv = stand_in_argv
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
