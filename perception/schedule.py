"""Learning rate as a pure function of samples seen, and the rule by which it follows the global batch."""

from __future__ import annotations

import math

from perception.config import OptimConfig
from perception.errors import UserError


def peak_learning_rate(config: OptimConfig, global_batch: int) -> float:
    """`lr` scaled from `reference_batch_size` to the global batch.

    sqrt: Malladi et al. 2022, for Adam and its kin; linear: Goyal et al. 2017, for SGD.
    """
    ratio = global_batch / config.reference_batch_size
    factors = {"sqrt": math.sqrt(ratio), "linear": ratio, "none": 1.0}
    if config.lr_scaling not in factors:
        raise UserError(f'optim.lr_scaling = "{config.lr_scaling}": must be one of {", ".join(factors)}')
    return config.lr * factors[config.lr_scaling]


def learning_rate(config: OptimConfig, peak: float, samples: int, num_samples: int) -> float:
    """Linear warm-up to `peak`, then a cosine to `final_lr_fraction` of it at `num_samples`."""
    warmup = min(config.warmup_samples, num_samples // 10)
    if samples < warmup:
        return peak * (samples + 1) / (warmup + 1)
    done = (samples - warmup) / max(1, num_samples - warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return peak * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)


def ema_decay(config: OptimConfig, samples: int, step_samples: int, num_samples: int) -> float:
    """Share of the moving average that one step of `step_samples` keeps.

    The time constant grows with the run, so that early weights are soon forgotten.
    """
    constant = min(config.ema_decay_samples, num_samples // 10, max(1, samples // 5))
    return math.exp(-step_samples / constant) if constant > 0 else 0.0
