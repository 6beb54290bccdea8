"""The nodes of a Slurm partition: how many are up, with how many slots, of what."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%c|%G")
_AWAY = ("down", "drain", "fail", "unknown", "maint", "powering_down", "powered_down", "inval", "no_respond")


@dataclass(frozen=True)
class Node:
    name: str
    is_up: bool
    num_cores: int
    num_gpus: int
    gpu: str
    """Type of its GPUs as Slurm's configuration names it; empty: none, or not named."""


def read_sinfo(text: str) -> list[Node]:
    """Of SINFO; a node that is in several partitions comes once.

    >>> [(node.name, node.is_up, node.num_gpus, node.gpu) for node in read_sinfo("dgx1|idle|64|gpu:h100:8(S:0-1)")]
    [('dgx1', True, 8, 'h100')]
    """
    nodes: dict[str, Node] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, _, rest = rest.partition("|")
        cores, _, resources = rest.partition("|")
        if not name or not cores.rstrip("+").isdigit():
            continue
        gpus = re.findall(r"(?:^|,)gpu(?::([A-Za-z][^:,(]*))?:(\d+)", resources)
        is_up = not any(word in state.lower() for word in _AWAY) and not state.endswith("*")
        kind = gpus[0][0] if gpus else ""
        nodes[name] = Node(name, is_up, int(cores.rstrip("+")), sum(int(count) for _, count in gpus), kind)
    return list(nodes.values())


def slots_of(node: Node, cores_per_slot: int) -> int:
    return node.num_gpus or node.num_cores // max(1, cores_per_slot)


def describe_nodes(nodes: list[Node]) -> str:
    """The commonest kind, e.g. "8 x h100"."""
    kinds = Counter(
        f"{node.num_gpus} x {node.gpu or 'GPU'}" if node.num_gpus else f"{node.num_cores} cores" for node in nodes
    )
    return kinds.most_common(1)[0][0] if kinds else ""
