"""Tests wait for what can be seen, never for a time; where it does not come they say what they saw instead."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    waited_for: str,
    seen: Callable[[], object],
    *processes: subprocess.Popen[str],
    timeout_seconds: float = 120.0,
) -> None:
    """`processes` are to live until then; where one ends before, its output is in the failure."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        for process in processes:
            if process.poll() is not None and not condition():
                output = process.communicate()[0]
                raise AssertionError(f"ended before {waited_for}: exit code {process.returncode}, {seen()}\n{output}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{waited_for}: not within {timeout_seconds:.0f} s; seen: {seen()}")
        time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> None:
    """Whatever became of it; nothing of it is left for the next test."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
