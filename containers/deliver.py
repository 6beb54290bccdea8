"""From the cache, while it fills, into the engine; then a look whether the engine holds just that image."""

from __future__ import annotations

import io
import json
import queue
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from containers import handover
from containers.blob_cache import BlobCache
from containers.engine import ImageFacts
from containers.errors import ContainerError, EngineError
from containers.manifests import Descriptor, ImageConfig, Manifest, Platform
from containers.offer import Offer, as_it_is, num_layers_there, unpacked
from containers.progress import Progress, short
from containers.pull_engine import EngineAway, Event, EventStream, ImageStore, problem
from containers.retry import RetryPolicy
from containers.transfer import Transfers
from containers.transfer_errors import CorruptBlob, DiskFull, Interrupted, Stalled, TransferError

_ATTEMPTS = 3
_LOOK_SECONDS = 0.25
_PHASES = {"Extracting": "unpacking", "Pull complete": "done", "Already exists": "there"}
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ResolvedImage:
    """One image of one platform, known to the bit, whose configuration is in the cache."""

    name: str
    """For messages."""
    manifest: Manifest
    config: ImageConfig

    @property
    def image_ids(self) -> tuple[str, ...]:
        """What an engine may call it: by its configuration, or, where it keeps images as containerd does, by its
        manifest."""
        return (self.manifest.config.digest, self.manifest.digest)

    @property
    def platform(self) -> Platform:
        return self.config.platform


@dataclass(frozen=True)
class Delivery:
    """What it takes to bring images into one engine."""

    store: ImageStore
    cache: BlobCache
    transfers: Transfers
    policy: RetryPolicy
    progress: Progress
    unpack: bool = True
    """Large layers, on their way to an engine that takes them so."""


def deliver(image: ResolvedImage, delivery: Delivery, name_it: Callable[[ImageFacts], None]) -> ImageFacts:
    """Bring the image into the engine, fetching what that lacks, and return it as the engine shows it.

    `name_it` gives it the names it is to keep, before the passing one it arrived under is taken away.
    """
    layers = {layer.digest: layer.size for layer in image.manifest.layers}
    delivery.progress.layers(layers)
    remove_abandoned(delivery.store)
    sees_us = is_local(delivery.store.host)
    unpack = delivery.unpack and sees_us and not delivery.store.wants_sizes()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            sees_us = sees_us and _hand_over(image, delivery, name_it, unpack)
            if not sees_us:
                _load(image, delivery, name_it)
            break
        except (DiskFull, EngineAway, Stalled):
            raise
        except (EngineError, TransferError) as error:
            # A blob that turned out wrong was cut off in the engine's hands, or was damaged in the cache: what is under
            # way is waited for, so that the engine is given whole and verified ones now, and as they are.
            delivery.transfers.settle()
            damaged = _drop_damaged(image, delivery)
            if attempt == _ATTEMPTS or not (unpack or isinstance(error, (CorruptBlob, Interrupted))):
                raise
            unpack = False
            where = f" ({len(damaged)} in the cache, removed)" if damaged else ""
            delivery.progress.say(f"{error}{where}: again")
    return held_image(image, delivery.store)


def held_image(image: ResolvedImage, store: ImageStore) -> ImageFacts:
    """Raise unless the engine holds exactly this image; no event of its own is proof of that."""
    facts = find_image(image, store)
    if facts is None:
        raise EngineError(
            f"{image.name}: the engine at {store.host} reports success but does not have image "
            f"{image.manifest.config.digest[:19]}…: look into its log"
        )
    wanted = image.platform
    if facts.platform.split("/")[:2] != [wanted.os, wanted.architecture]:
        raise EngineError(f"{image.name}: the engine holds it for {facts.platform}, not for {wanted}")
    return facts


def find_image(image: ResolvedImage, store: ImageStore) -> ImageFacts | None:
    found = [store.image(image_id) for image_id in image.image_ids]
    return next((facts for facts in found if facts is not None and facts.image_id in image.image_ids), None)


def remove_abandoned(store: ImageStore) -> None:
    """Take away names that a pull which was killed has left in the engine."""
    for reference in store.names():
        if handover.abandoned(reference):
            with suppress(ContainerError):
                store.remove(reference)


def is_local(host: str) -> bool:
    """Whether the engine can be expected to share our loopback."""
    return host.startswith(("unix://", "npipe://", "http+docker://", "tcp://127.", "tcp://localhost"))


def _hand_over(image: ResolvedImage, delivery: Delivery, name_it: Callable[[ImageFacts], None], unpack: bool) -> bool:
    """False, with nothing changed, where the engine cannot reach our loopback."""
    num_there = num_layers_there(image.config, delivery.store.layer_chains()) if unpack else 0
    offer = as_it_is(image.manifest)
    if unpack:
        offer = unpacked(image.manifest, image.config, num_there, there_as_they_are=False)
    while True:
        with handover.serve(image.manifest, offer, delivery.transfers) as served:
            try:
                _pull(served, offer, image, delivery)
            except (EngineError, TransferError) as error:
                delivery.transfers.raise_failure()
                if served.known_otherwise.is_set():
                    offer = unpacked(image.manifest, image.config, num_there, there_as_they_are=True)
                    continue
                if served.num_requests() == 0 and not isinstance(error, (EngineAway, Stalled)):
                    delivery.progress.say(f"{error}: it does not see this process, so the image is sent to it whole")
                    return False
                raise
            name_it(held_image(image, delivery.store))
            delivery.store.remove(served.reference)
            return True


def _pull(served: handover.Handover, offer: Offer, image: ResolvedImage, delivery: Delivery) -> None:
    # No credentials: this registry is ours.
    stream = delivery.store.pull(served.reference, str(image.platform), None)
    _watch(
        stream,
        delivery,
        lambda event: _show(event, image, offer, delivery.progress),
        served.last_activity,
        served.known_otherwise,
    )


def _load(image: ResolvedImage, delivery: Delivery, name_it: Callable[[ImageFacts], None]) -> None:
    """For an engine elsewhere: everything, as `docker save` writes it."""
    delivery.transfers.fetch(image.manifest.blobs)
    stream = delivery.store.load(saved_archive(image.manifest, delivery.cache))
    _watch(stream, delivery, lambda event: None, lambda: 0.0, threading.Event())
    facts = held_image(image, delivery.store)
    name_it(facts)
    for layer in image.manifest.layers:
        delivery.progress.layer(layer.digest, "done", layer.size)


def saved_archive(manifest: Manifest, cache: BlobCache) -> Iterator[bytes]:
    """The image as a tar that engines load: layers as they came, compressed."""

    def name(blob: Descriptor) -> str:
        return blob.digest.removeprefix("sha256:")

    layers = [f"{name(layer)}.tar" for layer in manifest.layers]
    listing = [{"Config": f"{name(manifest.config)}.json", "RepoTags": None, "Layers": layers}]
    raw = json.dumps(listing).encode()
    yield from _member("manifest.json", len(raw), io.BytesIO(raw))
    members = {f"{name(manifest.config)}.json": manifest.config}
    members |= dict(zip(layers, manifest.layers, strict=True))
    for member, blob in members.items():
        with cache.path(blob.digest).open("rb") as file:
            yield from _member(member, blob.size, file)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(name: str, size: int, file: io.BufferedIOBase) -> Iterator[bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    yield entry.tobuf(tarfile.GNU_FORMAT)
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
    yield bytes(-size % tarfile.BLOCKSIZE)


def _watch(
    stream: EventStream,
    delivery: Delivery,
    show: Callable[[Event], None],
    other_activity: Callable[[], float],
    enough: threading.Event,
) -> None:
    """Follow the engine to its end. Raises what its stream tells of, what our transfers failed of, or Stalled.

    Interrupted once there is `enough` of it: an engine that is refused something asks for a minute before it says so.
    """
    events: queue.Queue[Event | BaseException | None] = queue.Queue()

    def read() -> None:
        try:
            for event in stream:
                events.put(event)
            events.put(None)
        except BaseException as error:
            events.put(error)

    threading.Thread(target=read, daemon=True, name="engine-events").start()
    heard = time.monotonic()
    try:
        while True:
            try:
                event = events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if enough.is_set():
                    raise Interrupted("this way of giving the engine the image is given up") from None
                delivery.transfers.raise_failure()
                quiet = time.monotonic() - max(heard, other_activity(), delivery.transfers.last_activity)
                if quiet > delivery.policy.engine_stall_seconds:
                    raise Stalled(
                        f"the engine at {delivery.store.host}: says nothing for {quiet:.0f} s: look into its log; "
                        "what was fetched is kept"
                    ) from None
                continue
            heard = time.monotonic()
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            if "error" in event:
                raise problem(str(event["error"]), delivery.store.host)
            show(event)
    finally:
        stream.stop()


def _show(event: Event, image: ResolvedImage, offer: Offer, progress: Progress) -> None:
    """Fetching is known better here; of the engine's events, how far it is with unpacking."""
    status = str(event.get("status", ""))
    if status in _PHASES:
        for layer, offered in zip(image.manifest.layers, offer.layers, strict=True):
            if short(offered.digest) == event.get("id"):
                progress.layer(layer.digest, _PHASES[status], layer.size)


def _drop_damaged(image: ResolvedImage, delivery: Delivery) -> list[str]:
    """Look which blob it was that the engine refused."""
    damaged = [blob for blob in image.manifest.blobs if delivery.cache.drop_if_damaged(blob)]
    for blob in damaged:
        delivery.transfers.again(blob)
    return [blob.digest for blob in damaged]
