"""Budget, shares and deadline: pure functions."""

from __future__ import annotations

import datetime
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.night.budget import (
    Account,
    Durations,
    Limits,
    Spent,
    deadline_utc,
    fits,
    next_model,
    split_useful,
    use_of,
    why_no_other,
)


def utc(text: str) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


@given(
    shares=st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    lengths=st.lists(st.floats(1, 100), min_size=5, max_size=5),
)
def test_use_follows_shares_whatever_jobs_cost(shares: list[float], lengths: list[float]) -> None:
    """No account is ever further from its share than one job of each."""
    used = [0.0] * len(shares)
    for _ in range(400):
        accounts = [Account(str(n), share, 0, used[n]) for n, share in enumerate(shares)]
        name = next_model(accounts)
        assert name is not None
        used[int(name)] += lengths[int(name)]
    per_share = [use / share for use, share in zip(used, shares, strict=True)]
    slack = max(length / share for length, share in zip(lengths, shares, strict=False))
    assert max(per_share) - min(per_share) <= slack * (1 + 1e-9)


def test_equal_accounts_are_taken_in_a_fixed_order_and_priority_has_the_first_word() -> None:
    assert next_model([Account("b", 1.0), Account("a", 1.0)]) == "a"
    assert next_model([Account("a", 1.0), Account("b", 0.001, priority=1, rank_seconds=1e9)]) == "b"
    assert next_model([]) is None


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        (Spent(9, 3599.0), ""),
        (Spent(10, 0.0), "budget spent: 10 of 10 jobs"),
        (Spent(0, 3600.0), "budget spent: 1.00 of 1.00 rank-hours"),
    ],
)
def test_the_end_of_a_budget_has_its_words(spent: Spent, words: str) -> None:
    assert why_no_other(Limits(10, 3600.0), spent) == words
    assert why_no_other(Limits(), Spent(10**6, 1e12)) == ""


@pytest.mark.parametrize(
    ("limits", "spent", "seconds", "words"),
    [
        (Limits(deadline_utc=100.0), Spent(0, 0), 60.0, ""),
        (Limits(deadline_utc=100.0), Spent(0, 0), 61.0, "deadline: 60 s are left, and such a job takes 61 s"),
        (Limits(deadline_utc=100.0), Spent(0, 0), None, ""),
        (Limits(deadline_utc=40.0), Spent(0, 0), None, "deadline reached"),
        (Limits(rank_seconds=3600.0), Spent(0, 3000.0, 500.0), 50.0, ""),
        (Limits(rank_seconds=3600.0), Spent(0, 3000.0, 500.0), 51.0, "0.03 are left, and such a job takes 0.03"),
        (Limits(rank_seconds=3600.0), Spent(0, 3000.0, 600.0), None, "0.00 are left"),
        (Limits(), Spent(0, 1e9, 1e9), 1e9, ""),
    ],
)
def test_a_job_is_begun_only_where_it_can_end(limits: Limits, spent: Spent, seconds: float | None, words: str) -> None:
    found = fits(limits, spent, 40.0, seconds, 2)
    assert (words in found) if words else not found


@pytest.mark.parametrize(
    ("now", "clock", "minutes", "expected"),
    [
        ("2026-11-30T22:00", "07:00", None, "2026-12-01T07:00"),
        ("2026-12-01T06:59", "07:00", None, "2026-12-01T07:00"),
        ("2026-12-01T07:00", "07:00", None, "2026-12-02T07:00"),
        ("2026-12-31T23:59", "00:00", None, "2027-01-01T00:00"),
        ("2026-11-30T22:00", "07:00", 15.0, "2026-11-30T22:15"),
        ("2026-11-30T06:50", "07:00", 15.0, "2026-11-30T07:00"),
        ("2026-11-30T06:50", "", 15.0, "2026-11-30T07:05"),
    ],
)
def test_the_deadline_is_the_next_such_time_of_day_in_utc(
    now: str, clock: str, minutes: float | None, expected: str
) -> None:
    assert deadline_utc(utc(now), clock, minutes, "p.toml") == utc(expected)


def test_no_deadline_and_a_wrong_one() -> None:
    assert deadline_utc(0.0, "", None, "p.toml") is None
    with pytest.raises(UserError, match=r'p\.toml: deadline = "7 am": write the time of day as HH:MM, UTC'):
        deadline_utc(0.0, "7 am", None, "p.toml")


@given(allocated=st.floats(0, 1e9), wasted=st.floats(-1e9, 2e9))
def test_useful_and_wasted_add_up_to_allocated(allocated: float, wasted: float) -> None:
    useful, lost = split_useful(allocated, wasted)
    assert useful >= 0 and 0 <= lost <= allocated
    assert useful + lost == pytest.approx(allocated)


def test_durations_are_means_of_jobs_of_one_length() -> None:
    durations = Durations()
    assert durations.rank_seconds("lane", 900) is None
    for seconds in (10.0, 20.0, 60.0):
        durations.add("lane", 900, seconds)
    durations.add("lane", 300, 5.0)
    assert durations.rank_seconds("lane", 900) == pytest.approx(30.0)
    assert durations.rank_seconds("lane", 300) == 5.0 and durations.rank_seconds("sign", 900) is None


def test_use_counts_what_ended_and_what_is_under_way() -> None:
    assert Counter(use_of({"a": 5.0}, [("a", 1.0), ("b", 2.0), ("b", 3.0)])) == {"a": 6.0, "b": 5.0}
