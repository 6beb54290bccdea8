"""An HTTP server of this process on the loopback: what the doubles, the proxy and the issuer of the tests stand on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    state: Any
    """What its handlers answer from."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients go away in the middle; that is what the tests are about."""


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LocalServer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[QuietHandler], state: Any) -> Iterator[str]:
    """Yield the address, HOST:PORT, at which `handler` answers from `state`."""
    server = LocalServer(("127.0.0.1", 0), handler)
    server.state = state
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
