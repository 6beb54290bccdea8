"""How ranks that srun or torchrun started find each other: through a store at the master address, which all know.

For Horovod over Gloo rank 0 serves Horovod's own rendezvous and publishes its port there; then each rank has the
variables that Horovod reads.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import threading
import time
import uuid

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from perception.distributed.environment import RankEnvironment
from perception.errors import UserError

_SECONDS_BETWEEN_LOOKS = 0.005
_served: dict[tuple[str, int], TCPStore] = {}
"""Stores of this process as rank 0, kept while it lives: another rank that joins again may be ahead of it."""


def open_store(place: RankEnvironment, master: tuple[str, int], timeout_seconds: float) -> Store:
    """The store of these ranks, empty at first. Raises UserError where they do not meet in time."""
    host, port = master
    # torchrun's agent serves a store at the same address already.
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = _served.get(master) if serves else None
        if store is None:
            store = TCPStore(host, port, place.size, is_master=serves, timeout=timeout, multi_tenant=True)
        if serves:
            _served[master] = store
        return PrefixStore(_name_of_attempt(store, place, timeout_seconds), store)
    except dist.DistError as error:
        raise not_met(place, master, error) from error


def not_met(place: RankEnvironment, master: tuple[str, int], error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"rank {place.rank} of {place.size} could not meet rank 0 at {master[0]}:{master[1]} ({reason}): "
        "check MASTER_ADDR, MASTER_PORT and that every rank started"
    )


def _name_of_attempt(store: TCPStore, place: RankEnvironment, timeout_seconds: float) -> str:
    """A name that rank 0 has made up and every living rank knows.

    The store may be older than these ranks: they join again, or torchrun has started them again at a fixed
    --master-port, whose store outlives them. They would find the addresses of an earlier time, of dead ones. The
    agents' counts of restarts need not be equal, so ranks agree: each asks under a name of its own, to which only a
    rank 0 that lives can answer.
    """
    own = uuid.uuid4().hex
    if place.rank > 0:
        store.set(f"roadfuse/question of {place.rank}", own)
        attempt: str = store.get(f"roadfuse/answer to {own}").decode()
        store.set(f"{attempt}/heard by {place.rank}", "")
        return attempt
    missing, deadline = list(range(1, place.size)), time.monotonic() + timeout_seconds
    while missing:
        for rank in missing:
            if store.check([question := f"roadfuse/question of {rank}"]):
                store.set(f"roadfuse/answer to {store.get(question).decode()}", own)
        missing = [rank for rank in missing if not store.check([f"{own}/heard by {rank}"])]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank {missing[0]} did not come within {timeout_seconds:g} s")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return own


def join_rendezvous(place: RankEnvironment, master: tuple[str, int], timeout_seconds: float) -> dict[str, str]:
    """Return the HOROVOD_* variables of this rank. Raises UserError if rank 0 cannot be met.

    Needs as many ranks on every host, numbered host by host, as srun and torchrun do.
    """
    host = master[0]
    store = open_store(place, master, timeout_seconds)
    try:
        rendezvous_port = _rendezvous_port(store, place)
    except dist.DistError as error:
        raise not_met(place, master, error) from error
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.node_rank),
        "HOROVOD_CROSS_SIZE": str(place.num_nodes),
        # Hosts may share a name (several emulated nodes on one machine): number them.
        "HOROVOD_HOSTNAME": f"node{place.node_rank}",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": rendezvous_port,
        **({"HOROVOD_GLOO_IFACE": "lo"} if place.num_nodes == 1 else {}),
    }


def _rendezvous_port(store: Store, place: RankEnvironment) -> str:
    if place.local_rank == 0:
        store.set(f"roadfuse/host{place.node_rank}", socket.gethostname())
    if place.rank == 0:
        names = [store.get(f"roadfuse/host{node}").decode() for node in range(place.num_nodes)]
        store.set("roadfuse/rendezvous", str(_serve(names, place)))
    port: str = store.get("roadfuse/rendezvous").decode()
    store.set(f"roadfuse/met{place.rank}", "1")
    if place.rank == 0:
        # The store goes with `join_rendezvous`: not before every rank has read from it.
        store.wait([f"roadfuse/met{rank}" for rank in range(place.size)])
    return port


def _serve(names: list[str], place: RankEnvironment) -> int:
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("", 0), RendezvousHandler, 0)
    server.daemon_threads = True
    hosts = [HostInfo(f"node{node}", place.local_size) for node in range(len(names))]
    server.init(get_host_assignments(hosts, place.size, place.size))
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    atexit.register(server.shutdown)
    return int(server.server_address[1])
