"""Communicator over Horovod: MPI or Gloo on CPUs, NCCL on GPUs.

Only `allreduce_async_` and `broadcast_` on flat one-dimensional tensors with stable
names are used: Horovod's own optimizer wrapper and state broadcast break on current
torch (channels_last, bf16, momentum, the first step of Adam).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator, Pending, ReduceOp
from perception.distributed.environment import RankEnvironment
from perception.distributed.stall_watch import StallWatch
from perception.errors import UserError

_WIRE = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}

_has_left = False
"""This process was one of Horovod's ranks and is no more."""


class _Handle:
    def __init__(self, horovod: ModuleType, handle: int, watch: StallWatch) -> None:
        self._horovod = horovod
        self._handle = handle
        self._watch = watch

    def done(self) -> bool:
        return bool(self._horovod.poll(self._handle))

    def wait(self) -> None:
        with self._watch.waiting():
            self._horovod.synchronize(self._handle)


class HorovodCommunicator(Communicator):
    engine = "horovod"

    def __init__(
        self, place: RankEnvironment, device: torch.device, transport: str, watch: StallWatch | None = None
    ) -> None:
        """Join the ranks. `connect` has set HOROVOD_* before; init reads them once."""
        super().__init__(place, device, watch)
        self.transport = transport
        import horovod.torch as horovod

        if _has_left:
            # MPI cannot be initialised twice, and over Gloo ranks would read each other's old addresses in the store.
            raise UserError(
                "Horovod cannot be joined again in the same process: start a new one, "
                "or take distributed.engine = torch"
            )
        horovod.init()
        self._horovod: ModuleType = horovod
        self._cross_set: Any = None
        self._ops = {"sum": horovod.Sum, "max": horovod.Max, "min": horovod.Min}
        if (horovod.rank(), horovod.size()) != (place.rank, place.size):
            raise RuntimeError(
                f"Horovod says rank {horovod.rank()} of {horovod.size()}, the environment says "
                f"{place.rank} of {place.size}: two launchers are mixed"
            )

    def start_allreduce(self, flat: Tensor, name: str, op: ReduceOp = "sum", stream: str = "") -> Pending:
        self.watch.reached(name)
        handle = self._horovod.allreduce_async_(flat, name=name, op=self._ops[op])
        return _Handle(self._horovod, handle, self.watch)

    def open_cross_group(self, stream: str) -> None:
        # Calls are told apart by name, so one set serves all streams; Horovod refuses a second equal one.
        if self._cross_set is not None:
            return
        if len(self.neighbours().ranks) == 1:
            self._cross_set = self._horovod.global_process_set
            return
        for ranks in self.neighbours().cross_groups:
            # Every rank takes part in adding every set. `connect` has told Horovod that there may be some.
            process_set = self._horovod.add_process_set(list(ranks))
            if self.rank in ranks:
                self._cross_set = process_set

    def start_cross_allreduce(self, flat: Tensor, name: str, stream: str) -> Pending:
        # Not counted by the watch: when a bucket crosses is up to each rank, and ranks of a host compare counts.
        handle = self._horovod.allreduce_async_(flat, name=name, op=self._ops["sum"], process_set=self._cross_set)
        return _Handle(self._horovod, handle, self.watch)

    def broadcast_flat(self, flat: Tensor, root: int, name: str) -> None:
        self.watch.reached(name)
        with self.watch.waiting():
            self._horovod.broadcast_(flat, root_rank=root, name=name)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Horovod reduces neither bf16 nor small integers; fp32 and int32 hold their values exactly.
        return _WIRE.get(dtype, dtype)

    def shutdown(self) -> None:
        global _has_left
        if self._horovod.is_initialized():
            self._horovod.shutdown()
            _has_left = True
