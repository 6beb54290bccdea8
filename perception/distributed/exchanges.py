"""Which exchange a reducer gets: shared memory where all ranks share a host, else the engine."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from perception.config import DistributedConfig
from perception.distributed.buckets import BucketPlan
from perception.distributed.communicator import Communicator
from perception.distributed.exchange import EngineExchange, Exchange
from perception.distributed.layout import arena_sizes
from perception.distributed.shared_memory_exchange import SharedMemoryExchange, aligned_bytes
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
    """The exchange that `config` asks for. Collective."""
    segment = _shared_arenas(communicator, config, plans, num_parameters, num_extras)
    # Several models' reductions may be in flight at once, and engines tell them apart by name.
    name = f"model{communicator.num_reducers}"
    communicator.num_reducers += 1
    if segment is not None:
        return SharedMemoryExchange(communicator, name, segment)
    communicator.open_stream(name)
    return EngineExchange(communicator, name, config.wire_format)


def _shared_arenas(
    communicator: Communicator,
    config: DistributedConfig,
    plans: Sequence[BucketPlan],
    num_parameters: int,
    num_extras: int,
) -> SharedSegment | None:
    """Memory for all gradients of all ranks; None if the engine is to reduce."""
    asked = config.local_reduction == "shared_memory"
    if config.local_reduction == "engine":
        return None
    own = cannot_reduce_in_memory(communicator)
    if own is None and config.wire_format != "fp32" and not asked:
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


def cannot_reduce_in_memory(communicator: Communicator) -> str | None:
    """Why this rank cannot reduce in memory that all ranks share; None if it can."""
    if communicator.local_size < communicator.size:
        return "ranks are on several hosts"
    if communicator.device.type != "cpu":
        return "gradients are not in main memory"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Counters are plain stores; only x86 promises that other cores see them after the data.
        return f"not on {platform.machine()} processors"
    return None
