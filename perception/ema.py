"""Exponential moving average of a model's weights and floating-point buffers, kept in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perception.distributed import Update
from perception.errors import UserError


class MovingAverage:
    """Shadow copies of every parameter and floating-point buffer, by name."""

    def __init__(self, model: nn.Module, update: Update | None = None) -> None:
        """Where ranks share an `update`, they share the averages of parameters: each keeps its own part up to date."""
        self.tensors: dict[str, Tensor] = {}
        self._own: list[str] = []
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                continue
            home = update.average_home(name) if update is not None else None
            self.tensors[name] = tensor.detach().float().clone() if home is None else home
            if home is None or (update is not None and update.is_own(tensor)):
                self._own.append(name)
        self._order = [self.tensors[name] for name in self._own]
        self.restart(model)

    @torch.no_grad()
    def restart(self, model: nn.Module) -> None:
        """Begin anew with the model's present weights."""
        for name, tensor in model.state_dict().items():
            if name in self.tensors:
                self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float) -> None:
        """average = decay * average + (1 - decay) * weights, of this rank's part."""
        state = model.state_dict(keep_vars=True)
        current = [state[name].detach() for name in self._own]
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
