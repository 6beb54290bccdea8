"""What the all-reduce layer promises, as functions that every rank of an engine runs.

`python scenarios.py FOLDER ENGINE TRANSPORT TIMEOUT_SECONDS SUITE [SCENARIO]` runs those of a suite, or one of
them, and writes what failed to FOLDER/rank<N>.json. A scenario raises AssertionError where a promise is broken.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perception import distributed
from perception.distributed import Communicator
from tests.perception.distributed import (
    communicator_scenarios,
    hard_large_scenarios,
    hard_model_scenarios,
    hard_order_scenarios,
    hard_slow_scenarios,
    hard_step_scenarios,
    hard_tensor_scenarios,
    hierarchical_scenarios,
    peer_scenarios,
    reducer_scenarios,
    unchanged_scenarios,
    update_scenarios,
    wire_format_scenarios,
)
from tests.perception.distributed.scenario_tools import SETTINGS

SUITES = {
    "fast": (
        communicator_scenarios,
        reducer_scenarios,
        unchanged_scenarios,
        hard_model_scenarios,
        hard_step_scenarios,
        hard_tensor_scenarios,
        update_scenarios,
        peer_scenarios,
    ),
    "slow": (hard_slow_scenarios,),
    "alone": (hard_order_scenarios,),
    "large": (hard_large_scenarios,),
    "wire": (wire_format_scenarios,),
    "hierarchical": (hierarchical_scenarios,),
}


def scenarios_of(suite: str) -> dict[str, Callable[[Communicator], None]]:
    """Name and function of each scenario of a suite, in the order in which every rank runs them."""
    return {
        name.removeprefix("scenario_"): function
        for module in SUITES[suite]
        for name, function in vars(module).items()
        if name.startswith("scenario_")
    }


def main(folder: Path, engine: str, transport: str, timeout_seconds: float, suite: str, only: str = "") -> None:
    settings = replace(SETTINGS, engine=engine, transport=transport, timeout_seconds=timeout_seconds)
    communicator = distributed.connect(settings)
    torch.set_num_threads(1)
    scenarios = {name: function for name, function in scenarios_of(suite).items() if only in ("", name)}
    failures: dict[str, str] = {}
    for name, function in scenarios.items():
        # Names the culprit where the process itself goes down.
        print(f"scenario {name}", flush=True)
        try:
            function(communicator)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
            print(failures[name], file=sys.stderr, flush=True)
        # Also notices when ranks got out of step.
        communicator.barrier()
    report = {"ran": list(scenarios), "failures": failures, "engine": communicator.engine, "size": communicator.size}
    (folder / f"rank{communicator.rank}.json").write_text(json.dumps(report))
    communicator.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), *sys.argv[5:])
