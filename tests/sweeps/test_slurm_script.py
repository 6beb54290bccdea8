"""What Slurm is given, and how its answers are read: recorded text, and bash itself for what has to be quoted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.job import Job
from sweeps.launchers.container_argv import local_container_argv, mounted_folders, pinned
from sweeps.launchers.slurm_commands import slurm_environment
from sweeps.launchers.slurm_entry import Entry
from sweeps.launchers.slurm_nodes import describe_nodes, read_sinfo, slots_of
from sweeps.launchers.slurm_script import Batch, batch_script, commands_text, make_batches, time_limit_minutes
from sweeps.launchers.slurm_state import (
    SlurmJob,
    expand_hosts,
    expand_tasks,
    read_sacct,
    read_scontrol,
    read_squeue,
)
from sweeps.planning.plan import SlurmSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "sweeps"
TRAIN = ("python", "-m", "pipelines", "train", "lane-small", "--set", "optim.lr=0.001")
IMAGE = "nvcr.io/nvidia/pytorch:26.07-py3"
PINNED = f"{IMAGE}@sha256:{'1f' * 32}"


def job(name: str = "2026-11-30.lane-small-0017.1", **fields: Any) -> Job:
    run_folder = Path("/nights/2026-11-30/jobs") / name.split(".")[1]
    argv = fields.pop("argv", (*TRAIN, "--data", "/data/culane", "--out", str(run_folder)))
    return Job(name, argv, run_folder, **{"time_limit_seconds": 5400.0, **fields})


def script(batch: Batch, settings: SlurmSettings, excluded: tuple[str, ...] = ()) -> str:
    return batch_script(batch, settings, Path("/nights/2026-11-30/launcher"), Path("/work"), excluded)


CASES: dict[str, tuple[Batch, SlurmSettings, tuple[str, ...]]] = {
    "two_nodes": (
        Batch((job(num_nodes=2, ranks_per_node=8, priority=3, environment={"NCCL_DEBUG": "WARN"}),)),
        SlurmSettings("nightly", "vision", "normal", gpus_per_node=8, cpus_per_rank=8, options=("--constraint=h100",)),
        ("dgx07", "dgx03"),
    ),
    "array": (
        Batch(tuple(job(f"2026-11-30.lane-small-{n:04}.1", ranks_per_node=8) for n in range(3))),
        SlurmSettings(gpus_per_node=8),
        (),
    ),
    "one_process": (Batch((job(starts_ranks=False, ranks_per_node=4),)), SlurmSettings(cpus_per_rank=2), ()),
    "pyxis": (
        Batch((job(num_nodes=2, ranks_per_node=8, image=PINNED, environment={"NCCL_DEBUG": "WARN"}),)),
        SlurmSettings(gpus_per_node=8, container="pyxis"),
        (),
    ),
    "docker": (
        Batch((job(num_nodes=2, ranks_per_node=8, image=IMAGE, environment={"NCCL_DEBUG": "WARN"}),)),
        SlurmSettings(gpus_per_node=8, container="docker"),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden_script(name: str) -> None:
    batch, chosen, excluded = CASES[name]
    text = script(batch, chosen, excluded)
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    command = "UPDATE_GOLDEN=1 python -m pytest tests/sweeps/test_slurm_script.py -k golden"
    assert text == path.read_text(), f"if the change is meant: {command}"
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).returncode == 0


def test_golden_commands_of_an_array() -> None:
    text = commands_text(CASES["array"][0])
    path = GOLDEN / "array.commands"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


WORDS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=12)


@settings(max_examples=40, deadline=None)
@given(argvs=st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=2, max_size=3))
def test_every_word_reaches_the_program_as_it_is(argvs: list[list[str]]) -> None:
    """Whatever is in it, also where one line of a file stands for a job."""
    jobs = tuple(job(f"n.a-{index}.1", argv=tuple(argv)) for index, argv in enumerate(argvs))
    lines = commands_text(Batch(jobs)).split("\n")
    assert len(lines) == len(jobs) + 1
    for line, argv in zip(lines, argvs, strict=False):
        shown = subprocess.run(
            ["bash", "-c", 'eval "$1"\nprintf "%s\\0" "$@"', "bash", line], capture_output=True, check=True
        )
        assert shown.stdout.split(b"\0")[:-1] == [word.encode() for word in argv]


def test_time_limits_are_rounded_up_to_minutes() -> None:
    assert [time_limit_minutes(job(time_limit_seconds=seconds)) for seconds in (1, 60, 61, 5400)] == [1, 1, 2, 90]


def test_jobs_alike_go_together_the_wide_and_long_first() -> None:
    shapes = [(1, 60, 0), (4, 60, 0), (1, 60, 0), (1, 120, 0), (4, 300, 0), (1, 60, 5), (4, 60, 0)]
    jobs = [
        job(f"n.a-{index}.1", num_nodes=nodes, time_limit_seconds=seconds, priority=priority)
        for index, (nodes, seconds, priority) in enumerate(shapes)
    ]
    batches = make_batches(jobs, 500)
    assert [[each.name for each in batch.jobs] for batch in batches] == [
        ["n.a-5.1"],
        ["n.a-4.1"],
        ["n.a-1.1", "n.a-6.1"],
        ["n.a-3.1"],
        ["n.a-0.1", "n.a-2.1"],
    ]
    assert [batch.name for batch in batches][2] == "n.a-1.1-and-1-more"


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 200), st.integers(-1, 1)), max_size=60),
    largest=st.integers(1, 7),
)
def test_batches_hold_every_job_once(shapes: list[tuple[int, int, int]], largest: int) -> None:
    jobs = [
        job(f"n.a-{i}.1", num_nodes=nodes, time_limit_seconds=float(seconds), priority=priority)
        for i, (nodes, seconds, priority) in enumerate(shapes)
    ]
    batches = make_batches(jobs, largest)
    assert sorted(each.name for batch in batches for each in batch.jobs) == sorted(each.name for each in jobs)
    assert all(len(batch.jobs) <= largest for batch in batches)
    assert len({batch.name for batch in batches}) == len(batches)
    for batch in batches:
        kinds = {(each.num_nodes, time_limit_minutes(each), each.priority) for each in batch.jobs}
        assert len(kinds) == 1
        assert len(set(batch.ids(7))) == len(batch.jobs)


def test_tasks_of_an_array_are_never_named_by_the_arrays_number() -> None:
    jobs = tuple(job(f"n.a-{index}.1") for index in range(2))
    assert Batch(jobs).ids(17) == ["17_0", "17_1"]
    assert Batch(jobs[:1]).ids(17) == ["17"]


def test_an_image_without_a_way_to_run_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"slurm\.container is empty"):
        script(Batch((job(image=IMAGE),)), SlurmSettings())


@pytest.mark.parametrize("fields", [{"environment": {"A B": "1"}}, {"environment": {"": "1"}}])
def test_a_variable_without_a_name_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no name of a variable"):
        script(Batch((job(**fields),)), SlurmSettings())


def test_an_outer_jobs_identity_and_token_are_not_passed_on() -> None:
    outer = {"SLURM_JOB_ID": "7", "SLURM_JWT": "secret", "SBATCH_PARTITION": "x", "SLURM_CONF": "/c", "HOME": "/h"}
    assert slurm_environment(outer) == {"SLURM_CONF": "/c", "HOME": "/h", "SLURM_TIME_FORMAT": "%s"}


def test_a_job_in_a_container_of_this_host_sees_its_folders_and_variables() -> None:
    one = job(image=IMAGE)
    words = local_container_argv(one, [*one.argv, "--ranks", "2"], ["OMP_NUM_THREADS"], has_gpus=False)
    begin, end = words[: words.index("--")], words[words.index("--") + 1 :]
    assert begin[1:5] == ["-m", "containers", "run", f"--image={IMAGE}"]
    assert "--mount=/data/culane" in begin and f"--mount={one.run_folder}" in begin
    assert {"--gpus=none", "--env=OMP_NUM_THREADS", f"--workdir={Path.cwd()}"} <= set(begin)
    assert end == [*one.argv, "--ranks", "2"]
    assert "--gpus=none" not in local_container_argv(one, one.argv, [], has_gpus=True)


def test_folders_are_mounted_once() -> None:
    one = job(argv=("train", "--data", "/data/culane", "--list=/data/culane/list/train.txt", "--set", "a=1"))
    assert mounted_folders(one, Path("/work")) == [Path("/data/culane"), one.run_folder, Path("/work")]
    assert mounted_folders(one, Path("/nights")) == [Path("/data/culane"), Path("/nights")]


def test_an_image_that_the_lock_file_does_not_pin_is_the_users_mistake() -> None:
    assert pinned(job(image=IMAGE)).image == IMAGE
    with pytest.raises(UserError, match="no-such-image"):
        pinned(job(image="no-such-image"))


# Slurm's answers


def test_node_lists() -> None:
    assert expand_hosts("") == ()
    assert expand_hosts("a,b[1-3],c[08-10]d,e[1,3-4]") == (
        "a", "b1", "b2", "b3", "c08d", "c09d", "c10d", "e1", "e3", "e4",
    )  # fmt: skip
    assert expand_hosts("r[1-2]n[0-1]") == ("r1n0", "r1n1", "r2n0", "r2n1")


@given(numbers=st.sets(st.integers(0, 999), min_size=1), width=st.integers(1, 4))
def test_node_lists_as_slurm_writes_them(numbers: set[int], width: int) -> None:
    ordered = sorted(numbers)
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][-1] + 1 and len(str(number)) == len(str(ranges[-1][0])):
            ranges[-1].append(number)
        else:
            ranges.append([number])
    shown = ",".join(
        str(each[0]).zfill(width) if len(each) == 1 else f"{str(each[0]).zfill(width)}-{str(each[-1]).zfill(width)}"
        for each in ranges
    )
    assert expand_hosts(f"dgx[{shown}]") == tuple(f"dgx{str(number).zfill(width)}" for number in ordered)


def test_waiting_tasks() -> None:
    assert expand_tasks("3,5-7%20") == (3, 5, 6, 7)
    assert expand_tasks("0-9:3") == (0, 3, 6, 9)
    assert expand_tasks("") == expand_tasks("N/A") == ()


OLD_FORM = {
    "array_job_id": 12,
    "array_task_id": 3,
    "array_task_string": "",
    "job_id": 15,
    "name": "n.a.1-and-9-more",
    "job_state": "RUNNING",
    "state_reason": "None",
    "state_description": "",
    "nodes": "dgx[01-02]",
    "submit_time": 100,
    "start_time": 110,
    "end_time": 5000,
    "exit_code": 0,
    "restart_cnt": 1,
    "comment": "/nights/launcher",
}
NEW_FORM = {
    **OLD_FORM,
    "array_job_id": {"set": True, "infinite": False, "number": 12},
    "array_task_id": {"set": True, "infinite": False, "number": 3},
    "job_state": ["RUNNING"],
    "submit_time": {"set": True, "infinite": False, "number": 100},
    "start_time": {"set": True, "infinite": False, "number": 110},
    "end_time": {"set": True, "infinite": False, "number": 5000},
    "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "number": 0}, "signal": {"id": {"set": False}}},
}


def test_the_form_of_a_newer_slurm_reads_the_same() -> None:
    (old,), (new,) = (read_squeue(json.dumps({"jobs": [form]})) for form in (OLD_FORM, NEW_FORM))
    assert old == new
    assert old == SlurmJob(
        "12_3", "n.a.1-and-9-more", "RUNNING", "", ("dgx01", "dgx02"), 100, 110, None, None, 1, "/nights/launcher"
    )


def test_a_flag_on_top_of_a_state_says_whether_nodes_are_held() -> None:
    form = {**NEW_FORM, "job_state": ["COMPLETED", "COMPLETING"]}
    assert read_squeue(json.dumps({"jobs": [form]}))[0].kind == "running"


def test_waiting_tasks_of_an_array_come_out_one_by_one() -> None:
    form = {**OLD_FORM, "array_task_id": None, "array_task_string": "4-5,7", "job_state": "PENDING", "job_id": 12}
    jobs = read_squeue(json.dumps({"jobs": [form]}))
    assert [job.id for job in jobs] == ["12_4", "12_5", "12_7"]
    assert all(job.started is None and job.nodes == () for job in jobs)


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", "[]", '{"jobs": 3}'])
def test_an_answer_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        read_squeue(text)


def test_accounts_have_every_start() -> None:
    text = (
        "12_3|n.a.1|PREEMPTED|0:0|dgx[01-02]|100|110|120|None|/n/l\n"
        "12_3|n.a.1|REQUEUED|0:0|dgx01|120|130|140|None|\n"
        "12_3|n.a.1|CANCELLED by 0|0:15|dgx01|140|150|160|None|/n|l\n"
        "13|n.b.1|PENDING|0:0|None assigned|100|Unknown|Unknown|Priority|\n"
        "14|n.c.1|RUNNING|0:0|dgx03|100|110|Unknown|None|\n"
    )
    jobs = read_sacct(text)
    assert [(job.id, job.state, job.started, job.ended) for job in jobs] == [
        ("12_3", "PREEMPTED", 110, 120),
        ("12_3", "REQUEUED", 130, 140),
        ("12_3", "CANCELLED", 150, 160),
        ("13", "PENDING", None, None),
        ("14", "RUNNING", 110, None),
    ]
    assert jobs[2].exit_code == 143 and jobs[2].comment == "/n|l"
    assert jobs[0].nodes == ("dgx01", "dgx02") and jobs[3].nodes == ()


def test_signals_are_told_as_a_shell_tells_them() -> None:
    form = {**OLD_FORM, "job_state": "FAILED", "exit_code": 9}
    assert read_squeue(json.dumps({"jobs": [form]}))[0].exit_code == 137
    form["exit_code"] = 2 << 8
    assert read_squeue(json.dumps({"jobs": [form]}))[0].exit_code == 2


def test_scontrol_tells_as_much() -> None:
    line = (
        "JobId=15 ArrayJobId=12 ArrayTaskId=3 JobName=n.a.1 UserId=u(1) Priority=1 Nice=0 JobState=FAILED "
        "Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 ExitCode=75:0 NodeList=dgx[01-02] "
        "SubmitTime=2026-11-30T01:00:00 StartTime=2026-11-30T01:00:05 EndTime=2026-11-30T01:00:09 Comment=/n/l \n"
    )
    (job,) = read_scontrol(line)
    assert (job.id, job.state, job.exit_code, job.num_restarts, job.nodes) == (
        "12_3",
        "FAILED",
        75,
        2,
        ("dgx01", "dgx02"),
    )
    assert job.comment == "/n/l"
    assert job.started is not None and job.ended is not None and job.ended - job.started == 4
    assert read_scontrol("No jobs in the system\n") == []


def test_nodes() -> None:
    text = "dgx1|idle|64|gpu:h100:8(S:0-1)\ndgx1|idle|64|gpu:h100:8(S:0-1)\ndgx2|down*|64|gpu:8\ncpu1|mixed|32|(null)\n"
    nodes = read_sinfo(text)
    assert [(node.name, node.is_up, slots_of(node, 4)) for node in nodes] == [
        ("dgx1", True, 8), ("dgx2", False, 8), ("cpu1", True, 8),
    ]  # fmt: skip
    assert describe_nodes(nodes[:1]) == "8 x h100"
    assert describe_nodes([]) == ""


# How a job stands


def start(state: str, **fields: Any) -> SlurmJob:
    return SlurmJob("7", "n.a.1", state, **fields)


def test_a_preemption_is_an_end_only_if_slurm_does_not_queue_the_job_again() -> None:
    entry = Entry("n.a.1", "7", "n.a.1", 0.0, settle_seconds=30)
    entry.see(start("RUNNING", submitted=1, started=10, nodes=("a",)), now=12)
    entry.see(start("PREEMPTED", submitted=1, started=10, ended=20, nodes=("a",)), now=21)
    assert not entry.has_ended(50)
    assert entry.has_ended(51)
    entry.see(start("PENDING", submitted=20), now=40)
    assert not entry.has_ended(1000)
    entry.see(start("RUNNING", submitted=20, started=50, nodes=("b",), num_restarts=1), now=52)
    entry.see(start("COMPLETED", submitted=20, started=50, ended=55, nodes=("b",), exit_code=0, num_restarts=1), now=56)
    status = entry.status()
    assert (status.state, status.num_starts, status.allocated_seconds, status.nodes) == ("ended", 2, 15, ("b",))
    assert (status.started_utc, status.ended_utc, status.reason) == (50, 55, "exit code 0")


def test_a_start_whose_end_nobody_saw_ended_when_the_job_was_queued_again() -> None:
    entry = Entry("n.a.1", "7", "n.a.1", 0.0, settle_seconds=30)
    entry.see(start("RUNNING", submitted=1, started=10), now=12)
    entry.see(start("RUNNING", submitted=17, started=30), now=31)
    entry.see(start("FAILED", submitted=17, started=30, ended=34, exit_code=1), now=40)
    assert entry.status().allocated_seconds == 7 + 4


def test_a_start_that_is_only_expected_is_none() -> None:
    """While the nodes of a job that is queued again are cleared, Slurm tells when it expects to start it."""
    entry = Entry("n.a.1", "7", "n.a.1", 0.0, settle_seconds=30)
    entry.see(start("COMPLETING", submitted=1, started=99), now=5)
    assert entry.status().state == "pending" and entry.status().num_starts == 0
    entry.see(start("RUNNING", submitted=1, started=10), now=12)
    entry.see(start("COMPLETING", submitted=1, started=10), now=19)
    assert entry.status().state == "running"
    entry.see(start("COMPLETING", submitted=20, started=26, num_restarts=1), now=21)
    assert entry.status().state == "pending"
    entry.see(start("RUNNING", submitted=20, started=30, num_restarts=1), now=31)
    entry.see(start("COMPLETED", submitted=20, started=30, ended=35, exit_code=0, num_restarts=1), now=36)
    assert (entry.status().num_starts, entry.status().allocated_seconds) == (2, 15)


def test_accounting_corrects_what_was_seen() -> None:
    entry = Entry("n.a.1", "7", "n.a.1", 0.0, settle_seconds=30)
    last = start("COMPLETED", submitted=40, started=50, ended=55, exit_code=0, num_restarts=2)
    entry.see(last, now=60)
    assert entry.missed_starts()
    earlier = [
        start("NODE_FAIL", submitted=1, started=10, ended=20),
        start("PREEMPTED", submitted=20, started=30, ended=33),
    ]
    entry.see_starts([*earlier, start("COMPLETED", submitted=40, started=50)], now=61)
    assert entry.status().allocated_seconds == 10 + 3 + 5
    assert entry.status().num_starts == 3


def test_a_job_that_nobody_knows_is_lost_only_after_a_while() -> None:
    entry = Entry("n.a.1", "7", "n.a.1", 0.0, settle_seconds=30)
    entry.see(start("RUNNING", submitted=1, started=10), now=12)
    entry.miss(now=20, lost_seconds=60)
    entry.miss(now=79, lost_seconds=60)
    assert not entry.has_ended(79)
    entry.miss(now=80, lost_seconds=60)
    assert entry.status().state == "lost"
