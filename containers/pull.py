"""Get an image, to the bit: by its name in the lock file, or by a full reference. Ends at a digest, or fails."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from containers.errors import ContainerError
from containers.lock import LOCK_FILE, Lock, LockedImage, read_lock
from containers.manifests import Platform, parse_platform
from containers.names import ImageReference
from containers.progress import NoProgress, Progress, format_bytes, progress_for
from containers.retry import RetryPolicy

if TYPE_CHECKING:
    from containers.blob_cache import BlobCache
    from containers.engine import ImageFacts
    from containers.pull_engine import ImageStore
    from containers.registry import Registry
    from containers.resolve import Resolved
    from containers.transfer import Transfers

MIRRORS_VARIABLE = "ROADFUSE_REGISTRY_MIRRORS"
_CONFIRM_SECONDS = 20.0


@dataclass(frozen=True)
class PullSettings:
    """How to pull, the same for every image of one command."""

    lock: Lock
    lock_path: Path
    cache_folder: Path
    environment: Mapping[str, str] = field(repr=False)
    """Where docker's config and keys are looked for."""
    mirrors: tuple[str, ...] = ()
    """HOST[:PORT][/PREFIX], tried in order before the registry itself."""
    plain_http: tuple[str, ...] = ()
    """Registries that speak no TLS, beside those of the loopback."""
    num_parallel: int = 4
    unpack: bool = True
    """Give the engine large layers unpacked, which is faster. It then knows them by other digests than the registry's,
    and a later push of an image that was built on this one may send them again."""
    policy: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(frozen=True)
class Pulled:
    """An image that the engine was seen to hold."""

    reference: ImageReference
    """With its digest."""
    image_id: str
    platform: str
    size_bytes: int
    """Of its blobs as registries hold them; unpacked, as the engine counts, where it was there already."""
    fetched_bytes: int
    """Over the network, by this pull."""
    seconds: float
    was_there: bool


@dataclass(frozen=True)
class Source:
    """A repository at its registry and mirrors, and the cache that is filled from them."""

    registries: tuple[Registry, ...]
    cache: BlobCache
    transfers: Transfers


def pull(text: str, settings: PullSettings, store: ImageStore, platform: Platform | None, progress: Progress) -> Pulled:
    """Pull one image, by its name in the lock file or by a full reference, into an engine."""
    from containers.resolve import resolve, wanted_image

    started = time.monotonic()
    wanted = wanted_image(text, settings.lock, settings.lock_path, platform)
    if wanted.locked is not None and wanted.reference.digest:
        facts = locked_image_there(wanted.locked, store)
        if facts is not None:
            seconds = time.monotonic() - started
            return Pulled(wanted.reference, facts.image_id, facts.platform, facts.size_bytes, 0, seconds, True)
    with open_source(wanted.reference, settings, progress) as source:
        resolved = resolve(wanted, settings.lock_path, source.registries, source.transfers, source.cache, progress.say)
        reference = wanted.reference.with_digest(resolved.digest)
        if wanted.locked is None:
            progress.say(f"{reference}: is not in {settings.lock_path}: this digest is what the tag names today")
        facts, was_there = _bring(reference, resolved, source, settings, store, progress)
        return Pulled(
            reference,
            facts.image_id,
            facts.platform,
            resolved.image.manifest.size,
            source.transfers.fetched_bytes,
            time.monotonic() - started,
            was_there,
        )


@contextmanager
def open_source(reference: ImageReference, settings: PullSettings, progress: Progress) -> Iterator[Source]:
    """Nothing that it transfers outlives it."""
    from containers.blob_cache import BlobCache
    from containers.credentials import find_credentials
    from containers.registry import Registry, endpoints
    from containers.transfer import Transfers

    stopping = threading.Event()
    say, given = progress.say, settings.policy
    registries = []
    found = endpoints(reference.registry, reference.repository, settings.mirrors, settings.plain_http)
    for endpoint in found:
        # A mirror is there to be fast: one that is not is soon left for the next.
        policy = settings.policy if endpoint is found[-1] else replace(settings.policy, attempts=min(2, given.attempts))
        credentials = find_credentials(endpoint.registry, settings.environment, say)
        registries.append(Registry(endpoint, credentials, policy, say, wait=stopping.wait))
    cache = BlobCache(settings.cache_folder)
    with cache.in_use():
        transfers = Transfers(cache, registries, given, progress, stopping, settings.num_parallel)
        try:
            yield Source(tuple(registries), cache, transfers)
        finally:
            transfers.stop()


def locked_image_there(locked: LockedImage, store: ImageStore) -> ImageFacts | None:
    """The image that the lock file pins, if the engine holds it, under its name."""
    for image_id in (locked.image_id, locked.pinned.pinned):
        facts = store.image(image_id)
        if facts is not None and facts.image_id in (locked.image_id, locked.digest):
            if locked.reference not in facts.tags:
                store.tag(facts.image_id, locked.pinned.full_repository, locked.pinned.tag)
            return facts
    return None


def _bring(
    reference: ImageReference,
    resolved: Resolved,
    source: Source,
    settings: PullSettings,
    store: ImageStore,
    progress: Progress,
) -> tuple[ImageFacts, bool]:
    """The image as the engine then holds it, and whether it did so before."""
    from containers.deliver import Delivery, deliver, find_image

    image, cache = resolved.image, source.cache

    def name_it(facts: ImageFacts) -> None:
        if reference.tag:
            store.tag(facts.image_id, reference.full_repository, reference.tag)
        confirmed = resolved.from_origin and _confirm(reference, resolved, source.registries[-1], store, progress)
        if not reference.tag and not confirmed:
            # Without any name the engine would take it for waste.
            store.tag(facts.image_id, reference.full_repository, f"pinned-{resolved.digest[7:19]}")

    facts = find_image(image, store)
    if facts is not None:
        name_it(facts)
        return facts, True
    blobs = image.manifest.blobs
    have = sum(blob.size if cache.has(blob) else cache.partial_bytes(blob.digest) for blob in blobs)
    cache.check_room(image.manifest.size - have)
    delivery = Delivery(store, cache, source.transfers, settings.policy, progress, settings.unpack)
    return deliver(image, delivery, name_it), False


def _confirm(
    reference: ImageReference, resolved: Resolved, registry: Registry, store: ImageStore, progress: Progress
) -> bool:
    """Have the engine ask the registry itself for the digest, so that it knows the image by that too.

    It has the image then and fetches the manifest alone. That it cannot is no failure: what it holds was compared with
    the manifest's own digests.
    """
    said = ""
    try:
        stream = store.pull(reference.pinned, str(resolved.image.platform), registry.authorizer.credentials)
        timer = threading.Timer(_CONFIRM_SECONDS, stream.stop)
        timer.daemon = True
        timer.start()
        try:
            for event in stream:
                said = str(event.get("error", "")) or said
        finally:
            timer.cancel()
    except ContainerError as error:
        said = str(error)
    facts = store.image(reference.pinned)
    if facts is not None and facts.image_id in resolved.image.image_ids:
        return True
    reason = said or "no answer"
    progress.say(f"note: the engine could not ask {reference.registry} itself ({reason}); it knows the image by its ID")
    return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a name of the lock file, or a full reference")
    parser.add_argument("--platform", help="OS/ARCHITECTURE[/VARIANT]; default: the lock's, or this machine's")
    parser.add_argument(
        "--keep-compressed",
        action="store_true",
        help="give the engine layers as the registry has them: slower, but a push of what is built on them is faster",
    )
    add_source_arguments(parser)


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Of every command that reads from registries."""
    parser.add_argument("--lock", type=Path, default=LOCK_FILE, help="the lock file (default: %(default)s)")
    parser.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="HOST[:PORT][/PREFIX]",
        help=f"asked before the registry itself, several in order; also {MIRRORS_VARIABLE}, separated by commas",
    )
    parser.add_argument(
        "--plain-http", action="append", default=[], metavar="HOST[:PORT]", help="speaks no TLS, as the loopback's"
    )
    policy = RetryPolicy()
    parser.add_argument("--parallel", type=int, default=4, help="layers at once (default: %(default)s)")
    parser.add_argument(
        "--attempts", type=int, default=policy.attempts, help="in a row that bring nothing (default: %(default)s)"
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=policy.stall_seconds,
        help="without one byte before a connection is made anew (default: %(default)s)",
    )
    parser.add_argument(
        "--longest-wait-seconds",
        type=float,
        default=policy.longest_retry_after_seconds,
        help="that a registry may ask us to wait (default: %(default)s)",
    )
    parser.add_argument("--cache", type=Path, help="the cache of blobs (default: ROADFUSE_IMAGE_CACHE or ~/.cache)")
    parser.add_argument("--quiet", action="store_true", help="no progress; errors all the same")


def settings_of(options: argparse.Namespace, environment: Mapping[str, str]) -> PullSettings:
    from containers.blob_cache import default_cache_folder

    for name in ("parallel", "attempts"):
        if getattr(options, name) < 1:
            raise ContainerError(f"--{name} {getattr(options, name)}: must be 1 or more")
    if options.stall_seconds <= 0 or options.longest_wait_seconds < 0:
        raise ContainerError("--stall-seconds must be above 0, --longest-wait-seconds 0 or more")
    named = [mirror.strip() for mirror in environment.get(MIRRORS_VARIABLE, "").split(",")]
    return PullSettings(
        lock=read_lock(options.lock),
        lock_path=options.lock,
        cache_folder=options.cache or default_cache_folder(environment),
        environment=environment,
        mirrors=tuple(options.mirror or [mirror for mirror in named if mirror]),
        plain_http=tuple(options.plain_http),
        num_parallel=options.parallel,
        policy=replace(
            RetryPolicy(),
            attempts=options.attempts,
            stall_seconds=options.stall_seconds,
            longest_retry_after_seconds=options.longest_wait_seconds,
        ),
    )


def run(options: argparse.Namespace) -> int:
    from containers.engine import DockerEngine
    from containers.pull_engine import DockerImages

    platform = parse_platform(options.platform) if options.platform else None
    settings = replace(settings_of(options, os.environ), unpack=not options.keep_compressed)
    with DockerEngine() as engine:
        store = DockerImages(engine)
        for image in options.images:
            progress: Progress = NoProgress() if options.quiet else progress_for()
            try:
                pulled = pull(image, settings, store, platform, progress)
            finally:
                progress.close()
            print(describe(pulled))
    return 0


def describe(pulled: Pulled) -> str:
    """One line for people and for scripts: the reference with its digest comes first."""
    end = f"image ID {pulled.image_id}, {pulled.platform}"
    if pulled.was_there:
        return f"{pulled.reference} {end}, was there"
    amount = f"{format_bytes(pulled.fetched_bytes)} of {format_bytes(pulled.size_bytes)} fetched"
    return f"{pulled.reference} {end}, {amount} in {pulled.seconds:.1f} s"
