"""What differs between ranks in a checkpoint: random state, batch-norm buffers, errors of the wire format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from perception.distributed import Communicator, Reducer
from perception.ema import MovingAverage
from perception.errors import UserError


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Batch-norm statistics, by name: each rank has its own."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def gather_rank_state(
    communicator: Communicator, model: nn.Module, average: MovingAverage | None, reducer: Reducer
) -> dict[str, list[Tensor]]:
    """Of every rank, by rank. Collective."""
    buffers = float_buffers(model)
    averages = [average.tensors[name] for name in buffers] if average else []
    return {
        "random": communicator.allgather(torch.get_rng_state()),
        "buffers": communicator.allgather(_flatten(list(buffers.values()))),
        "averages": communicator.allgather(_flatten(averages)),
        "reduction": communicator.allgather(_flatten(reducer.local_state())),
    }


def restore_rank_state(
    stored: Mapping[str, list[Tensor]],
    communicator: Communicator,
    model: nn.Module,
    average: MovingAverage | None,
    reducer: Reducer,
    say: Callable[[str], None],
) -> bool:
    """Take up this rank's own; of another number of ranks, what stands for all, and False."""
    if len(stored["random"]) == communicator.size:
        own = communicator.rank
        torch.set_rng_state(stored["random"][own])
        _set_buffers(model, average, stored["buffers"][own], stored["averages"][own])
        _set_reduction(reducer, stored["reduction"][own] if "reduction" in stored else torch.zeros(0), say)
        return True
    _set_buffers(model, average, torch.stack(stored["buffers"]).mean(0), torch.stack(stored["averages"]).mean(0))
    # Errors add up over ranks, so their sum stays as it is; factors may have any scale.
    before = stored.get("reduction") or [torch.zeros(0)]
    _set_reduction(reducer, torch.stack(before).sum(0) / communicator.size, say)
    return False


def _set_buffers(model: nn.Module, average: MovingAverage | None, flat: Tensor, averages: Tensor) -> None:
    buffers = float_buffers(model)
    _unflatten(flat, list(buffers.values()))
    if average is not None:
        _unflatten(averages, [average.tensors[name] for name in buffers])


def _set_reduction(reducer: Reducer, flat: Tensor, say: Callable[[str], None]) -> None:
    """Errors of a lossy wire format; those of another format or rank do not fit, and start from 0."""
    state = [torch.empty_like(tensor) for tensor in reducer.local_state()]
    if flat.numel() != sum(tensor.numel() for tensor in state):
        say("the checkpoint's gradient errors do not fit distributed.wire_format or powersgd_rank: left out")
        return
    _unflatten(flat, state)
    reducer.load_local_state(state)


def _flatten(tensors: list[Tensor]) -> Tensor:
    flat = [tensor.detach().float().cpu().reshape(-1) for tensor in tensors]
    return torch.cat(flat) if flat else torch.zeros(0)


def _unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    if start != flat.numel():
        raise UserError(
            "the checkpoint's batch-norm buffers do not fit this model; resume with the run's own config.json"
        )
