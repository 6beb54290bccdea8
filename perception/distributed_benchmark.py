"""One process of `bench allreduce`: builds a variant's training step, then does what the command asks, turn by turn.

    python -m perception.distributed_benchmark JOB.json

Requests and answers are JSON packets on a local socket, one each way. Between them the process waits without
using the processor; it ends when the socket is closed.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perception.config import DistributedConfig, from_json
from perception.distributed import failure
from perception.distributed.environment import rank_environment

CHECK_LEARNING_RATE = 0.01
BENCHMARK_LEARNING_RATE = 1e-5
FIRST_STEPS = 3
"""Steps that allocate, generate code and learn the order of gradients, and then as many that say how long one takes."""


@dataclass(frozen=True)
class Job:
    """All that a process needs to know; its rank comes from the environment."""

    method: str
    """plain, ours, ddp, horovod_optimizer, or reference: one process that does all ranks' work in turn."""
    model: str
    config: str | None
    """JSON of the detector's RunConfig; None for other models."""
    distributed: dict[str, Any]
    """Fields of DistributedConfig."""
    settings: dict[str, Any]
    """Arguments of the method's step."""
    image_size: tuple[int, int]
    batch_size: int
    threads: int
    precision: str
    """bf16 (autocast), fp32 or auto as in train.precision; the check of the weights is always in fp32."""
    channels_last: bool
    seed: int
    socket: str
    num_reference_ranks: int = 0

    @property
    def is_independent(self) -> bool:
        return self.method in ("plain", "reference")


def read_job(path: Path) -> Job:
    raw = json.loads(path.read_text())
    return Job(**{**raw, "image_size": tuple(raw["image_size"])})


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(dataclasses.asdict(job)))


def main(job_path: Path) -> int:
    place = rank_environment(os.environ)
    folder = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    failure.install(Path(folder) if folder else None, place.rank)
    job = read_job(job_path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(job.socket)
    process = _Process(job, place.rank, connection)
    process.send({"rank": place.rank, "pid": os.getpid()})
    while request := connection.recv(65536):
        process.answer(json.loads(request))
    process.end()
    return 0


@dataclass
class _Built:
    """A training step and what it trains."""

    step: Callable[[Any], float]
    batches: tuple[Any, ...]
    model: Any


@dataclass
class _Process:
    job: Job
    rank: int
    connection: socket.socket
    communicator: Any = None
    built: _Built | None = field(default=None)

    def send(self, answer: dict[str, Any]) -> None:
        self.connection.send(json.dumps(answer).encode())

    def answer(self, request: dict[str, Any]) -> None:
        match request["do"]:
            case "check":
                self.send(self._check(request["steps"], Path(request["folder"])))
            case "prepare":
                self.send(self._prepare())
            case "turn":
                self._turn(request["warm_up_steps"], request["steps"])
            case "profile":
                self.send(self._profile(request["steps"], Path(request["path"])))

    def end(self) -> None:
        if self.communicator is not None:
            self.communicator.shutdown()

    def _build(self, check: bool) -> _Built:
        import torch

        from perception.benchmark_models import build_workload
        from perception.evaluation import autocast

        job = self.job
        torch.set_num_threads(job.threads)
        self._connect()
        batches: list[tuple[Any, ...]] = []
        config = from_json(job.config, "the benchmark's configuration") if job.config else None
        # The last one's model is taken: all are equal.
        for rank in range(job.num_reference_ranks) if job.method == "reference" else [self.rank]:
            workload = build_workload(job.model, config, job.image_size, job.batch_size, rank, job.seed)
            batches.append(workload.batches)
        model = workload.model
        if job.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        device = torch.device("cpu")
        bf16 = self._bf16() and not check

        def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            with autocast(device, bf16):
                return workload.loss(model, batch)

        # In the check plain descent with momentum: Adam would blow rounding errors of tiny gradients up.
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=CHECK_LEARNING_RATE, momentum=0.9)
            if check
            else torch.optim.AdamW(model.parameters(), lr=BENCHMARK_LEARNING_RATE, fused=True)
        )
        step = self._step(model, optimizer, loss)
        return _Built(step, tuple(zip(*batches, strict=True)) if job.method == "reference" else batches[0], model)

    def _bf16(self) -> bool:
        import torch

        from perception.optimizer import use_bf16

        return use_bf16(self.job.precision, torch.device("cpu"))

    def _connect(self) -> None:
        if self.communicator is None and not self.job.is_independent:
            from perception import distributed

            self.communicator = distributed.connect(DistributedConfig(**self.job.distributed))

    def _step(self, model: Any, optimizer: Any, loss: Any) -> Callable[[Any], float]:
        from perception.distributed import baselines

        settings = self.job.settings
        match self.job.method:
            case "ours":
                return self._our_step(model, optimizer, loss)
            case "reference":
                return baselines.reference_step(model, optimizer, loss)
            case "ddp":
                return baselines.ddp_step(model, optimizer, loss, **settings)
            case "horovod_optimizer":
                return baselines.horovod_optimizer_step(model, optimizer, loss, **settings)
            case _:
                return baselines.plain_step(model, optimizer, loss, **settings)

    def _our_step(self, model: Any, optimizer: Any, loss: Any) -> Callable[[Any], float]:
        from perception.distributed import distribute, share_update

        config = DistributedConfig(**self.job.distributed)
        reducer = distribute(model, optimizer, self.communicator, config)
        update = share_update(model, optimizer, reducer, self.communicator, config)
        num_samples, global_samples = self.job.batch_size, self.job.batch_size * self.communicator.size

        def step(batch: Any) -> float:
            reducer.zero_grad()
            reducer.backward(loss(model, batch), num_samples, global_samples=global_samples)
            reduction = reducer.finish()
            optimizer.step()
            update.settle()
            return reduction.wait_seconds

        return step

    def _prepare(self) -> dict[str, Any]:
        """Build the step that is timed and run it until nothing is new to it."""
        self.built = self._build(check=False)
        self._run(FIRST_STEPS)
        began = time.perf_counter()
        self._run(FIRST_STEPS)
        seconds = (time.perf_counter() - began) / FIRST_STEPS
        return {
            "step_seconds": seconds,
            "private_bytes": _private_bytes(),
            "precision": "bf16" if self._bf16() else "fp32",
            "num_parameters": sum(parameter.numel() for parameter in self.built.model.parameters()),
        }

    def _run(self, steps: int) -> float:
        assert self.built is not None
        batches = self.built.batches
        return sum(self.built.step(batches[number % len(batches)]) for number in range(steps))

    def _turn(self, warm_up_steps: int, steps: int) -> None:
        """Warm up, say so, begin when all may, and report this rank's own time."""
        self._run(warm_up_steps)
        self.send({"ready": True})
        if not self.connection.recv(65536):
            return
        cpu = time.process_time()
        began = time.perf_counter()
        waited = self._run(steps)
        ended = time.perf_counter()
        self.send(
            # CLOCK_MONOTONIC, which all processes of a host share.
            {"began": began, "ended": ended, "cpu_seconds": time.process_time() - cpu, "wait_seconds": waited}
        )
        if self.job.is_independent:
            # The others may not have ended: let them not have the machine to themselves.
            while not select.select([self.connection], [], [], 0)[0]:
                self._run(1)

    def _check(self, steps: int, folder: Path) -> dict[str, Any]:
        """Train in fp32 from the seed; rank 0 leaves its weights in `folder`, all ranks their digest."""
        import numpy as np
        import torch

        built = self._build(check=True)
        before = [parameter.detach().clone() for parameter in built.model.parameters()]
        for number in range(steps):
            built.step(built.batches[number % len(built.batches)])
        names = [name for name, _ in built.model.named_parameters()]
        after = [parameter.detach() for parameter in built.model.parameters()]
        flat = torch.cat([tensor.contiguous().reshape(-1) for tensor in after]).numpy()
        if self.rank == 0:
            np.save(folder / "weights.npy", flat)
            np.save(folder / "initial.npy", torch.cat([t.contiguous().reshape(-1) for t in before]).numpy())
            (folder / "names.json").write_text(json.dumps([[n, t.numel()] for n, t in zip(names, after, strict=True)]))
        answer = {"digest": hashlib.sha256(flat.tobytes()).hexdigest()}
        # Its hooks tie the model into cycles, and the next one needs the memory.
        del built, before, after, flat
        gc.collect()
        return answer

    def _profile(self, steps: int, path: Path) -> dict[str, Any]:
        """Rank 0 leaves a table of the operators that take the most time."""
        from torch import profiler

        if self.rank != 0:
            self._run(steps)
            return {}
        with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
            self._run(steps)
        path.write_text(
            profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
        )
        return {}


def _private_bytes() -> int:
    """Memory of this process that no other shares."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
