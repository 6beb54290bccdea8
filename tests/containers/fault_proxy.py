"""A proxy in front of a registry that cuts, flips, delays and refuses as it is told, and counts what it let through."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from tests.containers.local_server import QuietHandler, serving

BLOBS = r"/blobs/sha256:"
MANIFESTS = r"/manifests/"
_CHUNK_BYTES = 64 << 10


@dataclass
class Fault:
    """What happens to requests whose path matches, in place of an honest answer."""

    path: str
    """A regular expression, searched for in the path."""
    action: Literal["cut", "flip", "short", "status", "hang", "replace", "slow"]
    times: int | None = None
    """How often; None: always."""
    after_bytes: int = 0
    """Of the body: cut, hang and short end it there; flip changes the byte there."""
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    """Of status and replace."""
    bytes_per_second: float = 1e9
    """Of slow."""
    smallest_bytes: int = 0
    """Bodies below are left alone: configurations, where layers are meant."""
    num_done: int = 0


@dataclass
class FaultProxy:
    upstream: str
    """HOST:PORT."""
    address: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and status."""
    blob_bytes: int = 0
    """Of blobs' bodies, sent to whoever asked."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def num_blob_requests(self) -> int:
        return sum("/blobs/sha256:" in path and method == "GET" for method, path, _ in self.requests)

    def take(self, path: str, length: int | None) -> Fault | None:
        """The first fault for this request that is not used up. `length` is of the honest body."""
        with self.lock:
            for fault in self.faults:
                used_up = fault.times is not None and fault.num_done >= fault.times
                if used_up or not re.search(fault.path, path):
                    continue
                if length is not None and length < fault.smallest_bytes:
                    continue
                fault.num_done += 1
                return fault
        return None


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    state = FaultProxy(upstream)
    with serving(_Handler, state) as state.address:
        try:
            yield state
        finally:
            state.closing.set()


class _Handler(QuietHandler):
    def do_GET(self) -> None:
        self._forward()

    do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = do_GET

    def _forward(self) -> None:
        state = self.server.state
        upstream = http.client.HTTPConnection(state.upstream, timeout=60)
        try:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else b""
            # As pairs: an engine sends one Accept a type, and all of them count.
            headers = [(name, value) for name, value in self.headers.items() if name.lower() != "connection"]
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                body = self._read_chunked()
                headers = [pair for pair in headers if pair[0].lower() != "transfer-encoding"]
                headers.append(("Content-Length", str(len(body))))
            # The registry's upload addresses then name the proxy.
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            self._answer(upstream.getresponse())
        finally:
            upstream.close()

    def _read_chunked(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        state = self.server.state
        honest_length = answer.headers.get("Content-Length")
        length = int(honest_length) if honest_length is not None else None
        fault = state.take(self.path, length) if answer.status < 400 or self.command != "HEAD" else None
        if fault is not None and fault.action in ("status", "replace"):
            answer.read()
            status = fault.status if fault.action == "status" else 200
            kept = {} if fault.action == "status" else {"Content-Type": answer.headers.get("Content-Type", "")}
            self._head(status, {**kept, **fault.headers, "Content-Length": str(len(fault.body))})
            if self.command != "HEAD":
                self.wfile.write(fault.body)
            return
        headers = {name: value for name, value in answer.headers.items() if name.lower() != "connection"}
        if length is None and self.command != "HEAD" and answer.status not in (204, 304):
            body = answer.read()
            headers.pop("Transfer-Encoding", None)
            self._head(answer.status, {**headers, "Content-Length": str(len(body))})
            self.wfile.write(body)
            return
        if fault is not None and fault.action == "short" and length is not None:
            headers["Content-Length"] = str(min(length, fault.after_bytes))
        self._head(answer.status, headers)
        if self.command != "HEAD" and length:
            self._body(answer, length, fault)

    def _body(self, answer: http.client.HTTPResponse, length: int, fault: Fault | None) -> None:
        state = self.server.state
        is_blob = "/blobs/sha256:" in self.path
        sent, started = 0, time.monotonic()
        while sent < length:
            chunk = answer.read(min(_CHUNK_BYTES, length - sent))
            if not chunk:
                break
            stop = fault.after_bytes if fault is not None and fault.action in ("cut", "hang", "short") else None
            if stop is not None:
                chunk = chunk[: max(0, stop - sent)]
            if fault is not None and fault.action == "flip" and sent <= fault.after_bytes < sent + len(chunk):
                place = fault.after_bytes - sent
                chunk = chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]
            # Counted first: whoever has read the last byte may look at the count at once.
            if is_blob:
                with state.lock:
                    state.blob_bytes += len(chunk)
            self.wfile.write(chunk)
            sent += len(chunk)
            if fault is not None and fault.action == "slow":
                ahead = sent / fault.bytes_per_second - (time.monotonic() - started)
                state.closing.wait(max(0.0, ahead))
            if stop is not None and sent >= stop:
                assert fault is not None
                if fault.action == "hang":
                    state.closing.wait(600)
                break
        if sent < length:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        state = self.server.state
        with state.lock:
            state.requests.append((self.command, self.path, status))
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
