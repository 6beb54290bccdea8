"""`lock`: show what is pinned, or pin a name to the image that a reference stands for on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from containers.engine import DockerEngine, Engine
from containers.errors import ContainerError
from containers.lock import LOCK_FILE, Lock, LockedImage, read_lock, update_lock
from containers.names import is_short_name, parse_our_reference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="what people will call it, e.g. lane; without: show what is pinned")
    parser.add_argument("reference", nargs="?", help="REGISTRY/ORG/NAME:YY.MM-py3, pulled or pushed from here before")
    parser.add_argument("--lock", type=Path, default=LOCK_FILE, metavar="FILE", help="instead of containers/lock.json")


def run(options: argparse.Namespace) -> int:
    if options.name is None:
        print("\n".join(lock_lines(read_lock(options.lock), options.lock)))
        return 0
    if not is_short_name(options.name):
        raise ContainerError(f'"{options.name}": give the name first: python -m containers lock lane REFERENCE')
    if options.reference is None:
        locked = read_lock(options.lock).image(options.name, options.lock)
        print("\n".join(lock_lines(Lock({locked.name: locked}), options.lock)))
        return 0
    with DockerEngine() as engine:
        locked = locked_image(engine, options.name, options.reference)
    before = read_lock(options.lock).images.get(options.name)
    update_lock(options.lock, [locked])
    if before == locked:
        print(f"{options.name}: was pinned to this before")
    else:
        print(f"{options.name}: {f'{before.pinned} -> ' if before else ''}{locked.pinned}")
    return 0


def locked_image(engine: Engine, name: str, text: str) -> LockedImage:
    """What is pinned for a reference. Raises ContainerError where its image is not here, or was in no registry."""
    reference = parse_our_reference(text)
    facts = engine.image(reference.pinned if reference.digest else reference.tagged)
    if facts is None:
        raise ContainerError(f"{text}: is not on this machine; get it by `python -m containers pull {text}`")
    prefix = f"{reference.full_repository}@"
    digests = [digest.removeprefix(prefix) for digest in facts.digests if digest.startswith(prefix)]
    if reference.digest:
        digests = [reference.digest]
    if len(digests) != 1:
        found = "no digest" if not digests else f"{len(digests)} digests"
        raise ContainerError(
            f"{text}: has {found} of {reference.full_repository}, since it was "
            f"{'pushed there more than once; append @sha256:... of one' if digests else 'neither pushed nor pulled'}"
        )
    return LockedImage(
        name, reference.tagged, digests[0], facts.image_id, facts.platform, facts.size_bytes, facts.created
    )


def lock_lines(lock: Lock, path: Path) -> list[str]:
    if not lock.images:
        return [f"{path}: pins no image yet; `make images REGISTRY=HOST:PORT/ORG` builds, pushes and pins ours"]
    width = max(map(len, lock.images))
    rows = (lock.images[name] for name in sorted(lock.images))
    return [f"{row.name:{width}}  {row.pinned}  {row.platform}  {row.size_bytes / 1e6:,.0f} MB" for row in rows]
