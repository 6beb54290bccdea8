"""Python packages for images: collected once into a folder of the user's cache, so that builds need no network.

pip finds them as it finds everything on this machine: by its own settings, none of which gets into an image.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from containers.errors import ContainerError
from containers.images_plan import SBOM_TOOL

EXTRAS = ("export",)
"""Of pyproject.toml: what the images' commands need beside training."""
_GLIBC = (34, 31, 28, 27, 24, 17, 12, 5)
"""Of the platforms that a wheel for another Python may be made for, newest first."""

Runner = Callable[[Sequence[str], str], None]
"""Runs a command to its end, with a text that says what it does; raises ContainerError where it fails."""


@dataclass(frozen=True)
class Requirements:
    """Files of pip's format: what goes into which part of an image."""

    packages: str
    """The project's own dependencies, with torch."""
    constraints: str
    """Exact versions of these, and of what they need."""
    horovod: str
    """Open MPI and what Horovod needs."""
    build: str
    """Only for building wheels."""
    sbom: str
    horovod_version: str

    def files(self) -> dict[str, str]:
        texts = {"packages": self.packages, "constraints": self.constraints, "horovod": self.horovod}
        return {f"{name}.txt": text for name, text in {**texts, "build": self.build, "sbom": self.sbom}.items()}


@dataclass(frozen=True)
class WheelSource:
    """Where pip looks beside its own settings, and for which Python."""

    python_version: str
    torch_version: str = ""
    """Empty: the one of requirements/torch.txt."""
    torch_index: str = ""
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Collection:
    wheels: Path
    sbom_wheels: Path

    @property
    def torch_version(self) -> str:
        """In full, e.g. 2.13.0+cpu."""
        names = [path.name for path in self.wheels.glob("torch-*.whl")]
        if len(names) != 1:
            raise ContainerError(f"{self.wheels}: holds {len(names)} wheels of torch, not 1; remove the folder")
        return names[0].split("-")[1].replace("%2B", "+")


def read_requirements(repository: Path, torch_version: str = "") -> Requirements:
    """From the files of the project. Raises ContainerError where one is missing or not as expected."""
    folder = repository / "requirements"
    try:
        project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lock, torch = (_lines((folder / name).read_text()) for name in ("lock.txt", "torch.txt"))
        horovod, build = (_lines((folder / name).read_text()) for name in ("horovod.txt", "horovod-build.txt"))
        recipe = (repository / "tools" / "horovod_wheel.py").read_text()
    except FileNotFoundError as error:
        raise ContainerError(f"{error.filename}: not found; images are built in a checkout of the project") from None
    torch = [f"torch=={torch_version}"] if torch_version else torch
    wanted = [line for line in project["dependencies"] if not re.match(r"torch\b", line)]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    version = re.search(r'^HOROVOD_VERSION = "([^"]+)"', recipe, re.MULTILINE)
    if version is None:
        raise ContainerError(f"{repository}/tools/horovod_wheel.py: names no HOROVOD_VERSION")
    return Requirements(
        packages=_text([*torch, *wanted]),
        constraints=_text([*lock, *torch]),
        horovod=_text(horovod),
        build=_text([*build, *(line for line in lock if line.startswith("setuptools=="))]),
        sbom=_text([SBOM_TOOL]),
        horovod_version=version[1],
    )


def collect(requirements: Requirements, source: WheelSource, cache: Path, run: Runner) -> Collection:
    """What is collected already is taken from the cache. Raises ContainerError where pip finds not everything."""
    folder = cache / "packages" / collection_key(requirements, source)
    found = Collection(folder / "wheels", folder / "sbom-wheels")
    if folder.is_dir():
        return found
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, text in requirements.files().items():
        (scratch / name).write_text(text)
    for argv, doing in download_commands(scratch, source, sys.version_info[:2], requirements.horovod_version):
        run(argv, doing)
    scratch.rename(folder)
    return found


def download_commands(
    folder: Path, source: WheelSource, running_python: tuple[int, int], horovod_version: str
) -> list[tuple[list[str], str]]:
    """pip's commands, each with what it does."""
    plain = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    plain += ["--progress-bar=off"]
    pip = [*plain, "--only-binary=:all:"]
    pip += [f"--find-links={path}" for path in source.folders]
    if source.python_version != "{}.{}".format(*running_python):
        # For another Python than the one that runs: pip does not know by itself what that one takes.
        pip += [f"--python-version={source.python_version}", "--implementation=cp"]
        pip += [f"--abi=cp{source.python_version.replace('.', '')}", "--abi=abi3", "--abi=none"]
        pip += [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["--platform=any"]
    wheels, sbom = f"--dest={folder}/wheels", f"--dest={folder}/sbom-wheels"
    torch = [f"--extra-index-url={source.torch_index}"] if source.torch_index else []
    constraint = f"--constraint={folder}/constraints.txt"
    # For an image whose C library, Python or torch no wheel in the cache fits: it is built in the image then.
    horovod = [*plain, wheels, "--no-deps", "--no-binary=horovod", "--no-build-isolation"]
    return [
        ([*pip, *torch, wheels, constraint, f"--requirement={folder}/packages.txt"], "collecting torch and the rest"),
        ([*pip, wheels, "--no-deps", f"--requirement={folder}/horovod.txt"], "collecting Open MPI"),
        ([*pip, wheels, "--no-deps", f"--requirement={folder}/build.txt"], "collecting what builds wheels"),
        ([*horovod, f"horovod=={horovod_version}"], "collecting Horovod's source"),
        ([*pip, sbom, f"--requirement={folder}/sbom.txt"], "collecting the tool that lists what is in an image"),
    ]


def fitting_horovod_wheels(cache: Path, requirements: Requirements, torch_version: str, python: str) -> list[Path]:
    """Folders of wheels in the user's cache that may fit; the image itself decides by its own C library and MPI."""
    start = f"horovod{requirements.horovod_version}-torch{torch_version}-cpython-{python.replace('.', '')}-"
    return sorted(record.parent for record in cache.glob("*/wheel.json") if record.parent.name.startswith(start))


def collection_key(requirements: Requirements, source: WheelSource) -> str:
    parts = [json.dumps(requirements.files(), sort_keys=True), source.python_version, source.torch_index]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_folder(environ: Mapping[str, str], part: str) -> Path:
    """<user's cache>/roadfuse/PART."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", str(Path.home()))) / ".cache"
    return Path(base) / "roadfuse" / part


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
