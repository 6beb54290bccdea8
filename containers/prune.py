"""Remove images that nothing needs any more, here, in a registry or in the cache; shows what it would do first.

Never what the lock file pins, nor what a container uses, nor images of other projects.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from containers.errors import ContainerError
from containers.listing import (
    ListedImage,
    format_age,
    is_ours,
    local_images,
    names_in_lock,
    parse_repository,
    remote_images,
)
from containers.lock import Lock
from containers.names import ImageReference
from containers.progress import format_bytes, progress_for
from containers.pull import PullSettings, add_source_arguments, open_source, settings_of

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class PrunePolicy:
    """Both must be so for an image to go: it is not among the last of its name, and it is old."""

    keep_last: int = 3
    """Of each name, whatever their age."""
    older_than_days: float = 30.0


@dataclass(frozen=True)
class InUse:
    """What containers need, as engine and registries call it."""

    image_ids: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    image: ListedImage
    remove: bool
    reason: str


def decide(
    images: Sequence[ListedImage], lock: Lock, in_use: InUse, policy: PrunePolicy, now_seconds: float
) -> list[Decision]:
    """What becomes of each image, in the order of their repositories, the newest first. Pure."""
    by_repository: dict[str, list[ListedImage]] = {}
    for image in images:
        by_repository.setdefault(image.reference.full_repository, []).append(image)
    decisions = []
    for repository in sorted(by_repository):
        newest_first = sorted(
            by_repository[repository],
            key=lambda image: (image.created_seconds or 0.0, image.reference.tag),
            reverse=True,
        )
        for place, image in enumerate(newest_first):
            reason = _why_kept(image, place, lock, in_use, policy, now_seconds)
            decisions.append(Decision(image, not reason, reason or _why_removed(image, policy, now_seconds)))
    return decisions


def keep_shared(decisions: Iterable[Decision]) -> list[Decision]:
    """Of a registry, which deletes a manifest with all its names: keep one that a kept name, or kept index, needs."""
    listed = list(decisions)
    kept = {digest for one in listed if not one.remove for digest in (one.image.reference.digest, *one.image.parts)}
    return [
        Decision(one.image, False, "another name that is kept needs it")
        if one.remove and one.image.reference.digest in kept
        else one
        for one in listed
    ]


def _why_kept(
    image: ListedImage, place: int, lock: Lock, in_use: InUse, policy: PrunePolicy, now_seconds: float
) -> str:
    names = names_in_lock(image, lock)
    if names:
        return f"the lock file pins {', '.join(names)} to it"
    if any(locked.reference == image.reference.tagged for locked in lock.images.values()):
        return "the lock file names its tag"
    if image.image_id in in_use.image_ids or {image.reference.digest, *image.parts} & in_use.digests:
        return "a container uses it"
    if place < policy.keep_last:
        return f"among the last {policy.keep_last}"
    if image.created_seconds is None:
        return "of unknown age"
    if now_seconds - image.created_seconds < policy.older_than_days * 86400:
        return f"not older than {policy.older_than_days:g} days"
    return ""


def _why_removed(image: ListedImage, policy: PrunePolicy, now_seconds: float) -> str:
    age = now_seconds - (image.created_seconds or now_seconds)
    return f"{format_age(age)} old, not among the last {policy.keep_last}"


def prune_local(
    settings: PullSettings, policy: PrunePolicy, repositories: Collection[str], apply: bool
) -> tuple[list[Decision], list[str]]:
    """Decide over the engine's images, remove if told so; returns the decisions and what the engine refused."""
    from containers.engine import DockerEngine
    from containers.pull_engine import DockerImages

    def wanted(reference: ImageReference) -> bool:
        return reference.full_repository in repositories if repositories else is_ours(reference, settings.lock)

    refused = []
    with DockerEngine() as engine:
        store = DockerImages(engine)
        listed = local_images(store.images(), wanted)
        in_use = InUse(frozenset(store.used_image_ids()))
        decisions = decide(listed, settings.lock, in_use, policy, time.time())
        for decision in decisions if apply else ():
            if decision.remove:
                try:
                    store.remove(decision.image.reference.tagged)
                except ContainerError as error:
                    refused.append(str(error))
    return decisions, refused


def prune_remote(
    settings: PullSettings, policy: PrunePolicy, repositories: Sequence[ImageReference], apply: bool
) -> tuple[list[Decision], list[str]]:
    """The same for repositories of registries. Their disks get free by their own garbage collection."""
    in_use = _used_in_engine(settings)
    decisions: list[Decision] = []
    for repository in repositories:
        # Only the registry itself: what a mirror holds is its own business.
        with open_source(repository, settings, progress_for(sys.stderr)) as source:
            origin = source.registries[-1]
            listed, _ = remote_images(repository, origin, None)
            decided = keep_shared(decide(listed, settings.lock, in_use, policy, time.time()))
        decisions += decided
        removed = {one.image.reference.digest for one in decided if one.remove}
        if apply and removed:
            _delete(repository, sorted(removed), settings)
    return decisions, []


def _delete(repository: ImageReference, digests: Sequence[str], settings: PullSettings) -> None:
    from containers.credentials import find_credentials
    from containers.registry import Registry, endpoints

    say = progress_for(sys.stderr).say
    endpoint = endpoints(repository.registry, repository.repository, (), settings.plain_http)[-1]
    credentials = find_credentials(repository.registry, settings.environment, say)
    registry = Registry(endpoint, credentials, settings.policy, say, actions="pull,delete")
    for digest in digests:
        registry.delete_manifest(digest)


def _used_in_engine(settings: PullSettings) -> InUse:
    """What containers of this engine need. Without an engine there are no containers here, and that is said."""
    from containers.engine import DockerEngine
    from containers.pull_engine import DockerImages

    try:
        with DockerEngine() as engine:
            store = DockerImages(engine)
            used = store.used_image_ids()
            digests = {
                digest.partition("@")[2]
                for image in store.images()
                if image.image_id in used
                for digest in image.digests
            }
    except ContainerError as error:
        print(f"note: {error}; no container of this machine is taken into account", file=sys.stderr)
        return InUse()
    return InUse(frozenset(used), frozenset(digests))


def parse_size(text: str) -> int:
    """Bytes.

    >>> parse_size("20G"), parse_size("1.5M"), parse_size("0")
    (20000000000, 1500000, 0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)B?", text.strip().upper())
    if found is None:
        raise ContainerError(f'size "{text}": must be a number with K, M, G or T, e.g. 20G')
    return int(float(found[1]) * _UNITS[found[2]])


def lines(decisions: Sequence[Decision], apply: bool) -> list[str]:
    """What is done, or would be, and why; what is kept too, so that nobody wonders."""
    verb = "removed" if apply else "would remove"
    said = []
    for one in decisions:
        image = f"{one.image.reference.tagged}, {format_bytes(one.image.size_bytes)}"
        said.append(f"{verb if one.remove else 'keeps'} {image}: {one.reason}")
    num_removed = sum(one.remove for one in decisions)
    said.append(f"{verb} {num_removed} of {len(decisions)} names")
    if num_removed and not apply:
        said.append("nothing was removed: --apply does it")
    return said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy = PrunePolicy()
    parser.add_argument("repositories", nargs="*", metavar="REPOSITORY", help="only these; default: ours in the engine")
    parser.add_argument("--remote", action="store_true", help="in the registry of each REPOSITORY, which must be named")
    parser.add_argument(
        "--keep-last", type=int, default=policy.keep_last, metavar="N", help="of each name (default: %(default)s)"
    )
    parser.add_argument(
        "--older-than-days", type=float, default=policy.older_than_days, metavar="D", help="default: %(default)s"
    )
    parser.add_argument(
        "--cache-size", metavar="SIZE", help="prune the cache of blobs instead, down to e.g. 20G, longest unused first"
    )
    parser.add_argument("--apply", action="store_true", help="remove; without it, only shows what would be")
    add_source_arguments(parser)


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options, os.environ)
    if options.keep_last < 0 or options.older_than_days < 0:
        raise ContainerError("--keep-last and --older-than-days must be 0 or more")
    if options.cache_size is not None:
        return _prune_cache(settings, parse_size(options.cache_size), options.apply)
    policy = PrunePolicy(options.keep_last, options.older_than_days)
    repositories = [parse_repository(name, settings.lock) for name in options.repositories]
    if options.remote:
        if not repositories:
            raise ContainerError(
                "--remote: name each repository to prune, REGISTRY/ORG/NAME or a name of the lock file"
            )
        decisions, refused = prune_remote(settings, policy, repositories, options.apply)
    else:
        names = {repository.full_repository for repository in repositories}
        decisions, refused = prune_local(settings, policy, names, options.apply)
    print("\n".join(lines(decisions, options.apply)))
    for line in refused:
        print(f"not removed: {line}", file=sys.stderr)
    return 1 if refused else 0


def _prune_cache(settings: PullSettings, keep_bytes: int, apply: bool) -> int:
    from containers.blob_cache import BlobCache

    pruned = BlobCache(settings.cache_folder).prune(keep_bytes, (), apply)
    verb = "removed" if apply else "would remove"
    print(
        f"{settings.cache_folder}: {verb} {len(pruned.removed)} blobs of {format_bytes(pruned.removed_bytes)}, "
        f"keeps {format_bytes(pruned.kept_bytes)}{'' if apply else '; --apply does it'}"
    )
    return 0
