"""Axes of charts: scales, ticks that people would choose, and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sweeps.report.wording import number


@dataclass(frozen=True)
class Scale:
    """From values to a share of an axis' length; low < high, both above 0 on a logarithmic one."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        if self.is_log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Iterable[float], is_log: bool = False, from_zero: bool = False, margin: float = 0.05) -> Scale:
    """One that holds all values with a margin at both ends; of no values, or all equal ones, a sensible one around."""
    known = [value for value in values if math.isfinite(value) and (value > 1e-300 or not is_log)]
    if is_log:
        low, high = (min(known), max(known)) if known else (1.0, 10.0)
        room = math.exp(max(margin * (math.log(high) - math.log(low)), 0.05))
        return Scale(max(low / room, 1e-300), min(high * room, 1e300), is_log=True)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        room = 0.5 * abs(high) or 0.5
        return Scale(0.0, 2 * high) if from_zero and high > 0 else Scale(low - room, high + room)
    room = margin * (high - low)
    return Scale(low if from_zero and low == 0 else low - room, high + room)


def ticks(scale: Scale, target: int = 5) -> list[float]:
    """Round values within the scale, about `target` of them, at least two."""
    if scale.is_log:
        return _log_ticks(scale, target)
    raw = (scale.high - scale.low) / max(1, target)
    power = 10.0 ** math.floor(math.log10(raw))
    for attempt in (1, 0.5):
        # What is counted (trials, jobs) has no halves.
        factors = (1, 2, 5, 10) if power == 1 else (1, 2, 2.5, 5, 10)
        step = attempt * power * next(m for m in factors if m * power >= raw * (1 - 1e-9))
        first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
        found = [index * step for index in range(first, last + 1)]
        if len(found) >= 2:
            break
    return found


def _log_ticks(scale: Scale, target: int) -> list[float]:
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        found = [d * 10.0**power for power in range(first, last + 1) for d in digits]
        found = [value for value in found if scale.low * (1 - 1e-9) <= value <= scale.high * (1 + 1e-9)]
        if len(found) >= min(3, target):
            break
    if len(found) < 2:
        return ticks(Scale(scale.low, scale.high), target)
    stride = math.ceil(len(found) / (2 * target))
    return found[::stride]


def tick_label(value: float) -> str:
    """
    >>> [tick_label(v) for v in (0, 0.25, 1500, 2_000_000, 3e-5)]
    ['0', '0.25', '1.5k', '2M', '3e−05']
    """
    size = abs(value)
    if size >= 999_999.5:
        return f"{number(value / 1e6).rstrip('0').rstrip('.') if '.' in number(value / 1e6) else number(value / 1e6)}M"
    if size >= 1000:
        text = number(value / 1e3)
        return f"{text.rstrip('0').rstrip('.') if '.' in text else text}k"
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text
