"""Layer tables → a step's profile: time shared out by FLOPs, where nothing was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perception.errors import UserError
from perception.scaling.profile import GradientReady, StepProfile

OPTIMIZER_PASSES = 7
"""Times that AdamW moves the parameters' bytes: reads weight, gradient and two moments, writes all but the gradient."""
LAUNCH_SECONDS = 15e-6
"""Shortest time of a layer's forward on a GPU: a few kernels, launched one by one from Python."""


@dataclass(frozen=True)
class Layer:
    """A layer with parameters, in order of execution."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    """(name, elements), the name without the layer's."""
    forward_flops: float
    """Of one image; a multiplication and an addition are two."""

    @property
    def numel(self) -> int:
        return sum(numel for _, numel in self.parameters)


def training_flops(layers: Sequence[Layer]) -> float:
    """Of one image, forward and backward: gradients of inputs and of weights cost what forward does, each."""
    return 3 * sum(layer.forward_flops for layer in layers)


def profile_at_rate(
    model: str,
    layers: Sequence[Layer],
    *,
    device: str,
    precision: str,
    batch_size_per_rank: int,
    images_per_second: float,
    memory_bytes_per_second: float,
    element_bytes: int = 4,
) -> StepProfile:
    """The profile of one rank that reaches `images_per_second`, which was measured.

    The optimizer takes what its memory traffic takes; a third of the rest is forward, two thirds are backward, and
    each layer has its share by FLOPs. Raises UserError for a rate that is not positive.
    """
    if images_per_second <= 0:
        raise UserError(f"images per second must be above 0, not {images_per_second}")
    step_seconds = batch_size_per_rank / images_per_second
    numel = sum(layer.numel for layer in layers)
    optimizer_seconds = min(OPTIMIZER_PASSES * numel * element_bytes / memory_bytes_per_second, 0.5 * step_seconds)
    flops = sum(layer.forward_flops for layer in layers)
    forward = [(step_seconds - optimizer_seconds) / 3 * layer.forward_flops / flops for layer in layers]
    return _profile(model, layers, forward, device, precision, batch_size_per_rank, optimizer_seconds, element_bytes)


def profile_at_flops(
    model: str,
    layers: Sequence[Layer],
    *,
    device: str,
    precision: str,
    batch_size_per_rank: int,
    flops_per_second: float,
    memory_bytes_per_second: float,
    element_bytes: int = 4,
) -> StepProfile:
    """The profile of one rank of a device that is assumed to sustain `flops_per_second`.

    No layer is faster than its kernels can be launched.
    """
    forward = [max(layer.forward_flops * batch_size_per_rank / flops_per_second, LAUNCH_SECONDS) for layer in layers]
    numel = sum(layer.numel for layer in layers)
    optimizer_seconds = OPTIMIZER_PASSES * numel * element_bytes / memory_bytes_per_second
    return _profile(model, layers, forward, device, precision, batch_size_per_rank, optimizer_seconds, element_bytes)


def _profile(
    model: str,
    layers: Sequence[Layer],
    forward: Sequence[float],
    device: str,
    precision: str,
    batch_size_per_rank: int,
    optimizer_seconds: float,
    element_bytes: int,
) -> StepProfile:
    gradients: list[GradientReady] = []
    seconds = 0.0
    for layer, layer_forward in zip(reversed(layers), reversed(forward), strict=True):
        seconds += 2 * layer_forward
        gradients += [
            GradientReady(f"{layer.name}.{name}" if layer.name else name, numel, element_bytes, seconds)
            for name, numel in reversed(layer.parameters)
        ]
    return StepProfile(
        model=model,
        device=device,
        precision=precision,
        batch_size_per_rank=batch_size_per_rank,
        forward_seconds=sum(forward),
        backward_seconds=seconds,
        optimizer_seconds=optimizer_seconds,
        gradients=tuple(gradients),
    )
