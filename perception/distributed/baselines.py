"""What others would use, for comparison only: plain torch, torch's DDP and Horovod's DistributedOptimizer.

Each function prepares a model and optimizer once and returns the step; the ranks must be connected
(`connect`) for the latter two. A step takes the gradient of `loss(model, batch)` and lets the optimizer
step; no clipping. Gradients end as means over ranks, every rank weighing the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], Tensor]
Step = Callable[[Any], float]
"""Trains on a batch and returns the seconds that it knows it waited for other ranks; 0 where it does not know."""


def plain_step(model: nn.Module, optimizer: Optimizer, loss: Loss, set_to_none: bool = True) -> Step:
    """One process that shares nothing."""

    def step(batch: Any) -> float:
        model.zero_grad(set_to_none=set_to_none)
        loss(model, batch).backward()
        optimizer.step()
        return 0.0

    return step


def reference_step(model: nn.Module, optimizer: Optimizer, loss: Loss) -> Step:
    """One process that does all ranks' work in turn: a batch is a sequence of the ranks' batches."""

    def step(batches: Sequence[Any]) -> float:
        model.zero_grad()
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        optimizer.step()
        return 0.0

    return step


def ddp_step(
    model: nn.Module, optimizer: Optimizer, loss: Loss, bucket_cap_mb: float = 25.0, set_to_none: bool = True
) -> Step:
    """DistributedDataParallel (Li et al. 2020) over the default process group, as fast as its options make it.

    Gradients are views of its buckets, the graph is declared static, and buffers stay each rank's own,
    since neither of the others broadcasts them.
    """
    from torch.nn.parallel import DistributedDataParallel

    distributed = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=True,
        forward_sync_buffers=False,
    )
    return plain_step(distributed, optimizer, loss, set_to_none)


def horovod_optimizer_step(
    model: nn.Module, optimizer: Optimizer, loss: Loss, num_groups: int = 0, set_to_none: bool = True
) -> Step:
    """Horovod's DistributedOptimizer (Sergeev and Del Balso 2018), as far as it works with today's torch.

    `num_groups` > 0 fixes what is fused with what. Gradients must be contiguous, so the model's weights must
    not be channels_last (the images may be). Raises RuntimeError where they are.
    """
    import horovod.torch as horovod

    strided = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    if strided:
        raise RuntimeError(f"Horovod's optimizer needs contiguous gradients, and {strided[0]} is channels_last")
    horovod.broadcast_parameters(model.state_dict(), root_rank=0)
    wrapped = horovod.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), groups=num_groups or None
    )
    # Not its own zero_grad, which takes no arguments.
    return plain_step(model, wrapped, loss, set_to_none)
