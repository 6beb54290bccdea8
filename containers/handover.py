"""A registry of one image on the loopback, from which the engine pulls what our cache is filled with meanwhile.

The engine keeps what it does well: it asks only for layers it does not have, verifies every digest, and unpacks while
later layers arrive. It never sees the real registry's faults: a connection that is cut or stalls is mended behind this.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO

from containers.manifests import Manifest
from containers.offer import Offer
from containers.transfer import BlobTransfer, Transfers
from containers.transfer_errors import Interrupted, TransferError

_PREFIX = "roadfuse-handover"
_REFERENCE = re.compile(rf"127\.0\.0\.1:[0-9]+/{_PREFIX}-([0-9]+)-[0-9a-f]+(?:[:@].*)?")
_SEND_BYTES = 4 << 20
_READ_BYTES = 1 << 20
_IDLE_SECONDS = 300.0


@dataclass
class _Served:
    """What the server's threads share."""

    manifest: Manifest
    offer: Offer
    transfers: Transfers
    repository: str
    known_otherwise: threading.Event = field(default_factory=threading.Event)
    last_activity: float = field(default_factory=time.monotonic)
    num_requests: int = 0


@dataclass(frozen=True)
class Handover:
    """The address of the image for the engine, while the server runs."""

    reference: str
    """127.0.0.1:PORT/SECRET@DIGEST, the digest that of the offered manifest."""
    known_otherwise: threading.Event
    """Set once the engine asked for an unpacked layer that it holds: it knows that by another digest."""
    num_requests: Callable[[], int]
    last_activity: Callable[[], float]


@contextmanager
def serve(manifest: Manifest, offer: Offer, transfers: Transfers) -> Iterator[Handover]:
    """Run the server. A layer is fetched once the engine asks for it or for one below it."""
    # Any user of this machine may connect to the port, and the image may be private: who does not know the name gets
    # nothing. The process number tells a later pull whether this one still needs its name.
    repository = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(16)}"
    served = _Served(manifest, offer, transfers, repository)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.served = served
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="handover")
    thread.start()
    try:
        yield Handover(
            f"127.0.0.1:{server.server_address[1]}/{repository}@{offer.digest}",
            served.known_otherwise,
            lambda: served.num_requests,
            lambda: served.last_activity,
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def abandoned(reference: str) -> bool:
    """Whether a name in an engine is of a handover whose process was killed before it could remove it."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    served: _Served

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that the engine gave up is its own business; it is not worth a traceback on the screen."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        served = self.server.served
        served.num_requests += 1
        served.last_activity = time.monotonic()
        path = self.path.partition("?")[0]
        if path == "/v2/":
            self._send_small(200, b"{}", "application/json", with_body)
            return
        known, slash, rest = path.removeprefix("/v2/").partition("/")
        kind, _, digest = rest.partition("/")
        place = served.offer.place(digest)
        if not slash or not secrets.compare_digest(known.encode(), served.repository.encode()):
            self._send_small(404, b'{"errors":[{"code":"NAME_UNKNOWN"}]}', "application/json", with_body)
        elif kind == "manifests" and digest == served.offer.digest:
            self._send_small(200, served.offer.raw, served.offer.media_type, with_body, digest)
        elif kind == "blobs" and digest == served.manifest.config.digest and with_body:
            self._send_blob(served.transfers.start((served.manifest.config,))[0], digest)
        elif kind == "blobs" and place is not None and with_body:
            self._send_layer(place, digest)
        else:
            self._send_small(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}', "application/json", with_body)

    def _send_layer(self, place: int, digest: str) -> None:
        served = self.server.served
        layer = served.offer.layers[place]
        if layer.there and layer.unpacked:
            # Fetching what it holds would be a waste: whoever runs this offers it by its other digest.
            served.known_otherwise.set()
            self._send_small(403, b'{"errors":[{"code":"DENIED"}]}', "application/json", True)
            return
        # An engine asks from the lowest layer it lacks on upwards, and will need all above: they need not wait.
        transfer = served.transfers.start(served.manifest.layers[place:])[0]
        if layer.unpacked:
            self._send_unpacked(transfer, digest)
        else:
            self._send_blob(transfer, digest)

    def _send_unpacked(self, transfer: BlobTransfer, digest: str) -> None:
        """In chunks, since nobody knows how many bytes it will be; always from the start."""
        self._head(200, None, "application/octet-stream", digest)
        self.wfile.flush()
        try:
            for piece in unpack_gzip(_pieces(transfer)):
                self.wfile.write(b"%x\r\n" % len(piece))
                self.wfile.write(piece)
                self.wfile.write(b"\r\n")
                self.server.served.last_activity = time.monotonic()
            self.wfile.write(b"0\r\n\r\n")
        except (TransferError, zlib.error):
            # No last chunk: it is not whole. What is no gzip at all is offered as it is next.
            self._hang_up()

    def _send_blob(self, transfer: BlobTransfer, digest: str) -> None:
        size = transfer.descriptor.size
        start = _range_start(self.headers.get("Range", ""))
        if start >= size > 0:
            self._send_small(416, b"", "application/json", True)
            return
        content_range = f"bytes {start}-{size - 1}/{size}" if start else None
        self._head(206 if start else 200, size - start, "application/octet-stream", digest, content_range)
        self.wfile.flush()
        try:
            for file, position, count in transfer.follow(start):
                end = position + count
                while position < end:
                    position += self._send_piece(file, position, min(end - position, _SEND_BYTES))
                    self.server.served.last_activity = time.monotonic()
        except TransferError:
            # The one way to say "no" after the headers: fewer bytes than promised.
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send_piece(self, file: IO[bytes], position: int, count: int) -> int:
        """By the kernel, from the file to the socket."""
        sent: int = self.connection.sendfile(file, position, count)
        if sent == 0:
            raise ConnectionError("the cached file is shorter than it was")
        return sent

    def _send_small(self, status: int, body: bytes, media_type: str, with_body: bool, digest: str = "") -> None:
        self._head(status, len(body), media_type, digest)
        if with_body:
            self.wfile.write(body)

    def _head(
        self, status: int, length: int | None, media_type: str, digest: str = "", content_range: str | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Content-Type", media_type)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
            self.send_header("Accept-Ranges", "bytes")
        if digest:
            self.send_header("Docker-Content-Digest", digest)
            self.send_header("Etag", f'"{digest}"')
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()


def unpack_gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a gzip file of one or several members, piece by piece. Raises zlib.error for anything else."""
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
    begun = False
    for piece in pieces:
        rest = piece
        while rest:
            if member.eof:
                member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            begun = True
            if content := member.decompress(rest, _SEND_BYTES):
                yield content
            rest = member.unused_data if member.eof else member.unconsumed_tail
    while begun and not member.eof and (content := member.decompress(b"", _SEND_BYTES)):
        yield content
    if begun and not member.eof:
        raise zlib.error("cut short")


def _pieces(transfer: BlobTransfer) -> Iterator[bytes]:
    for file, position, count in transfer.follow(0):
        end = position + count
        while position < end:
            piece = os.pread(file.fileno(), min(end - position, _READ_BYTES), position)
            if not piece:
                raise Interrupted("the cached file is shorter than it was")
            yield piece
            position += len(piece)


def _range_start(header: str) -> int:
    found = re.fullmatch(r"bytes=([0-9]+)-[0-9]*", header.strip())
    return int(found[1]) if found else 0
