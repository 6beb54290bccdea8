"""Starting ranks on this host: what is executed, and how a run ends when a rank, the user or the launcher ends it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perception.distributed.environment import rank_environment
from perception.errors import UserError
from pipelines import rank_commands
from pipelines.launch import launch_ranks

HELPER = Path(__file__).with_name("launched.py")
GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
ENGINES = [("horovod", "mpi"), ("horovod", "gloo"), ("torch", "gloo")]
LIMIT_SECONDS = 30.0
"""A rank's death must have ended the others by then."""

needs_engine = pytest.mark.parametrize(
    ("engine", "transport"),
    [
        pytest.param(
            engine,
            transport,
            marks=pytest.mark.skipif(importlib.util.find_spec(engine) is None, reason=f"{engine} is not installed"),
        )
        for engine, transport in ENGINES
    ],
)


class Run:
    """A launcher in a process of its own, with what it printed."""

    def __init__(self, folder: Path, *words: object, engine: str = "torch", transport: str = "gloo", ranks: int = 2):
        self.folder = folder / "ranks"
        self.output = folder / "output.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [engine, transport, str(ranks), str(self.folder), *map(str, words)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HELPER), "launch", *arguments], stdout=output, stderr=output, env=environment
            )

    def end(self) -> tuple[int, str]:
        """Exit code (negative for a signal) and everything shown."""
        try:
            code = self.process.wait(LIMIT_SECONDS + 30)
        finally:
            self.process.kill()
        return code, self.output.read_text()

    def log(self, rank: int) -> str:
        path = self.folder / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_until_ranks_wait(self, ranks: int) -> list[int]:
        """Process ids of the ranks, once all have set up and wait."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            shown = self.output.read_text() + "".join(self.log(rank) for rank in range(1, ranks))
            found = [int(number) for number in re.findall(r"pid (\d+) waits", shown)]
            if len(found) == ranks:
                return found
            assert self.process.poll() is None, shown
            time.sleep(0.02)
        raise AssertionError(f"the ranks were not ready: {self.output.read_text()}")


def alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def all_gone(process_ids: list[int], within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while any(alive(process_id) for process_id in process_ids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def descendants(process_id: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [process_id]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


# What is executed


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = "UPDATE_GOLDEN=1 python -m pytest tests/pipelines/test_launch.py -k golden"
    assert text == path.read_text(), f"if the change is meant: {command}"


def shown_environment(environment: dict[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in sorted(environment.items()))


def shown_argv(argv: list[str]) -> str:
    return "".join(f"{word}\n" for word in argv).replace(str(rank_commands.KEEPER.parent), "<pipelines>")


OUTER = {
    "HOME": "/home/user",
    "HOROVOD_FUSION_THRESHOLD": "1048576",
    "OMPI_MCA_btl_sm_free_list_max": "64",
    "PRTE_MCA_prte_tmpdir_base": "/scratch",
    # Left by an outer launcher: none of it may reach a rank.
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "OMPI_COMM_WORLD_RANK": "3",
    "PMIX_RANK": "3",
    "RANK": "5",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "node1",
    "HOROVOD_RANK": "4",
}


def test_golden_commands() -> None:
    keeper = rank_commands.keeper_argv("/venv/bin/python", "roadfuse-x", None, ["python", "-m", "pipelines", "train"])
    mpirun = rank_commands.mpirun_argv(Path("/venv/bin/mpirun"), 2, False, keeper)
    check_golden("mpirun_argv.txt", shown_argv(mpirun))
    as_root = rank_commands.mpirun_argv(Path("/venv/bin/mpirun"), 2, True, keeper)
    assert [word for word in as_root if word not in mpirun] == ["--allow-run-as-root"]
    direct = rank_commands.keeper_argv("/venv/bin/python", "roadfuse-x", 1, ["python", "-m", "pipelines", "train"])
    check_golden("keeper_argv.txt", shown_argv(direct))


def test_golden_environments() -> None:
    base = rank_commands.base_environment(OUTER, 2, 8, Path("/run/ranks"))
    check_golden("mpi_environment.txt", shown_environment(rank_commands.mpi_environment(base)))
    gloo = rank_commands.horovod_gloo_environment(base, 1, 2, 20001)
    check_golden("horovod_gloo_environment.txt", shown_environment(gloo))
    check_golden("torch_environment.txt", shown_environment(rank_commands.torch_environment(base, 1, 2, 20001)))


@pytest.mark.parametrize("make", [rank_commands.horovod_gloo_environment, rank_commands.torch_environment])
def test_a_rank_reads_its_place_from_its_environment(make: object) -> None:
    base = rank_commands.base_environment(OUTER, 3, 8, Path("/run/ranks"))
    for rank in range(3):
        place = rank_environment(make(base, rank, 3, 20001))  # type: ignore[operator]
        assert (place.rank, place.size, place.local_rank, place.local_size) == (rank, 3, rank, 3)


def test_thread_count_is_the_users_choice_first() -> None:
    chosen = rank_commands.base_environment({"OMP_NUM_THREADS": "7"}, 2, 8, Path("f"))
    assert chosen["OMP_NUM_THREADS"] == "7"
    assert rank_commands.base_environment({}, 3, 8, Path("f"))["OMP_NUM_THREADS"] == "2"
    assert rank_commands.base_environment({}, 16, 8, Path("f"))["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("ranks", "engine", "transport", "message"),
    [
        (0, "torch", "gloo", "--ranks 0"),
        (2, "torch", "mpi", "allowed: gloo, nccl"),
        (2, "horovod", "ucx", "allowed: mpi, gloo, nccl"),
        (2, "solo", "gloo", "starts no ranks"),
    ],
)
def test_impossible_requests(ranks: int, engine: str, transport: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        launch_ranks(["true"], ranks, engine, transport, {}, tmp_path)


# How a run ends; the ranks here do not communicate, hence need no torch


def test_rank_0_is_shown_and_the_others_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, "alone", "none", -1)
    code, shown = run.end()
    assert (code, shown) == (0, "rank 0 of 2: sum 1\nrank 0 ends\n")
    assert run.log(1) == "rank 1 of 2: sum 2\nrank 1 ends\n"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_traceback_is_shown_last(rank: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    code, shown = Run(tmp_path, "alone", "raise", rank).end()
    assert code == 1 and time.monotonic() - begin < LIMIT_SECONDS
    assert shown.count("Traceback") == 1
    *_, error, last = shown.splitlines()
    assert error == "ValueError: this rank is broken"
    assert last.startswith(f"rank {rank} of 2 ended with exit code 1: ValueError: this rank is broken; logs: ")


def test_a_killed_rank_is_named_with_its_last_words(tmp_path: Path) -> None:
    code, shown = Run(tmp_path, "alone", "kill", 1).end()
    assert code == 128 + signal.SIGKILL
    assert "UserWarning: about to be killed" in shown
    assert "rank 1 of 2 died of signal 9 (SIGKILL)" in shown.splitlines()[-1]


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_us_is_watched_too(tmp_path: Path) -> None:
    code, shown = Run(tmp_path, "alone", "unaware", 0).end()
    assert code == 128 + signal.SIGKILL and "rank 0 of 2 died of signal 9 (SIGKILL)" in shown


@pytest.mark.slow
def test_a_segmentation_fault_shows_the_stack(tmp_path: Path) -> None:
    code, shown = Run(tmp_path, "alone", "segfault", 1).end()
    assert code == 128 + signal.SIGSEGV
    assert "Segmentation fault" in shown and "in _misbehave" in shown


@pytest.mark.slow
def test_a_rank_that_vanishes_has_crashed(tmp_path: Path) -> None:
    code, shown = Run(tmp_path, "alone", "exit", 1).end()
    assert code == 1 and "rank 1 of 2 vanished with exit code 0" in shown


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_users_mistake_is_one_line(rank: int, tmp_path: Path) -> None:
    code, shown = Run(tmp_path, "alone", "user", rank).end()
    assert code == 2
    assert shown == "rank 0 of 2: sum 1\nerror: x.json: field y is 0; must be above 0\n"


@pytest.mark.slow
def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    code, shown = Run(tmp_path, "alone", "child", 0).end()
    assert code == 1
    assert all_gone([int(re.findall(r"pid (\d+) waits", shown)[0])], 5)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)),
    ],
)
def test_a_signal_reaches_each_rank_once_and_preempts(number: signal.Signals, tmp_path: Path) -> None:
    run = Run(tmp_path, "alone", "stop", -1)
    run.wait_until_ranks_wait(2)
    run.process.send_signal(number)
    code, shown = run.end()
    assert code == 75
    assert f"received [{number:d}]" in shown and f"received [{number:d}]" in run.log(1)


@pytest.mark.slow
def test_ctrl_c_twice_kills_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "alone", "stop-one", 1)
    ranks = run.wait_until_ranks_wait(2)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    code, _ = run.end()
    assert code == 128 + signal.SIGINT and time.monotonic() - begin < 1.0
    assert all_gone(ranks, 1)


@pytest.mark.slow
def test_ranks_without_a_handler_are_stopped_without_a_traceback(tmp_path: Path) -> None:
    run = Run(tmp_path, "alone", "wait", -1)
    run.wait_until_ranks_wait(2)
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in shown.splitlines()[-1] and "Traceback" not in shown


@pytest.mark.slow
def test_a_preempted_rank_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    begin = time.monotonic()
    run = Run(tmp_path, "alone", "preempted", 0, ranks=2)
    code, _ = run.end()
    # Rank 1 runs on and ends well: the ranks did not agree.
    assert code == 1 and time.monotonic() - begin < LIMIT_SECONDS


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    run = Run(tmp_path, "alone", "wait", -1)
    run.wait_until_ranks_wait(2)
    started = descendants(run.process.pid)
    assert len(started) == 4
    run.process.kill()
    run.end()
    assert all_gone(started, 5)


def test_a_missing_program_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_ranks([str(tmp_path / "missing")], 2, "torch", "gloo", os.environ, tmp_path / "ranks") == 1
    assert "missing: No such file or directory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [("UserError('x.json: mend it')", 2, "error: x.json: mend it"), ("ValueError('boom')", 1, "ValueError: boom")],
)
def test_without_a_launcher_errors_go_to_standard_error(raised: str, code: int, words: str) -> None:
    program = (
        "from perception.distributed import failure; from perception.errors import UserError; import atexit, time;"
        f"atexit.register(time.sleep, 60); failure.install(None, 0); raise {raised}"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=HELPER.parents[2], capture_output=True, text=True)
    assert answer.returncode == code and answer.stderr.splitlines()[-1] == words


# The same with real communication


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_reduce(engine: str, transport: str, ranks: int, tmp_path: Path) -> None:
    run = Run(tmp_path, "reduce", "none", -1, engine=engine, transport=transport, ranks=ranks)
    code, shown = run.end()
    assert code == 0, shown
    assert shown == f"rank 0 of {ranks}: sum {ranks * (ranks + 1) // 2}\nrank 0 ends\n"


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize(
    ("behaviour", "rank", "expected", "words"),
    [
        ("raise", 0, 1, "ValueError: this rank is broken"),
        ("raise", 1, 1, "ValueError: this rank is broken"),
        ("kill", 0, 137, "died of signal 9 (SIGKILL)"),
        ("kill", 1, 137, "died of signal 9 (SIGKILL)"),
        ("user", 1, 2, "error: x.json: field y is 0; must be above 0"),
        ("exit", 1, 1, "vanished with exit code 0"),
        ("segfault", 1, 139, "died of signal 11 (SIGSEGV)"),
    ],
)
def test_a_dead_rank_ends_a_communicating_run(
    engine: str, transport: str, behaviour: str, rank: int, expected: int, words: str, tmp_path: Path
) -> None:
    begin = time.monotonic()
    code, shown = Run(tmp_path, "reduce", behaviour, rank, engine=engine, transport=transport).end()
    assert time.monotonic() - begin < LIMIT_SECONDS
    assert code == expected, shown
    assert words in shown.splitlines()[-1]
    assert behaviour == "user" or f"rank {rank} of 2" in shown.splitlines()[-1]


@pytest.mark.slow
@needs_engine
def test_a_communicating_run_is_preempted(engine: str, transport: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "reduce", "stop", -1, engine=engine, transport=transport)
    run.wait_until_ranks_wait(2)
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75, shown
    assert "received [15]" in shown and "received [15]" in run.log(1)


@pytest.mark.slow
@needs_engine
def test_nothing_outlives_a_killed_launcher_of_a_communicating_run(engine: str, transport: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "reduce", "wait", -1, engine=engine, transport=transport)
    run.wait_until_ranks_wait(2)
    started = descendants(run.process.pid)
    assert len(started) >= 4
    run.process.kill()
    run.end()
    assert all_gone(started, 10)
