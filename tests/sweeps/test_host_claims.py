"""Several controllers on one host: together they start no more jobs than it has slots, and no slot is taken twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.launchers.host_claims import Claims, claim, release
from sweeps.launchers.host_slots import divide
from sweeps.launchers.local import LocalLauncher
from sweeps.night.night import find_nights
from tests.sweeps.launcher_contract import make_job, status_when, told, wait_for
from tests.sweeps.test_night import command, environment, state_of, write_plan
from tests.sweeps.waiting import end, wait_until


def launcher(folder: Path, name: str, slots: int = 2, reserve_after_seconds: float = 600.0) -> LocalLauncher:
    return LocalLauncher(slots, folder / name, 0.5, reserve_after_seconds, host_folder=folder / "seats")


@given(
    counts=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    num_cores=st.integers(1, 8),
    num_gpus=st.integers(0, 2),
    data=st.data(),
)
def test_seats_leave_no_more_to_others_than_one_plan_alone_would_use(
    counts: list[int], num_cores: int, num_gpus: int, data: st.DataObject
) -> None:
    """Whatever numbers of slots the plans have; a seat's name alone decides, so plain sets stand for locks here."""
    plans = [divide(min(count, num_gpus) or count, range(num_cores), list("ab")[:num_gpus]) for count in counts]
    every = data.draw(st.permutations([slot for plan in plans for slot in plan]))
    taken: set[str] = set()
    started = []
    for slot in every:
        assert slot.seats
        if not taken.intersection(slot.seats):
            taken.update(slot.seats)
            started.append(slot)
    if num_gpus:
        assert max(Counter(slot.gpu for slot in started).values()) == 1
        return
    on_core = Counter(core for slot in started for core in slot.cores)
    most = max(max(Counter(core for slot in plan for core in slot.cores).values()) for plan in plans)
    assert max(on_core.values()) <= most
    for plan in plans:
        alone = Counter(core for slot in plan for core in slot.cores)
        assert max(alone.values()) - min(alone.values()) <= 1


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 3)), st.booleans()), max_size=12))
def test_a_slot_is_never_claimed_by_two_and_what_is_let_go_is_free(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, set[int], bool]]
) -> None:
    """Three controllers, of which any claims some slots and keeps or lets go what it has."""
    folder = tmp_path_factory.mktemp("seats")
    seats = [[f"core-{number}.0", f"core-{number}.1"] for number in range(4)]
    controllers = [Claims(folder, seats) for _ in range(3)]
    kept: dict[int, set[int]] = {number: set() for number in range(3)}
    turn: int | None = None
    try:
        for number, wanted, keep in steps:
            elsewhere = set().union(*(slots for other, slots in kept.items() if other != number))
            assert set(controllers[number].take(wanted)) == kept[number] | (wanted - elsewhere)
            if keep and turn in (None, number):
                kept[number] |= wanted - elsewhere
                turn = number
            else:
                # One alone keeps slots, or two could wait for each other.
                kept[number] = set()
                turn = None if turn == number else turn
            controllers[number].settle(keep)
    finally:
        for each in controllers:
            each.settle(keep=False)
    free = claim(folder, [seat for slot in seats for seat in slot])
    assert free is not None
    release(free)


def test_a_lock_file_that_was_cleaned_away_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "seats"
    first = claim(folder, ["core-0.0"])
    assert first is not None and claim(folder, ["core-1.0", "core-0.0"]) is None
    release(first)
    (folder / "core-0.0").unlink()
    (folder / "core-1.0").unlink()
    folder.rmdir()
    again = claim(folder, ["core-0.0", "gpu-MIG-GPU-5a/1/0"])
    assert again is not None
    assert sorted(path.name for path in folder.iterdir()) == ["core-0.0", "gpu-MIG-GPU-5a_1_0"]
    # Of every user, who may lock and add files, and remove none but his own.
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert (folder / "core-0.0").stat().st_mode & 0o777 == 0o644
    release(again)


def test_a_folder_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "seats").write_text("")
    with pytest.raises(UserError, match=r"seats of this host cannot be claimed.*chmod 1777") as caught:
        launcher(tmp_path, "one").submit(make_job(tmp_path, "night.a.1", 0))
    assert "\n" not in str(caught.value)


def test_another_controllers_jobs_take_slots_and_free_them_however_they_end(tmp_path: Path) -> None:
    one, two = launcher(tmp_path, "one"), launcher(tmp_path, "two")
    jobs = [make_job(tmp_path, f"night.{number}.1", 60) for number in range(2)]
    waiting = [make_job(tmp_path, f"other.{number}.1", 60) for number in range(2)]
    ids = one.submit_many(jobs)
    two.submit_many(waiting)
    assert {status.state for status in one.poll().values()} == {"running"}
    assert {(status.state, status.reason) for status in two.poll().values()} == {
        ("pending", "other controllers on this host hold slots")
    }
    # The jobs hold them, not the controller that started them.
    one.close()
    assert {status.state for status in two.poll().values()} == {"pending"}
    wait_for((jobs[0].run_folder / "told.json").exists, "start")
    os.kill(int(ids[0].partition("@")[0]), signal.SIGKILL)
    status_when(two, waiting[0].name, "running")
    assert two.poll()[waiting[1].name].state == "pending"
    one.cancel(jobs[1].name)
    status_when(two, waiting[1].name, "running")
    wait_for((waiting[1].run_folder / "told.json").exists, "start")
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(told(waiting[0])["cores"]) & set(told(waiting[1])["cores"])
    for job in waiting:
        two.cancel(job.name)
        status_when(two, job.name, "ended")


def test_a_wide_job_that_has_waited_long_is_not_starved_by_another_controllers_small_ones(tmp_path: Path) -> None:
    one = launcher(tmp_path, "one", reserve_after_seconds=0.0)
    two = launcher(tmp_path, "two")
    three = launcher(tmp_path, "three", reserve_after_seconds=0.0)
    first = make_job(tmp_path, "small.1.1", 60)
    keeper = int(two.submit(first).partition("@")[0])
    wide, wide_too = (make_job(tmp_path, f"wide.{name}.1", 60, ranks_per_node=2) for name in ("one", "three"))
    # Both wait for both slots; only one may keep the free one, so that neither waits for the other's.
    one.submit(wide)
    three.submit(wide_too)
    small = make_job(tmp_path, "small.2.1", 60)
    two.submit(small)
    assert two.poll()[small.name].state == "pending"
    # A keeper that is killed before it could record itself is started again.
    wait_for((first.run_folder / "told.json").exists, "start")
    os.kill(keeper, signal.SIGKILL)
    status_when(one, wide.name, "running")
    assert two.poll()[first.name].state == "lost"
    assert (two.poll()[small.name].state, three.poll()[wide_too.name].state) == ("pending", "pending")
    one.cancel(wide.name)
    status_when(one, wide.name, "ended")
    status_when(three, wide_too.name, "running")
    three.cancel(wide_too.name)
    status_when(three, wide_too.name, "ended")
    status_when(two, small.name, "running")
    two.cancel(small.name)
    status_when(two, small.name, "ended")


@pytest.mark.slow
def test_two_nights_on_one_host_run_no_more_at_once_than_it_has_slots(tmp_path: Path) -> None:
    """Two real controllers. The second has given its jobs to the launcher while those of the first hold every slot."""
    root, gate = tmp_path / "nights", tmp_path / "gate"
    gate.mkdir()
    told_all = {**environment(0.2), "STAND_IN_GATE": str(gate)}

    def out(plan: str) -> int:
        nights = [night for night in find_nights(root) if night.plan_name == plan] if root.is_dir() else []
        state = state_of(root, nights[0].folder.name) if nights else None
        return sum(job.live is not None and job.live.id is not None for job in state.out.values()) if state else 0

    with contextlib.ExitStack() as stack:
        stack.callback((gate / "open").touch)
        processes = []
        for name in ("one", "two"):
            plan = write_plan(tmp_path, name=name, slots=2, max_trials=3)
            words = command("nightly", plan, "--root", root)
            process = subprocess.Popen(words, env=told_all, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(end, process)
            processes.append(process)
            wait_until(lambda name=name: out(name) == 2, f"2 jobs of {name}", lambda name=name: out(name), process)
        (gate / "open").touch()
        outs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outs)
    records = [json.loads(path.read_text()) for path in root.glob("*/launcher/*.run.json")]
    held = [(record["started_utc"], record["ended_utc"], slot) for record in records for slot in record["slots"]]
    assert len(held) == sum(len(state_of(root, night.folder.name).records) for night in find_nights(root)) == 12
    for begin, _, slot in held:
        at_once = [other for start, stop, other in held if start <= begin < stop]
        assert at_once.count(slot) == 1 and len(at_once) <= 2, sorted(held)
