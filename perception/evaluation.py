"""Evaluation over all ranks: each predicts its share, counts are added up, every rank gets the figures."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from perception.data.loader import Samples, evaluation_batches
from perception.distributed import Communicator
from perception.tasks import Task


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, samples: Samples, communicator: Communicator, batch_size: int, bf16: bool
) -> dict[str, float]:
    """Metrics of `model` on a data set; the model's mode is restored afterwards."""
    was_training = model.training
    model.eval()
    metric = task.metric()
    try:
        for batch in evaluation_batches(samples, task, communicator.rank, communicator.size, batch_size):
            batch = batch.to(communicator.device)
            with autocast(communicator.device, bf16):
                predictions = task.predict(model, batch)
            metric.update(predictions, batch.truths)
    finally:
        model.train(was_training)
    merged = task.metric()
    for counts in _gathered(metric.counts(), communicator):
        merged.merge(counts)
    return merged.compute()


def _gathered(counts: Any, communicator: Communicator) -> list[Any]:
    """Every rank's counts. Pickled, since they may hold arrays, and only ever by the ranks of this run."""
    own = torch.frombuffer(bytearray(pickle.dumps(counts)), dtype=torch.uint8)
    return [pickle.loads(row.numpy().tobytes()) for row in communicator.allgather(own)]


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """bf16 for convolutions and matrix products, fp32 for the rest; nothing where `bf16` is off."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)
