"""What set-up says while it works, and how it runs commands.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HEARTBEAT_SECONDS = 15.0


class SetupError(Exception):
    """Set-up cannot go on: the message says what is missing and what to do."""


class Console:
    """Progress lines with elapsed seconds; the commands' own output goes to a log file."""

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        self._start = time.monotonic()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_text("")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {text}", flush=True)

    def run(self, command: Sequence[str | Path], doing: str, environment: Mapping[str, str] | None = None) -> int:
        """Run a command to its end, its output appended to the log, with a line now and then. Returns its exit code."""
        self.say(f"{doing} ...")
        begin = time.monotonic()
        with self.log_file.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(os.environ if environment is None else environment),
            )
            try:
                while True:
                    try:
                        return process.wait(HEARTBEAT_SECONDS)
                    except subprocess.TimeoutExpired:
                        self.say(f"  still {doing} ({time.monotonic() - begin:.0f} s)")
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()

    def failure(self, what: str) -> SetupError:
        """An error for a command that failed, with the likeliest cause that its log shows."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        start = max((index for index, line in enumerate(lines) if line.startswith("$ ")), default=0)
        return SetupError(f"{what}: {likely_cause(lines[start + 1 :])}; all output is in {self.log_file}")


def likely_cause(lines: Sequence[str]) -> str:
    """One phrase for why a command failed, from what it printed.

    >>> likely_cause(["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"])
    'the disk is full'
    """
    text = "\n".join(lines)
    if "No space left on device" in text:
        return "the disk is full"
    if "Disk quota exceeded" in text:
        return "the disk quota is used up"
    network = ("Failed to establish a new connection", "name resolution", "Max retries exceeded", "ProxyError")
    if any(sign in text for sign in (*network, "Read timed out", "Network is unreachable", "ConnectionResetError")):
        return "the package index cannot be reached (network, proxy or PIP_INDEX_URL)"
    if "(from versions: none)" in text:
        return "the package index has no such package for this Python, or cannot be reached (PIP_INDEX_URL)"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "the package index has a certificate that is not trusted (PIP_CERT names yours)"
    if "Killed" in text and "cc1plus" in text:
        return "the compiler was killed, most likely for want of memory (MAKEFLAGS=-j1 needs least)"
    errors = [line.strip() for line in lines if line.lstrip().lower().startswith(("error", "fatal error"))]
    errors = errors or [line.strip() for line in lines if ": error: " in line or "Error: " in line]
    return errors[0] if errors else (lines[-1].strip() if lines else "it printed nothing")
