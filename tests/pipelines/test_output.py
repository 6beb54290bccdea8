"""Whoever reads the output leaves before its end, or a disk behind it is full: no command ends in a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.__main__ import COMMANDS as PIPELINES
from sweeps.__main__ import COMMANDS as SWEEPS
from tests.pipelines import training_runs as runs

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [("pipelines", name) for name in PIPELINES] + [("sweeps", name) for name in SWEEPS]
EARLY_LINES = 2
_MAIN = """
import os, sys
from pipelines.commands import outlive_readers, run_program
def main(arguments):
    {body}
sys.exit(run_program(main))
"""


def start(*argv: str, errors_too: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
        text=True,
    )


def read_and_leave(process: subprocess.Popen[str], num_lines: int) -> tuple[int, str]:
    """Exit code, and what came on standard error."""
    assert process.stdout is not None
    for _ in range(num_lines):
        assert process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read() if process.stderr is not None else ""
    if process.stderr is not None:
        process.stderr.close()
    return process.wait(60), errors


def program(body: str) -> list[str]:
    return ["-c", _MAIN.format(body=body.replace("\n", "\n    "))]


@pytest.mark.parametrize(("folder", "command"), PROGRAMS)
def test_nobody_reads_the_help(folder: str, command: str) -> None:
    code, errors = read_and_leave(start("-m", folder, command, "--help"), 0)
    assert (code, errors) == (0, "")


def test_a_command_is_cut_off() -> None:
    """Far more than any pipe holds, so that it cannot have come to its end."""
    body = "for number in range(10**9):\n    print(number)"
    assert read_and_leave(start(*program(body)), EARLY_LINES) == (128 + signal.SIGPIPE, "")
    assert read_and_leave(start(*program(body), errors_too=True), EARLY_LINES)[0] == 128 + signal.SIGPIPE


def test_a_command_that_had_ended_keeps_its_exit_code() -> None:
    """Its words waited in the buffer: only the very last write finds that nobody reads."""
    body = "print('a verdict')\nsys.stdin.readline()\nreturn 3"
    process = subprocess.Popen(
        [sys.executable, *program(body)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    assert (process.wait(60), process.stderr.read()) == (3, "")
    process.stderr.close()


def test_a_mistake_that_nobody_reads_is_still_one() -> None:
    assert read_and_leave(start("-m", "pipelines", "show-config", "lanee", errors_too=True), 0)[0] == 2


def test_another_broken_pipe_is_a_crash_with_its_traceback() -> None:
    body = "end, other = os.pipe()\nos.close(end)\nos.write(other, b'x')\nreturn 0"
    done = ended(body)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("BrokenPipeError: [Errno 32] Broken pipe")


def test_work_that_outlives_its_reader_comes_to_its_end(tmp_path: Path) -> None:
    body = (
        "outlive_readers()\n"
        "for number in range(50_000):\n    print(number, flush=number % 100 == 0)\n"
        "    print(number, file=sys.stderr)\n"
        f"open({str(tmp_path / 'done')!r}, 'w').close()\nreturn 75"
    )
    assert read_and_leave(start(*program(body), errors_too=True), EARLY_LINES)[0] == 75
    assert (tmp_path / "done").exists()


def ended(body: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *program(body)], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("path", "why"), [("a" * 300, "File name too long"), ("loop", "Too many levels of symbolic links")]
)
def test_a_file_system_that_refuses_a_path_is_one_line(tmp_path: Path, path: str, why: str) -> None:
    """Wherever it is asked: not each of a hundred looks at a file has its own words for it."""
    (tmp_path / "loop").symlink_to("loop")
    done = ended(f"open({path!r})", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {path}: {why}; give a path that can be used\n")


def test_a_missing_file_may_be_one_that_the_program_forgot_to_write() -> None:
    done = ended("open('none')")
    assert done.returncode == 1 and done.stderr.startswith("Traceback")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("a\nb\x1b[31m", "a?b?[31m"),
        ("x" * 5000 + "; the cure", "x; the cure"),
        ("a\u2028b", "a?b"),
        ("\udcff", "\\udcff"),
    ],
)
def test_a_mistake_is_one_line_whatever_it_repeats(message: str, shown: str) -> None:
    done = ended(f"from perception.errors import UserError\nraise UserError({message!r})")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr) < 1100
    assert done.stderr.count("\n") == 1 and done.stderr.rstrip("\n").endswith(shown) and "\x1b" not in done.stderr


def test_names_that_a_terminal_cannot_show_are_shown_as_well_as_can_be() -> None:
    done = ended("print('\\udcff \u2192 stra\u00dfe')\nreturn 0", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "\\udcff \\u2192 stra\\xdfe\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [("-m", "pipelines", "show-config", "lane"), ("-m", "sweeps", "--help")])
def test_output_to_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    line = "error: output cannot be written (No space left on device); make room, or send it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_closed_streams_are_no_trouble() -> None:
    for redirection in (">&-", "2>&-", ">&- 2>&-"):
        shell = f'"$0" -m pipelines show-config lane {redirection}'
        done = subprocess.run(
            ["bash", "-c", shell, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_without_its_reader_saves_when_it_is_told_to_stop(tmp_path: Path, ranks: int) -> None:
    """As with `train ... 2>&1 | tee log` and Ctrl-C, which ends tee first."""
    out, cache = tmp_path / "run", tmp_path / "cache"
    settings = {**runs.TINY, "train.num_samples": 20_000}
    argv = runs.command("train", "lane-small", "--out", str(out), "--ranks", str(ranks), settings=settings)
    process = subprocess.Popen(
        argv, cwd=ROOT, env=runs.environment(cache), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    log, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (log.exists() and log.read_text()):
        time.sleep(0.02)
    assert process.poll() is None and log.read_text(), "it ended, or never trained, once nobody read it"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75
    assert runs.result(out)["status"] == "preempted"
    assert (out / runs.result(out)["checkpoint"]["path"]).is_file()
