"""The search by ask and tell: every sampler, restarts, kills in the middle of a write, answers from the record."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.planning.space import Parameter, Sample, SearchSpace, key
from sweeps.search.search import Search, open_search
from sweeps.search.storage import Storage, choose_storage, open_storage

NUMBERS = SearchSpace((Parameter("x", "float", -1.0, 1.0), Parameter("y", "float", 1e-4, 1.0, log=True)))
MIXED = SearchSpace(
    (
        Parameter("batch", "int", 2.0, 64.0, log=True),
        Parameter("flag", "choice", choices=(True, False)),
        Parameter("lr", "float", 1e-4, 1e-1, log=True),
        Parameter("share", "float", 0.0, 0.7, step=0.1),
        Parameter("widths", "choice", choices=((8, 16), (16, 32), (32, 64))),
    )
)
SMALL = SearchSpace((Parameter("a", "choice", choices=(1, 2, 3)), Parameter("b", "int", 1.0, 4.0)))


def opened(folder: Path, space: SearchSpace = MIXED, sampler: str = "tpe", **more: object) -> Search:
    directions = more.pop("directions", ["maximize"])
    return open_search(space, directions, Storage(journal=folder / "search" / "journal.log"), "s", sampler, **more)  # type: ignore[arg-type]


def asked(search: Search) -> tuple[int, Sample]:
    suggestion = search.ask()
    assert suggestion is not None
    return suggestion.number, suggestion.parameters


def loss(sample: Sample) -> float:
    x, y = sample["x"], sample["y"]
    assert isinstance(x, float) and isinstance(y, float)
    return (x - 0.3) ** 2 + (math.log10(y) + 2) ** 2 / 4


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "qmc", "random", "grid"])
def test_every_sampler_suggests_samples_of_the_space_and_goes_on_after_a_restart(tmp_path: Path, sampler: str) -> None:
    space = NUMBERS if sampler == "cmaes" else MIXED
    if sampler == "grid":
        space = SearchSpace(tuple(p for p in MIXED.parameters if p.kind == "choice"))
    seen = []
    for _ in range(2):
        search = opened(tmp_path, space, sampler, seed=3)
        assert search.repairs == ()
        for _ in range(3):
            number, sample = asked(search)
            assert space.problem(sample) == ""
            seen.append((number, key(sample)))
            search.tell(number, [len(seen) / 10], "complete")
    assert [number for number, _ in seen] == list(range(6))
    # A search that was begun again draws other numbers than before.
    assert len({text for _, text in seen}) == 6


@pytest.mark.parametrize(
    ("sampler", "num_trials"), [("tpe", 60), ("cmaes", 60), pytest.param("gp", 20, marks=pytest.mark.slow)]
)
def test_samplers_that_learn_come_closer_than_chance(tmp_path: Path, sampler: str, num_trials: int) -> None:
    search = opened(tmp_path, NUMBERS, sampler, directions=["minimize"], seed=1)
    losses = []
    for _ in range(num_trials):
        number, sample = asked(search)
        losses.append(loss(sample))
        search.tell(number, [losses[-1]], "complete")
    # Of random samples the mean of 10,000 is .75.
    assert sum(losses[-8:]) / 8 < 0.75 / 2
    best = search.best()
    assert best is not None and best.values == (min(losses),)


def test_the_grid_is_tried_as_a_whole_without_a_point_lost_or_twice_over_restarts(tmp_path: Path) -> None:
    points = []
    while True:
        search = opened(tmp_path, SMALL, "grid", seed=7)
        suggestion = search.ask()
        if suggestion is None:
            break
        points.append(key(suggestion.parameters))
        outcome = "complete" if len(points) % 2 else "failed"
        search.tell(suggestion.number, [1.0] if outcome == "complete" else None, outcome)  # type: ignore[arg-type]
    assert sorted(points) == sorted(key(point) for point in SMALL.grid())
    assert points != sorted(points)


def test_suggestions_of_parallel_trials_differ(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS, seed=0)
    for _ in range(12):
        number, sample = asked(search)
        search.tell(number, [-loss(sample)], "complete")
    outstanding = [key(asked(search)[1]) for _ in range(16)]
    assert len(set(outstanding)) == 16


def test_what_is_enqueued_comes_next_and_only_once_over_restarts(tmp_path: Path) -> None:
    known: Sample = {"batch": 8, "flag": False, "lr": 0.012345678901234567, "share": 0.3, "widths": (16, 32)}
    search = opened(tmp_path)
    assert search.enqueue(known, "champion")
    search = opened(tmp_path)
    assert not search.enqueue(known, "champion")
    suggestion = search.ask()
    assert suggestion is not None
    assert suggestion.parameters == known
    assert suggestion.note == "champion"
    assert not opened(tmp_path).enqueue(known, "champion")
    assert opened(tmp_path).enqueue(known, "replayed")


def test_part_of_a_sample_is_completed_by_the_sampler(tmp_path: Path) -> None:
    search = opened(tmp_path)
    search.enqueue({"lr": 0.01})
    _, sample = asked(search)
    assert sample["lr"] == 0.01 and MIXED.problem(sample) == ""


def test_what_is_outside_of_the_space_cannot_be_enqueued_or_learnt(tmp_path: Path) -> None:
    search = opened(tmp_path)
    with pytest.raises(UserError, match=r"search s: lr = 1\.0 is outside of 0\.0001 to 0\.1, log"):
        search.enqueue({"lr": 1.0})
    with pytest.raises(UserError, match="batch is missing"):
        search.learn({"lr": 0.01}, [1.0], "night 1")


def test_results_of_past_nights_are_learnt_without_being_run(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS, directions=["minimize"])
    search.learn({"x": 0.3, "y": 0.01}, [0.001], "night 2026-11-29")
    number, _ = asked(search)
    assert number == 1
    best = search.best()
    assert best is not None and best.number == 0 and best.note == "night 2026-11-29"


def test_replaying_the_log_of_suggestions_gives_the_same_trials(tmp_path: Path) -> None:
    first = opened(tmp_path / "one", seed=1)
    log = [asked(first)[1] for _ in range(6)]
    second = opened(tmp_path / "two", seed=2)
    for place, sample in enumerate(log):
        second.enqueue(sample, f"replayed {place}")
    assert [asked(second)[1] for _ in range(6)] == log


def test_a_controller_that_was_killed_finds_its_running_trials_and_ends_them(tmp_path: Path) -> None:
    search = opened(tmp_path, owner="2026-11-30")
    done, _ = asked(search)
    search.tell(done, [0.5], "complete")
    left = [asked(search) for _ in range(3)]
    search.report(left[0][0], 1000, 0.25)
    search = opened(tmp_path, owner="2026-11-30")
    assert [(row.number, row.parameters) for row in search.running()] == left
    assert search.running()[0].curve == {1000: 0.25}
    search.report(left[0][0], 1000, 0.25)
    search.report(left[0][0], 2000, 0.3)
    assert search.tell(left[0][0], [0.4], "complete") == "complete"
    assert search.tell(left[1][0], None, "pruned") == "pruned"
    assert search.tell(left[2][0], None, "failed") == "failed"
    rows = {row.number: row for row in opened(tmp_path).trials()}
    assert [rows[number].state for number in range(4)] == ["complete", "complete", "pruned", "failed"]
    assert rows[1].curve == {1000: 0.25, 2000: 0.3}
    assert opened(tmp_path, owner="2026-11-30").running() == []


def test_running_trials_of_another_night_are_not_ours(tmp_path: Path) -> None:
    asked(opened(tmp_path, owner="one"))
    assert opened(tmp_path, owner="two").running() == []
    assert len(opened(tmp_path, owner="one").running()) == 1


def test_the_same_told_again_changes_nothing_and_another_answer_is_refused(tmp_path: Path) -> None:
    search = opened(tmp_path)
    number, _ = asked(search)
    search.tell(number, [0.5], "complete")
    assert search.tell(number, [0.5], "complete") == "complete"
    with pytest.raises(ValueError, match="trial 0 has ended already, as complete"):
        search.tell(number, [0.6], "complete")
    with pytest.raises(ValueError, match="it cannot end as pruned"):
        search.tell(number, None, "pruned")
    with pytest.raises(ValueError, match="trial 7 is unknown"):
        search.tell(7, [0.5], "complete")
    with pytest.raises(ValueError, match="1 values are needed, 2 given"):
        search.tell(asked(search)[0], [0.5, 0.6], "complete")


def test_a_controller_that_was_killed_while_it_told_tells_again(tmp_path: Path) -> None:
    search = opened(tmp_path)
    number, _ = asked(search)
    search.tell(number, [0.5], "complete", {"seconds": -1.0})
    lines = journal(tmp_path).read_bytes().splitlines(keepends=True)
    # Its last line is the trial's end, the one before the constraint.
    journal(tmp_path).write_bytes(b"".join(lines[:-1]))
    search = opened(tmp_path)
    assert [row.number for row in search.running()] == [number]
    search.tell(number, [0.5], "complete", {"seconds": -1.0})
    assert [(row.state, row.excesses) for row in search.trials()] == [("complete", {"seconds": -1.0})]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_divergence_of_its_own_and_stays_out_of_the_best(
    tmp_path: Path, value: float
) -> None:
    search = opened(tmp_path)
    number, _ = asked(search)
    search.report(number, 500, value)
    assert search.tell(number, [value], "complete") == "diverged"
    assert search.tell(number, None, "diverged") == "diverged"
    assert [(row.state, row.values, row.curve) for row in opened(tmp_path).trials()] == [("diverged", None, {})]
    assert search.best() is None


def test_a_sampler_that_learns_is_kept_from_where_trials_diverged(tmp_path: Path) -> None:
    """Of trials told as failed it learns nothing, and all of its later suggestions lie there."""
    beyond = {}
    for outcome in ("diverged", "failed"):
        search = opened(tmp_path / outcome, NUMBERS, seed=4, directions=["maximize"])
        drawn = []
        for _ in range(45):
            number, sample = asked(search)
            x = sample["x"]
            assert isinstance(x, float)
            drawn.append(x)
            # The best lie beside what diverges.
            search.tell(number, None if x > 0.5 else [x], outcome if x > 0.5 else "complete")
        beyond[outcome] = sum(x > 0.5 for x in drawn[-20:])
    assert beyond["diverged"] <= 12 < 18 <= beyond["failed"]


def test_constraints_keep_a_trial_from_being_the_answer(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS)
    for value, excess in ((0.9, 5.0), (0.5, -1.0), (0.4, 0.0)):
        number, _ = asked(search)
        search.tell(number, [value], "complete", {"images_per_second": excess})
    best = opened(tmp_path, NUMBERS).best()
    assert best is not None and best.values == (0.5,)
    assert best.excesses == {"images_per_second": -1.0}


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "qmc", "random"])
def test_several_objectives_give_a_front(tmp_path: Path, sampler: str) -> None:
    search = opened(tmp_path, NUMBERS, sampler, directions=["maximize", "minimize"], constraints=["c"])
    for values in ([0.5, 10.0], [0.6, 12.0], [0.4, 11.0], [0.6, 13.0]):
        number, _ = asked(search)
        search.report(number, 100, values[0])
        assert search.tell(number, values, "complete", {"c": -1.0}) == "complete"
    # Of one of them nothing is known: it could be an answer or none.
    for excesses in ({}, {"c": math.nan}):
        assert search.tell(asked(search)[0], [0.9, 1.0], "complete", excesses) == "failed"
    for outcome in ("pruned", "diverged", "failed"):
        search.tell(asked(search)[0], None, outcome)
    for _ in range(10):
        number, _ = asked(search)
        search.tell(number, [0.1, 99.0], "complete", {"c": 1.0})
    assert [row.number for row in search.front()] == [0, 1]
    best = search.best()
    assert best is not None and best.number == 1


def test_importance_names_the_parameter_that_decides(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS, "random", seed=2, directions=["minimize"])
    assert search.importance().reason == "0 complete trials, 10 are needed"
    for _ in range(60):
        number, sample = asked(search)
        x = sample["x"]
        assert isinstance(x, float)
        search.tell(number, [(x - 0.3) ** 2], "complete")
    found = search.importance()
    assert found.num_trials == 60 and found.reason == ""
    assert found.shares["x"] > 0.8 and sum(found.shares.values()) == pytest.approx(1)


def test_equal_values_have_no_importance(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS, "random")
    for _ in range(12):
        search.tell(asked(search)[0], [0.0], "complete")
    assert search.importance().reason == "all trials have the same value"


def test_other_objectives_under_the_same_name_are_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(UserError, match="was begun with other objectives"):
        opened(tmp_path, directions=["minimize"])


def test_times_are_utc_wherever_the_controller_runs(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.sweeps.test_search import opened, asked\n"
        "search = opened(Path(sys.argv[1])); n, _ = asked(search); search.tell(n, [1.0], 'complete')\n"
        "row = search.trials()[0]; print(row.started_utc, row.ended_utc)"
    )
    for zone in ("Pacific/Auckland",):
        before = time.time()
        environment = {**os.environ, "TZ": zone}
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / zone)], capture_output=True, text=True, env=environment
        )
        started, ended = map(float, done.stdout.split())
        assert before - 1 < started <= ended < time.time() + 1, done.stderr


# Damage and kills.


def journal(folder: Path) -> Path:
    return folder / "search" / "journal.log"


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_journal_that_was_cut_anywhere_is_mended_and_loses_its_last_line_only(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        search = opened(folder, NUMBERS, "random")
        for _ in range(3):
            number, _ = asked(search)
            search.report(number, 10, 0.1)
            search.tell(number, [0.5], "complete")
        whole = journal(folder).read_bytes()
        cut = data.draw(st.integers(1, len(whole) - 1))
        journal(folder).write_bytes(whole[:cut])
        search = opened(folder, NUMBERS, "random")
        if not whole[:cut].endswith(b"\n"):
            assert any("half-written last line" in line for line in search.repairs)
        # Every trial that is left running has all its values: the others were ended, and said.
        assert all(set(row.parameters) == {"x", "y"} for row in search.trials() if row.state == "running")
        number, sample = asked(search)
        assert NUMBERS.problem(sample) == ""
        search.tell(number, [0.7], "complete")
        assert opened(folder, NUMBERS, "random").repairs == ()


def test_zeros_at_the_end_of_a_journal_are_cut_off(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS)
    search.tell(asked(search)[0], [0.5], "complete")
    with journal(tmp_path).open("ab") as file:
        file.write(b"\0" * 4096)
    search = opened(tmp_path, NUMBERS)
    assert search.repairs == (f"{journal(tmp_path)}: 4096 bytes of a half-written last line are cut off",)
    assert [row.state for row in search.trials()] == ["complete"]


def test_damage_in_the_middle_of_a_journal_is_refused_with_its_line(tmp_path: Path) -> None:
    search = opened(tmp_path, NUMBERS)
    search.tell(asked(search)[0], [0.5], "complete")
    lines = journal(tmp_path).read_bytes().splitlines(keepends=True)
    lines[1] = b'{"op_co\n'
    journal(tmp_path).write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"journal\.log: line 2 is damaged"):
        opened(tmp_path, NUMBERS)


def test_the_lock_of_a_controller_that_was_killed_does_not_hold_up_the_next(tmp_path: Path) -> None:
    opened(tmp_path, NUMBERS)
    lock = journal(tmp_path).with_name("journal.log.lock")
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))
    begin = time.monotonic()
    search = opened(tmp_path, NUMBERS)
    asked(search)
    assert time.monotonic() - begin < 5
    assert search.repairs == (f"{journal(tmp_path)}: lock of a controller that was killed is removed",)


@pytest.mark.slow
def test_kills_at_any_moment_leave_a_search_that_goes_on(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.sweeps.test_search import NUMBERS, opened\n"
        "search = opened(Path(sys.argv[1]), NUMBERS, 'random', owner='night'); print('open', flush=True)\n"
        "for row in search.running(): search.tell(row.number, None, 'failed')\n"
        "while True:\n"
        "    s = search.ask(); search.report(s.number, 5, 0.1); search.tell(s.number, [0.5], 'complete')"
    )
    for round_number in range(5):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        time.sleep(0.2 + 0.07 * round_number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        lock = journal(tmp_path).with_name("journal.log.lock")
        if lock.exists():
            os.utime(lock, (time.time() - 60, time.time() - 60))
    search = opened(tmp_path, NUMBERS, "random", owner="night")
    assert len(search.running()) <= 1
    states = [row.state for row in search.trials()]
    assert states.count("complete") >= 5 and states.count("failed") <= 5
    assert search.ask() is not None


# Storage.


def test_a_shared_storage_is_postgresql_and_its_url_is_never_shown() -> None:
    url = "postgresql://sweeps:secret@localhost/sweeps"
    storage = choose_storage("postgresql", "URL", Path("j"), {"URL": url})
    assert storage.shared and storage.url == url
    assert "secret" not in repr(storage)
    assert not choose_storage("journal", "URL", Path("j"), {}).shared


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "environment variable URL is not set"),
        ({"URL": "sqlite:///search.db"}, "SQLite is locked when several write to it: take a PostgreSQL URL"),
        ({"URL": "mysql://u:secret@h/d"}, "must begin with postgresql://, not mysql://"),
    ],
)
def test_another_database_is_refused_in_one_line(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        choose_storage("postgresql", "URL", Path("j"), environment)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_database_that_does_not_answer_is_one_line_without_the_password() -> None:
    with pytest.raises(UserError, match="the search's database cannot be used") as caught:
        open_storage(Storage(url="postgresql://sweeps:secret@127.0.0.1:9/sweeps"))
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_journal_in_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "search").write_text("a file")
    with pytest.raises(UserError, match=r"journal\.log: cannot be prepared"):
        opened(tmp_path)


def test_the_journal_holds_plain_values_only(tmp_path: Path) -> None:
    """A dashboard reads it while the night runs."""
    search = opened(tmp_path)
    search.tell(asked(search)[0], [0.5], "complete")
    lines = [json.loads(line) for line in journal(tmp_path).read_text().splitlines()]
    assert {line["param_name"] for line in lines if "param_name" in line} == set(MIXED.names)
