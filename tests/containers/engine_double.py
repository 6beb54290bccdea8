"""An engine in this process that pulls, verifies and refuses as dockerd was seen to do."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import requests

from containers.engine import ImageFacts
from containers.pull_engine import Event, EventStream
from containers.tokens import Credentials


@dataclass
class _Stream:
    events: Callable[[], Iterator[Event]]
    stopped: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[Event]:
        for event in self.events():
            if self.stopped.is_set():
                return
            yield event

    def stop(self) -> None:
        self.stopped.set()


@dataclass
class EngineDouble:
    """An ImageStore."""

    host: str = "unix:///double"
    held: dict[str, ImageFacts] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)
    """Digests of blobs that it need not fetch again."""
    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the layers of each image, unpacked."""
    compares_sizes: bool = False
    takes_unpacked: bool = True
    used: set[str] = field(default_factory=set)
    sees_loopback: bool = True
    num_pulls: int = 0

    def image(self, reference: str) -> ImageFacts | None:
        for facts in self.held.values():
            if reference == facts.image_id or reference in facts.tags or reference in facts.digests:
                return facts
        return None

    def images(self) -> list[ImageFacts]:
        return list(self.held.values())

    def names(self) -> list[str]:
        return [name for facts in self.held.values() for name in (*facts.tags, *facts.digests)]

    def layer_chains(self) -> list[tuple[str, ...]]:
        return [self.chains[image_id] for image_id in self.held]

    def wants_sizes(self) -> bool:
        return self.compares_sizes

    def used_image_ids(self) -> set[str]:
        return self.used

    def tag(self, image_id: str, repository: str, tag: str) -> None:
        name = f"{repository}:{tag}"
        self.held = {key: _without(facts, name) for key, facts in self.held.items()}
        facts = self.held[image_id]
        self.held[image_id] = replace(facts, tags=(*facts.tags, name))

    def remove(self, reference: str) -> None:
        self.held = {key: _without(facts, reference) for key, facts in self.held.items()}
        self.held = {key: facts for key, facts in self.held.items() if facts.tags or facts.digests}

    def push(self, repository: str, tag: str, credentials: Credentials | None) -> EventStream:
        raise NotImplementedError

    def load(self, archive: Iterable[bytes]) -> EventStream:
        def events() -> Iterator[Event]:
            data = _Reader(archive)
            files: dict[str, bytes] = {}
            with tarfile.open(fileobj=data, mode="r|") as members:  # type: ignore[call-overload]
                for member in members:
                    file = members.extractfile(member)
                    assert file is not None
                    files[member.name] = file.read()
            for row in json.loads(files["manifest.json"]):
                config = files[row["Config"]]
                for name, diff_id in zip(row["Layers"], json.loads(config)["rootfs"]["diff_ids"], strict=True):
                    if _digest(gzip.decompress(files[name])) != diff_id:
                        yield {"error": "invalid diffID for layer"}
                        return
                self._hold(config, ())
                yield {"stream": "Loaded image"}

        return _Stream(events)

    def pull(self, reference: str, platform: str, credentials: Credentials | None) -> EventStream:
        self.num_pulls += 1
        found = re.fullmatch(r"([^/]+)/(.+)@(sha256:[0-9a-f]{64})", reference)
        assert found, reference
        base = f"http://{found[1]}/v2/{found[2]}"

        def events() -> Iterator[Event]:
            if not self.sees_loopback:
                yield {"error": "dial tcp: connect: connection refused"}
                return
            try:
                yield from self._pull(base, found[3], reference, platform)
            except requests.RequestException as error:
                refused = isinstance(error, requests.ConnectionError) and "refused" in str(error)
                yield {"error": "connection refused" if refused else f"unexpected EOF ({type(error).__name__})"}

        return _Stream(events)

    def _pull(self, base: str, digest: str, reference: str, platform: str) -> Iterator[Event]:
        answer = requests.get(f"{base}/manifests/{digest}", timeout=30)
        if answer.status_code != 200:
            yield {"error": f"manifest unknown ({answer.status_code})"}
            return
        if _digest(answer.content) != digest:
            yield {"error": "manifest verification failed for digest"}
            return
        manifest: dict[str, Any] = answer.json()
        if "manifests" in manifest:
            rows = manifest["manifests"]
            named = {f"{row['platform']['os']}/{row['platform']['architecture']}": row["digest"] for row in rows}
            yield from self._pull(base, named[platform], reference, platform)
            return
        config_digest = manifest["config"]["digest"]
        if config_digest in self.held:
            self._hold_digest(config_digest, reference)
            yield {"status": f"Digest: {digest}"}
            return
        if not self.takes_unpacked and any(layer["mediaType"].endswith(".tar") for layer in manifest["layers"]):
            yield {"error": "unsupported media type"}
            return
        config = requests.get(f"{base}/blobs/{config_digest}", timeout=30).content
        for layer in manifest["layers"]:
            short = layer["digest"].removeprefix("sha256:")[:12]
            if layer["digest"] in self.layers:
                yield {"status": "Already exists", "id": short}
                continue
            answer = requests.get(f"{base}/blobs/{layer['digest']}", timeout=30)
            if answer.status_code != 200:
                yield {"error": "denied: requested access to the resource is denied"}
                return
            blob = answer.content
            if _digest(blob) != layer["digest"]:
                yield {"error": f"filesystem layer verification failed for digest {layer['digest']}"}
                return
            self.layers.add(layer["digest"])
            yield {"status": "Extracting", "id": short, "progressDetail": {"current": 1, "total": 2}}
            yield {"status": "Pull complete", "id": short}
        self._hold(config, (reference,))
        yield {"status": f"Digest: {digest}"}

    def _hold(self, config: bytes, digests: tuple[str, ...]) -> None:
        data = json.loads(config)
        platform = f"{data['os']}/{data['architecture']}"
        image_id = _digest(config)
        self.chains[image_id] = tuple(data["rootfs"]["diff_ids"])
        self.held[image_id] = ImageFacts(image_id, (), digests, platform, 1, data["created"])

    def _hold_digest(self, image_id: str, reference: str) -> None:
        facts = self.held[image_id]
        self.held[image_id] = replace(facts, digests=(*facts.digests, reference))


class _Reader:
    """Chunks as a file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest += chunk
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _without(facts: ImageFacts, name: str) -> ImageFacts:
    return replace(
        facts,
        tags=tuple(tag for tag in facts.tags if tag != name),
        digests=tuple(digest for digest in facts.digests if digest != name),
    )


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
