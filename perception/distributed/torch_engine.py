"""Communicator over torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import atexit
import contextlib
import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from perception.distributed.communicator import Communicator, Pending, ReduceOp
from perception.distributed.environment import RankEnvironment
from perception.errors import UserError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Work:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class TorchCommunicator(Communicator):
    engine = "torch"

    def __init__(
        self,
        place: RankEnvironment,
        device: torch.device,
        transport: str,
        master: tuple[str, int],
        timeout_seconds: float,
    ) -> None:
        super().__init__(place, device)
        self.transport = transport
        timeout = datetime.timedelta(seconds=timeout_seconds)
        host, port = master
        try:
            dist.init_process_group(
                transport,
                init_method=f"tcp://{host}:{port}",
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
                device_id=device if transport == "nccl" else None,
            )
        except (dist.DistError, dist.DistNetworkError) as error:
            raise UserError(
                f"rank {place.rank} of {place.size} could not meet rank 0 at {host}:{port} ({_first_line(error)}): "
                "check MASTER_ADDR, MASTER_PORT and that every rank started"
            ) from error
        # Buckets have a group of their own: their order among themselves is fixed, but not against
        # calls that run inside forward and backward (synchronised batch norm).
        self._groups: dict[str, dist.ProcessGroup] = {
            "calls": dist.new_group(backend="gloo", timeout=timeout),
            "buckets": dist.new_group(backend=transport, timeout=timeout),
        }
        if transport == "nccl":
            self._groups["calls on GPU"] = dist.new_group(backend="nccl", timeout=timeout)
        # Also where nobody calls `shutdown`: a thread of Gloo that lets go of a tensor while the interpreter
        # shuts down aborts the process, so they must all have ended before.
        atexit.register(self._destroy)

    def start_allreduce(self, flat: Tensor, name: str, op: ReduceOp = "sum", bucket: bool = False) -> Pending:
        work = dist.all_reduce(flat, op=_OPS[op], group=self._group(flat, bucket), async_op=True)
        assert work is not None
        return _Work(work)

    def broadcast_flat(self, flat: Tensor, root: int, name: str) -> None:
        dist.broadcast(flat, src=root, group=self._group(flat, bucket=False))

    def shutdown(self) -> None:
        if not self._groups:
            return
        # A rank that leaves while another is still in a call would break that call.
        with contextlib.suppress(RuntimeError):
            self.barrier()
        self._destroy()

    def _destroy(self) -> None:
        atexit.unregister(self._destroy)
        # The last reference joins a group's threads.
        self._groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _group(self, flat: Tensor, bucket: bool) -> dist.ProcessGroup:
        if bucket:
            return self._groups["buckets"]
        return self._groups["calls on GPU" if flat.is_cuda else "calls"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
