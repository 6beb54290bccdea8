"""A run's GPUs, sampled beside it in a thread: means for metrics.jsonl, and joules by the counters' differences."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Protocol

from perception.gpu import HARMFUL_REASONS, Gpus, GpuSample, Xid, open_gpus

_CLOSING_SECONDS = 2.0


class GpuFollower(Protocol):
    def take(self) -> dict[str, float]:
        """Values of the time since the last call, to be logged with a step; {} where nothing new is known."""

    def close(self) -> None: ...


class NoFollower:
    """For runs without GPUs."""

    def take(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return None


def follow_gpus(environ: Mapping[str, str] = os.environ, period_seconds: float = 1.0) -> GpuFollower:
    """Sample the GPUs of this process in a thread of its own, until `close`."""
    gpus = open_gpus(environ)
    return ThreadedFollower(gpus, period_seconds) if gpus.indices else NoFollower()


class ThreadedFollower:
    """Asks every `period_seconds`: a call may take milliseconds, and a dying GPU's much longer."""

    def __init__(self, gpus: Gpus, period_seconds: float) -> None:
        self._gpus, self._period_seconds = gpus, period_seconds
        self._lock = threading.Lock()
        self._samples: list[list[GpuSample]] = []
        self._xids: list[Xid] | None = None
        self._energy = EnergyMeter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu sampler", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        with self._lock:
            samples, self._samples = self._samples, []
            xids, self._xids = self._xids, None
            joules = self._energy.take()
        return summary(samples, joules, xids)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(_CLOSING_SECONDS)
        # A thread that still waits for a dying GPU is left behind with the library: it ends with the process.
        if not self._thread.is_alive():
            self._gpus.close()

    def _run(self) -> None:
        while True:
            sample, xids = self._gpus.sample(), self._gpus.xids()
            with self._lock:
                self._samples.append(sample)
                if xids is not None:
                    self._xids = (self._xids or []) + xids
                self._energy.add(sample)
            if self._stopping.wait(self._period_seconds):
                return


class EnergyMeter:
    """Joules by the differences of a counter that starts anew with the driver."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._used: dict[int, float] = {}

    def add(self, samples: Iterable[GpuSample]) -> None:
        for sample in samples:
            if sample.energy_joules is None:
                continue
            before = self._last.get(sample.index)
            # What was used around a reset is not known.
            if before is not None and sample.energy_joules >= before:
                self._used[sample.index] = self._used.get(sample.index, 0.0) + sample.energy_joules - before
            self._last[sample.index] = sample.energy_joules

    def take(self) -> dict[int, float]:
        """GPU → joules since the last call; without those of which nothing is known."""
        used, self._used = self._used, {}
        return used


def summary(
    samples: Sequence[Sequence[GpuSample]], joules: Mapping[int, float], xids: list[Xid] | None
) -> dict[str, float]:
    """Values to log of some rounds of samples: means over GPUs and time, of the temperature the highest.

    `gpu_energy_joules` is of a GPU on average, `gpu_throttled` the share of samples with a reason that is harmful.
    A value that no GPU tells is left out.
    """
    if not samples:
        return {}
    every = [sample for round_ in samples for sample in round_ if not sample.fault]
    reasons = [sample.throttle_reasons for sample in every if sample.throttle_reasons is not None]
    temperatures = [sample.temperature_celsius for sample in every if sample.temperature_celsius is not None]
    values = {
        "gpu_utilisation": _mean(sample.utilisation for sample in every),
        "gpu_memory_bytes": _mean(sample.memory_bytes for sample in every),
        "gpu_power_watts": _mean(sample.power_watts for sample in every),
        "gpu_energy_joules": _mean(joules.values()),
        "gpu_sm_clock_mhz": _mean(sample.sm_clock_mhz for sample in every),
        "gpu_temperature_celsius": max(temperatures, default=None),
        "gpu_throttled": _mean(float(bool(set(HARMFUL_REASONS).intersection(found))) for found in reasons),
        "gpu_xids": None if xids is None else float(len(xids)),
        "num_gpus": float(len(samples[-1])),
        "num_gpus_lost": float(sum(bool(sample.fault) for sample in samples[-1])),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
