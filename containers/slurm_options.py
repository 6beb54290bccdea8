"""How a command runs in an image on the nodes of a Slurm allocation: by pyxis and enroot, or by docker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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

    `image` is a reference, or the path of a .sqsh file that `enroot import` made; `variables` are those that keep
    their value of the host where the image has its own.
    """
    source = image if image.endswith(".sqsh") else enroot_image(image)
    if for_sbatch:
        source = source.replace("#", "\\#")
    options = [f"--container-image={source}"]
    if mounts:
        options.append(f"--container-mounts={','.join(map(_mount, mounts))}")
    options += [f"--container-workdir={workdir}"] if workdir else []
    options += [f"--container-env={','.join(variables)}"] if variables else []
    # Its home is the node's, with the user's settings and packages for another Python.
    return [*options, "--no-container-mount-home", "--container-entrypoint"]


def enroot_image(image: str) -> str:
    """enroot's form of a reference: a # after the registry. By tag, as enroot takes it: a digest is left to a .sqsh
    file that was imported from a checked pull."""
    reference = parse_reference(image)
    tag = f":{reference.tag}" if reference.tag else f"@{reference.digest}"
    return f"{reference.registry}#{reference.repository}{tag}" if reference.registry else f"{reference.repository}{tag}"


def docker_rank_argv(image: str, argv: Sequence[str], mounts: Sequence[Path] = ()) -> list[str]:
    """What srun starts once a rank, on every node: a container each, which see each other as processes do."""
    return ["python", *wrapped_argv(image, argv, [str(mount) for mount in mounts], ["--slurm"])]


def _mount(mount: Mount) -> str:
    return f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"
