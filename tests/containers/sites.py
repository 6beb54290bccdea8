"""Where pulling is tested: a registry behind a fault proxy, and an engine; both doubles, or both real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import requests

from containers.manifests import OCI_MANIFEST, Platform
from containers.names import ImageReference
from containers.pull import Pulled, pull
from containers.pull_engine import ImageStore
from containers.retry import RetryPolicy
from tests.containers.fault_proxy import FaultProxy, fault_proxy
from tests.containers.pulling import FAST, Said, noise, settings
from tests.containers.registry_double import MadeImage, digest_of, make_image, registry_double

REPOSITORY = "roadfuse/lane"
TAG = "26.11-cpu-py3"
AMD64 = Platform("linux", "amd64")


class Upload(Protocol):
    def __call__(self, repository: str, tag: str, image: MadeImage) -> None: ...


@dataclass
class Site:
    proxy: FaultProxy
    store: ImageStore
    upload: Upload
    image: MadeImage = field(repr=False)
    repository: str = REPOSITORY

    @property
    def reference(self) -> str:
        return f"{self.proxy.address}/{self.repository}:{TAG}"

    @property
    def parsed(self) -> ImageReference:
        return ImageReference(self.proxy.address, self.repository, TAG)

    @property
    def largest(self) -> bytes:
        return max(self.image.layers, key=len)

    def holds_nothing(self) -> bool:
        """Neither the image nor its name: nothing half-pulled passes for done."""
        return self.store.image(self.image.image_id) is None and self.store.image(self.reference) is None


def example_image(seed: int = 1) -> MadeImage:
    return make_image([noise(seed, 300_000), b"lane " * 50_000, noise(seed + 1, 120_000)])


@contextmanager
def double_site() -> Iterator[Site]:
    from tests.containers.engine_double import EngineDouble

    with registry_double() as server, fault_proxy(server.address) as proxy:
        image = example_image()
        server.add(REPOSITORY, TAG, image)
        yield Site(proxy, EngineDouble(), server.add, image)


@contextmanager
def real_site(registry_address: str, store: ImageStore, number: int) -> Iterator[Site]:
    """With an image and a repository of its own, so that no test finds another one's layers in the engine."""
    image = example_image(1000 * number)
    repository = f"{REPOSITORY}-{number}"

    def upload(repository: str, tag: str, image: MadeImage) -> None:
        upload_image(registry_address, repository, tag, image)

    upload(repository, TAG, image)
    with fault_proxy(registry_address) as proxy:
        yield Site(proxy, store, upload, image, repository)
    for facts in store.images():
        if facts.image_id == image.image_id:
            for name in (*facts.tags, *facts.digests):
                store.remove(name)


def attempt(site: Site, folder: Path, said: Said | None = None, policy: RetryPolicy = FAST) -> Pulled:
    return pull(site.reference, settings(folder, policy=policy), site.store, AMD64, said or Said())


def assert_held(site: Site, pulled: Pulled) -> None:
    facts = site.store.image(site.reference)
    assert facts is not None
    assert facts.image_id == pulled.image_id == site.image.image_id
    assert f"{site.parsed.full_repository}@{site.image.digest}" in facts.digests
    assert not [name for name in (*facts.tags, *facts.digests) if "handover" in name]


def upload_image(
    registry: str, repository: str, tag: str, image: MadeImage, headers: Mapping[str, str] | None = None
) -> None:
    """Put an image into a real registry by its own protocol."""
    base = f"http://{registry}/v2/{repository}"
    with requests.Session() as session:
        session.headers.update(headers or {})
        for blob in (image.config, *image.layers):
            begun = _ok(session.post(f"{base}/blobs/uploads/", timeout=30))
            place = begun.headers["Location"]
            mark = "&" if "?" in place else "?"
            _ok(session.put(f"{place}{mark}digest={digest_of(blob)}", data=blob, timeout=60))
        for reference in (tag, image.digest):
            put_manifest(session, registry, repository, reference, image.manifest, OCI_MANIFEST)


def put_manifest(session: Any, registry: str, repository: str, reference: str, raw: bytes, media_type: str) -> None:
    url = f"http://{registry}/v2/{repository}/manifests/{reference}"
    _ok(session.put(url, data=raw, headers={"Content-Type": media_type}, timeout=30))


def _ok(answer: requests.Response) -> requests.Response:
    assert answer.status_code < 300, (answer.url, answer.status_code, answer.text)
    return answer
