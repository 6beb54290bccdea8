"""What is built, as pure functions: arguments of the Dockerfile, argv of docker, labels. Recorded text tests them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from containers.errors import ContainerError
from containers.names import Release, our_reference, parse_reference

DEBIAN_SUITE = "bookworm"
DEBIAN_PYTHON = "3.11"
"""The one of that suite; what the wheels are collected for."""
SBOM_TOOL = "cyclonedx-bom==7.5.0"
MODELS = {"cpu": ("lane-small", "sign"), "cuda": ("lane", "sign-full")}
"""What `train` means in the images lane and sign: the full networks need GPUs."""
LABEL_PREFIX = "org.roadfuse"
REVISION_LABEL = "org.opencontainers.image.revision"
REVISION_VARIABLE = "PERCEPTION_GIT_REVISION"
DESCRIPTIONS = {
    "base": "Python and Open MPI, to build images for training on",
    "train": "Training of lane and sign detectors, with torch and Horovod",
    "lane": "Training of lane detectors: train, evaluate, predict, export",
    "sign": "Training of sign detectors: train, evaluate, predict, export",
}


@dataclass(frozen=True)
class ImagesPlan:
    """One build of all images, or of some."""

    release: Release
    base_image: str
    """What the engine knows it by: by digest, or the tag of one that was made here."""
    base_name: str
    """For the label: where it comes from."""
    variant: str = "cpu"
    """cpu or cuda."""
    python_version: str = DEBIAN_PYTHON
    nccl_packages: str = ""
    extra_packages: str = ""
    prefix: str = ""
    """REGISTRY/ORG[/TEAM] of the tags."""

    def tag(self, name: str) -> str:
        return our_reference(self.prefix, name, self.release).tagged

    def unlabelled_tag(self, name: str) -> str:
        """Of the image before what was installed in it is known."""
        return f"roadfuse/unlabelled-{name}:{self.release}"

    @property
    def file_date(self) -> datetime.date:
        """No file in an image is younger. Begin of the month before the release's: it has to lie before any build, for
        which files from the future would be its own, and packed again in every layer."""
        begin = datetime.date(2000 + self.release.year, self.release.month, 1)
        return (begin - datetime.timedelta(days=1)).replace(day=1)

    @property
    def source_date_epoch(self) -> int:
        """The same in seconds, UTC."""
        return int(datetime.datetime.combine(self.file_date, datetime.time(), datetime.UTC).timestamp())

    @property
    def system_packages(self) -> tuple[str, ...]:
        return ("ca-certificates", f"python{self.python_version}", f"python{self.python_version}-venv")


def make_plan(
    gpu: bool,
    base: str | None,
    release: Release | None,
    today: datetime.date,
    python_version: str = DEBIAN_PYTHON,
    nccl_packages: str = "",
    extra_packages: str = "",
    prefix: str = "",
) -> ImagesPlan:
    """Raises ContainerError for a base that is not pinned, or missing where it cannot be made here, and for a release
    too far ahead."""
    variant = "cuda" if gpu else "cpu"
    numbers = release or Release(today.year % 100, today.month)
    release = Release(numbers.year, numbers.month, "" if gpu else "cpu")
    if base is None:
        if gpu:
            raise ContainerError(
                "--gpu needs --base: an image with CUDA's compiler, by digest, e.g. "
                "--base nvcr.io/nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:..."
            )
        if python_version != DEBIAN_PYTHON:
            raise ContainerError(
                f"--python {python_version}: Debian {DEBIAN_SUITE} has {DEBIAN_PYTHON}; give another base by --base"
            )
        base_image = f"roadfuse/debian:{DEBIAN_SUITE}-{release.year:02d}.{release.month:02d}"
        base_name = f"debian {DEBIAN_SUITE}, from its packages"
    else:
        reference = parse_reference(base)
        if not reference.digest:
            raise ContainerError(
                f"--base {base}: has no digest, so that a build tomorrow may be another; append @sha256:..."
            )
        base_image, base_name = reference.pinned, str(reference)
    plan = ImagesPlan(release, base_image, base_name, variant, python_version, nccl_packages, extra_packages, prefix)
    if plan.file_date >= today:
        raise ContainerError(
            f"--release {release.year:02d}.{release.month:02d}: more than a month ahead; give an earlier one"
        )
    return plan


def build_arguments(plan: ImagesPlan) -> dict[str, str]:
    lane_model, sign_model = MODELS[plan.variant]
    return {
        "BASE_IMAGE": plan.base_image,
        "PYTHON_VERSION": plan.python_version,
        "SOURCE_DATE_EPOCH": str(plan.source_date_epoch),
        "SYSTEM_PACKAGES": " ".join(plan.system_packages),
        "NCCL_PACKAGES": plan.nccl_packages,
        "EXTRA_PACKAGES": plan.extra_packages,
        "VARIANT": plan.variant,
        "LANE_MODEL": lane_model,
        "SIGN_MODEL": sign_model,
    }


def build_argv(
    docker: Sequence[str],
    plan: ImagesPlan,
    target: str,
    context: Path,
    network: str = "",
    build_round: str = "",
    output: Path | None = None,
) -> list[str]:
    """`build_round`: another one uses nothing that an earlier build left. `output`: a folder that gets the target's
    files; else the target becomes an image, without labels."""
    argv = [*docker, "build", "--progress=plain", f"--file={context}/Dockerfile", f"--target={target}"]
    argv += [f"--build-arg={name}={value}" for name, value in build_arguments(plan).items()]
    argv += [f"--network={network}"] if network else []
    argv += [f"--build-arg=BUILD_ROUND={build_round}"] if build_round else []
    argv += [f"--output=type=local,dest={output}"] if output else [f"--tag={plan.unlabelled_tag(target)}"]
    return [*argv, str(context)]


def label_argv(docker: Sequence[str], tag: str) -> list[str]:
    """The second, tiny build: its Dockerfile is `label_dockerfile`, on standard input, without a context."""
    return [*docker, "build", "--progress=plain", f"--tag={tag}", "-"]


def label_dockerfile(image: str, labels: Mapping[str, str]) -> str:
    """Runs record the revision too: an image has no checkout to ask."""
    lines = [f"FROM {image}", *(f"LABEL {name}={_quoted(labels[name])}" for name in sorted(labels))]
    revision = labels.get(REVISION_LABEL)
    lines += [f"ENV {REVISION_VARIABLE}={_quoted(revision)}"] if revision else []
    return "\n".join(lines) + "\n"


def image_labels(
    plan: ImagesPlan,
    name: str,
    versions: Mapping[str, str],
    revision: str,
    created: str,
    base_id: str,
) -> dict[str, str]:
    """`versions` is what the image itself answered; `base_id` the ID of the base that was built on."""
    standard = {
        "title": f"roadfuse {name}",
        "description": DESCRIPTIONS[name],
        "version": str(plan.release),
        "revision": revision,
        "created": created,
        "licenses": "Apache-2.0",
        "base.name": plan.base_name,
    }
    if "@" in plan.base_image:
        standard["base.digest"] = plan.base_image.rsplit("@", 1)[1]
    own = {
        "image": name,
        "variant": plan.variant,
        "base.id": base_id,
        **{f"version.{part}": version for part, version in versions.items()},
    }
    return {
        **{f"org.opencontainers.image.{key}": value for key, value in standard.items() if value},
        **{f"{LABEL_PREFIX}.{key}": value for key, value in own.items() if value},
    }


def _quoted(text: str) -> str:
    """A Dockerfile's double quotes, in which a dollar sign would be a variable."""
    return json.dumps(text, ensure_ascii=False).replace("$", "\\$")
