"""How much of a night is spent, whose turn it is, whether another job still fits: pure functions of plain numbers."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perception.errors import UserError

GUESSED_SECONDS = 60.0
"""Of a job of which nothing is known yet, for the shares alone."""


@dataclass(frozen=True)
class Limits:
    """What a night may use; None: as much as it likes."""

    max_jobs: int | None = None
    """Jobs that are run, of all kinds; those answered from a record are not counted."""
    rank_seconds: float | None = None
    deadline_utc: float | None = None


@dataclass(frozen=True)
class Spent:
    num_jobs: int
    """Planned so far, run or to be run."""
    rank_seconds: float
    """Allocated: of what has ended, and of what runs until now."""
    rank_seconds_to_come: float = 0.0
    """Expected of what is under way."""


@dataclass(frozen=True)
class Account:
    """What a model has had of the night."""

    model: str
    share: float
    """Of the rank-seconds, in any unit."""
    priority: int = 0
    rank_seconds: float = 0.0
    """Of jobs that ended, and expected of those under way."""


@dataclass
class Durations:
    """Mean time for which jobs of one sort hold their slots; of whole runs, so that a promise to fit in is kept."""

    means: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    """(model, samples) → number and mean of rank-seconds."""

    def add(self, model: str, num_samples: int, rank_seconds: float) -> None:
        number, mean = self.means.get((model, num_samples), (0, 0.0))
        self.means[(model, num_samples)] = (number + 1, mean + (rank_seconds - mean) / (number + 1))

    def rank_seconds(self, model: str, num_samples: int) -> float | None:
        """None where no such job has ended yet."""
        number, mean = self.means.get((model, num_samples), (0, 0.0))
        return mean if number else None


def next_model(accounts: Iterable[Account]) -> str | None:
    """The one whose use is furthest behind its share, among those of the highest priority; None where there is none.

    Each pick adds what it is expected to use to the account, so no model gets all free slots at once.
    """
    every = list(accounts)
    if not every:
        return None
    highest = max(account.priority for account in every)
    among = [account for account in every if account.priority == highest]
    return min(among, key=lambda account: (account.rank_seconds / account.share, account.model)).model


def why_no_other(limits: Limits, spent: Spent) -> str:
    """Why no job at all may be added, as a person reads it; empty if one may be."""
    if limits.max_jobs is not None and spent.num_jobs >= limits.max_jobs:
        return f"budget spent: {spent.num_jobs} of {limits.max_jobs} jobs"
    if limits.rank_seconds is not None and spent.rank_seconds >= limits.rank_seconds:
        return f"budget spent: {spent.rank_seconds / 3600:.2f} of {limits.rank_seconds / 3600:.2f} rank-hours"
    return ""


def fits(limits: Limits, spent: Spent, now_utc: float, seconds: float | None, num_ranks: int) -> str:
    """Why a job of this expected length must not begin now; empty if it may, also where its length is unknown."""
    if limits.deadline_utc is not None:
        left = limits.deadline_utc - now_utc
        if left <= 0:
            return "deadline reached"
        if seconds is not None and seconds > left:
            return f"deadline: {left:.0f} s are left, and such a job takes {seconds:.0f} s"
    if limits.rank_seconds is not None:
        left = limits.rank_seconds - spent.rank_seconds - spent.rank_seconds_to_come
        needed = (seconds or 0.0) * num_ranks
        if left <= 0 or needed > left:
            return (
                f"budget spent: of {limits.rank_seconds / 3600:.2f} rank-hours "
                f"{max(0.0, left) / 3600:.2f} are left, and such a job takes {needed / 3600:.2f}"
            )
    return ""


def deadline_utc(now_utc: float, clock: str, max_minutes: float | None, where: str) -> float | None:
    """The earlier of the next `HH:MM` (UTC) after now and `max_minutes` from now; None where neither is given."""
    ends = [now_utc + 60.0 * max_minutes] if max_minutes else []
    if clock:
        try:
            time_of_day = datetime.datetime.strptime(clock, "%H:%M").time()
        except ValueError:
            raise UserError(f'{where}: deadline = "{clock}": write the time of day as HH:MM, UTC') from None
        now = datetime.datetime.fromtimestamp(now_utc, datetime.UTC)
        at = datetime.datetime.combine(now.date(), time_of_day, datetime.UTC)
        if at <= now:
            at += datetime.timedelta(days=1)
        ends.append(at.timestamp())
    return min(ends) if ends else None


def split_useful(allocated: float, wasted: float) -> tuple[float, float]:
    """(useful, wasted), which add up to what was allocated, exactly: the wasted part can be no more than all of it."""
    wasted = min(max(0.0, wasted), allocated)
    return allocated - wasted, wasted


def use_of(ended: Mapping[str, float], under_way: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Model → rank-seconds: of attempts that ended, and what each job under way has used or is expected to."""
    used = dict(ended)
    for model, rank_seconds in under_way:
        used[model] = used.get(model, 0.0) + rank_seconds
    return used
