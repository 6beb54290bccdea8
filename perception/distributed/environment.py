"""Who am I: a rank's place, read from the environment that its launcher set.

Understood: our own launcher, Horovod's, Open MPI's mpirun, torchrun and Slurm's
srun. No torch here: the launcher asks too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from perception.errors import UserError


@dataclass(frozen=True)
class RankEnvironment:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"
    """none, horovod, mpirun, torchrun or slurm."""


# For each launcher: rank, size, local rank, local size, node rank. Open MPI does not tell the node (its
# NODE_RANK counts ranks on a node).
_VARIABLES = {
    "horovod": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
}


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Return this process's place; a single rank where no launcher left a trace.

    Raises UserError where a launcher's variables are incomplete or contradict each other.
    """
    for launcher, names in _VARIABLES.items():
        if (names[0] in environ or names[1] in environ) and not (launcher == "torchrun" and _are_pyxis_own(environ)):
            return _from_variables(environ, launcher, names)
    # srun sets SLURM_STEP_NUM_TASKS; a batch script outside srun has SLURM_PROCID=0 too, but is no rank.
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _from_slurm(environ)
    return RankEnvironment()


def _are_pyxis_own(environ: Mapping[str, str]) -> bool:
    """Under srun, in an image with PYTORCH_VERSION, pyxis sets RANK and LOCAL_RANK, and its hook WORLD_SIZE; torchrun
    never leaves out LOCAL_WORLD_SIZE."""
    srun = environ.get("SLURM_PROCID") if "SLURM_STEP_NUM_TASKS" in environ else None
    return srun is not None and environ.get("RANK") == srun and "LOCAL_WORLD_SIZE" not in environ


def _from_variables(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> RankEnvironment:
    rank, size, local_rank, local_size = (_number(environ, name, launcher) for name in names[:4])
    _check_below(names[0], rank, names[1], size)
    _check_below(names[2], local_rank, names[3], local_size)
    if local_size > size:
        raise UserError(f"{names[3]} = {local_size}, but {names[1]} = {size}: start the ranks anew by {launcher}")
    # What is not told: as if every node had as many ranks as this one, in blocks.
    node_rank = _number(environ, names[4], launcher, rank // local_size)
    num_nodes = max(-(-size // local_size), node_rank + 1)
    return RankEnvironment(rank, size, local_rank, local_size, node_rank, num_nodes, launcher)


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    rank_name, size_name, node_name = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"
    rank, size = _number(environ, rank_name, "srun"), _number(environ, size_name, "srun")
    local_rank, node_rank = _number(environ, "SLURM_LOCALID", "srun"), _number(environ, node_name, "srun")
    tasks_name, tasks = _tasks_per_node(environ)
    if sum(tasks) != size:
        raise UserError(f"{tasks_name} = {environ[tasks_name]}, but {size_name} = {size}: start the ranks anew by srun")
    _check_below(rank_name, rank, size_name, size)
    if not 0 <= node_rank < len(tasks):
        raise UserError(
            f"{node_name} = {node_rank}, but {tasks_name} = {environ[tasks_name]}: start the ranks anew by srun"
        )
    _check_below("SLURM_LOCALID", local_rank, tasks_name, tasks[node_rank])
    return RankEnvironment(rank, size, local_rank, tasks[node_rank], node_rank, len(tasks), "slurm")


def master_address(environ: Mapping[str, str], place: RankEnvironment) -> tuple[str, int]:
    """Host and port at which rank 0 is met: MASTER_ADDR/MASTER_PORT, or Slurm's first node.

    The port derives from the job and step id and lies below the ephemeral range, so that
    jobs that share a host do not meet.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], _port(environ)
    if place.launcher == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        host = environ.get("MASTER_ADDR") or first_host(nodes)
        if "MASTER_PORT" in environ:
            return host, _port(environ)
        job, step = (_number(environ, name, "srun", 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        return host, 12000 + (job * 31 + step * 7) % 18000
    missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ)
    if place.num_nodes == 1:
        raise UserError(f"{missing} not set: start ranks by --ranks N, torchrun or srun")
    raise UserError(f"{missing} not set: export the first node's address and a free port")


def first_host(node_list: str) -> str:
    """First host of a Slurm node list.

    >>> first_host("dgx[07-09,12],login1")
    'dgx07'
    """
    match = re.match(r"((?:[^\[\],\s]|\[\d[^\]]*\])+)(?:,|$)", node_list)
    if not match:
        raise UserError(f'SLURM_JOB_NODELIST = "{node_list}" names no host: export MASTER_ADDR')
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group(1))


def _tasks_per_node(environ: Mapping[str, str]) -> tuple[str, list[int]]:
    """The variable's name and the tasks of each node, from e.g. SLURM_STEP_TASKS_PER_NODE = "8(x2),4"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in environ and "SLURM_TASKS_PER_NODE" in environ:
        name = "SLURM_TASKS_PER_NODE"
    if name not in environ:
        raise UserError(f"{name} is not set though other variables of srun are: unset them or start by srun")
    per_node: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UserError(f'{name} = "{environ[name]}": not understood; srun writes it like 8(x2),4')
        per_node += [int(match.group(1))] * int(match.group(2) or 1)
    return name, per_node


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        raise UserError(f"{name} = {value} cannot be with {limit_name} = {limit}: unset them or start the ranks anew")


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT", "torchrun")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT = {port}: must be a port from 1 to 65535")
    return port


def _number(environ: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise UserError(
            f"{name} is not set though other variables of {launcher} are: unset them or start by {launcher}"
        )
    try:
        return int(text)
    except ValueError:
        raise UserError(f'{name} = "{text}": must be a whole number') from None
