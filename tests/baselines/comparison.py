"""Train lane-small and its peers in one loop, on the same scenes and samples, and say how each did."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from perception import distributed
from perception.config import RunConfig, override, to_json
from perception.data.lane_targets import SampleKey
from perception.evaluation import autocast
from perception.optimizer import use_bf16
from perception.run_folder import RunFolder, write_atomic
from perception.stopping import StopRequest
from perception.tasks import Task
from perception.telemetry import RunTelemetry
from perception.trainer import Trainer
from perception.training_run import load_sources, set_threads
from pipelines.lane import lane_small
from tests.baselines.peers import task_named

TARGET_F1 = 0.7
NUM_EVALUATIONS = 15
PREDICTION_ROUNDS = 5
IMAGES_A_ROUND = 20


@dataclass(frozen=True)
class Figures:
    name: str
    num_parameters: int
    samples: int
    seconds: float
    """Of training, evaluations included."""
    metrics: Mapping[str, float]
    target_seconds: float | None
    """When F1@50 was first seen to be at least TARGET_F1, None if never."""
    target_samples: int | None
    training_images_per_second: float
    predicted_images_per_second: float = 0.0


def configuration(name: str, num_samples: int, assignments: Sequence[str]) -> RunConfig:
    """lane-small's own, on one rank that takes as many samples a step as two ranks of `make train` do together."""
    config = lane_small()
    batch = 2 * config.train.batch_size_per_rank
    steps = -(-num_samples // batch)
    train = replace(
        config.train,
        num_samples=num_samples,
        batch_size_per_rank=batch,
        evaluate_every_steps=max(1, steps // NUM_EVALUATIONS),
    )
    return override(replace(config, name=name, train=train), assignments)


def compare(names: Sequence[str], out: Path, num_samples: int, assignments: Sequence[str]) -> list[Figures]:
    """Train each in a run folder under `out`, then let all predict in turn, so that a busy machine is so for all."""
    trained = [train(name, configuration(name, num_samples, assignments), out / name) for name in names]
    rates = prediction_rates([(task, model) for _, task, model in trained])
    figures = [
        replace(figure, predicted_images_per_second=rate) for (figure, _, _), rate in zip(trained, rates, strict=True)
    ]
    write_atomic(out / "comparison.json", json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return figures


def train(name: str, config: RunConfig, folder: Path) -> tuple[Figures, Task, nn.Module]:
    """One run of the project's trainer, without the records that only a run of the library needs."""
    run_folder = RunFolder(folder)
    run_folder.begin(resume=False)
    communicator = distributed.connect(config.distributed)
    set_threads(config, communicator)
    sources = load_sources(config, communicator)
    write_atomic(run_folder.config, to_json(config))
    task = task_named(name, config)
    telemetry = RunTelemetry(run_folder)
    trainer = Trainer(config, task, sources, communicator, run_folder, telemetry)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    telemetry.say(f"{name}: {num_parameters / 1e6:.2f} M parameters, {len(sources.train)} training scenes")
    try:
        telemetry.begin(0)
        outcome = trainer.run(StopRequest())
    finally:
        telemetry.close()
        communicator.shutdown()
    seconds, samples = first_reached(run_folder.metrics)
    figures = Figures(
        name=name,
        num_parameters=num_parameters,
        samples=outcome.progress.samples,
        seconds=outcome.progress.seconds,
        metrics=outcome.metrics,
        target_seconds=seconds,
        target_samples=samples,
        training_images_per_second=outcome.images_per_second,
    )
    return figures, task, outcome.model.eval()


def first_reached(metrics: Path) -> tuple[float, int] | tuple[None, None]:
    """Seconds and samples of the first evaluation in metrics.jsonl whose F1@50 is at least TARGET_F1."""
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("validation/culane_f1_50", 0.0) >= TARGET_F1:
            return float(row["seconds"]), int(row["samples"])
    return None, None


def prediction_rates(models: Sequence[tuple[Task, nn.Module]]) -> list[float]:
    """Images/s of network and decoding, one image at a time; the median of rounds in which all take turns."""
    config = models[0][0].config
    communicator = distributed.connect(config.distributed)
    validation = load_sources(config, communicator).validation
    bf16 = use_bf16(config.train.precision, communicator.device)
    count = min(IMAGES_A_ROUND, len(validation))
    batches = [
        [task.collate([task.prepare(validation.sample(i), SampleKey(0, i), train=False)]) for i in range(count)]
        for task, _ in models
    ]
    rounds: list[list[float]] = [[] for _ in models]
    for number in range(PREDICTION_ROUNDS + 1):
        for (task, model), images, rates in zip(models, batches, rounds, strict=True):
            started = time.perf_counter()
            with autocast(communicator.device, bf16), torch.no_grad():
                for batch in images:
                    task.predict(model, batch.to(communicator.device))
            if number:  # the first round warms up
                rates.append(count / (time.perf_counter() - started))
    communicator.shutdown()
    return [statistics.median(rates) for rates in rounds]


def table(figures: Sequence[Figures]) -> list[str]:
    lines = [
        f"| network | F1@50 | F1@75 | TuSimple accuracy | s to F1 {TARGET_F1} (samples) | training images/s | "
        "prediction images/s | parameters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in figures:
        reached = "not reached"
        if one.target_seconds is not None:
            reached = f"{one.target_seconds:.0f} ({one.target_samples})"
        f1, f1_75, accuracy = (one.metrics[key] for key in ("culane_f1_50", "culane_f1_75", "tusimple_accuracy"))
        lines.append(
            f"| {one.name} | {f1:.3f} | {f1_75:.3f} | {accuracy:.3f} | {reached} | "
            f"{one.training_images_per_second:.0f} | {one.predicted_images_per_second:.0f} | "
            f"{one.num_parameters / 1e6:.2f} M |"
        )
    return lines
