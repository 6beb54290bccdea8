"""Which engine and transport a run takes; asked by the launcher before ranks exist, and by each rank. No torch."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path

from perception.config import DistributedConfig
from perception.errors import UserError


def choose_engine(engine: str, size: int, on_gpu: bool = False) -> str:
    """horovod, torch or solo; auto takes solo for one rank, else Horovod where it is installed and can do the job.

    On GPUs that means built with NCCL, which set-up does where it finds nvcc.
    """
    installed = importlib.util.find_spec("horovod") is not None
    if engine == "auto":
        if size == 1:
            return "solo"
        return "horovod" if installed and (not on_gpu or horovod_has("nccl")) else "torch"
    if engine == "horovod" and installed and on_gpu and not horovod_has("nccl"):
        raise UserError(
            "distributed.engine = horovod, but it was built without NCCL: install nvcc and NCCL and run `make setup` "
            "again, or take torch"
        )
    if engine == "horovod" and not installed:
        raise UserError("distributed.engine = horovod, but Horovod is not installed: run `make setup` or take torch")
    if engine == "solo" and size > 1:
        raise UserError(f"distributed.engine = solo cannot have {size} ranks: take horovod or torch")
    return engine


def choose_transport(engine: str, transport: str, on_gpu: bool, mpi: bool) -> str:
    """mpi, gloo or nccl; auto: nccl on GPUs, else mpi for Horovod where `mpi` can be had and is of use, else gloo.

    Raises UserError for a combination that cannot be.
    """
    if transport == "auto":
        if on_gpu:
            return "nccl"
        return "mpi" if engine == "horovod" and mpi else "gloo"
    if engine == "torch" and transport == "mpi":
        raise UserError("distributed.transport = mpi needs distributed.engine = horovod; torch has gloo and nccl")
    if transport == "nccl" and not on_gpu:
        raise UserError("distributed.transport = nccl, but no GPU is seen: take gloo, or mpi with horovod")
    if transport == "mpi" and not mpi:
        raise UserError("distributed.transport = mpi: Horovod was built without MPI, or mpirun did not start this rank")
    return transport


def choose_launch(config: DistributedConfig, ranks: int) -> tuple[str, str]:
    """Engine and transport for `ranks` processes to be started on this host."""
    on_gpu = _gpus_can_be_used()
    engine = choose_engine(config.engine, ranks, on_gpu)
    mpi = engine == "horovod" and horovod_has("mpi")
    # Where shared memory reduces, Horovod has nothing to do, and over MPI its thread spins while it waits.
    wanted = config.transport == "mpi" or config.local_reduction == "engine" or not horovod_has("gloo")
    return engine, choose_transport(engine, config.transport, on_gpu, mpi and wanted)


def horovod_has(transport: str) -> bool:
    """True if the installed Horovod was built with mpi, gloo or nccl."""
    from horovod.common import util

    return bool({"mpi": util.mpi_built, "gloo": util.gloo_built, "nccl": util.nccl_built}[transport]())


def _gpus_can_be_used() -> bool:
    """A GPU is there, not hidden, and torch was built for it; told without importing torch, as ranks will find."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    try:
        cpu_build = metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        cpu_build = True
    return not cpu_build and any(Path("/dev").glob("nvidia[0-9]*"))
