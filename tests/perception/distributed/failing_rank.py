"""A rank that trains by unchanged code and, amid the backward of its third step, misbehaves.

failing_rank.py FOLDER ENGINE TRANSPORT TIMEOUT_SECONDS BEHAVIOUR WHO NUM_STEPS [NAME=VALUE ...]

`WHO` leaves the time of its misbehaviour in FOLDER/began. The rest are settings of `distributed`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from perception import distributed
from perception.config import RunConfig, override
from perception.distributed import failure
from perception.distributed.environment import rank_environment
from tests.perception.distributed.scenario_tools import TINY_BUCKETS

MISBEHAVES_AT_STEP = 3


def main(folder: Path, behaviour: str, who: int, num_steps: int, *overrides: str) -> None:
    place = rank_environment(os.environ)
    failure_folder = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    failure.install(Path(failure_folder) if failure_folder else None, place.rank)
    config = RunConfig("lane", "failing", distributed=TINY_BUCKETS)
    settings = override(config, [f"distributed.{word}" for word in overrides]).distributed
    communicator = distributed.connect(settings)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    distributed.distribute(model, optimizer, communicator, settings)
    step = 0

    def amid_backward(gradient: Tensor) -> None:
        if step == MISBEHAVES_AT_STEP and communicator.rank == who:
            (folder / "began").write_text(str(time.time()))
            misbehave(behaviour)

    model[2].weight.register_hook(amid_backward)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.full((2, 16), 0.1)).square().mean().backward()
        optimizer.step()
        if behaviour == "cut":
            # The test cuts the link once it sees this.
            (folder / f"rank{communicator.rank}.step").write_text(str(step))
            time.sleep(0.05)
    print(f"rank {communicator.rank} ends after step {step}", flush=True)
    communicator.shutdown()


def misbehave(behaviour: str) -> None:
    if behaviour == "exit":
        os._exit(3)
    if behaviour in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if behaviour == "kill" else signal.SIGSTOP)
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "slow":
        time.sleep(10)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
