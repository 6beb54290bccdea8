"""Batch norm over all ranks, on every engine, from two small reductions a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from perception.distributed.communicator import Communicator


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, mean and var over all ranks' samples.

    Ranks exchange (count, mean, M2) and combine them by Chan's parallel formula, which
    loses nothing to cancellation; backward sums the two moments of dy over ranks.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, communicator: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.float()
        dims = [d for d in range(x.dim()) if d != 1]
        local_count = x.numel() // max(1, x.shape[1])
        if local_count:
            local_var, local_mean = torch.var_mean(wide, dims, correction=0)
        else:
            local_mean = local_var = torch.zeros(x.shape[1], device=x.device)
        own = torch.cat([local_mean, local_var, torch.tensor([float(local_count)], device=x.device)])
        table = torch.zeros(communicator.size, own.numel(), device=x.device)
        table[communicator.rank] = own
        table = communicator.allreduce(table)
        channels = x.shape[1]
        means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        total = counts.sum()
        share = counts / total.clamp(min=1)
        mean = (means * share).sum(0)
        var = ((variances + (means - mean) ** 2) * share).sum(0)
        inverse_std = torch.rsqrt(var + eps)
        shape = [1, channels] + [1] * (x.dim() - 2)
        normalised = (wide - mean.view(shape)) * inverse_std.view(shape)
        y = (normalised * weight.view(shape) + bias.view(shape)).to(x.dtype)
        context.save_for_backward(normalised, weight, inverse_std, total)
        context.communicator = communicator
        context.dims, context.shape, context.dtype = dims, shape, x.dtype
        context.mark_non_differentiable(mean, var, total)
        return y, mean, var, total

    @staticmethod
    def backward(context: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight, inverse_std, total = context.saved_tensors
        dims, shape = context.dims, context.shape
        dy = dy.float()
        grad_bias = dy.sum(dims)
        grad_weight = (dy * normalised).sum(dims)
        sums = context.communicator.allreduce(torch.stack([grad_bias, grad_weight]))
        mean_dy, mean_dy_normalised = sums[0] / total, sums[1] / total
        dx = (dy - mean_dy.view(shape) - normalised * mean_dy_normalised.view(shape)) * (inverse_std * weight).view(
            shape
        )
        # Weight and bias keep their local sums: the gradient reducer adds them over ranks.
        return dx.to(context.dtype), grad_weight, grad_bias, None, None


class SynchronisedBatchNorm(nn.Module):
    """Drop-in for nn.BatchNorm1d/2d/3d, same names in the state dict, statistics over all ranks."""

    def __init__(self, original: _BatchNorm, communicator: Communicator) -> None:
        super().__init__()
        if original.weight is None or original.running_mean is None or original.num_batches_tracked is None:
            raise ValueError("batch norm without weights or running statistics cannot be synchronised")
        self.eps, self.momentum = original.eps, original.momentum
        self.weight, self.bias = original.weight, original.bias
        self.running_mean: Tensor
        self.running_var: Tensor
        self.num_batches_tracked: Tensor
        self.register_buffer("running_mean", original.running_mean)
        self.register_buffer("running_var", original.running_var)
        self.register_buffer("num_batches_tracked", original.num_batches_tracked)
        self.training = original.training
        self._communicator = communicator

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) → the same shape; B may be 0 on some ranks."""
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        y, mean, var, total = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps, self._communicator
        )
        with torch.no_grad():
            self.num_batches_tracked += 1
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = var * (total / (total - 1).clamp(min=1))
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(unbiased, momentum)
        return y  # type: ignore[no-any-return]


def synchronise_batch_norm(model: nn.Module, communicator: Communicator) -> nn.Module:
    """Replace every batch norm of `model`, in place, by one whose statistics span all ranks.

    The same parameter objects stay in use, so an optimizer built before keeps working.
    """
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            setattr(model, name, SynchronisedBatchNorm(child, communicator))
        else:
            synchronise_batch_norm(child, communicator)
    return model
