"""Throughput of training, measured by the loop's own step, without evaluation and checkpoints."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from perception import distributed
from perception.config import RunConfig
from perception.data.loader import training_batches
from perception.run_folder import RunFolder
from perception.step_clock import UNTIMED_STEPS, StepClock
from perception.stopping import StopRequest
from perception.tasks import task_for
from perception.telemetry import SilentTelemetry
from perception.trainer import Trainer
from perception.training_run import load_sources, set_threads


def measure_throughput(config: RunConfig, seconds: float, wait_for_start: Callable[[], None]) -> tuple[float, bool]:
    """(images/s over all ranks of this process's group, whether this is the first rank).

    Warm-up steps come before `wait_for_start`, so that processes started together measure together.
    """
    communicator = distributed.connect(config.distributed)
    set_threads(config, communicator)
    # Long enough never to end; the schedule does not matter for speed. As much for each rank on any number of them.
    train = dataclasses.replace(config.train, num_samples=1_000_000_000, global_batch=0)
    config = dataclasses.replace(config, train=train)
    sources = load_sources(config, communicator)
    with tempfile.TemporaryDirectory() as folder:
        task = task_for(config, sources.train)
        trainer = Trainer(config, task, sources, communicator, RunFolder(Path(folder)), SilentTelemetry())
        batches = training_batches(
            sources.train, task, communicator.rank, communicator.size, 0, communicator.device.type == "cuda"
        )
        stop, warm_up = StopRequest(), StepClock()
        for _ in range(UNTIMED_STEPS + 3):
            trainer.step(batches, trainer.global_batch, warm_up, stop)
        wait_for_start()
        communicator.barrier()
        began = time.perf_counter()
        steps = 0
        # The stop request travels with the gradients, so all ranks end after the same step.
        stopped = False
        while not stopped:
            stop.requested = time.perf_counter() - began >= seconds
            log = trainer.step(batches, trainer.global_batch, warm_up, stop)
            steps += 1
            stopped = log["stop_requests"] > 0
        elapsed = time.perf_counter() - began
    communicator.barrier()
    communicator.shutdown()
    return steps * trainer.global_batch / elapsed, communicator.is_first
