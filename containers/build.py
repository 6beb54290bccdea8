"""`build`: all images of this project on this machine, from Debian's packages or a pinned base; pushed and locked."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from containers.build_context import build_context
from containers.build_log import BuildLog
from containers.debian_base import bootstrap_tar
from containers.docker_client import find_docker
from containers.engine import DockerEngine, ImageFacts
from containers.errors import ContainerError
from containers.images_plan import (
    DEBIAN_PYTHON,
    DEBIAN_SUITE,
    LABEL_PREFIX,
    ImagesPlan,
    build_argv,
    image_labels,
    label_argv,
    label_dockerfile,
    make_plan,
)
from containers.lock import LOCK_FILE
from containers.names import IMAGES, check_image_name, parse_release
from containers.publish import check_registry, push_and_lock
from containers.wheels import (
    WheelSource,
    cache_folder,
    collect,
    fitting_horovod_wheels,
    read_requirements,
)

REPOSITORY = Path(__file__).resolve().parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="*", default=["all"], help=f"of {', '.join(IMAGES)}; by default all")
    parser.add_argument("--release", help="YY.MM of the tags, by default this month")
    parser.add_argument("--registry", default="", metavar="PREFIX", help="of the tags: REGISTRY[/ORG[/TEAM]]")
    parser.add_argument("--push", action="store_true", help="push to --registry, and pin what was pushed in the lock")
    parser.add_argument("--lock", type=Path, default=LOCK_FILE, metavar="FILE", help="instead of containers/lock.json")
    parser.add_argument("--base", metavar="REFERENCE@DIGEST", help="by default one is made from Debian's packages")
    parser.add_argument("--gpu", action="store_true", help="for GPUs: needs --base with CUDA's compiler; untested")
    parser.add_argument("--python", default=DEBIAN_PYTHON, metavar="3.N", help="the one of the base")
    parser.add_argument("--nccl", default="", metavar="PACKAGES", help='e.g. "libnccl2=... libnccl-dev=..."')
    parser.add_argument("--packages", default="", help="more Debian packages for the base, NAME or NAME=VERSION")
    parser.add_argument("--torch-version", default=os.environ.get("TORCH_VERSION", ""), help="another than the pinned")
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX", ""), metavar="URL", help="for your CUDA")
    parser.add_argument("--wheels", type=Path, action="append", default=[], metavar="DIR", help="where pip looks too")
    parser.add_argument("--network", default="", help="of the build's steps, as docker takes it, e.g. host")
    parser.add_argument("--fresh", action="store_true", help="use nothing that an earlier build left but wheels")
    parser.add_argument("--logs", type=Path, default=Path("build/images"), metavar="DIR", help="for logs and SBOMs")


def run(options: argparse.Namespace) -> int:
    names = chosen_images(options.images)
    if options.push and not options.registry:
        raise ContainerError("--push needs --registry: where to, e.g. --registry 127.0.0.1:5000")
    for folder in options.wheels:
        if not folder.is_dir():
            raise ContainerError(f"--wheels {folder}: no such folder")
    release = parse_release(f"{options.release}-py3") if options.release else None
    today = datetime.datetime.now(datetime.UTC).date()
    plan = make_plan(
        options.gpu, options.base, release, today, options.python, options.nccl, options.packages, options.registry
    )
    if options.push:
        check_registry(plan.tag(names[0]))
    source = WheelSource(options.python, options.torch_version, options.torch_index, tuple(options.wheels))
    with DockerEngine() as engine:
        log = BuildLog(options.logs)
        images = build_images(plan, names, source, engine, log, options.network, options.fresh)
        for name, image in images.items():
            print(f"{plan.tag(name)}  {image.size_bytes / 1e6:,.0f} MB  {image.image_id}")
        if options.push:
            push_and_lock(engine, {name: plan.tag(name) for name in names}, options.lock, log.say)
    return 0


def chosen_images(words: Sequence[str]) -> list[str]:
    """In the order in which they are built on each other."""
    if list(words) == ["all"]:
        return list(IMAGES)
    for word in words:
        check_image_name(word)
    return [name for name in IMAGES if name in words]


def build_images(
    plan: ImagesPlan,
    names: Sequence[str],
    source: WheelSource,
    engine: DockerEngine,
    log: BuildLog,
    network: str = "",
    fresh: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, ImageFacts]:
    """Build, check, label and list them. Raises ContainerError where a step fails, with the likeliest cause."""
    docker = find_docker(environ)
    cache = cache_folder(environ, "image-builds")
    requirements = read_requirements(REPOSITORY, source.torch_version)
    collection = collect(requirements, source, cache, log.run)
    horovod_cache = cache_folder(environ, "wheels")
    known = fitting_horovod_wheels(horovod_cache, requirements, collection.torch_version, plan.python_version)
    _ensure_base(plan, engine, cache, log, fresh)
    client = {**docker.environment, "DOCKER_HOST": engine.host}
    revision, created = _revision(REPOSITORY), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    base = engine.image(plan.base_image)
    with build_context(
        cache,
        REPOSITORY,
        requirements.files(),
        collection.wheels,
        collection.sbom_wheels,
        known,
        plan.source_date_epoch,
    ) as context:
        built: dict[str, ImageFacts] = {}
        # All images of this build share it, so that each step is made once.
        build_round = created if fresh else ""
        for name in names:
            argv = build_argv(docker.argv, plan, name, context, network, build_round)
            log.run(argv, f"building {name}", client, log.folder / f"{name}.log")
            built[name] = _label(plan, name, docker.argv, client, engine, log, revision, created, base)
        if list(names) != ["base"] and not known:
            _keep_horovod(plan, docker.argv, client, context, network, build_round, horovod_cache, log)
    return built


def _ensure_base(plan: ImagesPlan, engine: DockerEngine, cache: Path, log: BuildLog, fresh: bool) -> None:
    """A base by digest is fetched by the build itself; our own is made."""
    if "@" in plan.base_image or (engine.image(plan.base_image) and not fresh):
        return
    tar = bootstrap_tar(DEBIAN_SUITE, plan.system_packages, plan.source_date_epoch, cache, log.run, fresh)
    log.say(f"importing {tar.name} ({tar.stat().st_size / 1e6:,.0f} MB)")
    engine.import_tar(str(tar), plan.base_image, ['CMD ["bash"]'])


def _label(
    plan: ImagesPlan,
    name: str,
    docker: Sequence[str],
    client: Mapping[str, str],
    engine: DockerEngine,
    log: BuildLog,
    revision: str,
    created: str,
    base: ImageFacts | None,
) -> ImageFacts:
    """Ask the image what is in it, and write that on it."""
    unlabelled = plan.unlabelled_tag(name)
    python = "/opt/roadfuse/bin/python"
    versions = json.loads(engine.output(unlabelled, [python, "/usr/local/lib/roadfuse/versions.py"]))
    labels = image_labels(plan, name, versions, revision, created, base.image_id if base else "")
    dockerfile = label_dockerfile(unlabelled, labels)
    log.run(label_argv(docker, plan.tag(name)), f"labelling {name}", client, log.folder / "labels.log", dockerfile)
    if name != "base":
        sbom = engine.output(unlabelled, ["cat", "/usr/share/roadfuse/sbom.json"])
        (log.folder / f"{name}.sbom.json").write_bytes(sbom)
    engine.untag(unlabelled)
    image = engine.image(plan.tag(name))
    if image is None or image.labels.get(f"{LABEL_PREFIX}.image") != name:
        raise ContainerError(f"{plan.tag(name)}: is not there after its build; see {log.folder}/labels.log")
    return image


def _keep_horovod(
    plan: ImagesPlan,
    docker: Sequence[str],
    client: Mapping[str, str],
    context: Path,
    network: str,
    build_round: str,
    cache: Path,
    log: BuildLog,
) -> None:
    """Bring a wheel that was built in the image into the user's cache, where set-up finds it too: the very same one,
    by the round of the images' build."""
    output = log.folder / "horovod-wheel"
    argv = build_argv(docker, plan, "horovod-wheel", context, network, build_round, output)
    log.run(argv, "keeping Horovod's wheel", client, log.folder / "horovod-wheel.log")
    for record in output.glob("*/wheel.json"):
        kept = cache / record.parent.name
        if not (kept / "wheel.json").exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            record.parent.rename(kept)


def _revision(repository: Path) -> str:
    """Of the commit, with -dirty where files differ from it; empty outside a checkout."""
    argv = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
