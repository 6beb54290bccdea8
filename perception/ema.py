"""Exponential moving average of a model's weights and floating-point buffers, kept in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perception.errors import UserError


class MovingAverage:
    """Shadow copies of every parameter and floating-point buffer, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {
            name: tensor.detach().float().clone()
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }
        self._order = list(self.tensors.values())

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float) -> None:
        """average = decay * average + (1 - decay) * weights."""
        current = [tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items() if name in self.tensors]
        if any(tensor.dtype != torch.float32 for tensor in current):
            current = [tensor.float() for tensor in current]
        torch._foreach_lerp_(self._order, current, 1 - decay)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over stored averages. Raises UserError where they are of another model, or were never kept."""
        unlike = sorted(
            name
            for name in self.tensors.keys() | tensors.keys()
            if name not in tensors or name not in self.tensors or tensors[name].shape != self.tensors[name].shape
        )
        if unlike:
            raise UserError(
                f"the stored moving average does not fit this model ({len(unlike)} tensors, first {unlike[0]}): "
                "go on with the run's own optim.ema_decay_samples and model"
            )
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the model's weights and floating-point buffers with the averages."""
        state = model.state_dict()
        for name, tensor in self.tensors.items():
            state[name].copy_(tensor)
