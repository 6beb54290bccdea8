"""`bench predict --here`: a step of several ranks on this host, predicted from a calibration and measured."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from perception.config import from_json, to_json
from perception.cores import available_cores
from perception.distributed.environment import rank_environment
from perception.errors import UserError
from perception.run_folder import write_json
from pipelines.configs import named_config, with_options

_STEPS = 20


def compare(model: str, ranks: int, rounds: int, batch: int | None, assignments: list[str]) -> dict[str, Any]:
    """Start the ranks, print what was predicted and measured, and return it.

    Raises UserError where the ranks cannot be started or one fails.
    """
    from perception.distributed.choice import choose_launch
    from pipelines.launch import launch_ranks

    if ranks < 2 or rounds < 1:
        raise UserError("bench predict --here needs --ranks of at least 2 and --rounds of at least 1")
    config = with_options(named_config(model), None, None, assignments)
    engine, transport = choose_launch(config.distributed, ranks)
    threads = config.train.num_threads_per_rank or max(1, available_cores() // ranks)
    config = dataclasses.replace(
        config,
        distributed=dataclasses.replace(config.distributed, engine=engine, transport=transport),
        train=dataclasses.replace(
            config.train,
            num_threads_per_rank=threads,
            batch_size_per_rank=config.train.batch_size_per_rank if batch is None else batch,
        ),
    )
    print(f"{model}: {ranks} ranks over {engine}/{transport}, {rounds} rounds of {_STEPS} steps alone, then together")
    with tempfile.TemporaryDirectory(prefix="predict-") as name:
        folder = Path(name)
        settings, output = folder / "settings.json", folder / "comparison.json"
        settings.write_text(json.dumps({"config": to_json(config), "rounds": rounds, "output": str(output)}))
        argv = [sys.executable, "-m", "pipelines", "bench", "predict", "--rank-of", str(settings)]
        code = launch_ranks(argv, ranks, engine, transport, os.environ, folder / "failures")
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code != 0:
            raise UserError(f"measuring {ranks} ranks failed with exit code {code}; its message is above")
        figures: dict[str, Any] = json.loads(output.read_text())
    _print(figures)
    return figures


def run_rank(settings_path: Path) -> int:
    """One rank of the measurement; rank 0 writes the figures."""
    from perception.distributed import failure

    folder = os.environ.get(failure.FAILURE_FOLDER_VARIABLE)
    failure.install(Path(folder) if folder else None, rank_environment(os.environ).rank)
    settings = json.loads(settings_path.read_text())
    config = from_json(settings["config"], str(settings_path))

    import torch

    from perception import distributed
    from perception.benchmark_models import build_workload
    from perception.evaluation import autocast
    from perception.optimizer import build_optimizer, use_bf16
    from perception.scaling.measured import compare_here

    communicator = distributed.connect(config.distributed)
    torch.set_num_threads(config.train.num_threads_per_rank)
    batch_size = config.train.batch_size_per_rank
    work = build_workload(config.name, config, (224, 224), batch_size, communicator.rank, config.train.seed)
    bf16 = use_bf16(config.train.precision, communicator.device)
    model = work.model
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = work.batches[0]

    def loss_of_batch() -> torch.Tensor:
        with autocast(communicator.device, bf16):
            return work.loss(model, batch)

    found = compare_here(
        communicator,
        model,
        build_optimizer(config, model, communicator.device),
        loss_of_batch,
        config=config.distributed,
        name=config.name,
        precision="bf16" if bf16 else "fp32",
        batch_size_per_rank=batch_size,
        num_rounds=settings["rounds"],
        num_steps=_STEPS,
    )
    if communicator.is_first:
        write_json(
            Path(settings["output"]),
            {
                "constants": dataclasses.asdict(found.constants),
                "layer_seconds": found.prediction.layer_seconds,
                "jitter_seconds": found.prediction.jitter_seconds,
                "rounds": [{**dataclasses.asdict(one), "ratio": one.ratio} for one in found.rounds],
                "limit_seconds": found.median(lambda one: one.limit_seconds),
                "predicted_seconds": found.median(lambda one: one.predicted_seconds),
                "measured_seconds": found.median(lambda one: one.measured_seconds),
                "ratio": found.median(lambda one: one.ratio),
            },
        )
    communicator.shutdown()
    return 0


def _print(figures: dict[str, Any]) -> None:
    constants = figures["constants"]
    print(
        f"calibrated ({constants['local_reduction']}): {constants['step_seconds'] * 1e3:.2f} ms a step, "
        f"{constants['tensor_seconds'] * 1e6:.1f} us a gradient, {constants['bucket_seconds'] * 1e6:.0f} us a bucket, "
        f"{constants['bytes_per_second'] / 1e9:.2f} GB/s; {constants['core_share']:.0%} of it takes a core"
    )
    print(f"{'round':>6} {'limit ms':>9} {'predicted':>10} {'measured':>9} {'measured / predicted':>21}")
    for number, one in enumerate(figures["rounds"]):
        print(
            f"{number + 1:>6} {one['limit_seconds'] * 1e3:>9.2f} {one['predicted_seconds'] * 1e3:>10.2f} "
            f"{one['measured_seconds'] * 1e3:>9.2f} {one['ratio']:>21.3f}"
        )
    limit, predicted, measured = (figures[f"{name}_seconds"] for name in ("limit", "predicted", "measured"))
    print(
        f"medians: limit {limit * 1e3:.2f} ms, predicted {predicted * 1e3:.2f} ms ({limit / predicted:.1%} of it), "
        f"measured {measured * 1e3:.2f} ms ({limit / measured:.1%}); measured / predicted {figures['ratio']:.3f}"
    )
