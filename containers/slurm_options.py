"""How a command runs in an image on the nodes of a Slurm allocation: by pyxis and enroot, or by docker. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from containers.errors import ContainerError
from containers.names import parse_reference
from containers.run_options import Mount, wrapped_argv


def pyxis_options(
    image: str,
    mounts: Sequence[Mount] = (),
    workdir: str = "",
    variables: Sequence[str] = (),
    for_sbatch: bool = False,
) -> list[str]:
    """Options of srun, or of `#SBATCH` lines (`for_sbatch`), where # begins a comment and is escaped.

    `image` is a reference, or the absolute path of a .sqsh file that `enroot import` made; `variables` are those that
    keep their value of the host where the image has its own.
    """
    source = image if image.endswith(".sqsh") else enroot_image(image)
    if image.endswith(".sqsh") and not image.startswith("/"):
        # Where it began with a letter, pyxis would look for it on Docker Hub.
        raise ContainerError(f'image "{image}": give the absolute path of a .sqsh file, seen by every node')
    if for_sbatch:
        source = source.replace("#", "\\#")
    options = [f"--container-image={source}"]
    if mounts:
        options.append(f"--container-mounts={','.join(map(_mount, mounts))}")
    options += [f"--container-workdir={workdir}"] if workdir else []
    options += [f"--container-env={','.join(variables)}"] if variables else []
    # The node's home has the user's settings and packages for another Python. The entry point runs once a node, before
    # the ranks and without their command: it finds them a home they can write to, and turns no `train` into more words.
    return [*options, "--no-container-mount-home", "--container-entrypoint"]


def enroot_image(image: str) -> str:
    """enroot's form of a reference: a # after the registry, and a digest in the place of a tag.

    Every enroot that pyxis takes (3.1 and later) knows a digest in that form; only 4.0 and later know `@`.

    >>> enroot_image("nvcr.io/org/lane:26.11-py3")
    'nvcr.io#org/lane:26.11-py3'
    """
    reference = parse_reference(image)
    registry = f"{reference.registry}#" if reference.registry else ""
    return f"{registry}{reference.repository}:{reference.digest or reference.tag}"


def docker_rank_argv(image: str, argv: Sequence[str], mounts: Sequence[Path] = ()) -> list[str]:
    """What srun starts once a rank, on every node: a container each, which see each other as processes do."""
    return ["python", *wrapped_argv(image, argv, [str(mount) for mount in mounts], ["--slurm"])]


def _mount(mount: Mount) -> str:
    for path in (str(mount.source), mount.target):
        wrong = re.search(r"[,:\"$`\\\x00-\x1f\x7f]", path)
        if wrong:
            raise ContainerError(f"{path!r}: pyxis cannot mount a path with {wrong[0]!r} in it; choose another folder")
    return f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"
