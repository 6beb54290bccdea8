"""The training loop: one explicit loop, blind to the task and to how many ranks there are."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perception import schedule
from perception.checkpoint import Checkpoint, latest_good, load_checkpoint, remove_old, save_checkpoint
from perception.config import RunConfig, flatten, from_json, to_json
from perception.data.loader import training_batches
from perception.data.sources import Sources
from perception.data.stream import micro_batches, step_positions
from perception.distributed import Communicator, Reduction, distribute, share_update, synchronise_batch_norm
from perception.distributed.state import weights_digest
from perception.ema import MovingAverage
from perception.errors import UserError
from perception.evaluation import autocast, evaluate
from perception.hard_scenes import hard_scenes
from perception.optimizer import build_optimizer, use_bf16
from perception.rank_state import float_buffers, gather_rank_state, restore_rank_state
from perception.run_folder import RunFolder
from perception.step_clock import CAUSES, RankMeans, StepClock, timer_for
from perception.stopping import StopOrder, StopRequest
from perception.tasks import Task
from perception.telemetry import Telemetry, memory_bytes
from perception.trace import StepTrace

NUM_EXTRAS = 16
"""Numbers that travel with the gradients: loss terms first, then objects left out, orders and requests to stop.

Behind them come the times of the step before.
"""


@dataclass
class Progress:
    """Where a run stands; all of it is in the checkpoint."""

    step: int = 0
    samples: int = 0
    nonfinite_steps: int = 0
    seconds: float = 0.0
    """Training time of earlier, interrupted parts of the run."""


@dataclass
class Outcome:
    status: str
    cause: str
    metrics: dict[str, float]
    checkpoint: Checkpoint | None
    weights_sha256: str
    model: nn.Module
    """Averaged weights, on the CPU or the rank's device: what was evaluated and is to be used."""
    progress: Progress
    images_per_second: float
    rank_means: RankMeans
    """Where the time of the steps went."""
    target_reached: bool
    """`train.target_metric` was aimed at, and the last evaluation reached it."""


class Trainer:
    """Holds what a run needs between steps. `run` is the loop."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        sources: Sources,
        communicator: Communicator,
        folder: RunFolder,
        telemetry: Telemetry,
    ) -> None:
        self.config, self.task, self.sources = config, task, sources
        self.communicator, self.folder, self.telemetry = communicator, folder, telemetry
        self.device = communicator.device
        self.bf16 = use_bf16(config.train.precision, self.device)
        self.global_batch = config.train.global_batch_on(communicator.size)
        self.peak_lr = schedule.peak_learning_rate(config.optim, self.global_batch)
        torch.manual_seed(config.train.seed)
        model = task.build_model().to(self.device)
        if config.train.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.train.sync_batch_norm:
            synchronise_batch_norm(model, communicator)
        self.model: nn.Module = model.train()
        self.optimizer = build_optimizer(config, self.model, self.device)
        # Before a checkpoint is loaded: it gives every rank rank 0's buffers, a checkpoint each rank its own.
        self.rank_means = RankMeans(communicator.rank, communicator.size, self.device.type == "cuda")
        num_extras = NUM_EXTRAS + self.rank_means.num_values
        self.reducer = distribute(self.model, self.optimizer, communicator, config.distributed, num_extras)
        with_averages = config.optim.ema_decay_samples > 0
        self.update = share_update(
            self.model, self.optimizer, self.reducer, communicator, config.distributed, with_averages
        )
        self.average = MovingAverage(self.model, self.update) if with_averages else None
        self.hard_scenes = hard_scenes(config, len(sources.train), task.frequencies(sources.train), communicator)
        self.progress = Progress()
        self.losses: list[str] = []
        self.order = StopOrder(folder.control, communicator.is_first)
        self.figures: dict[str, float] = {}
        """Of the latest evaluation since this part of the run began."""
        self.last_step_unix_seconds = time.time()
        self.resumed_from: Checkpoint | None = None
        """Known to the first rank only, which alone writes."""

    def resume(self) -> None:
        """Take up the newest whole checkpoint; the same state on every rank, its own buffers on each."""
        found: tuple[Checkpoint, dict[str, Any]] | None = None
        if self.communicator.is_first:
            found = latest_good(self.folder.checkpoints, self.telemetry.say)
        path = self.communicator.broadcast_object(str(found[0].path) if found else None)
        if path is None:
            self.telemetry.say(f"{self.folder.checkpoints}: no whole checkpoint; starting from the beginning")
            return
        content = found[1] if found else load_checkpoint(self.folder.checkpoints / path.rsplit("/", 1)[-1])
        stored = from_json(content["config"], path)
        if (stored.task, stored.model) != (self.config.task, self.config.model):
            raise UserError(
                f"{path}: holds model {stored.name} of other settings; resume with the run's own config.json"
            )
        before, now = flatten(stored), flatten(self.config)
        for field in ("optim.name", "data.hard_scene_weight"):
            if before[field] != now[field]:
                raise UserError(f"{path}: is of {field} = {before[field]}; resume with the run's own config.json")
        self.model.load_state_dict(content["model"])
        self.update.load_optimizer_state(content["optimizer"])
        if self.average is not None:
            self.average.load(content["average"])
        elif content["average"]:
            raise UserError(f"{path}: holds a moving average; resume with the run's own optim.ema_decay_samples")
        if self.hard_scenes is not None:
            self.hard_scenes.load(content["hard_scenes"], content["samples"])
        self.resumed_from = found[0] if found else None
        if content.get("gradient_order"):
            self.reducer.follow(content["gradient_order"])
        local = content["local"]
        same_ranks = restore_rank_state(
            local, self.communicator, self.model, self.average, self.reducer, self.telemetry.say
        )
        if not same_ranks:
            ranks = len(local["random"]), self.communicator.size
            self.telemetry.say(schedule.describe_change_of_ranks(self.config, stored.train, *ranks))
        self.progress = Progress(content["step"], content["samples"], content["nonfinite_steps"], content["seconds"])
        self.telemetry.say(f"resumed from {path} at step {content['step']}, {content['samples']} images seen")

    def begin_from(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with a trained model's weights instead of random ones."""
        self.model.load_state_dict(weights)
        if self.average is not None:
            self.average.restart(self.model)
        self.update.settle()

    def run(self, stop: StopRequest, after_first_step: Callable[[], None] = lambda: None) -> Outcome:
        """Train to the end, or to a stop that the ranks agree on at a step boundary."""
        config, progress = self.config.train, self.progress
        resumed_step = progress.step
        batches = training_batches(
            self.sources.train,
            self.task,
            self.communicator.rank,
            self.communicator.size,
            progress.samples,
            pin_memory=self.device.type == "cuda",
            frequencies=self.hard_scenes,
        )
        clock = StepClock(timer_for(self.device))
        trace = StepTrace(config.trace_steps, clock, self.reducer, self.communicator)
        started = time.monotonic() - progress.seconds
        checkpoint: Checkpoint | None = None
        status, cause = "finished", ""
        for _, count in step_positions(config.num_samples, self.global_batch, self.communicator.size, progress.samples):
            log = self.step(batches, count, clock, stop)
            if progress.step == resumed_step + 1:
                after_first_step()
            if trace.after_step(progress.step):
                self.telemetry.say(trace.write(self.folder.path / "trace.json"))
            progress.seconds = time.monotonic() - started
            self.last_step_unix_seconds = time.time()
            if progress.step % config.log_every_steps == 0:
                rates = {"images_per_second": clock.images_per_second, "memory_bytes": memory_bytes()}
                self.telemetry.log(progress.step, {**log, **rates, **self.telemetry.gpu_values()})
            self.telemetry.progress(progress.samples, config.num_samples, clock.images_per_second, log["loss"])
            if progress.nonfinite_steps > config.max_nonfinite_steps:
                status, cause = "diverged", f"{progress.nonfinite_steps} steps with inf or NaN gradients"
                break
            if log["stop_orders"] > 0:
                status, cause = "pruned", self.order.cause
                break
            if log["stop_requests"] > 0:
                status, cause = "preempted", stop.cause or "another rank was asked to stop"
                break
            if progress.samples == config.num_samples:
                break
            evaluating = config.evaluate_every_steps and progress.step % config.evaluate_every_steps == 0
            figures = self._evaluate(progress.step) if evaluating else None
            if self._is_target_reached(figures):
                status, cause = "target_reached", self._target()
                break
            if figures or progress.step % config.checkpoint_every_steps == 0:
                checkpoint = self._save(figures)
        if trace.is_due:
            self.telemetry.say(trace.write(self.folder.path / "trace.json"))
        leftover = max(0, config.num_samples - progress.samples)
        if status == "finished" and leftover:
            self.telemetry.say(f"{leftover} of {config.num_samples} samples not trained on: fewer than ranks")
        if status == "finished" and self._is_target_reached(self._evaluate(progress.step)):
            status, cause = "target_reached", self._target()
        evaluated = status in ("finished", "target_reached")
        if status != "diverged":
            checkpoint = self._save(self.figures if evaluated else None)
        return Outcome(
            status,
            cause,
            # A pruned run is told by what it had reached.
            self.figures if evaluated or status == "pruned" else {},
            checkpoint,
            weights_digest([self.model.state_dict(), self.average.tensors if self.average else {}]),
            self.averaged_model(),
            progress,
            clock.images_per_second,
            self.rank_means,
            status == "target_reached",
        )

    def step(self, batches: Iterator[Any], count: int, clock: StepClock, stop: StopRequest) -> dict[str, float]:
        """One optimizer step on the next `count` samples of all ranks; returns the values to log.

        Those named seconds_* are means over ranks and of the step before, since what a step waited is known
        only after its reduction; after the first step of a run's part they are its own, of this rank.
        """
        progress, num_samples = self.progress, self.config.train.num_samples
        clock.begin()
        rate = schedule.learning_rate(self.config.optim, self.peak_lr, progress.samples, num_samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        buffers = list(float_buffers(self.model).values())
        before = [buffer.clone() for buffer in buffers]
        extras, names = self._gradients(batches, count, clock, stop)
        with clock.measuring("finish"):
            reduction = self.reducer.finish(self.config.optim.clip_norm, extras)
        if reduction.finite:
            with clock.measuring("update"):
                self.optimizer.step()
                if self.average is not None:
                    decay = schedule.ema_decay(self.config.optim, progress.samples, count, num_samples)
                    self.average.update(self.model, decay)
                self.update.settle()
        else:
            progress.nonfinite_steps += 1
            # The forward pass has moved batch-norm statistics already, and may have spoilt them for good.
            for buffer, earlier in zip(buffers, before, strict=True):
                buffer.copy_(earlier)
            self._report_nonfinite(extras, names)
        progress.step += 1
        progress.samples += count
        if self.hard_scenes is not None and (summary := self.hard_scenes.after_step(progress.samples)):
            self.telemetry.say(summary)
        clock.end(count, reduction.wait_seconds, reduction.straggler_seconds, reduction.busy_seconds)
        return self._averaged(reduction, rate, clock)

    def averaged_model(self) -> nn.Module:
        """A copy that holds the averaged weights and the mean of all ranks' buffers; what is evaluated and used."""
        model = copy.deepcopy(self.model)
        if self.average is not None:
            self.average.copy_to(model)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(self.communicator.average(buffer))
        return model

    def _gradients(
        self, batches: Iterator[Any], count: int, clock: StepClock, stop: StopRequest
    ) -> tuple[Tensor, list[str]]:
        """Forward and backward of this rank's micro-batches; what to sum over ranks, and the images' names."""
        with clock.measuring("zero"):
            self.reducer.zero_grad()
        sums: dict[str, Tensor] = {}
        names: list[str] = []
        left_out = 0
        parts = micro_batches(count, self.communicator.rank, self.communicator.size, self.config.train.accumulation)
        for number, (start, _) in enumerate(parts):
            with clock.measuring("data"):
                batch = next(batches).to(self.device)
            with clock.measuring("forward"), autocast(self.device, self.bf16):
                losses = self.task.loss(self.model, batch)
            if self.hard_scenes is not None:
                self.hard_scenes.record(self.progress.samples + start, losses.of_images)
            with clock.measuring("backward"):
                self.reducer.backward(losses.total, len(batch), number == len(parts) - 1, global_samples=count)
            for name, term in [("loss", losses.total), *losses.terms.items()]:
                sums[name] = sums.get(name, torch.zeros((), device=self.device)) + term.detach() * len(batch)
            names += batch.names
            left_out += batch.num_left_out
        self.losses = list(sums)
        stopping = stop.is_due(self.progress.step + 1, self.config.train.checkpoint_every_steps)
        extras = torch.zeros(self.reducer.num_extras, device=self.device)
        extras[: len(sums)] = torch.stack(list(sums.values()))
        endings = [float(self.order.is_given()), float(stopping)]
        others = [float(left_out), *endings, *self.rank_means.to_send(clock.latest)]
        extras[NUM_EXTRAS - 3 :] = torch.tensor(others)
        return extras, names

    def _averaged(self, reduction: Reduction, rate: float, clock: StepClock) -> dict[str, float]:
        values = reduction.extras.tolist()
        log = {name: value / reduction.weight for name, value in zip(self.losses, values, strict=False)}
        left_out, stop_orders, stop_requests = values[NUM_EXTRAS - 3 : NUM_EXTRAS]
        log.update(
            samples=float(self.progress.samples),
            lr=rate,
            grad_norm=reduction.grad_norm,
            left_out=left_out,
            nonfinite_steps=float(self.progress.nonfinite_steps),
            stop_orders=stop_orders,
            stop_requests=stop_requests,
        )
        times = self.rank_means.receive(values[NUM_EXTRAS:]) or clock.latest
        if times is not None:
            log.update({f"seconds_{cause}": getattr(times, cause) for cause in (*CAUSES, "step")})
        if self.rank_means.slowest_rank is not None:
            log["slowest_rank"] = self.rank_means.slowest_rank
        return log

    def _report_nonfinite(self, extras: Tensor, names: list[str]) -> None:
        """Name the images: of the ranks whose own loss is not finite, or of all if none is."""
        own_loss_is_finite = bool(torch.isfinite(extras[: len(self.losses)]).all())
        rows = self.communicator.allgather_object([own_loss_is_finite, names])
        guilty = [row for row in rows if not row[0]] or rows
        images = ", ".join(name for row in guilty for name in row[1])
        self.telemetry.say(
            f"step {self.progress.step + 1} skipped: inf or NaN in loss or gradients "
            f"({self.progress.nonfinite_steps} of at most {self.config.train.max_nonfinite_steps}); images: {images}"
        )

    def _evaluate(self, step: int) -> dict[str, float]:
        figures = evaluate(
            self.task,
            self.averaged_model(),
            self.sources.validation,
            self.communicator,
            self.config.train.batch_size_per_rank,
            self.bf16,
        )
        # By samples and seconds a sweep compares runs, of whatever batch.
        reached = {"samples": self.progress.samples, "seconds": self.progress.seconds}
        self.telemetry.log(step, reached | {f"validation/{name}": value for name, value in figures.items()})
        primary = self.task.primary_metric
        self.telemetry.say(f"step {step}: {primary} {figures[primary]:.4f} on {len(self.sources.validation)} images")
        self.figures = figures
        return figures

    def _is_target_reached(self, figures: Mapping[str, float] | None) -> bool:
        train = self.config.train
        return bool(figures and train.target_metric and figures[train.target_metric] >= train.target_value)

    def _target(self) -> str:
        train = self.config.train
        return f"{train.target_metric} {self.figures[train.target_metric]:.4f} >= {train.target_value}"

    def _save(self, metrics: dict[str, float] | None) -> Checkpoint | None:
        """Collect all ranks' local state; the first rank writes. All ranks learn of a failure."""
        local = gather_rank_state(self.communicator, self.model, self.average, self.reducer)
        averaged = self.averaged_model().state_dict()
        optimizer = self.update.optimizer_state()
        hardness = self.hard_scenes.state() if self.hard_scenes is not None else {}
        failure: str | None = None
        checkpoint: Checkpoint | None = None
        if self.communicator.is_first:
            content = {
                "config": to_json(self.config),
                "step": self.progress.step,
                "samples": self.progress.samples,
                "nonfinite_steps": self.progress.nonfinite_steps,
                "seconds": self.progress.seconds,
                "model": self.model.state_dict(),
                "optimizer": optimizer,
                "average": self.average.tensors if self.average else {},
                "averaged_model": averaged,
                "gradient_order": list(self.reducer.order or []),
                "local": local,
                "hard_scenes": hardness,
            }
            metric = metrics[self.task.primary_metric] if metrics else None
            try:
                checkpoint = save_checkpoint(
                    self.folder.checkpoints, self.progress.step, self.progress.samples, content, metric
                )
                remove_old(self.folder.checkpoints, self.config.train.keep_checkpoints)
            except UserError as error:
                failure = str(error)
            except OSError as error:
                self.telemetry.say(f"{self.folder.checkpoints}: old checkpoints stay ({error})")
        failure = self.communicator.broadcast_object(failure)
        if failure is not None:
            raise UserError(failure)
        return checkpoint
