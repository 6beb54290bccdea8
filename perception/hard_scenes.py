"""Scenes whose loss was high are seen more often: `data.hard_scene_weight`.

Each epoch has frequencies of its own, which follow from the losses of all samples up to the epoch before the last:
an epoch's order must be known while the one before it still runs, since a step may reach over its end and loader
processes prepare ahead. The first two epochs know no losses and hold all scenes alike.

What an epoch holds: with weight w, each scene as often as without (once, unless its data set says otherwise), and on
average 1 + w * s times that, where s is the share of scenes that were easier: 0 for the easiest, 1 for the hardest. An
epoch is therefore 1 + w / 2 times as long, every epoch the same. By its place among the others, and not by the loss
itself, a scene with a wrong label is seen at most 1 + w times as often as the rest.

Losses are kept by their place in the epoch, each by the rank that trained on it, and come together once an epoch and
for a checkpoint: neither the order nor a resumed run depends on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perception.config import RunConfig
from perception.data.loader import samples_ahead
from perception.data.stream import epoch_samples
from perception.distributed import Communicator
from perception.errors import UserError

_HARDEST_SHARE = 0.1
"""Of the scenes, whose losses are reported."""


def hard_frequencies(
    losses: NDArray[np.float32], frequencies: NDArray[np.float64], weight: float
) -> NDArray[np.float64]:
    """(num_scenes,) `frequencies` times 1 to 1 + weight, by how many scenes have a lower loss; NaN: 1 + weight / 2.

    Scenes count by their frequency, so that the sum is that of `frequencies` times 1 + weight / 2, whatever the losses.
    """
    shares = np.full(len(losses), 0.5)
    known = np.flatnonzero(np.isfinite(losses))
    # Stable: equal losses in the order of the data set.
    easiest_first = known[np.argsort(losses[known], kind="stable")]
    counts = frequencies[easiest_first]
    shares[easiest_first] = (np.cumsum(counts) - counts / 2) / max(counts.sum(), np.finfo(np.float64).tiny)
    return np.asarray(frequencies * (1 + weight * shares), dtype=np.float64)


@dataclass(frozen=True)
class _Piece:
    """Losses (n,) of consecutive samples of the stream."""

    position: int
    losses: Tensor


class HardScenes:
    """`EpochFrequencies` that follow from the losses of a run."""

    def __init__(self, weight: float, seed: int, frequencies: NDArray[np.float64], communicator: Communicator) -> None:
        """`frequencies` (num_scenes,): times that an epoch would hold each scene without."""
        self._weight, self._seed, self._frequencies = weight, seed, frequencies
        self._communicator = communicator
        # Rounded up, so that what is held once at least stays so.
        self.epoch_length = math.ceil(frequencies.sum() * (1 + weight / 2))
        self._epoch = 0
        unknown = np.full(len(frequencies), np.nan, dtype=np.float32)
        self._losses = [unknown, unknown]
        """Of each scene, behind the order of the present epoch and of the next."""
        self._pieces: list[_Piece] = []
        """Of this rank, left on its device until they are needed."""
        self._epoch_losses = torch.zeros(2, self.epoch_length)
        """Of this rank, by place in the present epoch: losses, and 1 where there is one."""

    def of_epoch(self, epoch: int) -> NDArray[np.float64]:
        if not 0 <= epoch - self._epoch < len(self._losses):
            raise RuntimeError(f"epoch {epoch} is asked for in epoch {self._epoch}: its losses are not at hand")
        wanted = hard_frequencies(self._losses[epoch - self._epoch], self._frequencies, self._weight)
        return np.asarray(wanted * (self.epoch_length / wanted.sum()), dtype=np.float64)

    def record(self, position: int, losses: Tensor | None) -> None:
        """Losses (n,) of this rank's samples number `position` and following of the run.

        Raises UserError for None, where the task cannot tell them.
        """
        if losses is None:
            raise UserError(f"data.hard_scene_weight = {self._weight:g}: this task tells no loss an image; set it to 0")
        self._pieces.append(_Piece(position, losses))

    def after_step(self, samples: int) -> str | None:
        """After every step; at an epoch's end, what it found for people. `samples`: trained on so far. Collective."""
        if samples < (self._epoch + 1) * self.epoch_length:
            return None
        values, seen = self._gather().numpy()
        scenes, _ = epoch_samples(self._seed, self._epoch, self.epoch_length, self.of_epoch(self._epoch))
        finite = (seen > 0) & np.isfinite(values)
        times = np.bincount(scenes[finite], minlength=len(self._frequencies))
        sums = np.bincount(scenes[finite], values[finite], minlength=len(self._frequencies))
        # A scene that had no finite loss keeps its former one.
        means = np.where(times > 0, sums / np.maximum(times, 1), self._losses[1]).astype(np.float32)
        self._losses = [self._losses[1], means]
        self._epoch += 1
        self._epoch_losses.zero_()
        return self._summary(means, int((times == 0).sum()))

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint, between steps; the same on every rank. Collective."""
        return {"losses": torch.from_numpy(np.stack(self._losses)), "epoch_losses": self._gather()}

    def load(self, state: Mapping[str, Tensor], samples: int) -> None:
        """Go on from `state` after so many samples, on any number of ranks.

        Raises UserError where it is of other data.
        """
        losses, epoch_losses = state["losses"], state["epoch_losses"]
        if losses.shape[1] != len(self._frequencies) or epoch_losses.shape != self._epoch_losses.shape:
            raise UserError(
                f"data.hard_scene_weight = {self._weight:g}: the checkpoint does not hold the losses of these "
                f"{len(self._frequencies)} scenes; resume with the run's own config.json"
            )
        self._epoch = samples // self.epoch_length
        self._losses = list(losses.numpy())
        # They are added up over ranks, so one rank has them all.
        self._epoch_losses = epoch_losses.clone() if self._communicator.is_first else torch.zeros_like(epoch_losses)
        self._pieces = []

    def _gather(self) -> Tensor:
        """The present epoch's losses of all ranks; pieces of the next one stay."""
        start, end = self._epoch * self.epoch_length, (self._epoch + 1) * self.epoch_length
        later = []
        for piece in self._pieces:
            count = max(0, min(len(piece.losses), end - piece.position))
            first = piece.position - start
            self._epoch_losses[0, first : first + count] = piece.losses[:count].float().cpu()
            self._epoch_losses[1, first : first + count] = 1.0
            if count < len(piece.losses):
                later.append(_Piece(piece.position + count, piece.losses[count:]))
        self._pieces = later
        # To the bit whatever the number of ranks: to each loss only zeros are added.
        return self._communicator.allreduce(self._epoch_losses.to(self._communicator.device)).cpu()

    def _summary(self, losses: NDArray[np.float32], without: int) -> str:
        known = np.sort(losses[np.isfinite(losses)])
        if not len(known):
            return f"epoch {self._epoch}: no scene had a finite loss"
        hardest = known[-max(1, round(len(known) * _HARDEST_SHARE)) :]
        return (
            f"epoch {self._epoch}: loss {known.mean():.3f}, of the hardest {_HARDEST_SHARE:.0%} of scenes "
            f"{hardest.mean():.3f}; data.hard_scene_weight = {self._weight:g}"
            + (f"; {without} scenes were without a finite loss" if without else "")
        )


def hard_scenes(
    config: RunConfig, num_scenes: int, frequencies: NDArray[np.float64] | None, communicator: Communicator
) -> HardScenes | None:
    """None where `data.hard_scene_weight` is 0. `frequencies` as `Task.frequencies` gives them.

    Raises UserError where an epoch is too short for what is prepared ahead.
    """
    weight = config.data.hard_scene_weight
    if not weight:
        return None
    plain = np.ones(num_scenes) if frequencies is None else frequencies
    scenes = HardScenes(weight, config.train.seed, plain, communicator)
    ahead = samples_ahead(config, communicator.size)
    if ahead > scenes.epoch_length:
        raise UserError(
            f"data.hard_scene_weight = {weight:g}: a step and what is prepared behind it may take {ahead} samples, an "
            f"epoch has {scenes.epoch_length}: lower the global batch or data.workers_per_rank, or set the weight to 0"
        )
    return scenes
