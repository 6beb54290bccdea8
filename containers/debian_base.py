"""A base image for CPUs made from Debian's packages, on a machine that can pull none."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from containers.errors import ContainerError

DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
)
"""No manuals, but every licence."""
MOUNT_POINTS = ("etc/hosts", "etc/resolv.conf", "etc/hostname")
"""Files that every builder mounts its own over: empty ones in the base. Where they are missing, a builder makes and
removes them, which shows in the time of their folder; and mmdebstrap would leave those of this machine."""


def bootstrap_argv(suite: str, packages: Sequence[str], tar: Path) -> list[str]:
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
    argv += [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
    hosts = " ".join(f'"$1"/{name}' for name in MOUNT_POINTS)
    return [*argv, '--aptopt=Acquire::Languages "none"', f"--customize-hook=rm -f {hosts}", suite, str(tar)]


def bootstrap_tar(
    suite: str,
    packages: Sequence[str],
    epoch: int,
    cache: Path,
    run: Callable[[Sequence[str], str, Mapping[str, str]], None],
    fresh: bool,
) -> Path:
    """The tar of a whole small system, from the cache where it was made for this suite, packages and month before."""
    made_by = [*bootstrap_argv(suite, packages, Path("base.tar")), str(epoch)]
    key = hashlib.sha256("\0".join(made_by).encode()).hexdigest()[:16]
    tar = cache / f"debian-{suite}-{key}.tar"
    if tar.is_file() and not fresh:
        return tar
    if shutil.which("mmdebstrap") is None:
        raise ContainerError(
            "no mmdebstrap to make a base image with: install it (Debian, Ubuntu: apt-get install mmdebstrap), "
            "or give a base by --base REFERENCE@sha256:..."
        )
    cache.mkdir(parents=True, exist_ok=True)
    part = tar.with_name(f".{tar.name}.part.tar")
    part.unlink(missing_ok=True)
    run(
        bootstrap_argv(suite, packages, part),
        f"making a base image from Debian {suite}'s packages",
        {"SOURCE_DATE_EPOCH": str(epoch)},
    )
    _add_mount_points(part, epoch)
    part.replace(tar)
    return tar


def _add_mount_points(tar: Path, epoch: int) -> None:
    with tarfile.open(tar, "a") as archive:
        for name in MOUNT_POINTS:
            entry = tarfile.TarInfo(f"./{name}")
            entry.mtime, entry.mode = epoch, 0o644
            archive.addfile(entry)
