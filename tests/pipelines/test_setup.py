"""Set-up: the cache of built wheels, what it says when something is missing, and the Makefile's commands."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
MAKE = shutil.which("make")
needs_make = pytest.mark.skipif(MAKE is None, reason="make is not installed")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tools/horovod_wheel.py; tools is a folder of scripts, not a package."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    yield importlib.import_module("horovod_wheel")


def clean_environment(**changes: str) -> dict[str, str]:
    """Without what an outer make, or the user's configuration of pip, brings along."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "PIP_", "TORCH_"))
        and name not in ("ENGINE", "PYTHON", "MODEL", "CXX", "RANKS", "DATA", "OUT", "ARGS")
    }
    return {**inherited, **changes}


def run_make(folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    assert MAKE is not None
    return subprocess.run(
        [MAKE, "--no-print-directory", *words],
        cwd=folder,
        env=clean_environment(**changes),
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What set-up needs of the repository, without its .venv."""
    folder = tmp_path / "clone"
    for name in ("tools", "requirements"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "Makefile", folder)
    return folder


def test_a_stored_wheel_is_found_and_a_damaged_one_is_not(tools: ModuleType, tmp_path: Path) -> None:
    built = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    built.write_bytes(b"wheel" * 1000)
    folder = tmp_path / "cache" / "key"
    assert tools.cached_wheel(folder) is None
    stored = tools.store_wheel(built, folder)
    assert tools.cached_wheel(folder) == stored == folder / built.name
    assert sorted(path.name for path in folder.iterdir()) == [built.name, "wheel.json"]
    stored.write_bytes(stored.read_bytes()[:-1])
    assert tools.cached_wheel(folder) is None
    tools.store_wheel(built, folder)
    (folder / "wheel.json").write_text("{")
    assert tools.cached_wheel(folder) is None


def test_each_thing_a_wheel_depends_on_is_in_its_key(tools: ModuleType) -> None:
    target = tools.Target("2.13.0+cpu", "cpython-311", "linux-x86_64", "glibc2.36", "5.0.11", "/include")
    changes = {
        "torch": "2.13.0+cu130",
        "python": "cpython-312",
        "platform": "linux-aarch64",
        "libc": "glibc2.39",
        "openmpi": "5.0.12",
        "nccl_home": "/usr",
    }
    keys = {replace(target, **{name: value}).key for name, value in changes.items()}
    assert len(keys | {target.key}) == len(changes) + 1


def test_cache_folder_follows_the_user(tools: ModuleType) -> None:
    assert tools.cache_folder({"HOME": "/home/a"}) == Path("/home/a/.cache/roadfuse/wheels")
    assert tools.cache_folder({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}) == Path("/c/roadfuse/wheels")


def test_build_settings(tools: ModuleType) -> None:
    target = tools.Target("2.13.0", "cpython-311", "linux-x86_64", "glibc2.36", "5.0.11", "/include")
    settings = tools.build_environment(target, Path("/venv/bin"), Path("/scratch/c++"), {"PATH": "/usr/bin"})
    assert settings["HOROVOD_WITH_GLOO"] == settings["HOROVOD_WITH_MPI"] == "1"
    assert settings["PATH"] == "/venv/bin:/usr/bin" and settings["CXX"] == "/scratch/c++"
    assert "HOROVOD_GPU_OPERATIONS" not in settings
    settings = tools.build_environment(replace(target, nccl_home="/n"), Path("/b"), Path("/c++"), {})
    assert (settings["HOROVOD_GPU_OPERATIONS"], settings["HOROVOD_NCCL_HOME"]) == ("NCCL", "/n")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("... Temporary failure in name resolution ...", "the package index cannot be reached"),
        ("ERROR: No matching distribution found for torch==9", "ERROR: No matching distribution found for torch==9"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "for want of memory"),
    ],
)
def test_likely_cause(tools: ModuleType, line: str, cause: str) -> None:
    console = importlib.import_module("console")
    assert cause in console.likely_cause(["Collecting torch", line, "more"])


def test_every_locked_version_is_exact() -> None:
    for path in (REPOSITORY / "requirements").glob("*.txt"):
        wanted = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert wanted and all(line.count("==") == 1 and "://" not in line and " " not in line for line in wanted), path


@needs_make
def test_train_passes_what_was_asked_for(clone: Path) -> None:
    def command(*words: str) -> str:
        lines = run_make(clone, "-n", "train", *words).stdout.replace("\\\n", " ").splitlines()
        return " ".join(next(line for line in lines if "-m pipelines" in line).split())

    assert command() == ".venv/bin/python -m pipelines train lane-small --ranks 2 --measure-scaling"
    assert command("ENGINE=solo") == ".venv/bin/python -m pipelines train lane-small --ranks 1 --engine solo"
    full = command("MODEL=lane-tiny", "RANKS=3", "ENGINE=torch", "DATA=/d", "OUT=/o", "ARGS=--set a.b=1")
    assert full.endswith(
        'train lane-tiny --ranks 3 --measure-scaling --data "/d" --engine torch --out "/o" --set a.b=1'
    )


@needs_make
def test_without_a_compiler_one_line_names_the_way_out(clone: Path, tmp_path: Path) -> None:
    answer = run_make(clone, "setup", CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert answer.returncode != 0
    line = answer.stderr.splitlines()[0]
    assert "no C++ compiler (no-such-compiler)" in line and "apt-get install g++" in line and "ENGINE=torch" in line
    assert not (clone / ".venv").exists()


@needs_make
def test_without_a_python_one_line_says_so(clone: Path) -> None:
    answer = run_make(clone, "setup", PATH="/nonexistent")
    assert answer.returncode != 0 and "no Python 3.11 or newer" in answer.stderr.splitlines()[0]


def test_an_unknown_engine_is_refused(clone: Path) -> None:
    command = [sys.executable, str(clone / "tools" / "setup_environment.py"), "--engine", "horovd"]
    answer = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert answer.returncode == 2
    assert answer.stderr == 'set-up: ENGINE = "horovd" is unknown; allowed: horovod, torch, solo\n'


@pytest.mark.slow
@needs_make
def test_without_an_index_one_line_names_cause_and_log(clone: Path) -> None:
    answer = run_make(
        clone,
        "setup",
        "ENGINE=torch",
        PIP_CONFIG_FILE=os.devnull,
        # Nobody listens there.
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
    )
    assert answer.returncode != 0
    line = answer.stderr.splitlines()[0]
    assert line.startswith("set-up: pip could not install torch==") and "cannot be reached" in line
    log = clone / "build" / "setup.log"
    assert str(log) in line and "127.0.0.1" in log.read_text()


@needs_make
@pytest.mark.skipif(not (REPOSITORY / ".venv" / "setup.json").exists(), reason="not an environment of `make setup`")
def test_setting_up_again_does_nothing() -> None:
    begin = time.monotonic()
    engine = "horovod" if importlib.util.find_spec("horovod") else "torch"
    answer = run_make(REPOSITORY, "setup", f"ENGINE={engine}")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
    assert time.monotonic() - begin < 5
