"""`python -m sweeps` with stand-ins of mixed lengths, one process for all ranks of a job: for nights of many jobs.

A process a rank, as real training has, would be 13,000 in a night of 1,000 jobs: on a few cores they would be what is
measured.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from perception.errors import UserError
from sweeps.__main__ import main
from sweeps.night import filling, planned_jobs
from tests.sweeps import stand_in_night

_launcher_job = planned_jobs.launcher_job


def one_process(*arguments, **named):  # type: ignore[no-untyped-def]
    return dataclasses.replace(_launcher_job(*arguments, **named), starts_ranks=False)


if __name__ == "__main__":
    stand_in_night.STAND_IN = Path(__file__).with_name("sized_stand_in.py")
    planned_jobs.training_argv = stand_in_night.stand_in_argv
    filling.launcher_job = one_process
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
