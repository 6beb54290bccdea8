"""`run`: a command in its image, as if it ran here: same user, same folders, same signals, same exit code."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from containers.engine import DockerEngine
from containers.errors import ContainerError
from containers.lock import LOCK_FILE, read_lock
from containers.preflight import check_gpus, choose_gpus, engine_limits, find_gpus, fit_ulimits
from containers.run_image import ChosenImage, choose_image
from containers.run_options import (
    GPU_ULIMITS,
    Mount,
    RunSettings,
    check_mounts,
    locate_folders,
    parse_environment,
    parse_gpus,
    parse_mount,
    parse_secrets,
    parse_size,
    parse_ulimit,
    slurm_environment,
)
from containers.run_watch import Patience, remove_stale, run_container
from containers.secret_files import remove_secrets, write_secrets
from containers.streams import Relay
from containers.user_mapping import User, parse_user, user_name

TAKES_COMMAND = True
"""What follows -- is the command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m containers run [IMAGE] [options] -- COMMAND ..."
    parser.add_argument("image", nargs="?", help="a name of the lock file: lane, sign, train, base")
    parser.add_argument("--image", dest="reference", metavar="REF", help="a name, or REGISTRY/ORG/NAME:TAG[@DIGEST]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder on this host; train gets it as --out")
    parser.add_argument("--data", type=Path, metavar="DIR", help="mounted read-only; train gets it as --data")
    parser.add_argument("--gpus", metavar="all|none|LIST", help="by default what CUDA_VISIBLE_DEVICES leaves, or all")
    parser.add_argument("--mount", action="append", default=[], metavar="SRC[:DST[:ro]]", help="must be there")
    parser.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="NAME alone: as it is here")
    parser.add_argument("--secret", action="append", default=[], metavar="NAME[=FILE]", help="no inspection shows it")
    parser.add_argument("--shm-size", default="8g", metavar="SIZE", help="of /dev/shm (8g)")
    parser.add_argument("--ipc", choices=("private", "host"), default="private", help="host: share /dev/shm with it")
    parser.add_argument("--ulimit", action="append", default=[], metavar="NAME=SOFT[:HARD]", help="e.g. memlock=-1")
    parser.add_argument("--memory", metavar="SIZE", help="by default all that the host has")
    parser.add_argument("--cpus", default="", metavar="LIST", help="e.g. 0-3; by default those that this process has")
    parser.add_argument("--network", default="", metavar="NAME", help="as the engine takes it; host for several nodes")
    parser.add_argument("--slurm", action="store_true", help="one rank of several that srun started, on any node")
    parser.add_argument("--user", metavar="UID[:GID]", help="by default whoever calls")
    parser.add_argument("--workdir", default="", metavar="DIR", help="in the container")
    parser.add_argument("--name", default="", help="of the container; by default a new one")
    parser.add_argument("--grace", type=float, default=120.0, metavar="SECONDS", help="from SIGTERM to SIGKILL (120)")
    parser.add_argument("--lock", type=Path, default=LOCK_FILE, metavar="FILE", help="instead of containers/lock.json")


def run(options: argparse.Namespace) -> int:
    """The exit code of the command; 125 where the engine fails, 126 and 127 where the command cannot be started."""
    text, command = options.reference or options.image, options.command_line
    if not text:
        raise ContainerError("name an image: python -m containers run lane -- train ..., or --image REFERENCE")
    if options.reference and options.image:
        raise ContainerError(f'image "{options.image}" and --image {options.reference}: give one of them')
    with DockerEngine() as engine:
        for name in remove_stale(engine):
            say(f"removed container {name}, left behind by a run that was killed")
        chosen = choose_image(engine, text, read_lock(options.lock), options.lock)
        if chosen.note:
            say(chosen.note)
        settings, secrets = run_settings(options, chosen, command, engine.host, os.environ)
        folder = write_secrets(secrets, settings.user.uid, settings.user.gid, os.environ)
        relay = Relay(sys.stdout.buffer, sys.stderr.buffer)
        try:
            code = run_container(
                engine,
                replace(settings, secrets=folder),
                options.name or f"roadfuse-run-{uuid.uuid4().hex[:12]}",
                Patience(grace_seconds=options.grace),
                relay,
                say,
            )
        finally:
            remove_secrets(folder)
        if relay.num_dropped_bytes:
            say(f"{relay.num_dropped_bytes} bytes of output were dropped: whoever read it had closed it")
    return code


def run_settings(
    options: argparse.Namespace, chosen: ChosenImage, command: Sequence[str], host: str, environ: Mapping[str, str]
) -> tuple[RunSettings, dict[str, str]]:
    """What is asked of the engine, checked against what this host has; and the secrets."""
    user = _user(options.user)
    ulimits = dict(parse_ulimit(text) for text in options.ulimit)
    here = find_gpus()
    asked = parse_gpus(options.gpus) if options.gpus is not None else ()
    gpus = choose_gpus(asked, options.gpus is not None, here, environ.get("CUDA_VISIBLE_DEVICES"), chosen.variant)
    warnings = check_gpus(gpus, here, chosen.cuda_version)
    fitted, more = fit_ulimits(ulimits, GPU_ULIMITS if gpus != () else {}, engine_limits(host))
    for warning in (*warnings, *more):
        say(warning)
    located = locate_folders(command, options.out, options.data, Path.cwd())
    mounts = [parse_mount(text, Path.cwd()) for text in options.mount]
    mounts += [Mount(located.data, str(located.data), read_only=True)] if located.data else []
    if located.out:
        _make_out(located.out, user, Path.cwd())
        mounts.append(Mount(located.out, str(located.out)))
    environment = slurm_environment(environ) if options.slurm else {}
    environment |= parse_environment(options.env, environ)
    settings = RunSettings(
        image=chosen.facts.image_id,
        command=located.command,
        user=user,
        digest=chosen.digest,
        gpus=gpus,
        mounts=check_mounts(mounts),
        environment=environment,
        shm_bytes=parse_size("--shm-size", options.shm_size),
        # Ranks in containers of their own see each other's shared memory and ports only so.
        ipc_host=options.ipc == "host" or options.slurm,
        ulimits=fitted,
        network=options.network or ("host" if options.slurm else ""),
        memory_bytes=parse_size("--memory", options.memory) if options.memory else 0,
        cpus=options.cpus or own_cpus(),
        workdir=options.workdir,
    )
    return settings, parse_secrets(options.secret, environ)


def own_cpus() -> str:
    """Those that this process is bound to, e.g. 0-3,8; empty where it may use all."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) == os.cpu_count():
        return ""
    return ",".join(map(str, mine))


def say(text: str) -> None:
    print(f"containers: {text}", file=sys.stderr, flush=True)


def _user(text: str | None) -> User:
    uid, gid = (os.getuid(), os.getgid()) if text is None else parse_user(text)
    try:
        known: pwd.struct_passwd | None = pwd.getpwuid(uid)
    except KeyError:
        known = None
    if gid is None:
        gid = known.pw_gid if known else uid
    groups = tuple(sorted(group for group in os.getgroups() if group != gid)) if text is None else ()
    return User(uid, gid, user_name(uid, known.pw_name if known else None), groups)


def _make_out(folder: Path, user: User, here: Path) -> None:
    """The run folder is a training's to make, and here on its behalf, with its parents under the working folder.

    Elsewhere its parent must be there: one that is not may be a disk that is not mounted.
    """
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    if len(missing) > 1 and not folder.is_relative_to(here):
        raise ContainerError(f"--out {folder}: its parent {folder.parent} does not exist; make it first")
    try:
        for path in reversed(missing):
            # Ranks on several nodes may all make it.
            path.mkdir(exist_ok=True)
            if os.geteuid() == 0:
                os.chown(path, user.uid, user.gid)
    except OSError as error:
        raise ContainerError(f"--out {folder}: cannot be made ({error.strerror}); give another") from None
