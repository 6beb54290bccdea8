"""Which engine and transport a run takes; asked by the launcher before ranks exist, and by each rank. No torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from perception.config import DistributedConfig
from perception.errors import UserError


def choose_engine(engine: str, size: int) -> str:
    """horovod, torch or solo; auto takes solo for one rank, else Horovod where it is installed."""
    installed = importlib.util.find_spec("horovod") is not None
    if engine == "auto":
        if size == 1:
            return "solo"
        return "horovod" if installed else "torch"
    if engine == "horovod" and not installed:
        raise UserError("distributed.engine = horovod, but Horovod is not installed: run `make setup` or take torch")
    if engine == "solo" and size > 1:
        raise UserError(f"distributed.engine = solo cannot have {size} ranks: take horovod or torch")
    return engine


def choose_transport(engine: str, transport: str, on_gpu: bool, mpi: bool) -> str:
    """mpi, gloo or nccl; auto: nccl on GPUs, else mpi for Horovod where `mpi` can be had, else gloo.

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
    engine = choose_engine(config.engine, ranks)
    on_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    mpi = engine == "horovod" and horovod_has_mpi()
    return engine, choose_transport(engine, config.transport, on_gpu, mpi)


def horovod_has_mpi() -> bool:
    """True if the installed Horovod was built with MPI."""
    from horovod.common import util

    return bool(util.mpi_built())
