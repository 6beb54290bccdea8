"""A registry in this process, small enough to be asked for what a real one does only by accident."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from containers.manifests import OCI_INDEX, OCI_MANIFEST
from tests.containers.local_server import QuietHandler, serving
from tests.containers.token_issuer import SERVICE, TokenIssuer


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class MadeImage:
    manifest: bytes
    config: bytes
    layers: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def image_id(self) -> str:
        return digest_of(self.config)

    @property
    def size(self) -> int:
        return len(self.config) + sum(map(len, self.layers))


def make_layer(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def make_image(
    contents: Sequence[bytes], architecture: str = "amd64", created: str = "2026-11-01T00:00:00Z"
) -> MadeImage:
    """An image with one file a layer."""
    files = [{f"layer-{number}": data} for number, data in enumerate(contents)]
    return make_layers_image(files, architecture, created)


def make_layers_image(
    layers_files: Sequence[Mapping[str, bytes]], architecture: str = "amd64", created: str = "2026-11-01T00:00:00Z"
) -> MadeImage:
    """An image with these files in each of its layers; the same in, the same out."""
    diff_ids, compressed = [], []
    for files in layers_files:
        tar = make_layer(files)
        diff_ids.append(digest_of(tar))
        compressed.append(gzip.compress(tar, compresslevel=1, mtime=0))
    return image_of_layers(compressed, diff_ids, architecture, created)


def image_of_layers(
    compressed: Sequence[bytes],
    diff_ids: Sequence[str],
    architecture: str = "amd64",
    created: str = "2026-11-01T00:00:00Z",
) -> MadeImage:
    layers = tuple(compressed)
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": {"Cmd": ["/layer-0"]},
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
    }
    raw = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": _descriptor(raw, "application/vnd.oci.image.config.v1+json"),
        "layers": [_descriptor(layer, "application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers],
    }
    return MadeImage(json.dumps(manifest).encode(), raw, layers)


def make_index(images: Mapping[str, MadeImage]) -> bytes:
    """By platform, OS/ARCHITECTURE."""
    manifests = []
    for platform, image in images.items():
        os_name, architecture = platform.split("/")
        row = _descriptor(image.manifest, OCI_MANIFEST)
        manifests.append({**row, "platform": {"os": os_name, "architecture": architecture}})
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests}).encode()


def _descriptor(data: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


@dataclass
class RegistryDouble:
    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """By repository and by tag or digest."""
    users: dict[str, str] = field(default_factory=dict)
    """Password by user; none: everybody may do everything."""
    issuer: TokenIssuer | None = None
    """Of bearer tokens, which then are wanted instead of passwords."""
    ignores_range: bool = False
    page_size: int = 1000
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    sent_blob_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repository: str, tag: str, image: MadeImage) -> None:
        self.blobs |= {digest_of(blob): blob for blob in (image.config, *image.layers)}
        for reference in (tag, image.digest):
            self.manifests[repository, reference] = image.manifest

    def add_index(self, repository: str, tag: str, images: Mapping[str, MadeImage]) -> str:
        for image in images.values():
            self.add(repository, image.digest, image)
        raw = make_index(images)
        for reference in (tag, digest_of(raw)):
            self.manifests[repository, reference] = raw
        return digest_of(raw)


@contextmanager
def registry_double() -> Iterator[RegistryDouble]:
    state = RegistryDouble()
    with serving(_Handler, state) as state.address:
        yield state


class _Handler(QuietHandler):
    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    @property
    def state(self) -> RegistryDouble:
        return self.server.state

    def _answer(self) -> None:
        state = self.state
        with state.lock:
            state.requests.append((self.command, self.path, dict(self.headers)))
        if self.state.issuer is not None and not self._has_token(self.state.issuer):
            repository = self.path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]
            challenge = f'Bearer realm="{self.state.issuer.realm}",service="{SERVICE}"'
            if repository:
                challenge += f',scope="repository:{repository}:pull"'
            self._send(401, b"{}", {"WWW-Authenticate": challenge})
            return
        if self.state.issuer is None and not self._known():
            self._send(401, b"{}", {"WWW-Authenticate": 'Basic realm="test"'})
            return
        path = urlsplit(self.path).path
        found = re.fullmatch(r"/v2/(?:(.+)/(manifests|blobs|tags)/([^/]+))?", path)
        if found is None:
            self._send(404, b"{}")
        elif found[2] is None:
            self._send(200, b"{}")
        elif found[2] == "tags":
            self._tags(found[1])
        elif found[2] == "manifests":
            self._manifest(found[1], found[3])
        else:
            self._blob(found[3])

    def _has_token(self, issuer: TokenIssuer) -> bool:
        access = issuer.issued.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        repository = self.path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]
        return access is not None and (not repository or any(one["name"] == repository for one in access))

    def _known(self) -> bool:
        if not self.state.users:
            return True
        kind, _, pair = self.headers.get("Authorization", "").partition(" ")
        user, _, password = base64.b64decode(pair).decode().partition(":") if kind == "Basic" else ("", "", "")
        return bool(user) and self.state.users.get(user) == password

    def _manifest(self, repository: str, reference: str) -> None:
        raw = self.state.manifests.get((repository, reference))
        if raw is None:
            self._send(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}')
        elif self.command == "DELETE":
            for key in [key for key, value in self.state.manifests.items() if key[0] == repository and value == raw]:
                del self.state.manifests[key]
            self._send(202, b"")
        else:
            self._send(200, raw, {"Content-Type": json.loads(raw)["mediaType"]})

    def _blob(self, digest: str) -> None:
        data = self.state.blobs.get(digest)
        if data is None:
            self._send(404, b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')
            return
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and not self.state.ignores_range else 0
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        with self.state.lock:
            self.state.sent_blob_bytes += len(data) - start
        self._send(206 if start else 200, data[start:], headers)

    def _tags(self, repository: str) -> None:
        tags = sorted(
            reference for name, reference in self.state.manifests if name == repository and ":" not in reference
        )
        last = parse_qs(urlsplit(self.path).query).get("last", [""])[0]
        page = [tag for tag in tags if tag > last][: self.state.page_size]
        headers = {}
        if page and page[-1] != tags[-1]:
            headers["Link"] = f'</v2/{repository}/tags/list?last={page[-1]}&n={self.state.page_size}>; rel="next"'
        self._send(200, json.dumps({"name": repository, "tags": page}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
