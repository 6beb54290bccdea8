"""How long a trained network takes for one image, on the machine that trained it."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

from perception.evaluation import autocast

WARM_UP_RUNS, WARM_UP_SECONDS = 20, 0.3
MEASURED_RUNS, MEASURED_SECONDS = 100, 0.7
"""Whichever comes first ends it, but not before LEAST_RUNS."""
LEAST_RUNS = 3


@torch.no_grad()
def latency_seconds(model: nn.Module, height: int, width: int, device: torch.device, bf16: bool) -> float:
    """Median time of the forward pass on one image, decoding left out; the model is left as it was found.

    With the threads and precision of this process, as evaluation has them, but weights are cast to bf16 once.
    """
    was_training = model.training
    model.eval()
    # Noise, as equal pixels may be quicker; by a generator of its own, as training's must not move.
    pixels = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = pixels.to(device)
    try:
        with autocast(device, bf16):
            _run_times(model, image, 1, WARM_UP_RUNS, WARM_UP_SECONDS)
            return median(_run_times(model, image, LEAST_RUNS, MEASURED_RUNS, MEASURED_SECONDS))
    finally:
        model.train(was_training)


def _run_times(model: nn.Module, image: torch.Tensor, least: int, most: int, seconds: float) -> list[float]:
    times: list[float] = []
    _wait(image.device)
    began = end = time.perf_counter()
    while len(times) < least or (len(times) < most and end - began < seconds):
        start = time.perf_counter()
        model(image)
        _wait(image.device)
        end = time.perf_counter()
        times.append(end - start)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
