"""Link tables: what joins the GPUs of a node, and nodes to each other; bandwidths in bytes/s, latencies in seconds.

Bus bandwidths are those that nccl-tests reports (2 (n - 1) / n of the data, over the time): A100 8-GPU 232.5 GB/s,
H100 370 with rings and 478 with NVLS, H200 475 and B200 830 with NVLS; V100 120 as in NCCL's own table. NICs: HDR 24
and NDR 47 GB/s of 25 and 50 on the line; EDR and 25 Gb Ethernet are taken at the same share of theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from perception.errors import UserError, nearest

GB = 1e9

NETWORKS: dict[str, float] = {"roce25": 2.94 * GB, "edr": 12 * GB, "hdr": 24 * GB, "ndr": 47 * GB}
"""What one NIC carries each way."""


@dataclass(frozen=True)
class NodeType:
    name: str
    gpu: str
    gpus: int
    link: str
    """nvlink or pci: which of NCCL's latencies hold inside the node."""
    generation: str
    """volta (and before), ampere or hopper (and after), as NCCL distinguishes them."""
    ring_bytes_per_second: float
    """Bus bandwidth of a ring over all GPUs of a node."""
    nvls_bytes_per_second: float
    """Bus bandwidth where the switch adds up (NVLS); 0 without."""
    nics: int
    network: str
    memory_bytes_per_second: float
    """Of one GPU, from its data sheet."""
    flops_per_second: Mapping[str, float]
    """What one GPU sustains in training convolutional networks, by precision; see ASSUMED_THROUGHPUT."""


ASSUMED_THROUGHPUT = (
    "sustained FLOP/s are those of ResNet-50 training as NVIDIA publishes it for V100 and A100 (24.5 GFLOP an image); "
    "H100, H200 and B200 are A100 times the ratio of memory bandwidths, since such networks wait for memory "
    "(the same rule from V100 to A100 gives 2.27, published is 2.06); a network of plain dense convolutions is faster, "
    "VGG-16 by 2.6 on a P100"
)

# ResNet-50 v1.5, 3 x 8.18 GFLOP an image, at the images/s of one GPU in NVIDIA's DeepLearningExamples.
_RESNET50_FLOPS = 24.5e9
_V100 = {"fp32": 367 * _RESNET50_FLOPS, "amp": 1200 * _RESNET50_FLOPS}
_A100 = {"fp32": 938 * _RESNET50_FLOPS, "amp": 2470 * _RESNET50_FLOPS}
_A100_MEMORY = 2039 * GB


def _like_a100(memory_bytes_per_second: float) -> dict[str, float]:
    return {precision: rate * memory_bytes_per_second / _A100_MEMORY for precision, rate in _A100.items()}


# P100: 219 images/s of ResNet-50 in fp32 (TensorFlow's benchmarks of May 2017); it has no tensor cores.
_P100 = {"fp32": 219 * _RESNET50_FLOPS, "amp": 219 * _RESNET50_FLOPS}

NODES: dict[str, NodeType] = {
    node.name: node
    for node in (
        NodeType("dgx-v100", "V100", 8, "nvlink", "volta", 120 * GB, 0, 4, "edr", 900 * GB, _V100),
        NodeType("dgx-a100", "A100", 8, "nvlink", "ampere", 232.5 * GB, 0, 8, "hdr", _A100_MEMORY, _A100),
        NodeType(
            "dgx-h100", "H100", 8, "nvlink", "hopper", 370 * GB, 478 * GB, 8, "ndr", 3350 * GB, _like_a100(3350 * GB)
        ),
        NodeType(
            "dgx-h200", "H200", 8, "nvlink", "hopper", 370 * GB, 475 * GB, 8, "ndr", 4800 * GB, _like_a100(4800 * GB)
        ),
        NodeType(
            "dgx-b200", "B200", 8, "nvlink", "hopper", 722 * GB, 830 * GB, 8, "ndr", 8000 * GB, _like_a100(8000 * GB)
        ),
        # Two groups of three V100 on NVLink, joined by the processors' X-bus (64 GB/s), which bounds a ring over six:
        # 50 GB/s is an estimate.
        NodeType("summit", "V100", 6, "nvlink", "volta", 50 * GB, 0, 2, "edr", 900 * GB, _V100),
        # The cluster of Horovod's 512-GPU figures: four Pascal GPUs on PCIe 3 (10 GB/s, an estimate) and one NIC.
        NodeType("p100-roce25", "P100", 4, "pci", "volta", 10 * GB, 0, 1, "roce25", 732 * GB, _P100),
        # Eight V100 and one EDR NIC: the machines of OneFlow's DLPerf.
        NodeType("v100-edr1", "V100", 8, "nvlink", "volta", 120 * GB, 0, 1, "edr", 900 * GB, _V100),
    )
}


@dataclass(frozen=True)
class Latencies:
    """Microseconds as NCCL's tuning model has them: start of a call, hop inside a node, hop between nodes."""

    base: float
    link: Mapping[str, float]
    net: float


# NVIDIA/nccl at b647562, src/graph/tuning.cc, baseLat and hwLat.
RING = {
    "LL": Latencies(6.6, {"nvlink": 0.6, "pci": 1.0}, 2.7),
    "LL128": Latencies(14.0, {"nvlink": 1.9, "pci": 2.5}, 4.0),
    "Simple": Latencies(8.4, {"nvlink": 3.4, "pci": 5.7}, 14.0),
}
TREE = {
    "LL": Latencies(6.8, {"nvlink": 0.6, "pci": 1.0}, 5.0),
    "LL128": Latencies(14.0, {"nvlink": 1.25, "pci": 1.9}, 8.5),
    "Simple": Latencies(0.0, {"nvlink": 28.0, "pci": 28.0}, 28.0),
}
NVLS_MICROSECONDS, NVLS_TREE_NET_MICROSECONDS = 23.0, 14.0
LL_BYTES_PER_SECOND = {"volta": 39 * GB, "ampere": 87.7 * GB, "hopper": 87.7 * GB}
"""Upper bound of the LL protocol inside a node."""
LL_BYTES_PER_SECOND_BETWEEN_NODES = 20.4 * GB


@dataclass(frozen=True)
class Cluster:
    """Nodes of one type, their network, and how a bucket's all-reduce is started on them."""

    node: NodeType
    nic_bytes_per_second: float
    launch_seconds: float
    """From a bucket being full to its all-reduce running."""
    algorithms: tuple[str, ...]
    """Of `perception.scaling.allreduce_time.ALGORITHMS`; each bucket takes the fastest."""

    @property
    def node_bytes_per_second(self) -> float:
        """What a node's NICs carry together each way."""
        return self.node.nics * self.nic_bytes_per_second

    def shape(self, ranks: int) -> tuple[int, int]:
        """(nodes, GPUs used of each) of so many ranks; nodes are filled one after another.

        Raises UserError where a last node would be filled in part, which the model does not describe.
        """
        if ranks <= self.node.gpus:
            return 1, ranks
        if ranks % self.node.gpus:
            raise UserError(f"{ranks} ranks do not fill nodes of {self.node.gpus} GPUs; give a multiple of it")
        return ranks // self.node.gpus, self.node.gpus


NCCL_ALGORITHMS = ("ring", "tree", "nvls")
LAUNCH_SECONDS = {"torch": 20e-6, "horovod": 0.55e-3}
"""torch: a kernel launch and an event. Horovod: half its cycle of 1 ms, and the exchange of what is ready.
Both are estimates."""


def cluster(
    node: str, network: str | None = None, engine: str = "horovod", algorithms: tuple[str, ...] = NCCL_ALGORITHMS
) -> Cluster:
    """A cluster of named nodes on a named network (the node type's own if None). UserError for unknown names."""
    if node not in NODES:
        raise UserError(f'--node "{node}" is unknown{nearest(node, NODES)}')
    network = network or NODES[node].network
    if network not in NETWORKS:
        raise UserError(f'--network "{network}" is unknown{nearest(network, NETWORKS)}')
    return Cluster(NODES[node], NETWORKS[network], LAUNCH_SECONDS[engine], algorithms)


def with_nic(given: Cluster, nic_bytes_per_second: float) -> Cluster:
    return dataclasses.replace(given, nic_bytes_per_second=nic_bytes_per_second)
