"""Figures and names as people read them: one way for the page and the terminal; None is always "–"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

NONE = "–"
_MINUS = "−"
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""What is not seen but changes how its surroundings are read: controls, marks of direction, halves of characters."""


def visible(text: str) -> str:
    """Of a text from outside: characters that hide or turn around what stands beside them, spelt out.

    >>> visible("lane\\u202eflip")
    'lane\\\\u202eflip'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text.replace("\r\n", "\n").replace("\r", "\n"))


def finite(value: float | None) -> float | None:
    """None for what is no number: NaN and infinity are not figures to rank or draw."""
    return value if value is not None and math.isfinite(value) else None


def number(value: float | None, digits: int = 3) -> str:
    """With `digits` significant ones, thousands apart, and no exponent where people would not write one."""
    value = finite(value)
    if value is None:
        return NONE
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10**15 or size < 1e-4:
        text = f"{value:.{digits}g}"
    elif float(value).is_integer() and size >= 10 ** (digits - 1):
        text = f"{value:,.0f}"
    else:
        text = f"{value:,.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"
        if "." in text and size < 1:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", _MINUS)


def signed(value: float | None, digits: int = 3) -> str:
    text = number(value, digits)
    return f"+{text}" if value is not None and text not in (NONE, "0") and value > 0 else text


def score(value: float | None) -> str:
    """An accuracy or another figure of ranking: four decimals below 1, so that columns line up.

    >>> score(0.84), score(12.5)
    ('0.8400', '12.50')
    """
    value = finite(value)
    if value is None:
        return NONE
    return f"{value:.4f}".replace("-", _MINUS) if abs(value) < 10 else number(value, 4)


def signed_score(value: float | None) -> str:
    return f"+{score(value)}" if value is not None and value > 0 else score(value)


def percent(share: float | None, decimals: int = 0) -> str:
    share = finite(share)
    if share is None:
        return NONE
    # Not −0.0.
    return f"{round(100 * share, decimals) + 0.0:.{decimals}f} %".replace("-", _MINUS)


def signed_percent(share: float | None, decimals: int = 1) -> str:
    return f"+{percent(share, decimals)}" if share is not None and share > 0 else percent(share, decimals)


def hours(seconds: float | None) -> str:
    """Rank-seconds or seconds as a number of hours, without the unit.

    >>> hours(5400), hours(90)
    ('1.50', '0.025')
    """
    return NONE if seconds is None else number(seconds / 3600)


def duration(seconds: float | None) -> str:
    """
    >>> duration(45), duration(754), duration(19_500), duration(200_000)
    ('45 s', '12 min 34 s', '5 h 25 min', '2 d 7 h')
    """
    seconds = finite(seconds)
    if seconds is None:
        return NONE
    whole = round(seconds)
    if whole < 60:
        return f"{number(seconds, 2)} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def clock(seconds_since_epoch: float | None) -> str:
    """UTC, to the minute."""
    if finite(seconds_since_epoch) is None:
        return NONE
    return datetime.fromtimestamp(float(seconds_since_epoch or 0.0), UTC).strftime("%Y-%m-%d %H:%M")


def short(digest: str, length: int = 12) -> str:
    """The beginning of a hash or revision; the algorithm's name before a colon is left out."""
    return digest.rpartition(":")[2][:length] if digest else NONE


def count(amount: int, one: str, many: str = "") -> str:
    """
    >>> count(1, "job"), count(0, "job"), count(2, "entry", "entries")
    ('1 job', 'no jobs', '2 entries')
    """
    if amount == 1:
        return f"1 {one}"
    return f"{f'{amount:,}' if amount else 'no'} {many or one + 's'}"


def joined(words: Iterable[str], limit: int = 6) -> str:
    """
    >>> joined(["a", "b", "c"]), joined(["a", "b", "c", "d"], limit=2)
    ('a, b and c', 'a, b and 2 more')
    """
    names = list(words)
    if len(names) > limit:
        names = [*names[:limit], f"{len(names) - limit} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def hour_unit(hardware: str) -> str:
    """What a rank occupies for an hour, as the cluster's users call it."""
    is_gpu = re.search(r"nvidia|gpu|\b[ahbvl]\d{2,3}\b|\bmi\d{3}", hardware, re.IGNORECASE)
    return "GPU-hours" if is_gpu else "rank-hours"
