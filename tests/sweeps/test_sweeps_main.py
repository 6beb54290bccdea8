"""python -m sweeps: help at once, mistakes in one line, the right exit codes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
# Runs the command as `python -m sweeps` does, then tells on standard error what it imported of the heavy ones.
_WATCHED = """
import runpy, sys
heavy = {"torch", "numpy", "optuna", "duckdb", "matplotlib", "docker", "jinja2", "apprise", "scipy", "ruptures"}
sys.argv = ["sweeps", *sys.argv[1:]]
try:
    runpy.run_module("sweeps", run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def watched(*arguments: str, folder: Path = ROOT) -> tuple[int, str, str, float]:
    before = _children_seconds()
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, _children_seconds() - before


def _children_seconds() -> float:
    """Of processor time, so that a busy machine is no slow program."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_answers_at_once_and_imports_nothing_heavy(command: str) -> None:
    arguments = [word for word in (command, "--help") if word]
    code, out, errors, seconds = watched(*arguments)
    assert (code, errors) == (0, "imported:\n") and "usage: python -m sweeps" in out
    assert seconds < 0.8


def test_help_tells_every_command() -> None:
    _, out, _, _ = watched("--help")
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["status"], "nights: holds no night"),
        (["nightly", "none.toml"], "none.toml: cannot be read"),
        (["plan", "none.toml"], "none.toml: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], line: str, tmp_path: Path) -> None:
    code, out, errors, _ = watched(*arguments, folder=tmp_path)
    assert (code, out) == (2, "")
    first, *_ = errors.splitlines()
    assert first.startswith("error: ") and line in first
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["nigthly"], ["nightly"], ["status", "--wach"]])
def test_wrong_usage_is_exit_code_2_too(arguments: list[str]) -> None:
    code, _, errors, _ = watched(*arguments)
    assert code == 2 and errors.startswith("usage: python -m sweeps")


def test_main_returns_the_commands_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ROOT / "sweeps/plans/demo.toml")]) == 0
    assert "demo" in capsys.readouterr().out
