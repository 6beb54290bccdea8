"""Secrets for one run, as files in memory that only the user of the run can read; gone with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from containers.errors import ContainerError


def write_secrets(secrets: Mapping[str, str], uid: int, gid: int, environ: Mapping[str, str]) -> Path | None:
    """The folder with a file a secret; None where there are none. The caller removes it."""
    if not secrets:
        return None
    if os.geteuid() not in (0, uid):
        raise ContainerError(f"--secret: cannot be given to user {uid} by user {os.geteuid()}; leave --user out")
    folder = Path(tempfile.mkdtemp(prefix="roadfuse-secrets-", dir=_memory(environ)))
    try:
        for name, value in secrets.items():
            file = folder / name
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                opened.write(value)
            _give(file, uid, gid)
        _give(folder, uid, gid)
    except BaseException:
        remove_secrets(folder)
        raise
    return folder


def remove_secrets(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _give(path: Path, uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, uid, gid)


def _memory(environ: Mapping[str, str]) -> str:
    """A folder that is no disk."""
    for folder in (environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"):
        if folder and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ContainerError("--secret: neither XDG_RUNTIME_DIR nor /dev/shm can be written, and secrets go to no disk")
