"""Two lines make a program distributed: `connect` joins the ranks, `distribute` a model."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from perception.config import DistributedConfig
from perception.distributed.buckets import BucketPlan, plan_buckets
from perception.distributed.choice import choose_engine, choose_transport
from perception.distributed.clock_alignment import clock_offset_seconds
from perception.distributed.communicator import Communicator, SoloCommunicator
from perception.distributed.environment import RankEnvironment, master_address, rank_environment
from perception.distributed.exchanges import cannot_reduce_in_memory, open_exchange
from perception.distributed.layout import parameter_spec, with_tail
from perception.distributed.open_mpi import check_shared_memory
from perception.distributed.reducer import GradientReducer
from perception.distributed.reduction import Reducer
from perception.distributed.shared_calls import CALL_BYTES, SharedCalls
from perception.distributed.shared_segment import SharedCounters, SharedSegment, open_segment
from perception.distributed.solo_reducer import SoloReducer
from perception.distributed.stall_watch import StallWatch
from perception.distributed.state import broadcast_model, broadcast_optimizer, check_same_everywhere
from perception.errors import UserError

_MIB = 1 << 20
_ENGINE_GRACE_SECONDS = 10
"""An engine's own time limit comes later than the watch's, which knows whom it waits for."""


def connect(config: DistributedConfig | None = None, environ: MutableMapping[str, str] | None = None) -> Communicator:
    """Join the ranks that the environment tells of; a solo communicator where it tells of none.

    On a GPU node each rank takes the GPU of its local rank before anything else touches CUDA.
    Raises UserError if the engine asked for is not installed or the environment is incomplete.
    """
    config = config or DistributedConfig()
    environ = os.environ if environ is None else environ
    place = rank_environment(environ)
    device = _device(place)
    on_gpu = device.type == "cuda"
    engine = choose_engine(config.engine, place.size, on_gpu)
    if engine == "solo":
        if place.size > 1:
            raise UserError(f"distributed.engine = solo, but {place.launcher} started {place.size} ranks")
        return SoloCommunicator(device)
    transport = choose_transport(engine, config.transport, device.type == "cuda", mpi="OMPI_COMM_WORLD_RANK" in environ)
    watch = StallWatch(place.rank, place.size, config.stall_warning_seconds, config.timeout_seconds)
    # Later than the engine's own limit, whose error says more.
    limit_seconds = config.timeout_seconds + 1.5 * _ENGINE_GRACE_SECONDS
    with watch.joining(limit_seconds, _cannot_meet(place, environ, limit_seconds)):
        if engine == "torch":
            from perception.distributed.torch_engine import TorchCommunicator

            master = ("127.0.0.1", _free_port()) if place.size == 1 else master_address(environ, place)
            communicator: Communicator = TorchCommunicator(
                place, device, transport, master, config.timeout_seconds + _ENGINE_GRACE_SECONDS, watch
            )
        else:
            _prepare_horovod(config, transport, place, environ)
            from perception.distributed.horovod_engine import HorovodCommunicator

            communicator = HorovodCommunicator(place, device, transport, watch)
    _share_memory(communicator, config)
    return communicator


def _cannot_meet(place: RankEnvironment, environ: Mapping[str, str], seconds: float) -> str:
    who = f"rank {place.rank} of {place.size}"
    if place.size == 1 or place.launcher not in ("torchrun", "slurm"):
        return f"{who} has not joined the others in {seconds:.0f} s: did every rank start?"
    host, port = master_address(environ, place)
    return (
        f"{who} has not met rank 0 at {host}:{port} in {seconds:.0f} s: is another program listening there? "
        "Check MASTER_ADDR, MASTER_PORT and that every rank started"
    )


def _share_memory(communicator: Communicator, config: DistributedConfig) -> None:
    """Let the ranks of a host see each other's progress, and make calls in memory where all ranks are on one."""
    in_memory = config.local_reduction != "engine" and not any(
        communicator.allgather_object(cannot_reduce_in_memory(communicator))
    )
    segment = open_segment(communicator, CALL_BYTES if in_memory else 0)
    if isinstance(segment, SharedSegment):
        communicator.watch.attach(SharedCounters(segment))
        if in_memory:
            communicator.share_calls(SharedCalls(segment, communicator.watch, communicator.progress))


def distribute(
    model: nn.Module,
    optimizer: Optimizer | None,
    communicator: Communicator,
    config: DistributedConfig | None = None,
    num_extras: int = 0,
) -> Reducer:
    """Make a model and its optimizer distributed. Collective.

    Compares models over ranks, gives all of them rank 0's weights, buffers and optimizer
    state, and takes over the gradients: they are averaged when `loss.backward()` returns.
    Raises UserError if ranks have different models or shared memory was asked for and cannot be had.
    """
    config = config or DistributedConfig()
    named = list(model.named_parameters())
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient: nothing to reduce")
    if communicator.size == 1:
        return SoloReducer(trained, frozen, num_extras)
    specs = [parameter_spec(name, parameter) for name, parameter in trained]

    def plan(order: Sequence[int] | None = None) -> tuple[BucketPlan, ...]:
        first, others = config.bucket_sizes_mib(communicator.device.type == "cuda")
        return with_tail(plan_buckets(specs, int(first * _MIB), int(others * _MIB), order))

    plans = plan()
    check_same_everywhere(communicator, specs, plans, model)
    exchange = open_exchange(communicator, config, plans, len(specs), num_extras)
    reducer = GradientReducer(trained, communicator, plans, exchange, plan, num_extras, frozen)
    reducer.align_clocks(clock_offset_seconds(communicator))
    broadcast_model(communicator, model)
    if optimizer is not None:
        broadcast_optimizer(communicator, optimizer)
        reducer.watch_steps_of(optimizer)
    return reducer


def _device(place: RankEnvironment) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if place.launcher == "slurm" and torch.cuda.device_count() == 1:
        # --gpus-per-task=1 shows each task its own GPU, as number 0.
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if place.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {place.local_rank} has no GPU: the node shows {torch.cuda.device_count()}; start fewer ranks"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _prepare_horovod(
    config: DistributedConfig, transport: str, place: RankEnvironment, environ: MutableMapping[str, str]
) -> None:
    """Set what Horovod reads once at init; what the user exported stays."""
    # Flat buckets are fused already; fusing them again would depend on timing and copy once more.
    environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(int(config.horovod_fusion_threshold_mib * _MIB)))
    idle = transport != "nccl" and place.num_nodes == 1 and config.local_reduction != "engine"
    cycle = config.horovod_cycle_time_milliseconds or (20.0 if idle else 1.0)
    environ.setdefault("HOROVOD_CYCLE_TIME", str(cycle))
    limit = int(config.timeout_seconds) + _ENGINE_GRACE_SECONDS
    environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(limit))
    environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(limit))
    environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(limit))
    if place.num_nodes > 1:
        # Gradients cross hosts within sets of ranks that are made when a model is distributed.
        environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    under_mpirun = "OMPI_COMM_WORLD_RANK" in environ
    if transport == "gloo" and under_mpirun:
        raise UserError("distributed.transport = gloo, but mpirun started this rank: take mpi, or start by --ranks N")
    control = "mpi" if under_mpirun else "gloo"
    if control == "mpi":
        check_shared_memory(place.local_size, environ)
    environ.setdefault("HOROVOD_CONTROLLER", control)
    environ.setdefault("HOROVOD_CPU_OPERATIONS", control)
    if control == "gloo" and place.launcher != "horovod" and place.size > 1:
        from perception.distributed.meeting import join_rendezvous

        environ.update(join_rendezvous(place, master_address(environ, place), config.timeout_seconds))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
