"""A bucket of one gigabyte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from perception import distributed
from perception.distributed import Communicator
from tests.perception.distributed.scenario_tools import SETTINGS

NEEDED_BYTES = 10 << 30
"""For two ranks: weights, gradients, buckets, and what broadcast and engine copy on the way."""


def available_bytes() -> int:
    """Main memory that can be had without swapping."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def scenario_a_bucket_of_one_gigabyte(c: Communicator) -> None:
    numel = (1 << 28) + 3
    model = nn.ParameterDict(
        {"large": nn.Parameter(torch.full((numel,), float(c.rank + 1))), "small": nn.Parameter(torch.ones(5))}
    )
    reducer = distributed.distribute(model, None, c, replace(SETTINGS, first_bucket_mib=2048, bucket_mib=2048))
    large = model["large"]
    # Both ends and the middle: nothing was cut off at 2^30 bytes.
    assert [large[i].item() for i in (0, numel // 2, -1)] == [1.0] * 3, "the weights are rank 0's"
    reducer.backward(large.sum() * (c.rank + 1) + model["small"].sum(), 1)
    assert reducer.finish().finite
    assert large.grad is not None and model["small"].grad is not None
    mean = (c.size + 1) / 2
    assert large.grad.min().item() == mean and large.grad.max().item() == mean
    assert model["small"].grad.tolist() == [1.0] * 5
