"""What the all-reduce layer promises, as functions that every rank of an engine runs.

`python scenarios.py FOLDER ENGINE` runs them all and writes what failed to
FOLDER/rank<N>.json. A scenario raises AssertionError where a promise is broken.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import Communicator
from tests.perception.distributed import communicator_scenarios, reducer_scenarios, unchanged_scenarios

SCENARIOS: dict[str, Callable[[Communicator], None]] = {
    name.removeprefix("scenario_"): function
    for module in (communicator_scenarios, reducer_scenarios, unchanged_scenarios)
    for name, function in vars(module).items()
    if name.startswith("scenario_")
}


def main(folder: Path, engine: str, transport: str) -> None:
    communicator = distributed.connect(DistributedConfig(engine=engine, transport=transport, timeout_seconds=60))
    torch.set_num_threads(1)
    failures: dict[str, str] = {}
    for name, function in SCENARIOS.items():
        try:
            function(communicator)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
        # Also notices when ranks got out of step.
        communicator.barrier()
    report = {"ran": list(SCENARIOS), "failures": failures, "engine": communicator.engine, "size": communicator.size}
    (folder / f"rank{communicator.rank}.json").write_text(json.dumps(report))
    communicator.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
