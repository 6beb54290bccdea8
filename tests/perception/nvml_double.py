"""Builds the test double of NVIDIA's library and runs programs against it, through the real binding."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("nvml_double.c")
_PROGRAM = """
import json, os, sys
def double(**settings):
    # A setting that comes first counts: the newest goes in front.
    new = ";".join(f"{name.replace('__', '.')}={value}" for name, value in settings.items())
    os.environ["NVML_DOUBLE"] = new + ";" + os.environ.get("NVML_DOUBLE", "")
"""


def build_double(folder: Path, old_driver: bool = False) -> Path:
    """The folder with the library in it. Skips where it cannot be built here; fails instead where CI=true."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    header = _header()
    missing = [what for what, found in (("a C compiler", compiler), ("nvidia-nvml-dev-cu12", header)) if not found]
    if missing:
        reason = f"the test double of NVML needs {' and '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    assert compiler is not None and header is not None
    folder.mkdir(parents=True)
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *(["-DOLD_DRIVER"] if old_driver else [])]
    command = [compiler, *options, "-I", str(header.parent), str(SOURCE), "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run(command, check=True)
    return folder


def environment(library: Path | None, settings: str = "", **variables: str) -> dict[str, str]:
    """That of a process which loads the library in this folder; None: whatever the system has."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NVML_DOUBLE": settings, **variables}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    if library is not None:
        environ["LD_LIBRARY_PATH"] = str(library)
    return {**environ, **variables}


def run_with(library: Path | None, program: str, settings: str = "", **variables: str) -> Any:
    """What `program` prints as JSON. It may change the double's settings by `double(name=value, gpu__name=value)`."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM + program],
        env=environment(library, settings, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _header() -> Path | None:
    for name in ("nvidia.nvml_dev", "nvidia"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        for place in spec.submodule_search_locations or () if spec else ():
            found = next(iter(sorted(Path(place).rglob("nvml.h"))), None)
            if found is not None:
                return found
    return None
