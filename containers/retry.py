"""When to try again, and after how long: pure functions of what happened."""

from __future__ import annotations

import email.utils
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a transfer is, in seconds and in attempts that brought nothing."""

    attempts: int = 6
    """In a row without progress, from one endpoint; one that brought data starts the count again."""
    first_delay_seconds: float = 1.0
    """Doubled each time: a registry that is restarted, and away for 15 seconds, is found again whatever the draw."""
    longest_delay_seconds: float = 20.0
    longest_retry_after_seconds: float = 120.0
    """A server that asks for more patience than this is told of, not waited for."""
    connect_seconds: float = 10.0
    stall_seconds: float = 30.0
    """Without one byte before an attempt is given up."""
    progress_bytes: int = 64 << 10
    """What an attempt must have brought to count as progress."""
    corrupt_attempts: int = 2
    """Of one endpoint that gave bytes with another digest: once may be the network, twice is the registry."""
    engine_stall_seconds: float = 300.0
    """Without a word of the engine, which may be busy with its disk, before it is given up."""


class Impatient(Exception):
    """The server asked to wait longer than the policy allows."""

    def __init__(self, asked_seconds: float, allowed_seconds: float) -> None:
        super().__init__(f"asked to wait {asked_seconds:.0f} s, more than the {allowed_seconds:.0f} s allowed")
        self.asked_seconds = asked_seconds


def delay_seconds(policy: RetryPolicy, failures: int, jitter: float, retry_after_seconds: float | None = None) -> float:
    """How long to wait after the `failures`-th failure in a row; `jitter` is a draw from [0, 1).

    A random half, so that the nodes of a cluster that failed together do not come back together.

    >>> [delay_seconds(RetryPolicy(), failures, 1.0) for failures in (1, 2, 3, 20)]
    [1.0, 2.0, 4.0, 20.0]
    >>> delay_seconds(RetryPolicy(), 1, 0.0)
    0.5
    >>> delay_seconds(RetryPolicy(), 1, 0.5, retry_after_seconds=7.0)
    7.5
    """
    exponential = min(policy.longest_delay_seconds, policy.first_delay_seconds * 2.0 ** min(failures - 1, 30))
    if retry_after_seconds is None:
        return exponential * (0.5 + 0.5 * jitter)
    if retry_after_seconds > policy.longest_retry_after_seconds:
        raise Impatient(retry_after_seconds, policy.longest_retry_after_seconds)
    # Never earlier than asked.
    return retry_after_seconds + policy.first_delay_seconds * jitter


def parse_retry_after(header: str | None, now_seconds: float) -> float | None:
    """Seconds from `now_seconds` (since the epoch) that a Retry-After header asks for, or None if it says nothing.

    >>> parse_retry_after("7", 0.0)
    7.0
    >>> parse_retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 20.0)
    40.0
    >>> parse_retry_after("soon", 0.0) is None
    True
    """
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return max(0.0, moment.timestamp() - now_seconds)


def worth_retrying(status: int) -> bool:
    """Of an HTTP status: whether the same request may succeed later."""
    return status in (408, 425, 429) or status >= 500
