"""Why jobs end without a result: the words of real logs, and what is done about each."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.job import START_MARK, TIME_LIMIT_MARK, JobStatus
from sweeps.night.failure_rules import BY_WORD, RULES, FailureRule, rule_from_plan
from sweeps.night.failures import SHOWN_CHARACTERS, classify, normalise, tail_lines


def ended(exit_code: int | None = 1, reason: str = "", **fields: Any) -> JobStatus:
    return JobStatus("n.a.1", "7", "ended", reason or f"exit code {exit_code}", exit_code, **fields)


def log(folder: Path, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "job.log").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def rank_words(folder: Path, rank: int, *lines: str, suffix: str = "txt") -> None:
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    (folder / "ranks" / f"rank{rank}.pid").write_text("1\n")
    (folder / "ranks" / f"rank{rank}.{suffix}").write_text("".join(f"{line}\n" for line in lines))


def result(folder: Path, **content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(content))


LINES: dict[tuple[str, str], tuple[str, ...]] = {
    ("out_of_memory", "give_up"): ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",),
    ("out_of_memory", "retry_elsewhere"): (
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.",
        "rank 1 of 2 died of signal 9 (SIGKILL); the kernel does so where memory runs out; logs: /r",
        "RuntimeError: DataLoader worker is killed by signal: Bus error. insufficient shared memory (shm).",
    ),
    ("collective_timeout", "retry"): (
        "[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE)",
        "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down",
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3412",
        "RuntimeError: Timed out waiting 60000ms for recv operation to complete",
    ),
    ("collective_timeout", "retry_elsewhere"): ("RuntimeError: NCCL error: unhandled system error",),
    ("not_finite", "give_up"): ("diverged: 11 steps with inf or NaN gradients",),
    ("hardware", "retry_elsewhere"): (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected",
        "OSError: [Errno 5] Input/output error: '/data/a.bin'",
    ),
    ("data", "retry_elsewhere"): (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/culane/list.txt'",
        "OSError: [Errno 116] Stale file handle: '/data/a'",
    ),
    ("data", "give_up"): ("ValueError: /data/a.jpg: image is cut off; copy it again",),
    ("time_limit", "give_up"): ("slurmstepd: error: *** JOB 7 ON dgx07 CANCELLED DUE TO TIME LIMIT ***",),
    ("node", "retry_elsewhere"): (
        "slurmstepd: error: *** JOB 7 ON dgx07 CANCELLED DUE TO NODE FAILURE ***",
        "OSError: [Errno 28] No space left on device",
    ),
    ("preempted", "resume"): ("slurmstepd: error: *** JOB 7 ON dgx07 CANCELLED DUE TO PREEMPTION ***",),
    ("code", "retry"): ("ValueError: shapes do not match",),
}


@pytest.mark.parametrize(
    ("line", "failure", "action"), [(line, *expected) for expected, lines in LINES.items() for line in lines]
)
def test_a_line_tells_the_failure_and_what_is_done(tmp_path: Path, line: str, failure: str, action: str) -> None:
    log(tmp_path, "step 1: loss 2.1", "Traceback (most recent call last):", line)
    report = classify(tmp_path, ended())
    assert (report.failure, report.action) == (failure, action)
    assert report.line == line
    assert report.signature == normalise(line)
    assert line in report.log_tail


@pytest.mark.parametrize(
    ("reason", "failure", "action"),
    [
        ("PREEMPTED", "preempted", "resume"),
        ("NODE_FAIL", "node", "retry_elsewhere"),
        ("OUT_OF_MEMORY", "out_of_memory", "retry_elsewhere"),
        ("TIMEOUT", "time_limit", "give_up"),
        ("launch failed requeued held", "node", "retry_elsewhere"),
        ("CANCELLED", "no_result", "give_up"),
    ],
)
def test_the_launchers_word_tells_the_failure(tmp_path: Path, reason: str, failure: str, action: str) -> None:
    log(tmp_path, "step 1: loss 2.1")
    report = classify(tmp_path, ended(None, reason, nodes=("dgx07",)))
    assert (report.failure, report.action, report.node) == (failure, action, "dgx07")
    assert report.signature == f"{failure}: {reason}"


def test_a_users_mistake_is_given_up_at_once_and_its_line_shown(tmp_path: Path) -> None:
    log(tmp_path, "reading", 'error: optim.lrr: no such field; did you mean "optim.lr"?')
    report = classify(tmp_path, ended(2))
    assert (report.failure, report.action) == ("user_error", "give_up")
    assert report.line.startswith("error: optim.lrr")


def test_a_disk_that_fails_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    log(tmp_path, "error: /data/a.bin: image cannot be read (Input/output error)")
    report = classify(tmp_path, ended(2, nodes=("dgx07",)))
    assert (report.failure, report.action, report.node) == ("hardware", "retry_elsewhere", "dgx07")


def test_code_that_fails_is_tried_once_more(tmp_path: Path) -> None:
    log(tmp_path, "Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 'x'")
    assert [classify(tmp_path, ended(), num_earlier=number).action for number in (0, 1)] == ["retry", "give_up"]


def test_a_preempted_job_goes_on_however_often(tmp_path: Path) -> None:
    result(tmp_path, status="preempted", cause="SIGUSR2 received")
    for word in ("PREEMPTED", "FAILED", "exit code 75"):
        report = classify(tmp_path, ended(75, word), num_earlier=100)
        assert (report.failure, report.action) == ("preempted", "resume")


def test_a_time_limit_with_a_checkpoint_goes_on_some_times(tmp_path: Path) -> None:
    result(tmp_path, status="preempted", cause="SIGUSR2 received")
    log(tmp_path, TIME_LIMIT_MARK)
    reports = [classify(tmp_path, ended(75), num_earlier=number) for number in (0, 3)]
    assert [report.failure for report in reports] == ["time_limit", "time_limit"]
    assert [report.action for report in reports] == ["retry", "give_up"]


def test_a_diverged_run_is_none_of_the_machines_business(tmp_path: Path) -> None:
    result(tmp_path, status="diverged", cause="11 steps with inf or NaN gradients")
    report = classify(tmp_path, ended(1))
    assert (report.failure, report.action) == ("not_finite", "give_up")


def test_nothing_at_all_is_no_result(tmp_path: Path) -> None:
    for status in (ended(0), JobStatus("n.a.1", "7", "lost")):
        report = classify(tmp_path / "nothing", status)
        assert (report.failure, report.action, report.log_tail) == ("no_result", "retry", "")


def test_a_result_that_is_cut_off_does_not_hide_the_log(tmp_path: Path) -> None:
    log(tmp_path, "torch.OutOfMemoryError: CUDA out of memory.")
    (tmp_path / "result.json").write_text('{"status": "fin')
    assert classify(tmp_path, ended()).failure == "out_of_memory"


def test_what_ended_an_earlier_start_is_past(tmp_path: Path) -> None:
    log(tmp_path, f"{START_MARK}2026-11-30T01:00:00Z as job 7 on dgx01", "torch.OutOfMemoryError: CUDA out of memory.")
    log(tmp_path, f"{START_MARK}2026-11-30T02:00:00Z as job 8 on dgx02", "ValueError: shapes do not match")
    report = classify(tmp_path, ended())
    assert report.failure == "code"
    assert "out of memory" not in report.log_tail


def test_the_rank_that_failed_first_is_shown_not_those_that_met_its_end(tmp_path: Path) -> None:
    """Rank 0 lost its connection because rank 5 ran out of memory; the clock tells nothing here."""
    rank_words(tmp_path, 0, "Traceback:", "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer")
    time.sleep(0.02)
    rank_words(tmp_path, 5, "Traceback:", "torch.OutOfMemoryError: CUDA out of memory")
    for rank in (1, 2, 3, 4, 6, 7):
        rank_words(tmp_path, rank)
    report = classify(tmp_path, ended(1, nodes=("dgx01", "dgx02")))
    assert (report.rank, report.failure) == (5, "out_of_memory")
    assert report.log_tail.endswith("torch.OutOfMemoryError: CUDA out of memory")
    # Eight ranks on two nodes: rank 5 was on the second.
    assert report.node == "dgx02"


def test_the_node_that_srun_names_is_the_one(tmp_path: Path) -> None:
    log(tmp_path, "srun: error: dgx09: task 11: Killed", "srun: error: dgx08: tasks 0-7: Terminated", "oom_kill event")
    report = classify(tmp_path, ended(137, nodes=("dgx08", "dgx09")))
    assert (report.failure, report.node, report.rank) == ("out_of_memory", "dgx09", 11)


def test_stacks_of_a_fatal_signal_are_words_too(tmp_path: Path) -> None:
    rank_words(tmp_path, 1, "Fatal Python error: Segmentation fault", '  File "a.py", line 3 in f', suffix="fault")
    report = classify(tmp_path, ended(139))
    assert (report.failure, report.rank, report.line) == ("code", 1, "Fatal Python error: Segmentation fault")


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    with (tmp_path / "job.log").open("wb") as file:
        file.write(b"CUDA out of memory\n")
        file.truncate(8 << 30)
        file.seek(8 << 30)
        file.write(b"\n" + b"\xff\xfe noise\r" * 20_000 + b"ValueError: last words\n")
    began = time.process_time()
    report = classify(tmp_path, ended())
    assert time.process_time() - began < 1
    assert (report.failure, report.signature) == ("code", "ValueError: last words")
    assert len(report.log_tail) <= SHOWN_CHARACTERS


def test_a_rule_of_the_plan_goes_before_the_table(tmp_path: Path) -> None:
    log(tmp_path, "torch.OutOfMemoryError: CUDA out of memory.")
    row = {"pattern": "out of memory", "failure": "hardware", "action": "retry_elsewhere", "max_retries": 1}
    rule = rule_from_plan(row, "plan.toml: failures[0]")
    reports = [classify(tmp_path, ended(), number, [rule]) for number in (0, 1)]
    assert [report.failure for report in reports] == ["hardware", "hardware"]
    assert [report.action for report in reports] == ["retry_elsewhere", "give_up"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patern": "x"}, 'field "patern" is unknown; did you mean "pattern"'),
        ({"pattern": ""}, "field pattern is missing"),
        ({"pattern": "("}, "is no regular expression"),
        ({"failure": "hardwear"}, 'failure = "hardwear" is unknown; did you mean "hardware"'),
        ({"action": "retry_elswhere"}, 'did you mean "retry_elsewhere"'),
        ({"max_retries": -1}, "max_retries = -1 must be a whole number from 0"),
        ({"max_retries": True}, "max_retries = True must be"),
    ],
)
def test_a_wrong_rule_of_a_plan_is_one_line(changes: dict[str, Any], words: str) -> None:
    row = {"pattern": "x", "failure": "hardware", "action": "retry", **changes}
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        rule_from_plan(row, "plan.toml: failures[0]")
    assert str(caught.value).startswith("plan.toml: failures[0]: ")


def test_equal_failures_have_equal_signatures() -> None:
    first = "[rank3]: RuntimeError: /data/run-7/a.bin: got 12 of 40 bytes at 0x7f3a9c from 10.0.0.7:4711"
    second = "[rank12]: RuntimeError: /mnt/other/b.bin: got 1 of 9000 bytes at 0xdeadbeef from 10.0.1.9:12"
    assert normalise(first) == normalise(second)
    assert normalise("KeyError: 'optim.lr'") != normalise("KeyError: 'optim.name'")
    assert normalise("\x1b[31mE 2026-11-30T01:02:03 a\x1b[0m") == "E <time> a"


@given(st.text(max_size=300))
def test_signatures_are_short_and_do_not_change_when_taken_again(line: str) -> None:
    once = normalise(line)
    assert len(once) <= 200
    assert "\n" not in once


@given(st.binary(max_size=2000))
def test_any_bytes_are_a_log(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.log").write_bytes(data)
        report = classify(Path(folder), ended())
        assert report.failure
        assert tail_lines(Path(folder) / "job.log") is not None


def test_every_rule_can_be_met() -> None:
    """Each failure of the table has a pattern that compiles, and none matches an ordinary line of a training run."""
    ordinary = [
        "step 1200: loss 0.4213 (segmentation 0.31, existence 0.11), lr 0.0003, 812 images/s, data 1.2 %",
        "culane_f1_50 0.8123 on 3000 images",
        "training: 88880 images, 332123 lanes",
        "wrote /nights/2026-11-30/jobs/a/result.json",
        "note: 3 labels were clipped to the image",
        "resumed from /runs/a/checkpoints/step-00001200.pt at step 1200, 38400 images seen",
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB",
    ]
    rules = [*RULES, *BY_WORD.values()]
    assert all(isinstance(rule, FailureRule) for rule in rules)
    for rule in RULES:
        assert rule.patterns
        for pattern in rule.patterns:
            for line in ordinary:
                assert not re.search(pattern, line, re.IGNORECASE), (pattern, line)
