"""Before a container is made: what this host forbids or lacks, by name, rather than an engine's riddle later."""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from containers.errors import ContainerError, EngineError

_PROC_NAMES = {
    "memlock": "Max locked memory", "nofile": "Max open files", "stack": "Max stack size", "nproc": "Max processes",
    "core": "Max core file size", "as": "Max address space", "data": "Max data size", "fsize": "Max file size",
    "cpu": "Max cpu time", "rss": "Max resident set", "locks": "Max file locks", "sigpending": "Max pending signals",
    "msgqueue": "Max msgqueue size", "nice": "Max nice priority", "rtprio": "Max realtime priority",
    "rttime": "Max realtime timeout",
}  # fmt: skip
_NUMBERS = {0: "cpu", 1: "fsize", 2: "data", 3: "stack", 4: "core", 5: "rss", 6: "nproc", 7: "nofile", 8: "memlock",
            9: "as", 10: "locks", 11: "sigpending", 12: "msgqueue", 13: "nice", 14: "rtprio", 15: "rttime"}  # fmt: skip
_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""The first driver of each major release of CUDA."""
_RAISE = "raise it for the engine (systemd: LimitMEMLOCK=infinity and its kin of docker.service and containerd.service)"


@dataclass(frozen=True)
class HostGpus:
    """What the host has, without NVIDIA's libraries."""

    num_gpus: int
    driver: str
    """e.g. 580.82; empty: none loaded."""


def find_gpus(proc: Path = Path("/proc/driver/nvidia")) -> HostGpus:
    try:
        text = (proc / "version").read_text(errors="replace")
    except OSError:
        return HostGpus(0, "")
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)", text)
    gpus = proc / "gpus"
    return HostGpus(len(list(gpus.iterdir())) if gpus.is_dir() else 0, match[1] if match else "")


def choose_gpus(
    asked: tuple[str, ...] | None, given: bool, host: HostGpus, visible: str | None, variant: str
) -> tuple[str, ...] | None:
    """What to ask the engine for. `asked` as `parse_gpus` reads it, if the user gave any (`given`); else what
    CUDA_VISIBLE_DEVICES of the caller leaves, or all there are. An image for CPUs gets none."""
    if variant == "cpu":
        if given and asked != ():
            raise ContainerError("--gpus: this image is for CPUs and has no CUDA; take its GPU variant, or --gpus none")
        return ()
    if given:
        return asked
    if host.num_gpus == 0:
        return ()
    if visible is None:
        return None
    return tuple(part.strip() for part in visible.split(",") if part.strip() and not part.strip().startswith("-"))


def check_gpus(gpus: tuple[str, ...] | None, host: HostGpus, cuda_version: str) -> list[str]:
    """Warnings. Raises ContainerError where training on GPUs cannot begin: a GPU that is not there, an old driver."""
    if gpus == ():
        return []
    if not host.driver:
        return ["GPUs were asked for, but this host has no NVIDIA driver: the engine's host may be another"]
    numbers = [int(gpu) for gpu in gpus or () if gpu.isdigit()]
    if numbers and max(numbers) >= host.num_gpus > 0:
        raise ContainerError(f"--gpus {max(numbers)}: this host has {host.num_gpus}, numbered from 0")
    needed = _DRIVERS.get(cuda_version.split(".")[0], 0)
    if int(host.driver.split(".")[0]) < needed:
        raise ContainerError(
            f"driver {host.driver} is too old for this image's CUDA {cuda_version}: it needs {needed} or newer; "
            "update the driver, or take an image with an older CUDA"
        )
    return []


def engine_limits(host: str) -> Mapping[str, int] | None:
    """Hard limits of the engine's own process, which bound those of its containers; None where it cannot be seen."""
    if not host.startswith("unix://"):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(host.removeprefix("unix://"))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", credentials)[0]
        # A socket that a service manager opened belongs to it, whose limits are not the engine's.
        return parse_limits(Path(f"/proc/{pid}/limits").read_text()) if pid > 1 else None
    except OSError:
        return None


def parse_limits(text: str) -> dict[str, int]:
    """Hard limits by --ulimit's names, -1 for none, from /proc/PID/limits."""
    limits = {}
    for name, title in _PROC_NAMES.items():
        match = re.search(rf"^{re.escape(title)}\s+\S+\s+(\S+)", text, re.MULTILINE)
        if match:
            limits[name] = -1 if match[1] == "unlimited" else int(match[1])
    return limits


def fit_ulimits(
    asked: Mapping[str, tuple[int, int]], wished: Mapping[str, tuple[int, int]], allowed: Mapping[str, int] | None
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """What to ask the engine for, and warnings: what the user asked for is granted or refused, by name; what is
    only `wished` for is lowered to what is allowed."""
    fitted, warnings = {}, []
    for name, (soft, hard) in asked.items():
        limit = -1 if allowed is None else allowed.get(name, -1)
        if limit != -1 and (hard == -1 or hard > limit):
            raise ContainerError(
                f"--ulimit {name}={_shown(hard)}: this host's engine allows at most {limit}; {_RAISE}, or ask for less"
            )
        fitted[name] = (soft, hard)
    for name, (soft, hard) in wished.items():
        if name in asked:
            continue
        limit = -1 if allowed is None else allowed.get(name, -1)
        if limit != -1 and (hard == -1 or hard > limit):
            warnings.append(f"{name} is limited to {limit} by this host's engine, should be {_shown(hard)}; {_RAISE}")
            soft, hard = limit if soft == -1 else min(soft, limit), limit
        fitted[name] = (soft, hard)
    return fitted, warnings


def explain_start(error: EngineError, command: str) -> ContainerError:
    """One line that helps, for the ways in which an engine fails to start what it has made."""
    text = str(error)
    rlimit = re.search(r"error setting rlimit type (\d+)", text)
    if rlimit:
        name = _NUMBERS.get(int(rlimit[1]), f"number {rlimit[1]}")
        return EngineError(f"--ulimit {name}: is above what this host's engine allows; {_RAISE}, or ask for less")
    if "could not select device driver" in text:
        return EngineError(
            "--gpus: the engine has no NVIDIA runtime; install nvidia-container-toolkit, restart the engine, "
            "or train on CPUs by --gpus none"
        )
    if "unsatisfied condition" in text:
        wanted = re.search(r"unsatisfied condition: ([^,;]+)", text)
        return EngineError(f"the image needs {wanted[1] if wanted else 'more'} of NVIDIA's driver: update the driver")
    if "executable file not found" in text or "no such file or directory" in text:
        failure = ContainerError(f'"{command}": there is no such program in the image')
        failure.exit_code = 127
        return failure
    if "permission denied" in text:
        failure = ContainerError(f'"{command}": is not a program that may be executed in the image')
        failure.exit_code = 126
        return failure
    return error


def _shown(limit: int) -> str:
    return "unlimited" if limit == -1 else str(limit)
