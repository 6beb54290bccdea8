"""How long one all-reduce takes: rings, trees, NVLS and the two-level (hierarchical) form, as NCCL models them.

Time is a latency that grows with the ranks and a volume over a bandwidth. A ring moves 2 (n - 1) / n of the data
over the slowest link in 2 (n - 1) steps; a double binary tree moves it twice in 2 log2(nodes) hops; NVLS adds up
in the switch. Constants: `perception.scaling.links`. After src/graph/tuning.cc of NVIDIA/nccl at b647562; rings in
Patarasu and Yuan 2009, trees in Sanders, Speck and Träff 2009.
"""

from __future__ import annotations

import math

from perception.scaling import links
from perception.scaling.links import Cluster

ALGORITHMS = ("ring", "tree", "nvls", "hierarchical")
PROTOCOLS = ("LL", "LL128", "Simple")
_NET_OVERHEAD_MICROSECONDS = 1.0
_LL128_SHARE, _TREE_SHARE = 0.92, 0.92
"""LL128 sends 120 bytes of 128; trees reach this share of a ring's bandwidth."""


def allreduce_seconds(cluster: Cluster, ranks: int, num_bytes: float) -> tuple[float, str]:
    """(seconds, algorithm) of the fastest algorithm of `cluster.algorithms`; nothing for one rank.

    Raises ValueError where none of them runs on such nodes.
    """
    if ranks == 1:
        return 0.0, "none"
    times = {
        "ring": ring_seconds(cluster, ranks, num_bytes),
        "tree": tree_seconds(cluster, ranks, num_bytes),
        "nvls": nvls_seconds(cluster, ranks, num_bytes),
        "hierarchical": hierarchical_seconds(cluster, ranks, num_bytes),
    }
    allowed = {name: times[name] for name in cluster.algorithms if math.isfinite(times[name])}
    if not allowed:
        raise ValueError(f"none of {', '.join(cluster.algorithms)} runs on {ranks} ranks of {cluster.node.name}")
    fastest = min(allowed, key=lambda name: allowed[name])
    return allowed[fastest], fastest


def ring_seconds(cluster: Cluster, ranks: int, num_bytes: float) -> float:
    """One ring over all ranks; the fastest of NCCL's three protocols."""
    nodes, _ = cluster.shape(ranks)
    node = cluster.node
    bus = node.ring_bytes_per_second if nodes == 1 else min(node.ring_bytes_per_second, cluster.node_bytes_per_second)
    volume = 2 * (ranks - 1) / ranks * num_bytes
    steps = 2 * (ranks - 1)
    steps_between_nodes = 2 * nodes if nodes > 1 else 0
    times = []
    for protocol in PROTOCOLS:
        constants = links.RING[protocol]
        hop = constants.link[node.link]
        if nodes > 1:
            hop = max(hop, _NET_OVERHEAD_MICROSECONDS * (3 if protocol == "Simple" else 1))
        latency = constants.base + (steps - steps_between_nodes) * hop + steps_between_nodes * constants.net
        if protocol == "Simple" and nodes > 1:
            # "Plateau effect of ring" in NCCL's model.
            latency *= 1.9 if node.generation == "volta" else 1.4
        times.append(latency * 1e-6 + volume / _protocol_bandwidth(cluster, bus, protocol, nodes))
    return min(times)


def tree_seconds(cluster: Cluster, ranks: int, num_bytes: float) -> float:
    """A chain in each node and a double binary tree over nodes."""
    nodes, per_node = cluster.shape(ranks)
    node = cluster.node
    bus = node.ring_bytes_per_second if nodes == 1 else min(node.ring_bytes_per_second, cluster.node_bytes_per_second)
    times = []
    for protocol in PROTOCOLS:
        constants = links.TREE[protocol]
        latency = constants.base + 2 * ((per_node - 1) * constants.link[node.link] + math.log2(nodes) * constants.net)
        bandwidth = _protocol_bandwidth(cluster, _TREE_SHARE * bus, protocol, nodes)
        times.append(latency * 1e-6 + 2 * num_bytes / bandwidth)
    return min(times)


def nvls_seconds(cluster: Cluster, ranks: int, num_bytes: float) -> float:
    """Sums made by the NVLink switch, and a tree over nodes beyond one; infinite where the switch cannot."""
    nodes, per_node = cluster.shape(ranks)
    node = cluster.node
    # NCCL forms NVLS groups over whole nodes; fewer GPUs take rings.
    if not node.nvls_bytes_per_second or per_node < node.gpus:
        return math.inf
    inside = 2 * (per_node - 1) / per_node * num_bytes / node.nvls_bytes_per_second
    if nodes == 1:
        return links.NVLS_MICROSECONDS * 1e-6 + inside
    latency = links.NVLS_MICROSECONDS + 2 * math.log2(nodes) * links.NVLS_TREE_NET_MICROSECONDS
    # Both levels run as one pipeline: the slower one sets the pace.
    return latency * 1e-6 + max(inside, 2 * num_bytes / cluster.node_bytes_per_second)


def hierarchical_seconds(cluster: Cluster, ranks: int, num_bytes: float) -> float:
    """Reduce-scatter in each node, all-reduce of each GPU's share over nodes, all-gather; one after the other.

    2 (g - 1) / g S / B_node + 2 (N - 1) / N (S / g) / B_nic, the NICs being shared by the node's g GPUs.
    The share travels by a ring or, as over thousands of nodes, by recursive halving and doubling in log2(N) hops.
    """
    nodes, per_node = cluster.shape(ranks)
    node = cluster.node
    constants = links.RING["Simple"]
    inside = 2 * (constants.base + (per_node - 1) * constants.link[node.link]) * 1e-6
    inside += 2 * (per_node - 1) / per_node * num_bytes / node.ring_bytes_per_second
    if nodes == 1:
        return inside
    hops = min(2 * (nodes - 1), 2 * math.ceil(math.log2(nodes)))
    between = (constants.base + hops * constants.net) * 1e-6
    between += 2 * (nodes - 1) / nodes * num_bytes / cluster.node_bytes_per_second
    return inside + between


def _protocol_bandwidth(cluster: Cluster, bus: float, protocol: str, nodes: int) -> float:
    if protocol == "LL":
        most = links.LL_BYTES_PER_SECOND[cluster.node.generation]
        return min(bus / 4, most if nodes == 1 else links.LL_BYTES_PER_SECOND_BETWEEN_NODES)
    return _LL128_SHARE * bus if protocol == "LL128" else bus
