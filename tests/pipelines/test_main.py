"""python -m pipelines: help at once, mistakes in one line, the right exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
# Runs the command as `python -m pipelines` does, then tells on standard error what it imported of the heavy ones.
_WATCHED = """
import runpy, sys
heavy = {"torch", "numpy", "cv2", "albumentations", "horovod"}
sys.argv = ["pipelines", *sys.argv[1:]]
try:
    runpy.run_module("pipelines", run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def watched(*arguments: str, folder: Path = ROOT) -> tuple[int, str, str, float]:
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, *arguments],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - started


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "show-config"),
        (["train", "--help"], "--measure-scaling"),
        (["evaluate", "--help"], "--predictions"),
        (["bench", "--help"], "scaling"),
        (["bench", "scaling", "--help"], "--rounds"),
        (["show-config", "--help"], "--set"),
        (["show-config", "lane"], '"name": "lane"'),
    ],
)
def test_answers_at_once_without_torch(arguments: list[str], shown: str) -> None:
    code, out, errors, seconds = watched(*arguments)
    assert (code, errors) == (0, "imported:\n") and shown in out
    # Importing torch alone takes longer; the best of three where the machine is busy.
    if seconds > 0.8:
        seconds = min(seconds, *(watched(*arguments)[3] for _ in range(2)))
    assert seconds < 0.8


def test_help_tells_every_command() -> None:
    _, out, _, _ = watched("--help")
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "lane-smal"], 'error: model "lane-smal" is unknown; did you mean "lane-small"?'),
        (["show-config", "zzz"], 'error: model "zzz" is unknown; allowed: '),
        (["train"], "error: give a model: "),
        (["train", "lane", "--set", "optim.lrr=1"], 'did you mean "optim.lr"?'),
        (["train", "lane", "--engine", "horovd"], 'distributed.engine = "horovd" is unknown; did you mean "horovod"?'),
        (["train", "lane", "--ranks", "0"], "error: --ranks 0: must be 1 or more"),
        (["show-config", "none.json"], "error: none.json: no such configuration file"),
        (["bench", "scaling", "lane", "--ranks", "1"], "error: bench scaling needs --ranks of at least 2"),
        (["train", "--resume"], "error: --resume needs --out"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], line: str, tmp_path: Path) -> None:
    code, out, errors, _ = watched(*arguments, folder=tmp_path)
    assert (code, out) == (2, "")
    first, imported = errors.splitlines()
    assert first.startswith("error: ") and line in first and imported == "imported:"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train", "lane", "--rank"], ["train", "lane", "--ranks", "two"]])
def test_wrong_usage_is_exit_code_2_too(arguments: list[str]) -> None:
    code, _, errors, _ = watched(*arguments)
    assert code == 2 and errors.startswith("usage: python -m pipelines")


def test_show_config_prints_what_can_be_given_back(tmp_path: Path) -> None:
    _, out, _, _ = watched("show-config", "lane-small", "--data", "/d", "--engine", "torch", "--set", "train.seed=3")
    config = json.loads(out)
    assert (config["name"], config["data"]["source"], config["train"]["seed"]) == ("lane-small", "/d", 3)
    assert config["distributed"]["engine"] == "torch"
    (tmp_path / "config.json").write_text(out)
    _, again, _, _ = watched("show-config", str(tmp_path / "config.json"))
    assert again == out


def test_main_returns_the_commands_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "lane"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "lane"


_RANK = """
import sys, types
from pathlib import Path
import atexit, runpy
from perception.distributed import failure
from perception.errors import UserError
def run(options):
    failure.install(Path(sys.argv.pop()), 1)
    atexit.register(lambda: print("shut down in order: would wait for the other ranks"))
    raise {error}
command = types.ModuleType("pipelines.show_config")
command.add_arguments = lambda parser: parser.add_argument("rest", nargs="*")
command.run = run
sys.modules["pipelines.show_config"] = command
sys.argv[1:1] = ["show-config"]
runpy.run_module("pipelines", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("error", "expected_code", "recorded"),
    [
        ("UserError('a.json: field b')", 2, "error: a.json: field b\n"),
        ("KeyboardInterrupt", 130, None),
        ("ValueError('bug')", 1, "Traceback"),
    ],
)
def test_a_rank_that_fails_ends_at_once_and_leaves_its_words(
    error: str, expected_code: int, recorded: str | None, tmp_path: Path
) -> None:
    """A communication library's exit hook would wait for ranks that wait for this one."""
    done = subprocess.run(
        [sys.executable, "-c", _RANK.format(error=error), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (expected_code, ""), done.stderr
    words = tmp_path / "rank1.txt"
    if recorded is None:
        assert not words.exists()
    else:
        assert words.read_text().startswith(recorded)
