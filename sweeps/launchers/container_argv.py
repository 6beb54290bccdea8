"""How a job's command becomes one inside its container image: on this host, and as steps of a Slurm job.

Everything that the command names stays at its own path: its run folder, the working folder, and each absolute path
among its words are mounted where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from containers.errors import ContainerError
from containers.lock import read_lock
from containers.names import is_short_name
from containers.run_options import DIGEST_VARIABLE, Mount, wrapped_argv
from containers.slurm_options import pyxis_options
from perception.distributed.failure import FAILURE_FOLDER_VARIABLE
from perception.errors import UserError
from sweeps.job import Job


def mounted_folders(job: Job, working_folder: Path) -> list[Path]:
    """Folders that a job's container sees; none lies within another.

    >>> job = Job("a", ("train", "--data", "/data/culane", "--list=/data/culane/train.txt"), Path("/home/anna/runs/a"))
    >>> [str(folder) for folder in mounted_folders(job, Path("/home/anna"))]
    ['/data/culane', '/home/anna']
    """
    wanted = {job.run_folder, working_folder}
    for word in job.argv[1:]:
        path = Path(word.rpartition("=")[2])
        if path.is_absolute() and len(path.parts) > 1:
            wanted.add(path.parent if path.suffix else path)
    return sorted(path for path in wanted if not wanted.intersection(path.parents))


def command_in_image(job: Job) -> tuple[str, ...]:
    """Its words, with the image's own Python in place of this host's."""
    words = wrapped_argv(job.image, job.argv)
    return tuple(words[words.index("--") + 1 :])


def local_container_argv(job: Job, argv: Sequence[str], told: Sequence[str], has_gpus: bool) -> list[str]:
    """By `python -m containers run` on this host; `told`: names of variables that the job is to see."""
    mounts = [str(folder) for folder in mounted_folders(job, Path.cwd())]
    # GPUs and cores are those that the process itself was given.
    options = [*([] if has_gpus else ["--gpus=none"]), *(f"--env={name}" for name in told)]
    return [sys.executable, *wrapped_argv(job.image, argv, mounts, [*options, f"--workdir={Path.cwd()}"])]


def pyxis_words(job: Job, working_folder: Path) -> list[str]:
    """Options of srun, where the pyxis plug-in is installed."""
    mounts = [Mount(folder, str(folder)) for folder in mounted_folders(job, working_folder)]
    # The image's own value of a variable would win over the plan's.
    told = sorted({*job.environment, *image_environment(job)})
    try:
        return pyxis_options(job.image, mounts, str(working_folder), told)
    except ContainerError as error:
        raise UserError(f"job {job.name}: {error}") from None


def pyxis_preamble(job: Job) -> list[str]:
    """Lines of a batch script before its exports: pyxis hands all variables of the host on to the container.

    What runs is to be the image's Python and code, for which its digest stands, and not a checkout's.
    """
    if not job.image:
        return []
    return [
        "# A login shell, in which enroot begins, would take Debian's PATH for the image's.",
        "export ENROOT_LOGIN_SHELL=no",
        "# The host's packages are of another Python, and its cache is not mounted.",
        "unset PYTHONPATH PYTHONHOME XDG_CACHE_HOME",
        "# The code is the image's own, also where the working folder is a checkout; PYTHONSAFEPATH= takes that one.",
        'export PYTHONSAFEPATH="${PYTHONSAFEPATH-1}"',
    ]


def docker_words(job: Job, working_folder: Path) -> list[str]:
    """What stands before a rank's command where each rank runs in a container of its node's docker."""
    mounts = [str(folder) for folder in mounted_folders(job, working_folder)]
    told = [*job.environment, FAILURE_FOLDER_VARIABLE]
    options = ["--slurm", *(f"--env={name}" for name in told), f"--workdir={working_folder}"]
    return [job.argv[0], *wrapped_argv(job.image, [], mounts, options)]


def pinned(job: Job) -> Job:
    """With the reference and digest of its image, where it has the name of one in the lock file."""
    if not job.image or not is_short_name(job.image):
        return job
    try:
        return replace(job, image=str(read_lock().image(job.image).pinned))
    except ContainerError as error:
        raise UserError(f"job {job.name}: {error}") from None


def image_environment(job: Job) -> dict[str, str]:
    """A run records the digest of its image, which only who starts it knows.

    >>> image_environment(Job("a", ("train",), Path("/runs/a"), image="nvcr.io/org/lane:26.07-py3@sha256:1f"))
    {'PERCEPTION_IMAGE_DIGEST': 'sha256:1f'}
    """
    _, at, digest = job.image.partition("@")
    return {DIGEST_VARIABLE: digest} if at else {}
