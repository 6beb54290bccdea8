"""Communicator over Horovod: MPI or Gloo on CPUs, NCCL on GPUs.

Only `allreduce_async_` and `broadcast_` on flat one-dimensional tensors with stable
names are used: Horovod's own optimizer wrapper and state broadcast break on current
torch (channels_last, bf16, momentum, the first step of Adam).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator, Pending, ReduceOp
from perception.distributed.environment import RankEnvironment
from perception.distributed.stall_watch import StallWatch

_WIRE = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}


class _Handle:
    def __init__(self, horovod: ModuleType, handle: int, watch: StallWatch) -> None:
        self._horovod = horovod
        self._handle = handle
        self._watch = watch

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

        horovod.init()
        self._horovod: ModuleType = horovod
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

    def broadcast_flat(self, flat: Tensor, root: int, name: str) -> None:
        self.watch.reached(name)
        with self.watch.waiting():
            self._horovod.broadcast_(flat, root_rank=root, name=name)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Horovod reduces neither bf16 nor small integers; fp32 and int32 hold their values exactly.
        return _WIRE.get(dtype, dtype)

    def shutdown(self) -> None:
        if self._horovod.is_initialized():
            self._horovod.shutdown()
