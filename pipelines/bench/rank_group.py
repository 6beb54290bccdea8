"""The processes of one variant of a benchmark: started together, asked together, stopped while others are measured.

The launcher runs in a process of its own, so that several groups can be alive at once and the end of the
benchmark, however it comes, ends them all: the launcher's standard input closes, and with it everything below.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perception.errors import UserError

START_SECONDS = 120.0
END_SECONDS = 20.0


class RankGroup:
    """`ranks` processes that run `argv` and serve requests.

    Each connects to `socket_path(folder)` (SOCK_SEQPACKET), says {"rank", "pid"}, then answers each JSON packet
    by one of its own, and ends once the socket is closed.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        ranks: int,
        engine: str,
        transport: str,
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        """Start them and wait until all have said hello. Raises UserError with their output shown if one fails."""
        self.name, self.folder = name, folder
        self.connections: list[socket.socket] = []
        self.pids: list[int] = []
        self._pidfds: list[int] = []
        """What a signal goes to: never to a stranger that got the number of a rank that has ended."""
        socket_path(folder).unlink(missing_ok=True)
        self._log = folder / "output.log"
        command = [sys.executable, "-m", "pipelines.bench.rank_group"]
        job = {"argv": list(argv), "ranks": ranks, "engine": engine, "transport": transport, "folder": str(folder)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, self._log.open("wb") as log:
            listener.bind(str(socket_path(folder)))
            listener.listen(ranks)
            listener.settimeout(0.2)
            self._launcher = subprocess.Popen(
                [*command, json.dumps(job)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C ends the benchmark, and that ends the launcher.
                start_new_session=True,
            )
            try:
                self._accept(listener, ranks)
            except BaseException:
                self.kill()
                raise

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a request to every rank and return the answers, by rank."""
        self.tell(request)
        return self.answers()

    def tell(self, request: Mapping[str, Any]) -> None:
        packet = json.dumps(request).encode()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # One that is gone is told of by `answers`.
                connection.send(packet)

    def answers(self) -> list[dict[str, Any]]:
        waiting = dict(enumerate(self.connections))
        found: dict[int, dict[str, Any]] = {}
        while waiting:
            readable, _, _ = select.select(list(waiting.values()), [], [], 1.0)
            for rank, connection in list(waiting.items()):
                if connection in readable:
                    found[rank] = self._receive(connection)
                    del waiting[rank]
            if self._launcher.poll() is not None and waiting:
                self._fail()
        return [found[rank] for rank in sorted(found)]

    def pause(self) -> None:
        """Stop the processes: they take no processor time, background threads included, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Processor time that the ranks have taken so far, with all their threads."""
        ticks = 0
        for pid in self.pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                self._fail()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Let the ranks end in order; by force if they do not. Raises UserError if one failed at that."""
        self.resume()
        for connection in self.connections:
            connection.close()
        try:
            code = self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return
        if code != 0:
            self._fail()

    def kill(self) -> None:
        """End the launcher, and so the ranks, at once."""
        for connection in self.connections:
            connection.close()
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        try:
            self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        # The ranks are ended by their keepers, which are nobody's children once the launcher is gone.
        for descriptor in self._pidfds:
            select.select([descriptor], [], [], END_SECONDS)
            os.close(descriptor)
        self._pidfds.clear()

    def _signal(self, number: signal.Signals) -> None:
        for descriptor in self._pidfds:
            with contextlib.suppress(ProcessLookupError):  # One that is gone is told of by `answers`.
                signal.pidfd_send_signal(descriptor, number)

    def _accept(self, listener: socket.socket, ranks: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, socket.socket] = {}
        pids: dict[int, int] = {}
        while len(by_rank) < ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is not None:
                    self._fail()
                if time.monotonic() > deadline:
                    raise UserError(f"{self.name}: its processes did not start within {START_SECONDS:.0f} s") from None
                continue
            hello = self._receive(connection)
            by_rank[hello["rank"]] = connection
            pids[hello["rank"]] = hello["pid"]
            self._pidfds.append(os.pidfd_open(hello["pid"]))
        self.connections = [by_rank[rank] for rank in range(ranks)]
        self.pids = [pids[rank] for rank in range(ranks)]

    def _receive(self, connection: socket.socket) -> dict[str, Any]:
        packet = b""
        with contextlib.suppress(OSError):
            packet = connection.recv(65536)
        if not packet:
            self._fail()
        answer: dict[str, Any] = json.loads(packet)
        return answer

    def _fail(self) -> NoReturn:
        """A rank is gone: the launcher ends the others too; show what it says."""
        # Connections stay open: an innocent rank that found its own closed would fail by that, perhaps first.
        self.resume()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(END_SECONDS)
        self.kill()
        sys.stdout.flush()
        sys.stderr.write(self._log.read_text(errors="replace"))
        raise UserError(f"{self.name}: a process ended; its message is above")


def socket_path(folder: Path) -> Path:
    return folder / "socket"


def main(job: Mapping[str, Any]) -> int:
    from pipelines.launch import launch_ranks

    # The benchmark holds the other end and never writes: once it is gone, so is this process, and its ranks.
    threading.Thread(target=_end_with_benchmark, daemon=True).start()
    failures = Path(job["folder"]) / "failures"
    return launch_ranks(job["argv"], job["ranks"], job["engine"], job["transport"], os.environ, failures)


def _end_with_benchmark() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except UserError as error:
        sys.exit(f"error: {error}")
