"""Make all ranks start alike: compare models, broadcast weights, buffers and optimizer state.

Optimizer state travels as a schema (plain JSON in which tensors are numbered) and the
tensors themselves, from rank 0. No dummy step is taken, so a fresh optimizer stays fresh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perception.distributed.buckets import BucketPlan, ParameterSpec, digest, first_difference
from perception.distributed.communicator import Communicator
from perception.errors import UserError


def check_same_everywhere(
    communicator: Communicator,
    specs: Sequence[ParameterSpec],
    plans: Sequence[BucketPlan],
    model: nn.Module,
) -> None:
    """Raise UserError on every rank if models or bucket plans differ, naming the first difference."""
    buffers = [f"{name} {list(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    own = digest(specs, plans) + hashlib.sha256("\n".join(buffers).encode()).hexdigest()
    digests = communicator.allgather_object(own)
    if len(set(digests)) == 1:
        return
    # Only now, when something is wrong, are the long lists exchanged.
    rows = communicator.allgather_object(
        [[s.name, list(s.shape), s.dtype, s.element_bytes, list(s.strides)] for s in specs]
    )
    lists = communicator.allgather_object(buffers)
    reference = [_spec(row) for row in rows[0]]
    for rank in range(1, communicator.size):
        theirs = [_spec(row) for row in rows[rank]]
        difference = first_difference(reference, theirs, 0, rank)
        if difference is None and lists[0] != lists[rank]:
            position, (here, there) = next(
                (i, pair) for i, pair in enumerate(_zip_longest(lists[0], lists[rank])) if pair[0] != pair[1]
            )
            difference = f"buffer {position} is {here} on rank 0 but {there} on rank {rank}"
        if difference is None and digests[0] != digests[rank]:
            difference = f"bucket sizes of rank 0 and rank {rank} differ: give all ranks the same settings"
        if difference is not None:
            raise UserError(f"the ranks have different models: {difference}")


def broadcast_tensors(communicator: Communicator, tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with rank 0's, one flat broadcast for each dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    if communicator.size == 1:
        return
    for group in groups.values():
        flat = torch.cat([tensor.contiguous().reshape(-1) for tensor in group])
        flat = communicator.broadcast(flat)
        for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def broadcast_model(communicator: Communicator, model: nn.Module) -> None:
    """Rank 0's parameters and buffers on every rank."""
    broadcast_tensors(communicator, [*model.parameters(), *model.buffers()])


def broadcast_optimizer(communicator: Communicator, optimizer: Optimizer) -> None:
    """Rank 0's optimizer state and hyperparameters on every rank.

    Works on fresh, loaded and half-filled optimizers, on frozen parameters and on
    optimizers without state; the parameters themselves are never touched.
    """
    if communicator.size == 1:
        return
    tensors: list[Tensor] = []
    schema = communicator.broadcast_object(_pack(optimizer.state_dict(), tensors) if communicator.is_first else None)
    layout = communicator.broadcast_object(
        [[list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type != "cpu"] for t in tensors]
    )
    if not communicator.is_first:
        tensors = [
            torch.empty(shape, dtype=getattr(torch, name), device=communicator.device if on_device else None)
            for shape, name, on_device in layout
        ]
    broadcast_tensors(communicator, tensors)
    if not communicator.is_first:
        optimizer.load_state_dict(_unpack(schema, tensors))


def weights_digest(states: Iterable[Mapping[str, Tensor]]) -> str:
    """Hex sha256 over names, dtypes, shapes and bytes of the named tensors, in order."""
    sha = hashlib.sha256()
    for state in states:
        for name, tensor in state.items():
            data = tensor.detach().cpu().contiguous()
            sha.update(f"{name} {data.dtype} {list(data.shape)}\n".encode())
            sha.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    """Plain JSON for a state_dict; tensors, tuples and non-text keys are marked."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"optimizer state holds a {type(value).__name__}: only tensors and plain values can be broadcast")


def _unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_unpack(item, tensors) for item in value["tuple"])
    return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value["dict"]}


def _spec(row: Sequence[Any]) -> ParameterSpec:
    return ParameterSpec(row[0], tuple(row[1]), row[2], row[3], tuple(row[4]))


def _zip_longest(left: Sequence[str], right: Sequence[str]) -> Iterable[tuple[str, str]]:
    for position in range(max(len(left), len(right))):
        yield (
            left[position] if position < len(left) else "missing",
            right[position] if position < len(right) else "missing",
        )
