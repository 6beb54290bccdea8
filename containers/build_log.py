"""What a build says while it works: a line a step; the whole output of its commands goes to files."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from containers.errors import ContainerError

HEARTBEAT_SECONDS = 15.0
_STEP = re.compile(r"#\d+ \[(?!internal)([^\]]+)\] (\w+) ?(.*)")


class BuildError(ContainerError):
    """A step failed: not by the arguments, as far as we can tell."""

    exit_code = 1


class BuildLog:
    def __init__(self, folder: Path) -> None:
        """Raises ContainerError where the folder cannot be made."""
        self.folder = folder
        self._begin = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ContainerError(f"--logs {folder}: cannot be made ({error.strerror}); give another") from None

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:4.0f} s] {text}", flush=True)

    def run(
        self,
        argv: Sequence[str],
        doing: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        text: str = "",
    ) -> None:
        """A command to its end, `text` on its standard input. `environment` lays over this process's own.

        Raises BuildError with the likeliest cause where it fails.
        """
        path = log or self.folder / "build.log"
        self.say(f"{doing} ...")
        begin = time.monotonic()
        with path.open("ab") as file:
            start = file.tell()
            file.write(f"$ {' '.join(argv)}\n".encode())
            file.flush()
            code = self._run(argv, doing, {**os.environ, **(environment or {})}, file, text)
        if code != 0:
            lines = path.read_bytes()[start:].decode(errors="replace").splitlines()
            raise BuildError(
                f"{doing} failed after {time.monotonic() - begin:.0f} s: {likely_cause(lines)}; see {path}"
            )

    def _run(self, argv: Sequence[str], doing: str, environment: Mapping[str, str], file: IO[bytes], text: str) -> int:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise BuildError(f"{doing} failed: {argv[0]} cannot be started ({error.strerror})") from None
        with process:
            assert process.stdin is not None and process.stdout is not None
            try:
                # Output is merged and read to its end: the little that goes in never fills a pipe both ways.
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(text.encode())
                    process.stdin.close()
                steps: dict[str, str] = {}
                told: set[str] = set()
                now = doing
                spoken = time.monotonic()
                for row in process.stdout:
                    file.write(row)
                    line = row.decode(errors="replace")
                    number, _, rest = line.partition(" ")
                    if step := step_text(line):
                        # Told again whenever another step spoke in between.
                        if number not in told:
                            steps[number] = step
                    elif number in steps and not rest.startswith("sha256:"):
                        # Its next word tells whether it is done now, or was in an earlier build.
                        step = steps.pop(number)
                        told.add(number)
                        if not rest.startswith("CACHED"):
                            spoken, now = time.monotonic(), step
                            self.say(f"  {step}")
                    elif time.monotonic() - spoken > HEARTBEAT_SECONDS:
                        spoken = time.monotonic()
                        self.say(f"  still {now}")
            except BaseException:
                process.terminate()
                raise
        return process.returncode


def step_text(line: str) -> str:
    """A step of BuildKit's plain progress in a few words, empty for any other line.

    >>> step_text('#12 [installed 3/4] RUN --mount=type=bind,source=images,target=/context     pip install --quiet x')
    'installed 3/4: RUN pip install x'
    """
    match = _STEP.match(line)
    if not match or match[2] == "FROM":
        return ""
    rest = " ".join(match[3].split())
    rest = rest.replace("begin=$(/run/build/context/tidy.sh begin); ", "").partition("; /run/build/context/tidy.sh")[0]
    # Options say how, and paths where a step's tools are mounted: neither is the user's concern.
    words = [re.sub(r"^/run/build/(?:\w+/)*", "", word) for word in rest.split() if not word.startswith("--")]
    return f"{match[1]}: {match[2]} {' '.join(words)}"[:100]


def likely_cause(lines: Sequence[str]) -> str:
    """One phrase for why a command failed, from what it printed.

    >>> likely_cause(["#9 0.3 E: Unable to locate package g++", "error: failed to solve"])
    'E: Unable to locate package g++'
    """
    text = "\n".join(lines)
    if "no space left on device" in text.lower():
        return "the disk is full"
    plain = [re.sub(r"^#\d+ (?:[\d.]+ )?", "", line).strip() for line in lines]
    signs = ("E: ", "ERROR: ", "error: ", "Error: ", "fatal: ")
    errors = [line for line in plain if line.startswith(signs) and "failed to solve" not in line]
    if errors:
        return errors[0]
    said = [line for line in plain if line and "failed to solve" not in line]
    return said[-1] if said else "it printed nothing"
