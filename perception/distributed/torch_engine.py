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
from perception.distributed.meeting import not_met, open_store
from perception.distributed.stall_watch import StallWatch

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Work:
    def __init__(self, work: dist.Work, watch: StallWatch) -> None:
        self._work = work
        self._watch = watch

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        with self._watch.waiting():
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
        watch: StallWatch | None = None,
    ) -> None:
        super().__init__(place, device, watch)
        self.transport = transport
        timeout = datetime.timedelta(seconds=timeout_seconds)
        store = open_store(place, master, timeout_seconds)
        try:
            dist.init_process_group(
                transport,
                store=store,
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
                device_id=device if transport == "nccl" else None,
            )
        except dist.DistError as error:
            raise not_met(place, master, error) from error
        self._timeout = timeout
        self._groups: dict[str, dist.ProcessGroup] = {"calls": dist.new_group(backend="gloo", timeout=timeout)}
        if transport == "nccl":
            self._groups["calls on GPU"] = dist.new_group(backend="nccl", timeout=timeout)
        # Also where nobody calls `shutdown`: a thread of Gloo that lets go of a tensor while the interpreter
        # shuts down aborts the process, so they must all have ended before.
        atexit.register(self._destroy)

    def start_allreduce(self, flat: Tensor, name: str, op: ReduceOp = "sum", stream: str = "") -> Pending:
        self.watch.reached(name)
        work = dist.all_reduce(flat, op=_OPS[op], group=self._group(flat, stream), async_op=True)
        assert work is not None
        return _Work(work, self.watch)

    def broadcast_flat(self, flat: Tensor, root: int, name: str) -> None:
        self.watch.reached(name)
        with self.watch.waiting():
            dist.broadcast(flat, src=root, group=self._group(flat))

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

    def open_stream(self, name: str) -> None:
        # A group matches calls by their order: buckets of one model are in a fixed one among themselves, but not
        # against another model's, nor against calls within forward and backward (synchronised batch norm).
        self._groups[name] = dist.new_group(backend=self.transport, timeout=self._timeout)

    def open_cross_group(self, stream: str) -> None:
        for ranks in self.neighbours().cross_groups:
            # Every rank takes part in making every group, its own and the others'.
            group = dist.new_group(list(ranks), backend=self.transport, timeout=self._timeout)
            if self.rank in ranks:
                self._groups[f"cross {stream}"] = group

    def start_cross_allreduce(self, flat: Tensor, name: str, stream: str) -> Pending:
        # Not counted by the watch: when a bucket crosses is up to each rank, and ranks of a host compare counts.
        work = dist.all_reduce(flat, group=self._groups[f"cross {stream}"], async_op=True)
        assert work is not None
        return _Work(work, self.watch)

    def _group(self, flat: Tensor, stream: str = "") -> dist.ProcessGroup:
        if stream:
            return self._groups[stream]
        return self._groups["calls on GPU" if flat.is_cuda else "calls"]
