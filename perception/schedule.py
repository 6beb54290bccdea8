"""Learning rate as a pure function of samples seen, and the rule by which it follows the global batch."""

from __future__ import annotations

import math

from perception.config import OptimConfig, RunConfig, TrainConfig
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


def warmup_samples(config: OptimConfig, num_samples: int) -> int:
    return min(config.warmup_samples, num_samples // 10)


def describe_rate(config: RunConfig, global_batch: int) -> str:
    """One line: the optimizer, and the learning rate that follows from the global batch."""
    optim = config.optim
    peak = peak_learning_rate(optim, global_batch)
    warmup = warmup_samples(optim, config.train.num_samples)
    return (
        f"{optim.name}, global batch {global_batch}, learning rate {peak:.3g} ({optim.lr:.3g} at "
        f"{optim.reference_batch_size}, {optim.lr_scaling} rule), warm-up over {warmup} of {config.train.num_samples} "
        f"samples, {math.ceil(config.train.num_samples / global_batch)} steps in all"
    )


def describe_change_of_ranks(config: RunConfig, before: TrainConfig, ranks_before: int, ranks: int) -> str:
    """One line: what another number of ranks than the checkpoint's changes for the steps to come."""
    train, optim = config.train, config.optim
    batch_before, batch = before.global_batch_on(ranks_before), train.global_batch_on(ranks)
    most = math.ceil(batch / (ranks * train.accumulation))
    shares = f"at most {most} a rank, accumulated over {train.accumulation}"
    line = f"the checkpoint is of {ranks_before} ranks, this run has {ranks}: the sample order goes on; "
    if batch_before == batch:
        return f"{line}global batch {batch} and learning rate as before ({shares})"
    rate, rate_before = (peak_learning_rate(optim, size) for size in (batch, batch_before))
    return (
        f"{line}global batch {batch} instead of {batch_before} ({shares}), peak learning rate "
        f"{rate:.3g} instead of {rate_before:.3g} ({optim.lr_scaling} rule)"
    )


def learning_rate(config: OptimConfig, peak: float, samples: int, num_samples: int) -> float:
    """Linear warm-up to `peak`, then a cosine to `final_lr_fraction` of it at `num_samples`."""
    warmup = warmup_samples(config, num_samples)
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
