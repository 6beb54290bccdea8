"""Which jobs start on which slots of a host, and what they are told of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.launchers.host_slots import divide, slot_environment, visible_gpus
from sweeps.launchers.placement import Waiting, choose_slots, place

JOBS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.floats(0, 1000)), max_size=20).map(
    lambda each: [Waiting(f"job-{i}", slots, priority, i, waited) for i, (slots, priority, waited) in enumerate(each)]
)


@given(waiting=JOBS, free=st.sets(st.integers(0, 15)), reserve_after=st.floats(1, 1000))
def test_placement_gives_each_job_its_slots_and_no_slot_twice(
    waiting: list[Waiting], free: set[int], reserve_after: float
) -> None:
    placed = place(waiting, sorted(free), reserve_after)
    given_slots = [slot for _, slots in placed for slot in slots]
    assert len(given_slots) == len(set(given_slots)) and set(given_slots) <= free
    sizes = {job.name: job.num_slots for job in waiting}
    assert all(len(slots) == sizes[name] for name, slots in placed)
    left = len(free) - len(given_slots)
    started = {name for name, _ in placed}
    stays = [job for job in waiting if job.name not in started]
    reserved = [job for job in stays if job.waited_seconds >= reserve_after]
    if not reserved:
        # Nothing that fits is left waiting.
        assert all(job.num_slots > left for job in stays)


@given(waiting=JOBS, free=st.sets(st.integers(0, 15)))
def test_a_job_that_has_waited_long_is_passed_by_none_of_its_equals(waiting: list[Waiting], free: set[int]) -> None:
    started = [name for name, _ in place(waiting, sorted(free), 500)]
    by_name = {job.name: job for job in waiting}
    for job in waiting:
        if job.name not in started and job.waited_seconds >= 500:
            behind = [
                by_name[name]
                for name in started
                if by_name[name].priority <= job.priority
                and not (by_name[name].waited_seconds >= 500 and by_name[name].order < job.order)
                and by_name[name].priority == job.priority
            ]
            assert not behind


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=30), slots=st.integers(4, 8))
def test_every_job_is_started_in_the_end(sizes: list[int], slots: int) -> None:
    """A stream of small jobs that never stops does not starve a large one."""
    waiting = [Waiting("large", 4, 0, 0)]
    running: list[tuple[int, tuple[int, ...]]] = [(index % 3, (index,)) for index in range(slots)]
    for turn in range(40):
        running = [(end, held) for end, held in running if end > turn]
        free = set(range(slots)) - {slot for _, held in running for slot in held}
        size = 1 + sizes[turn % len(sizes)] % 3
        waiting.append(Waiting(f"small-{turn}", size, 0, turn + 1))
        aged = [
            Waiting(job.name, job.num_slots, job.priority, job.order, 100.0 * (turn - max(0, job.order - 1)))
            for job in waiting
        ]
        for name, held in place(aged, sorted(free), 500):
            running.append((turn + 2, held))
            waiting = [job for job in waiting if job.name != name]
    assert all(job.name != "large" for job in waiting)


@given(free=st.sets(st.integers(0, 15), min_size=1), data=st.data())
def test_slots_of_a_job_are_neighbours_where_they_can_be(free: set[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(free)))
    chosen = choose_slots(sorted(free), count)
    assert len(set(chosen)) == count and set(chosen) <= free
    run_exists = any(all(first + step in free for step in range(count)) for first in free)
    assert not run_exists or chosen == tuple(range(chosen[0], chosen[0] + count))


@given(count=st.integers(1, 20), num_cores=st.integers(1, 64))
def test_cores_are_shared_out_evenly(count: int, num_cores: int) -> None:
    cores = list(range(100, 100 + num_cores))
    slots = divide(count, cores, [])
    assert len(slots) == count
    sizes = [len(slot.cores) for slot in slots]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    if count <= num_cores:
        assert sorted(core for slot in slots for core in slot.cores) == cores


@pytest.mark.parametrize(
    ("listed", "num_gpus", "expected"),
    [
        (None, 2, ["0", "1"]),
        (None, 0, []),
        ("1,0", 2, ["1", "0"]),
        ("GPU-5ab,GPU-7cd", 8, ["GPU-5ab", "GPU-7cd"]),
        ("", 8, []),
        ("-1", 8, []),
        ("0,9,1", 2, ["0"]),
        ("0,1", 0, []),
    ],
)
def test_gpus_are_those_that_cuda_would_see(listed: str | None, num_gpus: int, expected: list[str]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(environ, num_gpus) == expected


def test_a_job_is_told_its_own_gpus_and_threads() -> None:
    slots = divide(4, list(range(8)), ["3", "1", "0", "2"])
    assert slot_environment(slots[1:3], {}) == {"CUDA_VISIBLE_DEVICES": "1,0", "OMP_NUM_THREADS": "2"}
    assert slot_environment(slots[:1], {"OMP_NUM_THREADS": "7"}) == {"CUDA_VISIBLE_DEVICES": "3"}
