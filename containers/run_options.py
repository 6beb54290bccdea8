"""From what the user asked for to what the engine is told: pure functions, tested by recorded text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from containers.errors import ContainerError, nearest
from containers.user_mapping import User

SECRETS_FOLDER = "/run/secrets/roadfuse"
DIGEST_VARIABLE = "PERCEPTION_IMAGE_DIGEST"
"""By which a run records the image that it was trained in."""
GPU_ULIMITS = {"memlock": (-1, -1), "stack": (67_108_864, 67_108_864)}
"""What NVIDIA's libraries ask for: memory pinned for the network, deep stacks."""
ULIMITS = (
    "as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss", "rtprio",
    "rttime", "sigpending", "stack",
)  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_GPU = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-zA-Z/-]+")
_SLURM_SECRETS = ("SLURM_JWT",)


@dataclass(frozen=True)
class Mount:
    source: Path
    """On the host, absolute."""
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class RunSettings:
    """A container to be, complete."""

    image: str
    """Its ID: a tag may be moved between two requests."""
    command: tuple[str, ...]
    user: User
    digest: str = ""
    """Of the image, for the run's records."""
    gpus: tuple[str, ...] | None = ()
    """None: all; empty: none; else numbers or UUIDs."""
    mounts: tuple[Mount, ...] = ()
    secrets: Path | None = None
    """The host's folder of files, of a name and a mode 0400 each."""
    environment: Mapping[str, str] = field(default_factory=dict)
    shm_bytes: int = 8 << 30
    ipc_host: bool = False
    ulimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Soft and hard; -1: none."""
    network: str = ""
    memory_bytes: int = 0
    """0: all that the host has."""
    cpus: str = ""
    """Numbers of cores, e.g. 0-3; empty: all."""
    workdir: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def container_settings(settings: RunSettings) -> dict[str, Any]:
    """What the engine's API is told, whole."""
    environment = {**settings.user.environment(), **settings.environment}
    if settings.digest:
        environment[DIGEST_VARIABLE] = settings.digest
    if settings.gpus == ():
        # Images for GPUs ask for all of them by themselves.
        environment["NVIDIA_VISIBLE_DEVICES"] = "void"
    mounts = list(settings.mounts)
    if settings.secrets is not None:
        mounts.append(Mount(settings.secrets, SECRETS_FOLDER, read_only=True))
    host: dict[str, Any] = {
        # PID 1 that hands signals on and buries the dead: Python as PID 1 would ignore SIGTERM.
        "Init": True,
        "Mounts": [
            {"Type": "bind", "Source": str(mount.source), "Target": mount.target, "ReadOnly": mount.read_only}
            for mount in mounts
        ],
        "Ulimits": [
            {"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in sorted(settings.ulimits.items())
        ],
        "GroupAdd": [str(gid) for gid in settings.user.groups],
    }
    if settings.ipc_host:
        host["IpcMode"] = "host"
    else:
        host["ShmSize"] = settings.shm_bytes
    if settings.gpus is None or settings.gpus:
        host["DeviceRequests"] = [_device_request(settings.gpus)]
    if settings.network:
        host["NetworkMode"] = settings.network
    if settings.memory_bytes:
        # Of memory and swap together the same: a run that swaps is as good as dead.
        host["Memory"] = host["MemorySwap"] = settings.memory_bytes
    if settings.cpus:
        host["CpusetCpus"] = settings.cpus
    created: dict[str, Any] = {
        "Image": settings.image,
        "Cmd": list(settings.command),
        "Env": [f"{name}={environment[name]}" for name in sorted(environment)],
        "User": f"{settings.user.uid}:{settings.user.gid}",
        "Labels": dict(settings.labels),
        "AttachStdin": False,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "HostConfig": host,
    }
    if settings.workdir:
        created["WorkingDir"] = settings.workdir
    return created


def _device_request(gpus: tuple[str, ...] | None) -> dict[str, Any]:
    """Either a count or a list: docker refuses both, and takes a count of 0 for none, silently."""
    if gpus is None:
        return {"Driver": "", "Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}
    return {"Driver": "", "Count": 0, "DeviceIDs": list(gpus), "Capabilities": [["gpu"]], "Options": {}}


def parse_gpus(text: str) -> tuple[str, ...] | None:
    """all → None; none → (); else numbers or UUIDs, each once."""
    if text == "all":
        return None
    if text in ("none", ""):
        return ()
    gpus = tuple(part.strip() for part in text.split(","))
    wrong = [gpu for gpu in gpus if not _GPU.fullmatch(gpu)]
    if wrong:
        raise ContainerError(f'--gpus {text}: "{wrong[0]}" is no GPU; give all, none, or numbers or UUIDs: 0,1')
    if len(set(gpus)) != len(gpus):
        raise ContainerError(f"--gpus {text}: names a GPU twice")
    return gpus


def parse_size(option: str, text: str) -> int:
    """Bytes of 8g, 512m, 64k or a plain number, in powers of 1024.

    >>> parse_size("--shm-size", "8g")
    8589934592
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ContainerError(f"{option} {text}: is no size; give e.g. 8g or 512m")
    size = int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
    if size <= 0:
        raise ContainerError(f"{option} {text}: must be more than 0")
    return size


def parse_mount(text: str, folder: Path) -> Mount:
    """SOURCE[:TARGET[:ro]]; without TARGET at the same place. A relative SOURCE is one of `folder`."""
    parts = text.split(":")
    if len(parts) > 3 or (len(parts) == 3 and parts[2] not in ("ro", "rw")) or not parts[0]:
        raise ContainerError(f"--mount {text}: give SOURCE[:TARGET[:ro]]; a colon cannot be part of a path here")
    source = folder / Path(parts[0]).expanduser()
    target = parts[1] if len(parts) > 1 and parts[1] else str(source)
    return _checked(Mount(source, target, parts[2:] == ["ro"]), f"--mount {text}")


def check_mounts(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Each once. Raises ContainerError where a source is not there, for which an engine would make an empty folder of
    root's, or where a target is asked for twice."""
    seen: dict[str, Mount] = {}
    for mount in mounts:
        if not mount.source.exists():
            raise ContainerError(f"{mount.source}: to be mounted at {mount.target}, does not exist; make it first")
        other = seen.setdefault(mount.target, mount)
        if other.source != mount.source:
            raise ContainerError(f"{mount.target}: both {other.source} and {mount.source} are to be mounted there")
        if other.read_only and not mount.read_only:
            seen[mount.target] = mount
    return tuple(seen.values())


def _checked(mount: Mount, where: str) -> Mount:
    target = PurePosixPath(mount.target)
    if not target.is_absolute() or ".." in target.parts:
        raise ContainerError(f'{where}: target "{mount.target}" is not an absolute path')
    if target == PurePosixPath("/") or target.parts[1:2] in (("proc",), ("sys",)):
        raise ContainerError(f'{where}: target "{mount.target}" would hide what every container needs')
    return Mount(mount.source, str(target), mount.read_only)


def parse_ulimit(text: str) -> tuple[str, tuple[int, int]]:
    """NAME=SOFT[:HARD], -1 or unlimited for none."""
    match = re.fullmatch(r"([a-z]+)=(-1|unlimited|\d+)(?::(-1|unlimited|\d+))?", text)
    if not match:
        raise ContainerError(f"--ulimit {text}: give NAME=SOFT[:HARD], e.g. memlock=-1 or nofile=65536")
    if match[1] not in ULIMITS:
        raise ContainerError(f'--ulimit {text}: "{match[1]}" is unknown{nearest(match[1], ULIMITS)}')
    soft = _limit(match[2])
    hard = _limit(match[3]) if match[3] else soft
    if hard != -1 and (soft == -1 or soft > hard):
        raise ContainerError(f"--ulimit {text}: the soft limit is above the hard one")
    return match[1], (soft, hard)


def _limit(text: str) -> int:
    return -1 if text == "unlimited" else int(text)


def parse_environment(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """NAME (its value here) or NAME=VALUE. Raises ContainerError for what looks like a secret: inspection shows it."""
    chosen = {}
    for word in words:
        name, given, value = word.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise ContainerError(f"--env {name}: is no name of a variable; give NAME or NAME=VALUE")
        secret = next((part for part in _SECRET_WORDS if part in name.upper()), None)
        if secret:
            raise ContainerError(
                f"--env {name}: looks like a secret ({secret}), and everybody can inspect a container; "
                f"give it by --secret {name}, which takes its value from the environment"
            )
        if not given and name not in environ:
            raise ContainerError(f"--env {name}: is not set here; give --env {name}=VALUE")
        chosen[name] = value if given else environ[name]
    return chosen


def parse_secrets(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """NAME (a variable of this process) or NAME=FILE; values never come from the command line, which all can see."""
    chosen = {}
    for word in words:
        name, given, file = word.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise ContainerError(f"--secret {name}: is no name of a variable; give NAME or NAME=FILE")
        if not given:
            if name not in environ:
                raise ContainerError(f"--secret {name}: is not set here; set it, or give --secret {name}=FILE")
            chosen[name] = environ[name]
            continue
        try:
            chosen[name] = Path(file).expanduser().read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError):
            # Without the text: whoever wrote the value itself here must not find it in a log.
            raise ContainerError(f"--secret {name}=...: what follows = is no file that can be read") from None
    return chosen


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What tells a rank, started by srun on each node, its place; no key of Slurm's."""
    begins = ("SLURM_", "PMIX_", "PMI_")
    names = (name for name in environ if name.startswith(begins) or name in ("MASTER_ADDR", "MASTER_PORT"))
    return {name: environ[name] for name in names if name not in _SLURM_SECRETS}


@dataclass(frozen=True)
class Located:
    """A command whose folders are those of this host, at the same place in the container."""

    command: tuple[str, ...]
    out: Path | None
    data: Path | None


def locate_folders(command: Sequence[str], out: Path | None, data: Path | None, folder: Path) -> Located:
    """`train` and the folders that it reads and writes, given to us (`out`, `data`) or in the command itself.

    Relative ones are of `folder`. Raises ContainerError where a training would write into the container alone, which
    is gone in the end. Other commands are left as they are.
    """
    words = list(command)
    paths = {"--out": folder / out if out else None, "--data": folder / data if data else None}
    if not is_training(words) or {"--help", "-h"} & set(words):
        return Located(tuple(words), paths["--out"], paths["--data"])
    for option, path in paths.items():
        place, value = _option(words, option)
        if place is None:
            words += [option, str(path)] if path else []
            continue
        # A data set may be named rather than placed: generated.
        named = option == "--data" and not (folder / value).exists() and "/" not in value
        here = None if named else folder / Path(value).expanduser()
        if path is not None and here != path:
            raise ContainerError(f"{option} {path}: the command says {option} {value}; give it once")
        if here is not None:
            paths[option] = here
            words[place : place + (1 if words[place] != option else 2)] = [option, str(here)]
    if paths["--out"] is None:
        raise ContainerError("train: what it writes would be gone with the container; give --out DIR")
    return Located(tuple(words), paths["--out"], paths["--data"])


def is_training(command: Sequence[str]) -> bool:
    """By the image's entry point, or by Python's full name for it."""
    words = list(command)
    is_python = bool(words) and PurePosixPath(words[0]).name.startswith("python")
    return words[:1] == ["train"] or (is_python and words[1:4] == ["-m", "pipelines", "train"])


def _option(words: Sequence[str], option: str) -> tuple[int | None, str]:
    """Where it is, and its value; None where it is not, or has none."""
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return place, words[place + 1]
        if word.startswith(f"{option}="):
            return place, word.partition("=")[2]
    return None, ""


def wrapped_argv(image: str, argv: Sequence[str], mounts: Sequence[str] = (), options: Sequence[str] = ()) -> list[str]:
    """The command line that runs `argv` in an image: for whoever starts jobs.

    `image` is a name of the lock file or a reference; Python's own path is that of the image. `mounts` as --mount.
    """
    command = list(argv)
    if command and PurePosixPath(command[0]).name.startswith("python"):
        command[0] = "python"
    words = ["-m", "containers", "run", f"--image={image}", *(f"--mount={mount}" for mount in mounts), *options]
    return [*words, "--", *command]
