"""How a pull comes on: bars by layer on a terminal, plain lines elsewhere, nothing where nobody looks."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 5.0
_RATE_SECONDS = 5.0
"""Over which the rate is averaged: long enough to be calm, short enough to be true."""


class Progress(Protocol):
    """Told by any thread."""

    def layers(self, sizes: dict[str, int]) -> None:
        """All there are, by digest, in order."""
        ...

    def layer(self, digest: str, phase: str, received_bytes: int) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class NoProgress:
    """Says nothing."""

    def layers(self, sizes: dict[str, int]) -> None:
        pass

    def layer(self, digest: str, phase: str, received_bytes: int) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Layer:
    digest: str
    size: int
    phase: str = "waiting"
    received_bytes: int = 0


class _Rate:
    """Bytes per second of what comes over the network."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def add(self, now: float, received_bytes: int) -> None:
        if len(self._points) > 1 and now - self._points[-2][0] < _REDRAW_SECONDS:
            self._points.pop()
        self._points.append((now, received_bytes))
        while len(self._points) > 2 and self._points[1][0] <= now - _RATE_SECONDS:
            self._points.pop(0)

    def per_second(self) -> float:
        if len(self._points) < 2:
            return 0.0
        (first, before), (last, after) = self._points[0], self._points[-1]
        return max(0.0, (after - before) / (last - first)) if last > first else 0.0


class _Follower:
    """What both kinds of output know: the layers, and how fast they come."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = threading.RLock()
        self._layers: dict[str, _Layer] = {}
        self._rate = _Rate()
        self._fetched_bytes = 0
        """Seen to come: neither what was in the cache nor what an earlier pull has left there."""

    def layers(self, sizes: dict[str, int]) -> None:
        with self._lock:
            self._layers = {digest: _Layer(digest, size) for digest, size in sizes.items()}
            self._rate = _Rate()
            self._rate.add(self._clock(), self._fetched_bytes)

    def _update(self, digest: str, phase: str, received_bytes: int) -> str | None:
        """Returns the phase it was in, or None for what is no layer."""
        layer = self._layers.get(digest)
        if layer is None:
            return None
        before, layer.phase = layer.phase, phase
        known, layer.received_bytes = layer.received_bytes, max(0, min(received_bytes, layer.size))
        if before == "fetching" and phase in ("fetching", "fetched"):
            self._fetched_bytes += max(0, layer.received_bytes - known)
            self._rate.add(self._clock(), self._fetched_bytes)
        return before

    def _total(self) -> str:
        layers = self._layers.values()
        size, received = sum(layer.size for layer in layers), sum(layer.received_bytes for layer in layers)
        rate = self._rate.per_second()
        text = f"{format_bytes(received)} of {format_bytes(size)}"
        if received < size:
            text += f", {format_bytes(rate)}/s, {format_remaining(size - received, rate)}"
        num_done = sum(layer.phase in ("done", "there") for layer in layers)
        return f"{text}, {num_done} of {len(self._layers)} layers in the engine"


class PlainProgress(_Follower):
    """A line when a layer arrives, and one every few seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, clock)
        self._said_at = clock()

    def layer(self, digest: str, phase: str, received_bytes: int) -> None:
        with self._lock:
            before = self._update(digest, phase, received_bytes)
            if before is None:
                return
            if phase != before and phase in ("fetched", "cached", "there"):
                words = {"fetched": "fetched", "cached": "is in the cache", "there": "is in the engine"}
                self._write(f"{short(digest)}: {words[phase]}, {format_bytes(self._layers[digest].size)}")
            if self._clock() - self._said_at >= _LINE_SECONDS:
                self._said_at = self._clock()
                self._write(self._total())

    def say(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarProgress(_Follower):
    """A bar a layer, redrawn in place, and a line for all."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
    ) -> None:
        super().__init__(stream, clock)
        self._size = size
        self._drawn_at = float("-inf")
        self._num_drawn = 0

    def layer(self, digest: str, phase: str, received_bytes: int) -> None:
        with self._lock:
            if self._update(digest, phase, received_bytes) is None:
                return
            if self._clock() - self._drawn_at >= _REDRAW_SECONDS:
                self._draw()

    def say(self, line: str) -> None:
        with self._lock:
            self._erase()
            self._stream.write(f"{line}\n")
            self._stream.flush()
            self._draw()

    def close(self) -> None:
        """Leave the last state on the screen."""
        with self._lock:
            self._draw()
            self._num_drawn = 0

    def _draw(self) -> None:
        if not self._layers:
            return
        self._drawn_at = self._clock()
        columns, rows = self._size()
        width = max(20, columns - 1)
        total = self._total()
        lines = [bar(layer.digest, layer.phase, layer.received_bytes, layer.size, width) for layer in self._shown(rows)]
        hidden = len(self._layers) - len(lines)
        lines.append(f"{total}{f' ({hidden} not shown)' if hidden else ''}"[:width])
        self._erase()
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._num_drawn = len(lines)

    def _shown(self, rows: int) -> list[_Layer]:
        """As many as the screen holds, those that move first: what has scrolled off cannot be redrawn."""
        room = max(1, rows - 2)
        layers = list(self._layers.values())
        if len(layers) <= room:
            return layers
        moving = [layer for layer in layers if layer.phase not in ("done", "there", "waiting")]
        rest = [layer for layer in layers if layer.phase == "waiting"]
        chosen = {layer.digest for layer in (moving + rest)[:room]}
        return [layer for layer in layers if layer.digest in chosen]

    def _erase(self) -> None:
        if self._num_drawn:
            self._stream.write(f"\x1b[{self._num_drawn}A\x1b[J")
            self._num_drawn = 0


def progress_for(stream: TextIO | None = None) -> Progress:
    """Bars if the stream (standard error by default) is a terminal that can move its cursor."""
    chosen = stream if stream is not None else sys.stderr
    if chosen.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return BarProgress(chosen)
    return PlainProgress(chosen)


def bar(digest: str, phase: str, received_bytes: int, size: int, width: int) -> str:
    """One line of at most `width` columns.

    >>> bar("sha256:0123456789abcdef", "fetching", 500_000, 1_000_000, 64)
    '0123456789ab fetching   [##########          ] 500 kB of 1.0 MB'
    """
    sizes = f"{format_bytes(received_bytes)} of {format_bytes(size)}"
    head = f"{short(digest)} {phase:<10} "
    room = width - len(head) - len(sizes) - 3
    if room < 5:
        return f"{head}{sizes}"[:width]
    length = min(room, 20)
    filled = length if size == 0 else length * received_bytes // size
    return f"{head}[{'#' * filled}{' ' * (length - filled)}] {sizes}"


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def format_bytes(count: float) -> str:
    """In powers of ten, as registries and disks are sold.

    >>> [format_bytes(count) for count in (0, 999, 1500, 2_000_000, 3_200_000_000)]
    ['0 B', '999 B', '2 kB', '2.0 MB', '3.20 GB']
    """
    if count < 1000:
        return f"{count:.0f} B"
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    if count < 1e9:
        return f"{count / 1e6:.1f} MB"
    if count < 1e12:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e12:.2f} TB"


def format_remaining(missing_bytes: int, rate: float) -> str:
    """
    >>> format_remaining(300, 1.0), format_remaining(30, 1.0), format_remaining(10, 0.0)
    ('5 min 00 s left', '30 s left', 'time left unknown')
    """
    if rate <= 0:
        return "time left unknown"
    seconds = round(missing_bytes / rate)
    if seconds < 60:
        return f"{seconds} s left"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s left"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min left"
