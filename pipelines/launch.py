"""Start the ranks of one run on this host, watch them, and end as one process would.

Rank 0's output is the run's output. A rank that dies ends all of them, and why it died is the
last thing shown. Signals reach every rank once. Nothing outlives the launcher.

Several hosts are for Slurm, mpirun or torchrun: a rank finds its place in the environment.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from perception.cores import available_cores
from perception.distributed import failure
from perception.distributed.rendezvous import horovod_rendezvous
from perception.errors import UserError
from perception.stopping import CHANGE_SIGNAL
from pipelines import rank_commands
from pipelines.rank_report import INNOCENT, End, Outcome, RankEnd, conclude

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Patience:
    """How long the launcher waits before it uses force, in seconds."""

    start: float = 60.0
    """For all ranks to be started."""
    grace: float = 5.0
    """After a rank died, for the others to end by themselves: they may know more."""
    terminate: float = 5.0
    """After SIGTERM, before SIGKILL."""
    preempted: float = 120.0
    """After a rank ended as preempted, for the others to do so."""


@dataclass
class _Rank:
    number: int
    connection: socket.socket | None = None
    """To its keeper, from when that said hello."""
    pid: int | None = None
    end: RankEnd | None = None


@dataclass
class _Ranks:
    """The state of a run: what the loop below reads and changes."""

    ranks: list[_Rank]
    failure_folder: Path
    stop_signals: list[signal.Signals] = field(default_factory=list)
    """Those that were asked for from outside, in order."""
    terminated: bool = False
    """The launcher itself sent SIGTERM to what was left."""
    killed: bool = False
    change_asked: bool = False
    """The first rank was told that the number of ranks is to change."""

    @property
    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.end is None]


@dataclass(frozen=True)
class Ended:
    """How one launch ended."""

    outcome: Outcome
    ends: tuple[RankEnd, ...]
    """By rank."""
    stop_signals: tuple[signal.Signals, ...]
    """Those that were forwarded to the ranks."""
    change_asked: bool


def launch_ranks(
    argv: Sequence[str],
    ranks: int,
    engine: str,
    transport: str,
    environment: Mapping[str, str],
    failure_folder: Path,
    patience: Patience | None = None,
) -> int:
    """Run `argv` as `ranks` processes on this host and return one exit code.

    `engine` and `transport`: horovod with mpi, gloo or nccl; torch with gloo or nccl.

    0: all ended well. 1: a rank crashed. 2: a rank reported a UserError. 75: all were preempted.
    128 + n: a rank died of signal n, or the ranks were stopped by it. Everything but rank 0's
    live output is kept in `failure_folder`. Raises UserError where ranks cannot be started.
    """
    with signals_as_bytes() as signals:
        ended = run_ranks(
            argv, ranks, engine, transport, environment, failure_folder, patience or Patience(), signals, lambda: False
        )
    show(ended.outcome)
    return ended.outcome.exit_code


def run_ranks(
    argv: Sequence[str],
    ranks: int,
    engine: str,
    transport: str,
    environment: Mapping[str, str],
    failure_folder: Path,
    patience: Patience,
    signals: socket.socket,
    wants_change: Callable[[], bool],
) -> Ended:
    """`launch_ranks` for a caller that starts ranks more than once and shows how they ended itself.

    `signals` is of `signals_as_bytes`, which outlives a launch: what arrives between two of them waits for the next.
    `wants_change` is asked a few times a second; its first True stops the ranks as a preemption does (exit code 75).
    """
    _check(argv, ranks, engine, transport)
    _prepare_folder(failure_folder)
    base = rank_commands.base_environment(environment, ranks, available_cores(), failure_folder)
    state = _Ranks([_Rank(number) for number in range(ranks)], failure_folder)
    with ExitStack() as stack:
        listener, name = _listen(stack)
        starters = _start(stack, argv, ranks, engine, transport, environment, base, name, failure_folder)
        try:
            _watch(state, listener, starters, patience, signals, wants_change, stack)
        finally:
            # Whatever happened here, the keepers end their ranks once their connection closes.
            for rank in state.ranks:
                if rank.connection is not None:
                    rank.connection.close()
            listener.close()
            for starter in starters:
                _end_starter(starter)
    ends = [rank.end for rank in state.ranks if rank.end is not None]
    outcome = conclude(ends, failure_folder, state.stop_signals)
    return Ended(outcome, tuple(ends), tuple(state.stop_signals), state.change_asked)


def show(outcome: Outcome) -> None:
    """Say on standard error how the ranks ended, after all that they have said."""
    sys.stdout.flush()
    for line in outcome.lines:
        print(line, file=sys.stderr)
    sys.stderr.flush()


def _check(argv: Sequence[str], ranks: int, engine: str, transport: str) -> None:
    if not argv:
        raise UserError("no command to start as ranks")
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be 1 or more")
    allowed = {"horovod": ("mpi", "gloo", "nccl"), "torch": ("gloo", "nccl")}
    if engine not in allowed:
        raise UserError(f'engine "{engine}" starts no ranks; allowed: {", ".join(allowed)}')
    if transport not in allowed[engine]:
        raise UserError(
            f'distributed.transport = "{transport}" is not one of engine {engine}; allowed: '
            f"{', '.join(allowed[engine])}"
        )


def _prepare_folder(folder: Path) -> None:
    """Create it, and remove what an earlier start of the same run left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("rank[0-9]*.*"), folder / "mpirun.log"]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}): choose another --out") from None


def _listen(stack: ExitStack) -> tuple[socket.socket, str]:
    """A socket for the keepers. Its name is abstract: it leaves no file, and dies with the launcher."""
    name = f"roadfuse-{uuid.uuid4().hex}"
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listener.bind(f"\0{name}")
    listener.listen(1024)
    return listener, name


def _start(
    stack: ExitStack,
    argv: Sequence[str],
    ranks: int,
    engine: str,
    transport: str,
    environment: Mapping[str, str],
    base: Mapping[str, str],
    name: str,
    failure_folder: Path,
) -> list[subprocess.Popen[bytes]]:
    """Start the keepers: by one mpirun, or one by one."""
    if (engine, transport) == ("horovod", "mpi"):
        keeper = rank_commands.keeper_argv(sys.executable, name, None, argv)
        mpirun = rank_commands.find_mpirun(environment)
        command = rank_commands.mpirun_argv(mpirun, ranks, os.geteuid() == 0, keeper)
        log = stack.enter_context((failure_folder / "mpirun.log").open("wb"))
        return [_spawn(command, rank_commands.mpi_environment(base), log.fileno())]
    if engine == "horovod":
        port = stack.enter_context(horovod_rendezvous(ranks))
        environments = [rank_commands.horovod_gloo_environment(base, rank, ranks, port) for rank in range(ranks)]
    else:
        port = rank_commands.free_port()
        environments = [rank_commands.torch_environment(base, rank, ranks, port) for rank in range(ranks)]
    return [
        _spawn(rank_commands.keeper_argv(sys.executable, name, rank, argv), environments[rank], None)
        for rank in range(ranks)
    ]


def _spawn(command: Sequence[str], environment: Mapping[str, str], log: int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Out of the terminal's foreground group: Ctrl-C must not reach mpirun, which would kill the ranks.
        start_new_session=True,
    )


def _watch(
    state: _Ranks,
    listener: socket.socket,
    starters: Sequence[subprocess.Popen[bytes]],
    patience: Patience,
    signals: socket.socket,
    wants_change: Callable[[], bool],
    stack: ExitStack,
) -> None:
    """Serve keepers and signals until every rank has ended."""
    selector = stack.enter_context(selectors.DefaultSelector())
    selector.register(listener, selectors.EVENT_READ)
    selector.register(signals, selectors.EVENT_READ)
    started = time.monotonic()
    while state.running:
        for key, _ in selector.select(timeout=0.2):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                if not _same_user(connection):
                    connection.close()
                    continue
                selector.register(connection, selectors.EVENT_READ)
            elif key.fileobj is signals:
                for number in signals.recv(64):
                    _on_signal(state, signal.Signals(number))
            else:
                assert isinstance(key.fileobj, socket.socket)
                if not _on_message(state, key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        _check_starters(state, starters, started, patience)
        _use_force(state, patience)
        if not state.change_asked and wants_change():
            state.change_asked = True
            # One rank is enough: it tells the others with the next step.
            _signal_rank(state.ranks[0], CHANGE_SIGNAL)


def _on_message(state: _Ranks, connection: socket.socket) -> bool:
    """Take one message of a keeper; False once there will be no more."""
    try:
        packet = connection.recv(65536)
    except OSError:
        packet = b""
    rank = next((rank for rank in state.ranks if rank.connection is connection), None)
    if not packet:
        if rank is not None and rank.end is None:
            # Its keeper is gone, and the kernel ended the rank with it.
            rank.end = RankEnd(End.STATUS, -signal.SIGKILL, time.monotonic(), by_launcher=state.killed)
        return False
    message = json.loads(packet)
    if rank is None:
        rank = state.ranks[int(message["rank"])]
        if rank.connection is not None or rank.end is not None or state.killed:
            return False
        rank.connection = connection
        _hand_over_output(connection, rank.number, state.failure_folder)
    elif "pid" in message:
        rank.pid = int(message["pid"])
        # What was asked for while the rank was starting.
        for number in state.stop_signals:
            _signal_rank(rank, number)
    elif "error" in message:
        rank.end = RankEnd(End.NOT_STARTED, 127, time.monotonic(), detail=str(message["error"]))
    else:
        status = int(message["status"])
        kind = End.VANISHED if _vanished(state.failure_folder, rank.number, status) else End.STATUS
        rank.end = RankEnd(kind, status, float(message["time"]), by_launcher=state.terminated or state.killed)
    return True


def _vanished(folder: Path, rank: int, status: int) -> bool:
    """A rank that called `failure.install` and then ended well in name, but by os._exit or C's exit."""
    installed = failure.pid_file(folder, rank).exists()
    return status in INNOCENT and installed and not failure.clean_exit_file(folder, rank).exists()


def _hand_over_output(connection: socket.socket, rank: int, folder: Path) -> None:
    """Give rank 0 this process's own output, terminal or not; any other a log file."""
    if rank == 0:
        sys.stdout.flush()
        sys.stderr.flush()
        socket.send_fds(connection, [b"output"], [1, 2])
    else:
        with failure.log_file(folder, rank).open("ab") as log:
            socket.send_fds(connection, [b"output"], [log.fileno(), log.fileno()])


def _on_signal(state: _Ranks, number: signal.Signals) -> None:
    if number not in FORWARDED_SIGNALS:
        return
    state.stop_signals.append(number)
    if state.stop_signals.count(signal.SIGINT) > 1:
        _kill_all(state)
        return
    if number == signal.SIGINT:
        print("stopping after this step; Ctrl-C again to kill", file=sys.stderr, flush=True)
    for rank in state.running:
        _signal_rank(rank, number)


def _use_force(state: _Ranks, patience: Patience) -> None:
    """End what is left, some time after the first rank ended badly."""
    ends = [rank.end for rank in state.ranks if rank.end is not None]
    bad = [end.time + patience.grace for end in ends if end.failed]
    preempted = [end.time + patience.preempted for end in ends if end.status == failure.EXIT_PREEMPTED]
    deadline = min(bad + preempted, default=None)
    if deadline is None or not state.running:
        return
    now = time.monotonic()
    if now >= deadline and not state.terminated:
        state.terminated = True
        for rank in state.running:
            _signal_rank(rank, signal.SIGTERM)
    if now >= deadline + patience.terminate:
        _kill_all(state)


def _kill_all(state: _Ranks) -> None:
    """End every rank at once, with what it started."""
    state.killed = True
    for rank in state.running:
        if rank.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        else:
            rank.end = RankEnd(End.STATUS, -signal.SIGKILL, time.monotonic(), by_launcher=True)


def _check_starters(
    state: _Ranks, starters: Sequence[subprocess.Popen[bytes]], started: float, patience: Patience
) -> None:
    """Give up ranks whose keeper never said hello: mpirun failed, or the machine is stuck."""
    missing = [rank for rank in state.running if rank.connection is None]
    if not missing:
        return
    late = time.monotonic() - started > patience.start
    for rank in missing:
        starter = starters[rank.number if len(starters) > 1 else 0]
        code = starter.poll()
        if code is not None or late:
            detail = f"its starter ended with code {code}" if code is not None else f"not within {patience.start:.0f} s"
            rank.end = RankEnd(End.NOT_STARTED, 1, time.monotonic(), detail=detail)


def _signal_rank(rank: _Rank, number: signal.Signals) -> None:
    if rank.pid is not None and rank.end is None:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def _end_starter(starter: subprocess.Popen[bytes]) -> None:
    """Keepers and mpirun end by themselves once the ranks have; make sure."""
    for force in (signal.SIGTERM, signal.SIGKILL):
        try:
            starter.wait(5)
            return
        except subprocess.TimeoutExpired:
            starter.send_signal(force)
    starter.wait()


def _same_user(connection: socket.socket) -> bool:
    """Abstract sockets have no file permissions: ask who is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


@contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """A socket on which each signal to be forwarded arrives as a byte, its number."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may set handlers; its owner then decides about signals.
            yield receiver
            return
        sender.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in FORWARDED_SIGNALS}
        wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield receiver
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
