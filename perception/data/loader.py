"""From sample keys to batches: in the rank itself, or in worker processes that prepare ahead."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from perception.config import RunConfig
from perception.data.lane_targets import SampleKey
from perception.data.stream import EpochFrequencies, SampleStream, micro_batches, step_positions
from perception.stopping import STOP_SIGNALS

BATCHES_AHEAD = 4
"""Micro-batches that each worker process prepares ahead."""


class Samples(Protocol):
    """A random-access data set; what a sample is, only the task knows."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Any: ...


class Preparation(Protocol):
    """The part of a task that runs where data are loaded: sample → example, examples → batch."""

    config: RunConfig

    def frequencies(self, samples: Any) -> NDArray[np.float64] | None: ...

    def prepare(self, sample: Any, key: SampleKey, train: bool) -> Any: ...

    def collate(self, examples: Sequence[Any]) -> Any: ...


class _Prepared(Dataset[Any]):
    """Maps a key to a prepared example; all randomness derives from the key."""

    def __init__(self, samples: Samples, task: Preparation, train: bool) -> None:
        self._samples = samples
        self._task = task
        self._train = train

    def __getitem__(self, key: SampleKey) -> Any:
        return self._task.prepare(self._samples.sample(key.index), key, self._train)


class _Keys:
    """The key lists of all micro-batches of one rank, in order, from a position on."""

    def __init__(
        self,
        stream: SampleStream,
        num_samples: int,
        global_batch: int,
        rank: int,
        size: int,
        accumulation: int,
        position: int,
    ) -> None:
        self._stream = stream
        self._num_samples, self._global_batch, self._position = num_samples, global_batch, position
        self._rank, self._size, self._accumulation = rank, size, accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for position, count in step_positions(self._num_samples, self._global_batch, self._size, self._position):
            keys = self._stream.keys(position, count)
            for start, end in micro_batches(count, self._rank, self._size, self._accumulation):
                yield keys[start:end]


def samples_ahead(config: RunConfig, size: int) -> int:
    """How far in the stream a step and what is prepared behind it may reach, at most."""
    steps = 1 + math.ceil(BATCHES_AHEAD * config.data.workers_per_rank / config.train.accumulation)
    return steps * config.train.global_batch_on(size)


def training_batches(
    samples: Samples,
    task: Preparation,
    rank: int,
    size: int,
    position: int,
    pin_memory: bool,
    frequencies: EpochFrequencies | None = None,
) -> Iterator[Any]:
    """This rank's micro-batches in order, from sample number `position` of the run on.

    `task.config` tells global batch, accumulation, length, seed and worker processes. `frequencies` None: the task's.
    """
    config = task.config
    keys = _Keys(
        SampleStream(
            config.train.seed, len(samples), task.frequencies(samples) if frequencies is None else frequencies
        ),
        config.train.num_samples,
        config.train.global_batch_on(size),
        rank,
        size,
        config.train.accumulation,
        position,
    )
    loader = _loader(_Prepared(samples, task, train=True), keys, task, config.data.workers_per_rank, pin_memory)
    return _iterate(loader)


def evaluation_batches(samples: Samples, task: Preparation, rank: int, size: int, batch_size: int) -> Iterator[Any]:
    """This rank's share of a data set, each sample once over all ranks, without augmentation."""
    indices = list(range(rank, len(samples), size))
    keys = [
        [SampleKey(0, index) for index in indices[start : start + batch_size]]
        for start in range(0, len(indices), batch_size)
    ]
    workers = task.config.data.workers_per_rank
    return _iterate(_loader(_Prepared(samples, task, train=False), keys, task, workers, pin_memory=False))


def _loader(
    prepared: _Prepared, keys: Iterable[list[SampleKey]], task: Preparation, workers: int, pin_memory: bool
) -> DataLoader[Any]:
    return DataLoader(
        prepared,
        batch_sampler=keys,
        collate_fn=task.collate,
        num_workers=workers,
        worker_init_fn=_one_thread if workers else None,
        multiprocessing_context="forkserver" if workers else None,
        prefetch_factor=BATCHES_AHEAD if workers else None,
        pin_memory=pin_memory,
        # Its own, unused: from torch's global one a draw would be taken, and a resumed run would differ.
        generator=torch.Generator(),
    )


def _iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the workers deaf to the signals that ask a run to stop.

    Ctrl-C and Slurm signal every process of a run; a worker that died of it would end the rank by an error
    before it has saved. Workers end with their rank instead. The mask is inherited by all they start from.
    """
    if not loader.num_workers:
        return iter(loader)
    # It unblocks SIGINT and SIGTERM behind itself, hence before the mask is set for the rest.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _one_thread(_: int) -> None:
    import cv2

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
