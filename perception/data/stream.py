"""Which samples a step takes, as pure functions of (seed, position): ranks never change the order.

A run sees one endless stream of samples, epoch after epoch, each epoch a permutation
drawn from (seed, epoch); where samples have frequencies, it holds some of them more than once. Frequencies may
differ from epoch to epoch, its length never does.
A step takes the next `count` of them; ranks take contiguous shares of it, micro-batches contiguous
parts of a share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perception.data.lane_targets import SampleKey
from perception.errors import UserError


def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """(num_samples,) permutation of the data set for one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def times_in_epoch(seed: int, epoch: int, frequencies: NDArray[np.float64]) -> NDArray[np.int64]:
    """(num_samples,) times that an epoch holds each sample: its frequency rounded up or down, right on average.

    `frequencies` add up to a whole number, and so do the times, to the same (systematic sampling).
    """
    edges = np.concatenate([[0.0], np.cumsum(frequencies)])
    edges[-1] = round(edges[-1])
    shift = np.random.default_rng([seed, epoch, 1]).random()
    return np.asarray(np.diff(np.minimum(np.floor(edges + shift), edges[-1])), dtype=np.int64)


class EpochFrequencies(Protocol):
    """Frequencies that differ from epoch to epoch."""

    epoch_length: int
    """Samples in every epoch: what the frequencies of each add up to."""

    def of_epoch(self, epoch: int) -> NDArray[np.float64]:
        """(num_samples,) times that this epoch holds each sample on average."""


def epoch_samples(
    seed: int, epoch: int, length: int, frequencies: NDArray[np.float64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(length,) samples of an epoch in their order, and (length,) how often it held each of them before."""
    order = epoch_order(seed, epoch, length)
    if frequencies is None:
        return order, np.zeros_like(order)
    times = times_in_epoch(seed, epoch, frequencies)
    samples = np.repeat(np.arange(len(frequencies)), times)
    # Held so often before: the place within the sample's own block.
    repeats = np.arange(length) - np.repeat(np.cumsum(times) - times, times)
    return samples[order], repeats[order]


class SampleStream:
    """Keys of the stream from any position on; keeps the current epoch's order."""

    def __init__(
        self, seed: int, num_samples: int, frequencies: NDArray[np.float64] | EpochFrequencies | None = None
    ) -> None:
        """`frequencies` (num_samples,), above 0: times that an epoch holds each sample on average; None: once each."""
        if num_samples < 1:
            raise UserError("the training set is empty: nothing to train on")
        self._seed = seed
        self.epoch_length = num_samples
        """The same for all epochs."""
        if isinstance(frequencies, np.ndarray):
            self.epoch_length = max(1, round(float(frequencies.sum())))
            frequencies = frequencies * (self.epoch_length / frequencies.sum())
        elif frequencies is not None:
            self.epoch_length = frequencies.epoch_length
        self._frequencies: NDArray[np.float64] | EpochFrequencies | None = frequencies
        self._epoch = -1
        self._samples = np.empty(0, dtype=np.int64)
        self._repeats = np.empty(0, dtype=np.int64)

    def keys(self, position: int, count: int) -> list[SampleKey]:
        """Samples number position .. position + count - 1 of the run."""
        out = []
        for number in range(position, position + count):
            epoch, offset = divmod(number, self.epoch_length)
            if epoch != self._epoch:
                self._begin(epoch)
            out.append(SampleKey(epoch, int(self._samples[offset]), int(self._repeats[offset])))
        return out

    def _begin(self, epoch: int) -> None:
        known = self._frequencies
        frequencies = known if known is None or isinstance(known, np.ndarray) else known.of_epoch(epoch)
        self._samples, self._repeats = epoch_samples(self._seed, epoch, self.epoch_length, frequencies)
        self._epoch = epoch


def split_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """[start, end) of each part; sizes differ by at most 1, larger ones first."""
    base, larger = divmod(count, parts)
    bounds = []
    start = 0
    for part in range(parts):
        end = start + base + (1 if part < larger else 0)
        bounds.append((start, end))
        start = end
    return bounds


def micro_batches(count: int, rank: int, size: int, accumulation: int) -> list[tuple[int, int]]:
    """[start, end) within a global batch of `count` samples of each micro-batch of `rank`.

    All ranks get equally many, none of them empty (synchronised batch norm needs both):
    a short last batch is accumulated over fewer micro-batches, each of two images at most where
    the others have one. Needs count >= size.
    """
    if count < size:
        raise ValueError(f"{count} samples cannot be shared by {size} ranks")
    num_micro = min(accumulation, count // size)
    start, end = split_evenly(count, size)[rank]
    return [(start + a, start + b) for a, b in split_evenly(end - start, num_micro)]


def step_positions(num_samples: int, global_batch: int, size: int, position: int) -> Iterator[tuple[int, int]]:
    """(position, count) of each step from `position` on. A remainder smaller than `size` is not trained on."""
    while num_samples - position >= size:
        count = min(global_batch, num_samples - position)
        yield position, count
        position += count
