"""How ranks of Horovod over Gloo that srun or torchrun started on several hosts find each other.

Rank 0 serves Horovod's rendezvous store and publishes its port through torch's TCPStore at
the master address, which all ranks know; then each rank has the variables Horovod reads.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import threading

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from perception.distributed.environment import RankEnvironment
from perception.errors import UserError


def join_rendezvous(place: RankEnvironment, master: tuple[str, int], timeout_seconds: float) -> dict[str, str]:
    """Return the HOROVOD_* variables of this rank. Raises UserError if rank 0 cannot be met.

    Needs as many ranks on every host, numbered host by host, as srun and torchrun do.
    """
    host, port = master
    # torchrun's agent serves a store at the same address already.
    is_master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            host, port, place.size, is_master=is_master, timeout=datetime.timedelta(seconds=timeout_seconds)
        )
        rendezvous_port = _rendezvous_port(store, place)
    except (dist.DistError, dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            f"rank {place.rank} of {place.size} could not meet rank 0 at {host}:{port} ({type(error).__name__}): "
            "check MASTER_ADDR, MASTER_PORT and that every rank started"
        ) from error
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


def _rendezvous_port(store: TCPStore, place: RankEnvironment) -> str:
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
