"""A rank that joins the others, reduces, leaves, and joins them again.

reconnecting_rank.py ENGINE TRANSPORT TIMEOUT_SECONDS NUM_ROUNDS
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from perception import distributed
from perception.distributed import failure
from perception.distributed.environment import rank_environment
from tests.perception.distributed.scenario_tools import SETTINGS


def main(engine: str, transport: str, timeout_seconds: float, num_rounds: int) -> None:
    folder = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    # Without a launcher the rank's own environment may be what is wrong.
    failure.install(Path(folder) if folder else None, int(os.environ.get("RANK", rank_environment(os.environ).rank)))
    settings = replace(SETTINGS, engine=engine, transport=transport, timeout_seconds=timeout_seconds)
    for number in range(num_rounds):
        communicator = distributed.connect(settings)
        total = communicator.allreduce(torch.tensor([communicator.rank + 1.0]))
        model = nn.Linear(3, 1)
        distributed.distribute(model, None, communicator, settings)
        (model(torch.ones(1, 3)) * (communicator.rank + 1)).sum().backward()
        assert model.bias.grad is not None
        print(f"round {number}: sum {total.item():g}, mean {model.bias.grad.item():g}", flush=True)
        communicator.shutdown()
        communicator.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
