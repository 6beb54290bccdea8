"""Where ranks of Horovod over Gloo meet: a small HTTP store, in the launcher's process.

It takes the place of `horovodrun`, which wants ssh even on one host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from perception.errors import UserError

LOOPBACK = "127.0.0.1"


@contextmanager
def horovod_rendezvous(num_ranks: int) -> Iterator[int]:
    """Serve the store for `num_ranks` ranks on this host; yields its port on the loopback interface.

    Raises UserError where Horovod is not installed.
    """
    try:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise UserError(f"engine horovod is not installed ({error}): run `make setup`, or use --engine torch") from None

    # Horovod's own RendezvousServer listens on every interface, at a port it finds by trying.
    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    server.init(get_host_assignments([HostInfo("localhost", num_ranks)], num_ranks, num_ranks))
    thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def horovod_variables(rank: int, num_ranks: int, port: int) -> Mapping[str, str]:
    """What Horovod reads to join the store at `port` as one rank of a single host."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(num_ranks),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(num_ranks),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
    }
