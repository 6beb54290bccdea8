"""What test_launch.py runs in processes of their own: a launcher, and ranks that behave in some way.

launched.py launch ENGINE TRANSPORT RANKS FOLDER COMMUNICATES BEHAVIOUR RANK
launched.py rank COMMUNICATES BEHAVIOUR RANK
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from perception.distributed import failure
from perception.distributed.environment import rank_environment
from perception.errors import UserError


def launch(engine: str, transport: str, ranks: str, folder: str, *behaviour: str) -> int:
    from pipelines.launch import Patience, launch_ranks

    argv = [sys.executable, __file__, "rank", *behaviour]
    patience = Patience(grace=0.5, terminate=0.5, preempted=3.0)
    return launch_ranks(argv, int(ranks), engine, transport, os.environ, Path(folder), patience)


def rank_main(communicates: str, behaviour: str, who: str) -> int:
    place = rank_environment(os.environ)
    if behaviour != "unaware":
        failure.install(Path(os.environ[failure.FAILURE_FOLDER_VARIABLE]), place.rank)
    received: list[int] = []
    if behaviour == "stop" or (behaviour == "stop-one" and place.rank != int(who)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: received.append(number))
    reduce = _reduction() if communicates == "reduce" else _no_reduction
    print(f"rank {place.rank} of {place.size}: sum {reduce(place.rank + 1.0):g}")
    if place.rank == int(who):
        _misbehave(behaviour)
    if behaviour in ("stop", "stop-one", "wait"):
        print(f"pid {os.getpid()} waits", flush=True)
        while not received:
            time.sleep(0.01)
        time.sleep(0.3 + 0.2 * place.rank)
        print(f"received {received}")
        return 75
    if behaviour in ("raise", "user", "kill", "exit", "segfault") and communicates != "reduce":
        time.sleep(30)
    reduce(1.0)
    print(f"rank {place.rank} ends")
    return 0


def _misbehave(behaviour: str) -> None:
    if behaviour == "raise":
        raise ValueError("this rank is broken")
    if behaviour == "user":
        raise UserError("x.json: field y is 0; must be above 0")
    if behaviour in ("kill", "unaware"):
        warnings.warn("about to be killed", stacklevel=1)
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "exit":
        os._exit(0)
    if behaviour == "segfault":
        import ctypes

        ctypes.string_at(0)
    if behaviour == "child":
        child = subprocess.Popen(["sleep", "300"])
        print(f"pid {child.pid} waits", flush=True)
        raise ValueError("left a child")
    if behaviour == "preempted":
        raise SystemExit(75)


def _no_reduction(value: float) -> float:
    return value


def _reduction() -> Callable[[float], float]:
    """A sum over ranks, by the engine that the environment speaks of."""
    import torch

    if "HOROVOD_CONTROLLER" in os.environ:
        import horovod.torch as horovod

        horovod.init()
        expected = os.environ["HOROVOD_CONTROLLER"]
        assert (horovod.mpi_enabled(), horovod.gloo_enabled()) == (expected == "mpi", expected == "gloo")

        def by_horovod(value: float) -> float:
            return float(horovod.allreduce(torch.tensor([value]), op=horovod.Sum, name="sum").item())

        return by_horovod
    import torch.distributed

    torch.distributed.init_process_group("gloo")

    def by_torch(value: float) -> float:
        tensor = torch.tensor([value])
        torch.distributed.all_reduce(tensor)
        return float(tensor.item())

    return by_torch


if __name__ == "__main__":
    sys.exit({"launch": launch, "rank": rank_main}[sys.argv[1]](*sys.argv[2:]))
