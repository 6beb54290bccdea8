"""The optimizer's work shared out: ranks of one host train one copy of the parameters, each rank updates its part.

On a processor every rank would read and write all of the optimizer's memory to compute what its neighbour computes
too. Here the parameters of all ranks of a host are one memory; a parameter has one owner, who alone keeps its
optimizer state (as in ZeRO's first stage, Rajbhandari et al. 2020) and writes it for all. No parameter is sent.

It is safe because `finish` returns on a rank only when backward has ended on all, so nobody reads weights that are
being written, and `settle` returns only when all are written. Steps are the same to the bit: an optimizer treats
each parameter by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from perception.config import DistributedConfig
from perception.distributed.communicator import Communicator
from perception.distributed.exchanges import cannot_share_gradients
from perception.distributed.host_memory import aligned_bytes
from perception.distributed.layout import gradient_strides
from perception.distributed.reduction import Reducer
from perception.distributed.shared_segment import SharedSegment, open_segment
from perception.distributed.shared_wait import wait_until
from perception.errors import UserError

_NUMEL_OF_A_CALL = 2000
"""What an update costs for being one, in elements that are updated in that time."""


class Update(Protocol):
    """Which part of the optimizer's work this rank does."""

    def is_own(self, parameter: Tensor) -> bool:
        """This rank updates it."""

    def average_home(self, name: str) -> Tensor | None:
        """Where the fp32 average of parameter `name` lies for all ranks of the host; None: each rank has its own."""

    def settle(self) -> None:
        """Return when every rank has done its part, after each step of the optimizer. Collective over the host."""

    def optimizer_state(self) -> dict[str, Any]:
        """`optimizer.state_dict()` as it would be with one rank. Collective."""

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `optimizer_state` gave, on any number of ranks."""


class WholeUpdate:
    """`Update` where each rank does all of it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def is_own(self, parameter: Tensor) -> bool:
        return True

    def average_home(self, name: str) -> Tensor | None:
        return None

    def settle(self) -> None:
        return None

    def optimizer_state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(dict(state))


def share_update(
    model: nn.Module,
    optimizer: Optimizer,
    reducer: Reducer,
    communicator: Communicator,
    config: DistributedConfig | None = None,
    with_averages: bool = False,
) -> Update:
    """Share the work of `optimizer.step()` among the ranks of each host. Collective; `reducer` is from `distribute`.

    Afterwards `optimizer` holds this rank's parameters only, `reducer.finish` gives gradients to these alone, and each
    step ends with `settle`. `with_averages` keeps
    room for a moving average of every parameter too. Where memory cannot be shared, each rank goes on updating all;
    if distributed.shared_update = on asked for it, UserError says why it cannot be had.
    """
    config = config or DistributedConfig()
    if config.shared_update == "off" or communicator.size == 1:
        return WholeUpdate(optimizer)
    own = _cannot_share(communicator, optimizer, config)
    reason = next((text for text in communicator.allgather_object(own) if text), None)
    if reason is None:
        numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places = len(communicator.neighbours().ranks)
        owners = assign_owners([parameter.numel() for parameter in numbered], places)
        layout = _Layout(model, numbered, owners, places, with_averages)
        segment = open_segment(communicator, layout.num_bytes)
        if isinstance(segment, SharedSegment):
            update = SharedUpdate(optimizer, communicator, segment, numbered, owners, layout)
            reducer.leave_to_owners(update.is_own)
            return update
        reason = segment
    if config.shared_update == "on":
        raise UserError(f"distributed.shared_update = on: {reason}")
    return WholeUpdate(optimizer)


def assign_owners(numels: Sequence[int], places: int) -> list[int]:
    """The place of each parameter's owner: the largest first, each to whom has the least to do.

    >>> assign_owners([10_000, 1_000_000, 900_000, 5_000], 2)
    [1, 0, 1, 1]
    """
    work = [0] * places
    owners = [0] * len(numels)
    for number in sorted(range(len(numels)), key=lambda number: -numels[number]):
        owners[number] = work.index(min(work))
        work[owners[number]] += numels[number] + _NUMEL_OF_A_CALL
    return owners


def _cannot_share(communicator: Communicator, optimizer: Optimizer, config: DistributedConfig) -> str | None:
    """Why this rank cannot; None if it can."""
    if config.local_reduction == "engine":
        return "distributed.local_reduction = engine was asked for"
    if len(communicator.neighbours().ranks) == 1:
        return f"rank {communicator.rank} is alone on its host"
    if isinstance(optimizer, LBFGS):
        return "LBFGS updates all parameters as one"
    return cannot_share_gradients(communicator)


class _Layout:
    """Where in the memory of its owner each parameter, and each average, lies."""

    def __init__(
        self, model: nn.Module, numbered: Sequence[Tensor], owners: Sequence[int], places: int, with_averages: bool
    ) -> None:
        self._used = [0] * places
        self.weights = [self._take(owner, tensor, tensor.dtype) for tensor, owner in zip(numbered, owners, strict=True)]
        self.averages: dict[str, tuple[int, int, Tensor]] = {}
        """Name → (owner, offset, parameter); a parameter with two names has two averages."""
        if with_averages:
            owner_of = {id(tensor): owner for tensor, owner in zip(numbered, owners, strict=True)}
            for name, tensor in model.state_dict(keep_vars=True).items():
                if id(tensor) in owner_of and tensor.is_floating_point():
                    owner = owner_of[id(tensor)]
                    self.averages[name] = (owner, self._take(owner, tensor, torch.float32), tensor)

    @property
    def num_bytes(self) -> int:
        """Of each rank: as much as the owner of the most needs."""
        return max(self._used)

    def _take(self, owner: int, tensor: Tensor, dtype: torch.dtype) -> int:
        offset = self._used[owner]
        self._used[owner] += aligned_bytes(tensor.numel(), dtype)
        return offset


class SharedUpdate:
    """`Update` of one rank among several of a host."""

    def __init__(
        self,
        optimizer: Optimizer,
        communicator: Communicator,
        segment: SharedSegment,
        numbered: Sequence[nn.Parameter],
        owners: Sequence[int],
        layout: _Layout,
    ) -> None:
        """Move the parameters into `segment` and leave `optimizer` those that this rank owns."""
        self._optimizer, self._communicator, self._segment = optimizer, communicator, segment
        self._place = segment.neighbours.own
        self._owners = list(owners)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._own = {id(p) for p, owner in zip(numbered, owners, strict=True) if owner == self._place}
        self._own_numbers = [number for number, owner in enumerate(owners) if owner == self._place]
        self._settled = 0
        for parameter, owner, offset in zip(numbered, owners, layout.weights, strict=True):
            home = _view(segment, owner, offset, parameter, parameter.dtype)
            if owner == self._place:
                home.copy_(parameter.detach())
            parameter.data = home
        self._averages = {
            name: _view(segment, owner, offset, tensor, torch.float32)
            for name, (owner, offset, tensor) in layout.averages.items()
        }
        self._keep_own()
        self.settle()

    def is_own(self, parameter: Tensor) -> bool:
        return id(parameter) in self._own

    def average_home(self, name: str) -> Tensor | None:
        return self._averages.get(name)

    def settle(self) -> None:
        self._communicator.watch.reached("the end of the optimizer's step")
        counters = self._segment.counters
        self._settled += 1
        counters[self._place * 8] = self._settled
        settled = self._settled
        places = range(len(self._segment.neighbours.ranks))
        wait_until(
            lambda: [place for place in places if counters[place * 8] < settled],
            self._communicator.progress,
            self._segment,
            self._communicator.watch,
        )

    def optimizer_state(self) -> dict[str, Any]:
        packed = self._optimizer.state_dict()
        own = {self._own_numbers[index]: entry for index, entry in packed["state"].items()}
        entries: dict[int, dict[str, Any]] = {}
        for place, root in enumerate(self._communicator.neighbours().hosts[0]):
            entries |= self._entries_of(root, own if place == self._place else {})
        first = 0
        groups = []
        for group, size in zip(packed["param_groups"], self._sizes, strict=True):
            groups.append({**group, "params": list(range(first, first + size))})
            first += size
        return {"state": dict(sorted(entries.items())), "param_groups": groups}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        place_of = {number: index for index, number in enumerate(self._own_numbers)}
        groups = [
            {**group, "params": [place_of[number] for number in group["params"] if number in place_of]}
            for group in state["param_groups"]
        ]
        own = {place_of[number]: entry for number, entry in state["state"].items() if number in place_of}
        self._optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _keep_own(self) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in self._own]
        for parameter in [p for p in self._optimizer.state if id(p) not in self._own]:
            del self._optimizer.state[parameter]

    def _entries_of(self, root: int, own: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """State of all parameters that rank `root` owns, on every rank. Collective."""
        communicator = self._communicator
        rows = [[number, [[key, _told(value)] for key, value in entry.items()]] for number, entry in own.items()]
        schema = communicator.broadcast_object(rows, root)
        tensors = [v for entry in own.values() for v in entry.values() if isinstance(v, Tensor)]
        shapes = [told for _, entry in schema for _, told in entry if isinstance(told, list)]
        arrived = iter(_broadcast(communicator, tensors, shapes, root))
        return {
            number: {key: next(arrived) if isinstance(told, list) else told["value"] for key, told in entry}
            for number, entry in schema
        }


def _view(segment: SharedSegment, owner: int, offset: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    flat = segment.tensor(owner, dtype, offset, like.numel())
    return flat.as_strided(like.size(), gradient_strides(like)) if like.numel() else torch.empty_like(like, dtype=dtype)


def _told(value: Any) -> list[Any] | dict[str, Any]:
    if isinstance(value, Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch.")]
    return {"value": value}


def _broadcast(
    communicator: Communicator, tensors: Iterable[Tensor], shapes: Sequence[list[Any]], root: int
) -> list[Tensor]:
    """Tensors of rank `root`, which alone passes any, on every rank; one broadcast for each dtype."""
    given = list(tensors)
    results: list[Tensor] = [
        torch.empty_strided(shape, strides, dtype=getattr(torch, name)) for shape, strides, name in shapes
    ]
    for dtype in dict.fromkeys(result.dtype for result in results):
        numbers = [number for number, result in enumerate(results) if result.dtype is dtype]
        parts = [(given[number] if given else results[number]).reshape(-1) for number in numbers]
        flat = communicator.broadcast(torch.cat(parts), root)
        for number, part in zip(numbers, flat.split([part.numel() for part in parts]), strict=True):
            results[number].copy_(part.view(results[number].shape))
    return results
