"""The layer table of any of the project's models, from one forward pass over shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from perception.config import RunConfig
from perception.scaling.layers import Layer
from perception.tasks import task_for


def model_layers(config: RunConfig) -> tuple[Layer, ...]:
    """Layers of the model of `config` at its input size, in order of execution; no memory, no arithmetic."""
    with torch.device("meta"):
        model = task_for(config).build_model()
        images = torch.zeros(1, config.model.input_height, config.model.input_width, 3, dtype=torch.uint8)
    return traced_layers(model, images)


def traced_layers(model: nn.Module, images: Tensor) -> tuple[Layer, ...]:
    """Layers with parameters of their own, in the order in which `model(images)` reaches them first.

    FLOPs are those of convolutions and linear layers, for one image of the batch; what has no weights (pooling,
    interpolation, attention's own products) counts nothing. A layer that is reached twice counts twice.
    """
    order: list[nn.Module] = []
    flops: dict[nn.Module, float] = {}

    def reached(module: nn.Module, _: Any) -> None:
        if module not in flops:
            order.append(module)
            flops[module] = 0.0

    def left(module: nn.Module, _: Any, output: Any) -> None:
        flops[module] += _flops(module, output) / len(images)

    names = {module: name for name, module in model.named_modules()}
    owners = [module for module in names if any(True for _ in module.parameters(recurse=False))]
    hooks = [module.register_forward_pre_hook(reached) for module in owners]
    hooks += [module.register_forward_hook(left) for module in owners]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    # What forward does not reach has its place among the others all the same: it is reduced too.
    order += [module for module in owners if module not in flops]
    seen: set[int] = set()
    layers = []
    for module in order:
        own = [(name, parameter) for name, parameter in module.named_parameters(recurse=False)]
        new = [(name, parameter) for name, parameter in own if parameter.requires_grad and id(parameter) not in seen]
        seen.update(id(parameter) for _, parameter in new)
        parameters = tuple((name, parameter.numel()) for name, parameter in new)
        layers.append(Layer(names[module], parameters, flops.get(module, 0.0)))
    return tuple(layers)


def _flops(module: nn.Module, output: Any) -> float:
    if isinstance(module, nn.Conv2d):
        return float(2 * output.numel() * module.weight[0].numel())
    if isinstance(module, nn.Linear):
        return float(2 * output.numel() * module.in_features)
    return 0.0
