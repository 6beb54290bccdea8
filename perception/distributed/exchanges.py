"""Which exchange a reducer gets: shared memory within hosts, the engine between them or where memory cannot be had."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from perception.config import DistributedConfig
from perception.distributed.buckets import BucketPlan
from perception.distributed.communicator import Communicator, Neighbours
from perception.distributed.exchange import EngineExchange, Exchange
from perception.distributed.hierarchical_exchange import HierarchicalExchange
from perception.distributed.host_memory import aligned_bytes
from perception.distributed.layout import arena_sizes
from perception.distributed.powersgd_exchange import PowerSgdExchange
from perception.distributed.shared_memory_exchange import SharedMemoryExchange
from perception.distributed.shared_segment import SharedSegment, open_segment
from perception.distributed.tail import Tail
from perception.errors import UserError


def open_exchange(
    communicator: Communicator,
    config: DistributedConfig,
    plans: Sequence[BucketPlan],
    num_parameters: int,
    num_extras: int,
) -> Exchange:
    """The exchange that `config` asks for. Collective. Raises UserError if this run cannot have it."""
    _refuse_unfit(communicator, config)
    segment = _shared_arenas(communicator, config, plans, num_parameters, num_extras)
    # Several models' reductions may be in flight at once, and engines tell them apart by name.
    name = f"model{communicator.num_reducers}"
    communicator.num_reducers += 1
    if segment is not None:
        if len(communicator.neighbours().hosts) > 1:
            return HierarchicalExchange(communicator, name, segment, config.wire_format)
        return SharedMemoryExchange(communicator, name, segment)
    communicator.open_stream(name)
    if config.wire_format == "powersgd":
        return PowerSgdExchange(communicator, name, config.powersgd_rank)
    return EngineExchange(communicator, name, config.wire_format)


def _refuse_unfit(communicator: Communicator, config: DistributedConfig) -> None:
    if config.wire_format == "bf16" and communicator.engine == "horovod":
        raise UserError(
            "distributed.wire_format = bf16: Horovod cannot reduce bf16; take fp16, or distributed.engine = torch"
        )
    if config.local_reduction == "shared_memory" and config.wire_format not in _formats_sent(communicator.neighbours()):
        raise UserError(
            f"distributed.wire_format = {config.wire_format}: nothing is sent in shared memory; "
            "take distributed.local_reduction = engine, or fp32"
        )


def _shared_arenas(
    communicator: Communicator,
    config: DistributedConfig,
    plans: Sequence[BucketPlan],
    num_parameters: int,
    num_extras: int,
) -> SharedSegment | None:
    """Memory for all gradients of all ranks of this host; None if the engine alone is to reduce."""
    asked = config.local_reduction == "shared_memory"
    if config.local_reduction == "engine":
        return None
    neighbours = communicator.neighbours()
    own = cannot_share_gradients(communicator) or _cannot_reduce_by_hosts(neighbours)
    if own is None and config.wire_format not in _formats_sent(neighbours):
        own = f"distributed.wire_format = {config.wire_format} was asked for"
    reasons = communicator.allgather_object(own)
    reason = next((text for text in reasons if text), None)
    if reason is None:
        tail_numel = Tail(communicator, num_parameters, num_extras).numel
        sizes = arena_sizes(plans, tail_numel)
        opened = open_segment(communicator, sum(aligned_bytes(numel, dtype) for dtype, numel in sizes.items()))
        if isinstance(opened, SharedSegment):
            return opened
        reason = opened
        if not asked and communicator.is_first:
            # Worth a word: the engine is slower, and the cure is in the user's hands.
            print(f"gradients are reduced by {communicator.engine}, not in shared memory: {reason}", file=sys.stderr)
    if asked:
        raise UserError(f"distributed.local_reduction = shared_memory: {reason}")
    return None


def _formats_sent(neighbours: Neighbours) -> tuple[str, ...]:
    """Wire formats that mean something where hosts sum in memory: what crosses is cast, within a host nothing is."""
    return ("fp32", "fp16", "bf16") if len(neighbours.hosts) > 1 else ("fp32",)


def cannot_reduce_in_memory(communicator: Communicator) -> str | None:
    """Why this rank cannot reduce in memory that all ranks share; None if it can."""
    if communicator.local_size < communicator.size:
        return "ranks are on several hosts"
    return cannot_share_gradients(communicator)


def _cannot_reduce_by_hosts(neighbours: Neighbours) -> str | None:
    """Why several hosts cannot each sum in memory what they exchange; None if they can, or if there is one."""
    if len(neighbours.hosts) == 1:
        return None
    if not neighbours.same_everywhere:
        return "hosts have different numbers of ranks"
    return "each host has one rank" if len(neighbours.ranks) == 1 else None


def cannot_share_gradients(communicator: Communicator) -> str | None:
    """Why this rank cannot have its gradients in memory that other ranks of its host map; None if it can."""
    if communicator.device.type != "cpu":
        return "gradients are not in main memory"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Counters are plain stores; only x86 promises that other cores see them after the data.
        return f"not on {platform.machine()} processors"
    return None
