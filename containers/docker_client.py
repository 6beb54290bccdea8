"""The command line client that builds images: the first on the path that has BuildKit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from containers.errors import ContainerError

FIRST_WITHOUT_BUILTIN = 23
"""From this release on BuildKit is a plug-in of the client, buildx; before it, a variable chooses it."""


@dataclass(frozen=True)
class DockerClient:
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def find_docker(environ: Mapping[str, str]) -> DockerClient:
    """Raises ContainerError where none is installed, or none has BuildKit."""
    seen = []
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        program = Path(folder) / "docker"
        if not os.access(program, os.X_OK) or program.is_dir():
            continue
        version = _version(program, environ)
        if version is None:
            continue
        if version < FIRST_WITHOUT_BUILTIN or _has_buildx(program, environ):
            # Attestations would make an index of each image, and give it another ID than its configuration's.
            settings = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
            return DockerClient((str(program),), {**environ, **settings})
        seen.append(str(program))
    if seen:
        raise ContainerError(
            f"{seen[0]} has no BuildKit to build images with: install its plug-in (apt-get install docker-buildx)"
        )
    raise ContainerError("no docker on the path to build images with: install it (Debian: apt-get install docker.io)")


def _version(program: Path, environ: Mapping[str, str]) -> int | None:
    answer = _answer([str(program), "--version"], environ)
    match = re.search(r"version (\d+)\.", answer or "")
    return int(match[1]) if match else None


def _has_buildx(program: Path, environ: Mapping[str, str]) -> bool:
    return _answer([str(program), "buildx", "version"], environ) is not None


def _answer(argv: list[str], environ: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, env=dict(environ), check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
