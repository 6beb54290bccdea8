"""`bench record MODEL --out PROFILE.json`: one rank's training step, timed, for `bench replay` and `bench predict`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from perception.config import RunConfig
from perception.errors import UserError
from perception.run_folder import check_folder_of
from perception.scaling.profile import StepProfile, scaled, write_profile
from pipelines.configs import CONFIGS, named_config, with_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"one of {', '.join(CONFIGS)}, or a config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="PROFILE.json")
    parser.add_argument("--data", help="generated (the default), or the folder of a data set")
    parser.add_argument("--steps", type=int, default=15, help="recorded steps; medians over them are written")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--images-per-second",
        type=float,
        metavar="R",
        help="stretch the step so that one rank reaches R: the shape recorded here at the pace of another device",
    )
    parser.add_argument("--device", help="with --images-per-second: the name of that device")


def run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: must be at least 1")
    if (options.images_per_second is None) != (options.device is None):
        raise UserError("--images-per-second and --device go together: whose pace is it?")
    if options.images_per_second is not None and not 0 < options.images_per_second < math.inf:
        raise UserError(f"--images-per-second {options.images_per_second}: must be a positive number")
    check_folder_of("--out", options.out)
    config = with_options(named_config(options.model), options.data, "solo", options.set)
    profile = record_model(config, options.steps)
    if options.device is not None:
        device = f"{options.device}, stretched from {profile.device}"
        profile = scaled(profile, options.images_per_second, device)
    write_profile(options.out, profile)
    print(
        f"{profile.model} on {profile.device}, {profile.precision}, batch {profile.batch_size_per_rank}: forward "
        f"{profile.forward_seconds * 1e3:.2f} ms, backward {profile.backward_seconds * 1e3:.2f} ms, optimizer "
        f"{profile.optimizer_seconds * 1e3:.2f} ms, {profile.images_per_second:.1f} images/s; "
        f"{len(profile.gradients)} gradients of {profile.gradient_bytes / 1e6:.1f} MB\nwritten to {options.out}"
    )
    return 0


def record_model(config: RunConfig, num_steps: int) -> StepProfile:
    """Train one process on one batch of the configuration's data, again and again, and time its steps."""
    import torch

    from perception.data.loader import training_batches
    from perception.distributed import connect
    from perception.evaluation import autocast
    from perception.optimizer import build_optimizer, use_bf16
    from perception.scaling.record import record_profile
    from perception.tasks import task_for
    from perception.training_run import load_sources, set_threads

    communicator = connect(config.distributed)
    set_threads(config, communicator)
    device = communicator.device
    bf16 = use_bf16(config.train.precision, device)
    # What one rank takes at once.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=0))
    # One batch is all that is needed.
    few = min(config.data.num_train_scenes, 8 * config.train.batch_size_per_rank)
    data = dataclasses.replace(config.data, num_train_scenes=few, num_validation_scenes=1)
    sources = load_sources(dataclasses.replace(config, data=data), communicator)
    task = task_for(config, sources.train)
    torch.manual_seed(config.train.seed)
    model = task.build_model().to(device).train()
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = next(training_batches(sources.train, task, 0, 1, 0, pin_memory=False)).to(device)

    def loss_of_batch() -> torch.Tensor:
        with autocast(device, bf16):
            return task.loss(model, batch).total

    return record_profile(
        model,
        loss_of_batch,
        build_optimizer(config, model, device),
        name=config.name,
        precision="bf16" if bf16 else "fp32",
        batch_size_per_rank=len(batch),
        num_steps=num_steps,
    )
