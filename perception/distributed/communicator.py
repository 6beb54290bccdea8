"""What ranks say to each other: one small class, its solo twin, and what every engine shares.

An engine implements the few operations on flat one-dimensional tensors at the
bottom of `Communicator`; shapes, strides, dtypes and objects are handled here once.
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from perception.distributed.environment import RankEnvironment
from perception.distributed.stall_watch import StallWatch

ReduceOp = Literal["sum", "max", "min"]

_EXACT = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Pending(Protocol):
    """A reduction in flight."""

    def done(self) -> bool:
        """True once `wait` returns, or raises, without blocking."""

    def wait(self) -> None:
        """Block until the tensor holds the result; raise if another rank is gone."""


@dataclass(frozen=True)
class Neighbours:
    """The ranks that share a host with this one."""

    ranks: tuple[int, ...]
    """Global ranks in order."""
    own: int
    """This rank's place among them."""
    same_everywhere: bool
    """Every host has equally many ranks."""
    hosts: tuple[tuple[int, ...], ...]
    """Global ranks of each host in order, hosts in the order of their first ranks."""

    @property
    def cross_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each place on a host the ranks that have it, one a host; needs equally many ranks everywhere."""
        return tuple(zip(*self.hosts, strict=True))


class SharedCalls(Protocol):
    """Calls among the ranks of one host that do not need the engine."""

    def combine(self, flat: Tensor, op: str, name: str) -> None: ...

    def broadcast(self, flat: Tensor, root: int, name: str) -> None: ...


class Communicator(ABC):
    """The ranks of one run. Collective: every rank calls the same methods in the same order."""

    engine: str = "solo"
    transport: str = "none"

    def __init__(self, place: RankEnvironment, device: torch.device, watch: StallWatch | None = None) -> None:
        self.watch = watch or StallWatch(place.rank, place.size)
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.node_rank = place.node_rank
        self.device = device
        self._neighbours: Neighbours | None = None
        self._calls: SharedCalls | None = None
        self.num_reducers = 0
        """Gradient reducers made so far, in the same order on every rank: part of their buckets' names."""
        self.exchanges: weakref.WeakSet[Any] = weakref.WeakSet()
        """Shared-memory exchanges: a rank that waits in one does its share of all, as others may wait in another."""
        self.unfinished: list[Any] = []
        """Reducers whose gradients the backward that is running has reached."""

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes files."""
        return self.rank == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        # A copied model (synchronised batch norm holds its communicator) speaks to the same ranks.
        return self

    def neighbours(self) -> Neighbours:
        """The ranks of this host, as the launcher numbers nodes. Collective at the first call."""
        if self._neighbours is None:
            nodes = self.allgather_object(self.node_rank)
            hosts = tuple(
                tuple(rank for rank, other in enumerate(nodes) if other == node) for node in dict.fromkeys(nodes)
            )
            ranks = next(host for host in hosts if self.rank in host)
            same = all(len(host) == len(ranks) for host in hosts)
            self._neighbours = Neighbours(ranks, ranks.index(self.rank), same, hosts)
        return self._neighbours

    def share_calls(self, calls: SharedCalls) -> None:
        """From now on all calls on tensors in main memory go through memory that all ranks share."""
        self._calls = calls

    def progress(self) -> bool:
        """Do this rank's share of what others may be waiting for; tells whether there was any."""
        worked = [bool(exchange.progress()) for exchange in self.exchanges]
        return any(worked)

    def allreduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combine a tensor of equal shape over ranks; returns a new one with the same strides.

        Integers and bools are exact (bool: sum and max are "any", min is "all").
        Raises TypeError for complex and other dtypes, naming the way out.
        """
        _refuse_unknown(tensor.dtype)
        flat = tensor.detach().contiguous().reshape(-1)
        wire = flat.to(self.wire_dtype(flat.dtype), copy=True)
        self._combine(wire, f"allreduce.{op}.{wire.dtype}.{wire.numel()}", op)
        if tensor.dtype is torch.bool:
            wire = wire > 0
        result = torch.empty_like(tensor)
        result.copy_(wire.view(tensor.shape))
        return result

    def _combine(self, flat: Tensor, name: str, op: ReduceOp) -> None:
        if self._calls is not None and not flat.is_cuda:
            self._calls.combine(flat, op, name)
        elif flat.numel():
            self.start_allreduce(flat, name, op).wait()

    def average(self, tensor: Tensor) -> Tensor:
        """Mean over ranks of a floating-point tensor; integers are refused, as their mean is no integer."""
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"average of {tensor.dtype}: convert it first, e.g. tensor.float()")
        return self.allreduce(tensor).div_(self.size)

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, by rank; shapes may differ between ranks, dtypes may not."""
        _refuse_unknown(tensor.dtype)
        shapes = [tuple(shape) for shape in self.allgather_object(list(tensor.shape))]
        sizes = [int(torch.Size(shape).numel()) for shape in shapes]
        # Bits summed as int64 into disjoint slots of zeros: exact for every dtype, by the one primitive all have.
        words = [-(-size * tensor.element_size() // 8) for size in sizes]
        buffer = torch.zeros(sum(words), dtype=torch.int64, device=tensor.device)
        start = sum(words[: self.rank])
        own = buffer[start : start + words[self.rank]].view(tensor.dtype)
        own[: tensor.numel()] = tensor.detach().reshape(-1)
        self._combine(buffer, f"allgather.{buffer.numel()}", "sum")
        return [
            part.view(tensor.dtype)[:size].clone().reshape(shape)
            for part, size, shape in zip(buffer.split(words), sizes, shapes, strict=True)
        ]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Rank `root`'s values on every rank; shapes and dtypes must agree already.

        Raises ValueError where there is no such rank.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"root = {root}, but there {'is 1 rank' if self.size == 1 else f'are {self.size} ranks'}")
        _refuse_unknown(tensor.dtype)
        flat = tensor.detach().contiguous().reshape(-1)
        wire = flat.to(self.wire_dtype(flat.dtype), copy=True)
        name = f"broadcast.{root}.{wire.dtype}.{wire.numel()}"
        if self._calls is not None and not wire.is_cuda:
            self._calls.broadcast(wire, root, name)
        elif wire.numel():
            self.broadcast_flat(wire, root, name)
        result = torch.empty_like(tensor)
        result.copy_(wire.view(tensor.shape))
        return result

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s JSON-able object on every rank (lists come back for tuples)."""
        text = json.dumps(value).encode() if self.rank == root else b""
        size = self.broadcast(torch.tensor([len(text)], dtype=torch.int64), root)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == root:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return json.loads(bytes(self.broadcast(data, root).tolist()))

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's JSON-able object, by rank."""
        text = json.dumps(value).encode()
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(text)
        sizes = self.allreduce(sizes)
        data = torch.zeros(self.size, int(sizes.max()), dtype=torch.uint8)
        data[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.allreduce(data)
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        self.allreduce(torch.zeros(1, dtype=torch.int32))

    def agree(self, flag: bool) -> bool:
        """True on every rank if it is true on any."""
        return bool(self.allreduce(torch.tensor([int(flag)], dtype=torch.int32), "max").item())

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which values of `dtype` travel, wide enough to be exact or better."""
        return {torch.bool: torch.uint8, torch.int16: torch.int32}.get(dtype, dtype)

    @abstractmethod
    def start_allreduce(self, flat: Tensor, name: str, op: ReduceOp = "sum", stream: str = "") -> Pending:
        """Combine a contiguous 1-D tensor in place. Within a stream all ranks call in one order; streams may cross."""

    def open_stream(self, name: str) -> None:
        """Prepare a stream of its own. Collective."""
        return None

    def open_cross_group(self, stream: str) -> None:
        """Prepare a stream among the ranks with this rank's place on every host. Collective over all ranks.

        Every host must have equally many ranks.
        """
        return None

    @abstractmethod
    def start_cross_allreduce(self, flat: Tensor, name: str, stream: str) -> Pending:
        """Sum a contiguous 1-D tensor in place over the ranks of an `open_cross_group`, in one order within it."""

    @abstractmethod
    def broadcast_flat(self, flat: Tensor, root: int, name: str) -> None:
        """Overwrite a contiguous 1-D tensor with rank `root`'s."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group; bounded in time, idempotent."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SoloCommunicator(Communicator):
    """One rank: every reduction is already done."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(RankEnvironment(), device or torch.device("cpu"))

    def start_allreduce(self, flat: Tensor, name: str, op: ReduceOp = "sum", stream: str = "") -> Pending:
        return _Done()

    def start_cross_allreduce(self, flat: Tensor, name: str, stream: str) -> Pending:
        return _Done()

    def broadcast_flat(self, flat: Tensor, root: int, name: str) -> None:
        return None

    def shutdown(self) -> None:
        return None


def _refuse_unknown(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise TypeError(f"{dtype} cannot be reduced: pass torch.view_as_real(tensor)")
    if dtype not in _EXACT and dtype not in _FLOATS:
        raise TypeError(f"{dtype} cannot be reduced: convert it to float32 or int64 first")
