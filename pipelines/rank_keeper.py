"""Keeps one rank: starts it with the launcher's files, reports how it ended, lets it outlive nobody.

    python -I -S rank_keeper.py SOCKET RANK COMMAND ...

Run by the launcher, or by its mpirun (RANK is then "mpi"). mpirun hides how a rank ended,
kills the others at the first exit, and puts its own terminal between; with a keeper in each
place it only introduces the ranks to each other. Standard library only, and few modules:
it starts in a few hundredths of a second.

Messages, each a JSON object in one packet: {"rank"} → the launcher's answer carries the
descriptors of standard output and error → {"pid"} → {"status", "time"}, or {"error"}.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> int:
    name, rank_text, *command = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"] if rank_text == "mpi" else rank_text)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{name}")
        _send(connection, rank=rank)
        _, descriptors, _, _ = socket.recv_fds(connection, 64, 2)
    except OSError:
        descriptors = []
    if len(descriptors) != 2:
        return 1  # The launcher is gone, or does not want this rank any more.
    output, errors = descriptors
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            # Its own session: Ctrl-C at the terminal reaches it by the launcher alone, hence once.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        _send(connection, error=f"{command[0]}: {error.strerror}")
        return 0
    os.close(output)
    os.close(errors)
    try:
        _send(connection, pid=process.pid)
        ended = os.pidfd_open(process.pid)
        readable, _, _ = select.select([connection.fileno(), ended], [], [])
        if ended not in readable:
            _kill(process)  # The launcher hung up: it died, or has given up on the rank.
        _send(connection, status=process.wait(), time=time.monotonic())
        # Stay until the launcher hangs up: mpirun must not see a first exit before all have ended.
        connection.recv(1)
    except OSError:
        pass
    finally:
        _kill(process)
    return 0


def _send(connection: socket.socket, **message: object) -> None:
    connection.send(json.dumps(message).encode())


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End the rank and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
