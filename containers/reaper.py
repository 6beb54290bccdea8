"""Ends a container whose client was killed: holds a pipe to it, and acts when that closes without a last word.

    python -m containers.reaper HOST CONTAINER_NAME OWNER GRACE_SECONDS [SECRETS_FOLDER]

Nothing heavy is imported before it is needed: one waits beside every run.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LAST_WORD = b"done"
RETRY_SECONDS = 2.0
GIVE_UP_SECONDS = 3600.0
"""After which an engine that is away is left alone: the next run removes what is left."""
_left: list[subprocess.Popen[bytes]] = []
"""Those that outlive their client, who does not wait for them."""


class Reaper:
    """The client's side: started before the container is made."""

    def __init__(self, host: str, name: str, owner: str, grace_seconds: float, secrets: Path | None) -> None:
        argv = [sys.executable, "-m", "containers.reaper", host, name, owner, str(grace_seconds)]
        argv += [str(secrets)] if secrets else []
        # In a session of its own: what kills the client's whole group does not reach it.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parent.parent,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Nothing is left to do: the container is gone, and the secrets are."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(LAST_WORD)
            self._process.stdin.close()
        self._process.wait()

    def leave(self) -> None:
        """To its task: the client ends, and the container could not be removed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        _left.append(self._process)


def main(arguments: list[str]) -> int:
    host, name, owner, grace_seconds, *rest = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read().endswith(LAST_WORD):
        return 0
    deadline = time.monotonic() + GIVE_UP_SECONDS
    try:
        while time.monotonic() < deadline:
            if _end(host, name, owner, float(grace_seconds)):
                return 0
            time.sleep(RETRY_SECONDS)
        return 1
    finally:
        for folder in rest:
            shutil.rmtree(folder, ignore_errors=True)


def _end(host: str, name: str, owner: str, grace_seconds: float) -> bool:
    """False where the engine is away. A container of that name that is another's is let alone."""
    from containers.engine import DockerEngine
    from containers.errors import EngineError
    from containers.owner import OWNER_LABEL

    try:
        with DockerEngine(host) as engine:
            facts = engine.container(name)
            if facts is not None and facts.labels.get(OWNER_LABEL) != owner:
                return True
            if facts is not None and facts.state == "running":
                # As if the user had: a training writes a checkpoint first.
                engine.signal(facts.container_id, "SIGTERM")
                deadline = time.monotonic() + grace_seconds
                while facts is not None and facts.state == "running" and time.monotonic() < deadline:
                    time.sleep(0.2)
                    facts = engine.container(name)
            if facts is not None:
                engine.remove(facts.container_id)
            return True
    except EngineError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
