"""Bring images to a registry: `python -m containers push lane --registry REGISTRY`. Prints each one's digest."""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from containers.errors import ContainerError, EngineError, nearest
from containers.names import (
    IMAGES,
    ImageReference,
    is_short_name,
    our_reference,
    parse_our_reference,
    parse_reference,
    parse_release,
)
from containers.progress import NoProgress, Progress, format_bytes, progress_for, short
from containers.retry import RetryPolicy, delay_seconds
from containers.tokens import Credentials
from containers.transfer_errors import Interrupted, ServerFailure, Stalled, TooManyRequests, Unreachable

if TYPE_CHECKING:
    from containers.engine import ImageFacts
    from containers.pull_engine import EventStream, ImageStore

_TRANSIENT = (Interrupted, ServerFailure, Stalled, TooManyRequests, Unreachable)


@dataclass(frozen=True)
class PushSettings:
    environment: Mapping[str, str] = field(repr=False)
    """Where docker's config and keys are looked for."""
    plain_http: tuple[str, ...] = ()
    policy: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(frozen=True)
class Pushed:
    """An image that the registry was seen to hold."""

    reference: ImageReference
    """With the digest of its manifest."""
    image_id: str
    size_bytes: int
    """Of its blobs in the registry."""
    num_layers_there: int
    """Which the registry had before."""
    num_layers: int
    seconds: float


def push(source: str, target: ImageReference, settings: PushSettings, store: ImageStore, progress: Progress) -> Pushed:
    """Push the image that the engine calls `source` as `target`, and compare what the registry then has with it.

    What breaks is tried again; layers that arrived are not sent twice, in the next attempt or the next call.
    """
    from containers.credentials import find_credentials
    from containers.manifests import Manifest, parse
    from containers.registry import Registry, endpoints

    started = time.monotonic()
    if not target.registry or not target.tag:
        raise ContainerError(
            f'image "{target}": to be pushed it must name a registry and a tag; give --registry HOST:PORT/ORG'
        )
    facts = store.image(source)
    if facts is None:
        raise ContainerError(f'image "{source}": the engine at {store.host} has none; python -m containers list')
    credentials = find_credentials(target.registry, settings.environment, progress.say)
    store.tag(facts.image_id, target.full_repository, target.tag)
    digest, layers = _push_retried(target, settings.policy, store, credentials, progress)
    endpoint = endpoints(target.registry, target.repository, (), settings.plain_http)[-1]
    registry = Registry(endpoint, credentials, settings.policy, progress.say)
    raw, media_type = registry.manifest(digest)
    manifest = parse(raw, media_type, str(target))
    if not isinstance(manifest, Manifest) or facts.image_id not in (manifest.config.digest, digest):
        raise EngineError(f"{target}: the registry has another image under {digest} than the engine says it pushed")
    num_there = sum(status == "Layer already exists" for status in layers.values())
    seconds = time.monotonic() - started
    return Pushed(target.with_digest(digest), facts.image_id, manifest.size, num_there, len(manifest.layers), seconds)


def _push_retried(
    target: ImageReference, policy: RetryPolicy, store: ImageStore, credentials: Credentials | None, progress: Progress
) -> tuple[str, dict[str, str]]:
    failures = 0
    while True:
        try:
            return _push_once(target, policy, store, credentials, progress)
        except _TRANSIENT as error:
            failures += 1
            if failures >= policy.attempts:
                raise type(error)(f"{error} (after {failures} attempts; what arrived is not sent again)") from None
            seconds = delay_seconds(policy, failures, random.random())
            progress.say(f"{error}: again in {seconds:.1f} s (attempt {failures} of {policy.attempts} failed)")
            time.sleep(seconds)


def _push_once(
    target: ImageReference, policy: RetryPolicy, store: ImageStore, credentials: Credentials | None, progress: Progress
) -> tuple[str, dict[str, str]]:
    """The digest that the engine reports, and the last word on each layer."""
    from containers.pull_engine import problem

    stream = store.push(target.full_repository, target.tag, credentials)
    digest, layers, sizes = "", dict[str, str](), dict[str, int]()
    with _Watchdog(stream, policy.engine_stall_seconds) as watchdog:
        for event in stream:
            watchdog.heard()
            if "error" in event:
                raise problem(str(event["error"]), store.host)
            aux, layer, status = event.get("aux"), str(event.get("id", "")), str(event.get("status", ""))
            if isinstance(aux, dict) and aux.get("Digest"):
                digest = str(aux["Digest"])
            elif layer and layer != target.tag:
                layers[layer] = status
                _show(progress, sizes, layer, status, event.get("progressDetail"))
    if watchdog.barked:
        raise Stalled(f"the engine at {store.host}: says nothing for {policy.engine_stall_seconds:.0f} s of a push")
    if not digest:
        raise EngineError(f"{target}: the push ended without a digest: look into the engine's log")
    return digest, layers


def _show(progress: Progress, sizes: dict[str, int], layer: str, status: str, detail: object) -> None:
    """Sizes become known one by one, so that there is no total to show before the end; lines will do."""
    if isinstance(detail, dict) and isinstance(detail.get("total"), int):
        sizes[layer] = detail["total"]
    if status == "Pushed":
        progress.say(f"{short(layer)}: pushed, {format_bytes(sizes.get(layer, 0))} unpacked")
    elif status in ("Layer already exists",) or status.startswith("Mounted from"):
        progress.say(f"{short(layer)}: is in the registry")


class _Watchdog:
    """Ends a stream that says nothing for too long."""

    def __init__(self, stream: EventStream, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        self._heard = time.monotonic()
        self._ended = threading.Event()
        self.barked = False

    def heard(self) -> None:
        self._heard = time.monotonic()

    def __enter__(self) -> _Watchdog:
        threading.Thread(target=self._watch, daemon=True, name="push-watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._stream.stop()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._heard > self._seconds:
                self.barked = True
                self._stream.stop()
                return


def choose_local(name: str, images: list[ImageFacts]) -> ImageReference:
    """The newest release in the engine of one of our images, by its name."""
    if name not in IMAGES:
        raise ContainerError(f'image "{name}" is unknown{nearest(name, IMAGES)}')
    for image in images:  # The newest first.
        for tag in image.tags:
            try:
                reference = parse_our_reference(tag)
            except ContainerError:
                continue
            if reference.name == name:
                return reference
    raise ContainerError(f'image "{name}": is not in the engine: python -m containers build {name}')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="base, train, lane, sign, or a full reference")
    parser.add_argument(
        "--registry", metavar="REGISTRY[/ORG[/TEAM]]", help="where to; without it, as the reference says"
    )
    parser.add_argument("--plain-http", action="append", default=[], metavar="HOST[:PORT]", help="speaks no TLS")
    parser.add_argument("--quiet", action="store_true", help="no progress; errors all the same")


def run(options: argparse.Namespace) -> int:
    from containers.engine import DockerEngine
    from containers.pull_engine import DockerImages

    settings = PushSettings(os.environ, tuple(options.plain_http))
    with DockerEngine() as engine:
        store = DockerImages(engine)
        for image in options.images:
            local = choose_local(image, store.images()) if is_short_name(image) else parse_reference(image)
            target = local
            if options.registry:
                target = our_reference(options.registry, local.name, parse_release(local.tag))
            progress: Progress = NoProgress() if options.quiet else progress_for(sys.stderr)
            pushed = push(str(local), target, settings, store, progress)
            print(
                f"{pushed.reference} image ID {pushed.image_id}, {format_bytes(pushed.size_bytes)}, "
                f"{pushed.num_layers_there} of {pushed.num_layers} layers were there, in {pushed.seconds:.1f} s"
            )
    return 0
