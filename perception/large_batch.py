"""Optimizers for large batches: each tensor moves in proportion to its own length, whatever its gradient's.

LARS: You, Gitman and Ginsburg 2017. LAMB: You et al. 2019. A group with `adapted` False moves as by momentum SGD or
Adam: biases and the parameters of norms, whose length says nothing about how far they should go.

A very short tensor counts as longer than it is, as LAMB's phi allows: the weights of each output as of length 1/2 at
least, a little less than a usual initialisation gives them. A last layer that begins near 0 would else stay there,
since each step could only multiply its length.

A tensor's update depends on itself and its gradient alone, so that ranks may share the work tensor by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

LEAST_OUTPUT_LENGTH = 0.5
"""What the weights of an output count as at least."""


class Lars(Optimizer):
    """velocity = momentum * velocity + lr * ratio * (gradient + weight_decay * weight); weight -= velocity.

    ratio = trust_coefficient * length / (|gradient| + weight_decay * |weight|), of each tensor.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adapted": True}
        super().__init__(params, defaults | {"trust_coefficient": trust_coefficient})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _evaluate(closure)
        for group in self.param_groups:
            weights, gradients = _with_gradients(group)
            if not weights:
                continue
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["velocity"] = torch.zeros_like(weight)
            velocities = [self.state[weight]["velocity"] for weight in weights]
            directions = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            if group["adapted"]:
                norms = torch.stack(torch._foreach_norm(weights))
                divisors = torch.stack(torch._foreach_norm(gradients)) + group["weight_decay"] * norms
                _scale(directions, group["trust_coefficient"] * _lengths(weights, norms) / divisors)
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, directions, alpha=group["lr"])
            torch._foreach_sub_(weights, velocities)
        return loss


class Lamb(Optimizer):
    """Adam's direction with decoupled weight decay, made as long as the tensor itself; weight -= lr * that."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapted": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _evaluate(closure)
        for group in self.param_groups:
            weights, gradients = _with_gradients(group)
            if not weights:
                continue
            states = [self._state_of(weight) for weight in weights]
            means, squares = [state["mean"] for state in states], [state["square"] for state in states]
            beta_mean, beta_square = group["betas"]
            torch._foreach_lerp_(means, gradients, 1 - beta_mean)
            torch._foreach_mul_(squares, beta_square)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta_square)
            # Both averages begin at 0; divided by what they hold, they are averages of gradients alone.
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, [math.sqrt(1 - beta_square ** state["step"]) for state in states])
            torch._foreach_add_(roots, group["eps"])
            directions = torch._foreach_div(means, [1 - beta_mean ** state["step"] for state in states])
            torch._foreach_div_(directions, roots)
            if group["weight_decay"]:
                torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
            if group["adapted"]:
                lengths = _lengths(weights, torch.stack(torch._foreach_norm(weights)))
                _scale(directions, lengths / torch.stack(torch._foreach_norm(directions)))
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
        return loss

    def _state_of(self, weight: Tensor) -> dict[str, Any]:
        """Of the step that begins."""
        state: dict[str, Any] = self.state[weight]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(weight), "square": torch.zeros_like(weight)}
        state["step"] += 1
        return state


def _lengths(weights: list[Tensor], norms: Tensor) -> Tensor:
    """What each tensor counts as."""
    least = [LEAST_OUTPUT_LENGTH * math.sqrt(math.prod(weight.shape[:1])) for weight in weights]
    return torch.maximum(norms, torch.tensor(least, dtype=norms.dtype, device=norms.device))


def _scale(directions: tuple[Tensor, ...] | list[Tensor], ratios: Tensor) -> None:
    """By a ratio each; a direction of length 0 stays what it is."""
    torch._foreach_mul_(directions, list(torch.where(torch.isfinite(ratios), ratios, 1.0).unbind()))


def _with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    weights = [parameter for parameter in group["params"] if parameter.grad is not None]
    return weights, [weight.grad for weight in weights]


def _evaluate(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
