"""One rank of one training run, from its configuration to `result.json`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import torch

from perception import distributed
from perception.checkpoint import set_aside_damaged
from perception.config import RunConfig, TrainConfig, to_json
from perception.cores import available_cores
from perception.data.sources import LabelledImages, Sources, check_target, open_sources, prepare_sources
from perception.distributed import Communicator
from perception.distributed.failure import EXIT_CRASH, EXIT_PREEMPTED
from perception.draw import draw_contact_sheet
from perception.errors import UserError
from perception.generations import Generation, begin_generation, end_generation, generations_json, record_first_step
from perception.gpu_follower import follow_gpus
from perception.latency import latency_seconds
from perception.pretrained import PACKAGE, pretrained_backbone
from perception.run_folder import (
    RunFolder,
    combined_manifest,
    describe_environment,
    manifest_digest,
    write_atomic,
    write_json,
)
from perception.run_model import load_trained
from perception.schedule import describe_rate
from perception.sign_task import check_same_classes, with_classes
from perception.stopping import StopRequest
from perception.tasks import Task, task_for
from perception.telemetry import RunTelemetry, SilentTelemetry, Telemetry
from perception.trainer import Outcome, Trainer

EXIT_CODES = {"finished": 0, "target_reached": 0, "pruned": 0, "preempted": EXIT_PREEMPTED, "diverged": EXIT_CRASH}


def run_training(config: RunConfig, folder: Path, resume: bool) -> int:
    """Train in this rank; every rank of the run calls it. Returns the exit code.

    Raises UserError for what the user can mend.
    """
    stop = StopRequest()
    stop.listen()
    communicator = distributed.connect(config.distributed)
    # A run is of so many ranks, whoever started them: config.json alone must reproduce it.
    config = replace(config, distributed=replace(config.distributed, num_ranks=communicator.size))
    run_folder = RunFolder(folder)
    set_threads(config, communicator)
    sources = load_sources(config, communicator)
    if len(sources.train) < communicator.size:
        raise UserError(
            f"{config.data.source}: {len(sources.train)} training images for {communicator.size} ranks: "
            "start at most one rank per image"
        )
    if config.task == "sign":
        config = with_classes(config, sources.train.classes)
    _together(communicator, lambda: run_folder.begin(resume))
    telemetry: Telemetry = SilentTelemetry()
    if communicator.is_first:
        telemetry = RunTelemetry(run_folder, follow_gpus() if communicator.device.type == "cuda" else None)
    # config.json keeps what any number of ranks is fitted from; checkpoints what these ranks did.
    fitted = replace(config, train=fit_to_ranks(config.train, communicator.size))
    task = task_for(fitted, sources.train)
    trainer = Trainer(fitted, task, sources, communicator, run_folder, telemetry)
    if resume:
        trainer.resume()
        if communicator.broadcast_object(_is_complete(trainer) if communicator.is_first else None):
            telemetry.say(f"{run_folder.result}: the run has ended already; nothing was changed")
            communicator.shutdown()
            return 0
    # A run that was stopped before its first checkpoint begins again as it began.
    if config.train.initial_checkpoint and trainer.progress.step == 0:
        _together(communicator, lambda: begin_from_trained(trainer), everywhere=True)
    elif config.train.pretrained_backbone and trainer.progress.step == 0:
        _together(communicator, lambda: begin_from_pretrained(trainer), everywhere=True)
    # Only now is the folder this run's: one that was refused has changed nothing in it.
    _together(communicator, lambda: _claim(trainer, config))
    try:
        _announce(trainer, sources)
        telemetry.begin(trainer.progress.step)
        outcome = trainer.run(stop, lambda: _training_again(trainer))
        if communicator.is_first:
            cause = f"{outcome.status}: {outcome.cause}" if outcome.cause else outcome.status
            end_generation(folder, cause, trainer.last_step_unix_seconds, trainer.progress.step)
            _conclude(trainer, outcome, run_folder, stop)
    except Exception as error:
        if communicator.is_first and not run_folder.result.exists():
            # A full disk may be what failed: the cause that matters is the one already being raised.
            with contextlib.suppress(UserError):
                cause = f"{type(error).__name__}: {error}"
                end_generation(folder, cause, time.time())
                write_json(run_folder.result, failed_result(cause) | {"generations": generations_json(folder)})
        raise
    finally:
        telemetry.close()
    communicator.barrier()
    communicator.shutdown()
    return EXIT_CODES[outcome.status]


def fit_to_ranks(train: TrainConfig, ranks: int) -> TrainConfig:
    """The fewest micro-batches in which `ranks` ranks make up `global_batch`; as configured if that is 0.

    Raises UserError where a rank would be left without a sample.
    """
    if not train.global_batch:
        return train
    if train.global_batch < ranks:
        raise UserError(f"train.global_batch = {train.global_batch} cannot be shared by {ranks} ranks: start fewer")
    return replace(train, accumulation=math.ceil(train.global_batch / (train.batch_size_per_rank * ranks)))


def failed_result(cause: str) -> dict[str, Any]:
    """Content of `result.json` for a run that ended by an error."""
    return {"status": "failed", "cause": cause, "metrics": {}}


def load_sources(config: RunConfig, communicator: Communicator) -> Sources:
    """Render what is missing, each rank of a host its share, and open the data on every rank.

    Raises UserError where hosts hold different data.
    """
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if communicator.is_first and (time.monotonic() - reported > 5 or done == total):
            reported = time.monotonic()
            print(f"preparing {config.task} images: {done} of {total} parts", flush=True)

    share = (communicator.local_rank, communicator.local_size)
    _together(communicator, lambda: prepare_sources(config.data, config.task, share, progress), everywhere=True)
    sources = open_sources(config.data, config.task)
    sizes = sorted(set(communicator.allgather_object(len(sources.train))))
    if len(sizes) > 1:
        raise UserError(
            f"{config.data.source}: ranks have {sizes[0]} and {sizes[-1]} training images: give all hosts equal data "
            "and the same image"
        )
    check_target(config.train.target_metric, sources.validation)
    return sources


def begin_from_trained(trainer: Trainer) -> None:
    """Take over the weights that `train.initial_checkpoint` names; UserError where they are of another model."""
    config = trainer.config
    trained = load_trained(Path(config.train.initial_checkpoint))
    where = f"train.initial_checkpoint = {trained.checkpoint}"
    if trained.config.task != config.task:
        raise UserError(f"{where}: is of task {trained.config.task}, not {config.task}")
    check_same_classes(trained.classes, getattr(trainer.task, "classes", ()), str(trained.checkpoint), "this run")
    try:
        trainer.begin_from(trained.model.state_dict())
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise UserError(f"{where}: its weights do not fit this model's settings: {first}") from None
    trainer.telemetry.say(f"begins with the weights of {trained.checkpoint}")


def begin_from_pretrained(trainer: Trainer) -> None:
    """Take over a backbone's published weights; UserError where their package is not installed."""
    backbone = {f"backbone.{name}": tensor for name, tensor in pretrained_backbone().items()}
    trainer.begin_from({**trainer.model.state_dict(), **backbone})
    trainer.telemetry.say(f"begins with the backbone of {PACKAGE}")


def set_threads(config: RunConfig, communicator: Communicator) -> None:
    """Compute threads of this rank, and none of OpenCV's own beside them."""
    count = config.train.num_threads_per_rank
    if not count and communicator.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        count = max(1, available_cores() // communicator.local_size)
    if count:
        torch.set_num_threads(count)
    cv2.setNumThreads(1)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Costs a memset for every new tensor, and nothing here reads uninitialised memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _together(communicator: Communicator, work: Any, everywhere: bool = False) -> None:
    """Run on the first rank (or on all); if it fails on any, every rank raises the same UserError."""
    failure: str | None = None
    if communicator.is_first or everywhere:
        try:
            work()
        except UserError as error:
            failure = str(error)
    failures = [text for text in communicator.allgather_object(failure) if text]
    if failures:
        raise UserError(failures[0])


def _is_complete(trainer: Trainer) -> bool:
    """The result says that the run ended, and what ended it still holds."""
    train = trainer.config.train
    try:
        result = json.loads(trainer.folder.result.read_text())
        if result["status"] == "pruned":
            return trainer.folder.control.exists()
        if result["status"] == "target_reached" and train.target_metric:
            return bool(result["metrics"][train.target_metric] >= train.target_value)
        trained = train.num_samples - trainer.progress.samples < trainer.communicator.size
        return trained and result["status"] in ("finished", "target_reached")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _claim(trainer: Trainer, config: RunConfig) -> None:
    """Record the configuration; an interrupted part's result goes, and checkpoints that were passed over."""
    write_atomic(trainer.folder.config, to_json(config))
    trainer.folder.remove_result()
    train, ranks = trainer.config.train, trainer.communicator.size
    begin_generation(
        trainer.folder.path,
        Generation(
            ranks,
            trainer.global_batch,
            train.batch_size_per_rank,
            train.accumulation,
            first_step=trainer.progress.step + 1,
        ),
    )
    if trainer.resumed_from is not None:
        for path in set_aside_damaged(trainer.folder.checkpoints, trainer.resumed_from):
            trainer.telemetry.say(f"{path}: set aside")


def _training_again(trainer: Trainer) -> None:
    """After the first step of a generation, on the rank that writes: how long nothing was trained."""
    if not trainer.communicator.is_first:
        return
    try:
        downtime = record_first_step(trainer.folder.path)
    except UserError as error:
        trainer.telemetry.say(str(error))
        return
    if downtime is not None:
        trainer.telemetry.say(
            f"training again on {trainer.communicator.size} ranks, {downtime:.1f} s after it was interrupted"
        )


def _announce(trainer: Trainer, sources: Sources) -> None:
    config, communicator, say = trainer.config, trainer.communicator, trainer.telemetry.say
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    manifests = {
        "train": _manifest(sources.train, trainer.task, communicator),
        "validation": _manifest(sources.validation, trainer.task, communicator),
    }
    if communicator.is_first:
        ranks = {"engine": communicator.engine, "transport": communicator.transport, "ranks": communicator.size}
        described = describe_environment(ranks, {"source": config.data.source, **manifests})
        write_json(trainer.folder.environment, described)
    say(
        f"{config.name}: {parameters / 1e6:.2f} M parameters, input "
        f"{config.model.input_height}x{config.model.input_width}, {'bf16' if trainer.bf16 else 'fp32'} on "
        f"{communicator.device}, {communicator.size} ranks ({communicator.engine}, {communicator.transport})"
    )
    say(describe_rate(config, trainer.global_batch))
    for name, samples in [("training", sources.train), ("validation", sources.validation)]:
        say(f"{name}: {len(samples)} images, {trainer.task.objects(samples.report)}")
        for line in samples.report.lines():
            say(f"  {line}")
    for note in sources.notes:
        say(f"note: {note}")


def _manifest(samples: LabelledImages, task: Task, communicator: Communicator) -> dict[str, Any]:
    """Digest of names, sizes and labels; each rank reads its share, since sizes are in the images' headers."""
    lines = [task.describe(samples.truth(index)) for index in range(communicator.rank, len(samples), communicator.size)]
    shares = communicator.allgather_object(manifest_digest(lines))
    return {"images": len(samples), "manifest_sha256_sum": combined_manifest(shares)}


def _target(trainer: Trainer, outcome: Outcome) -> dict[str, Any] | None:
    """Time to accuracy; evaluations are part of the time."""
    train, progress = trainer.config.train, outcome.progress
    if not train.target_metric:
        return None
    return {
        "metric": train.target_metric,
        "value": train.target_value,
        "reached_seconds": progress.seconds if outcome.target_reached else None,
        "reached_samples": progress.samples if outcome.target_reached else None,
    }


def _conclude(trainer: Trainer, outcome: Outcome, folder: RunFolder, stop: StopRequest) -> None:
    say = trainer.telemetry.say
    pictures = []
    latency: float | None = None
    if outcome.status in ("finished", "target_reached"):
        draw_contact_sheet(folder.contact_sheet, trainer.task, outcome.model, trainer.sources.validation)
        pictures.append(folder.contact_sheet.name)
        # The other ranks wait, as they do for the pictures.
        config = trainer.config.model
        latency = latency_seconds(outcome.model, config.input_height, config.input_width, trainer.device, trainer.bf16)
    checkpoint = outcome.checkpoint
    scaling = json.loads(folder.scaling.read_text()) if folder.scaling.exists() else {}
    mean = outcome.rank_means.mean()
    result = {
        "status": outcome.status,
        "cause": outcome.cause,
        "metrics": outcome.metrics,
        "throughput": {
            "images_per_second": outcome.images_per_second,
            "scaling_factor": scaling.get("scaling_factor"),
            "ratio_to_limit": scaling.get("ratio_to_limit"),
        },
        # Shares of the step, on average over ranks; None in a run too short to be measured.
        "lost_scaling": {
            cause: getattr(mean, cause) / mean.step if mean else None
            for cause in ("data", "exposed_allreduce", "straggler")
        },
        "checkpoint": {
            "path": str(checkpoint.path.relative_to(folder.path)) if checkpoint else None,
            "sha256": checkpoint.sha256 if checkpoint else None,
            "weights_sha256": outcome.weights_sha256,
        },
        "model": {
            "num_parameters": sum(parameter.numel() for parameter in outcome.model.parameters()),
            "latency_seconds": latency,
        },
        "target": _target(trainer, outcome),
        "seconds": outcome.progress.seconds,
        "samples": outcome.progress.samples,
        "steps": outcome.progress.step,
        "nonfinite_steps": outcome.progress.nonfinite_steps,
        "generations": generations_json(folder.path),
        "pictures": pictures,
    }
    write_json(folder.result, result)
    reason = f": {outcome.cause}" if outcome.cause else ""
    say(f"{outcome.status} after {outcome.progress.samples} images in {outcome.progress.seconds:.0f} s{reason}")
    if outcome.status == "preempted" and stop.requested:
        say(f"go on with --resume --out {folder.path}")
    for name, value in outcome.metrics.items():
        if "/" not in name:
            say(f"  {name:24} {value:.4f}")
    for summary in outcome.rank_means.summary():
        say(summary)
    for line in [folder.result, *(folder.path / picture for picture in pictures)]:
        say(f"wrote {line}")
