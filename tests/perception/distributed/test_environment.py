"""A rank's place, from environments as real launchers set them."""

from __future__ import annotations

import pytest

from perception.distributed.environment import RankEnvironment, first_host, master_address, rank_environment
from perception.errors import UserError


def torchrun(rank: int, nodes: int, per_node: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(nodes * per_node),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


def mpirun(rank: int, nodes: int = 2, per_node: int = 8) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(nodes * per_node),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % per_node),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
        # Counts ranks on a node, whatever its name says.
        "OMPI_COMM_WORLD_NODE_RANK": str(rank % per_node),
        "OMPI_UNIVERSE_SIZE": "16",
        "PMIX_RANK": str(rank),
    }


BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "dgx[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "16",
    "SLURM_NPROCS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def srun(rank: int, tasks: tuple[int, ...] = (8, 8), written: str = "8(x2)") -> dict[str, str]:
    node, local = next((node, rank - sum(tasks[:node])) for node in range(len(tasks)) if rank < sum(tasks[: node + 1]))
    return {
        **BATCH_SCRIPT,
        "SLURM_NTASKS": str(sum(tasks)),
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
        "SLURM_STEP_NUM_NODES": str(len(tasks)),
        "SLURM_STEP_TASKS_PER_NODE": written,
        "SLURM_STEP_NODELIST": "dgx[07-08]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
    }


def horovodrun(rank: int) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "16",
        "HOROVOD_LOCAL_RANK": str(rank % 8),
        "HOROVOD_LOCAL_SIZE": "8",
        "HOROVOD_CROSS_RANK": str(rank // 8),
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": f"node{rank // 8}",
        "HOROVOD_CONTROLLER": "gloo",
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankEnvironment()),
        ({"PATH": "/bin", "MASTER_ADDR": "h", "HOROVOD_CYCLE_TIME": "1"}, RankEnvironment()),
        (torchrun(3, 1, 4), RankEnvironment(3, 4, 3, 4, 0, 1, "torchrun")),
        (torchrun(0, 1, 1), RankEnvironment(0, 1, 0, 1, 0, 1, "torchrun")),
        (torchrun(11, 2, 8), RankEnvironment(11, 16, 3, 8, 1, 2, "torchrun")),
        (mpirun(7), RankEnvironment(7, 16, 7, 8, 0, 2, "mpirun")),
        (mpirun(13), RankEnvironment(13, 16, 5, 8, 1, 2, "mpirun")),
        (mpirun(1, nodes=1, per_node=2), RankEnvironment(1, 2, 1, 2, 0, 1, "mpirun")),
        (srun(0), RankEnvironment(0, 16, 0, 8, 0, 2, "slurm")),
        (srun(15), RankEnvironment(15, 16, 7, 8, 1, 2, "slurm")),
        (srun(7, (8, 4), "8,4"), RankEnvironment(7, 12, 7, 8, 0, 2, "slurm")),
        (srun(8, (8, 4), "8,4"), RankEnvironment(8, 12, 0, 4, 1, 2, "slurm")),
        (srun(9, (4, 4, 2), "4(x2),2"), RankEnvironment(9, 10, 1, 2, 2, 3, "slurm")),
        (srun(0, (1,), "1"), RankEnvironment(0, 1, 0, 1, 0, 1, "slurm")),
        (BATCH_SCRIPT, RankEnvironment()),
        (horovodrun(9), RankEnvironment(9, 16, 1, 8, 1, 2, "horovod")),
        # The inner launcher's word counts: mpirun and torchrun within a Slurm job, Horovod under mpirun.
        ({**BATCH_SCRIPT, **mpirun(13)}, RankEnvironment(13, 16, 5, 8, 1, 2, "mpirun")),
        ({**srun(1, (1, 1), "1(x2)"), **torchrun(11, 2, 8)}, RankEnvironment(11, 16, 3, 8, 1, 2, "torchrun")),
        # pyxis's own words, in images with PYTORCH_VERSION, are no launcher's.
        ({**srun(9), "RANK": "9", "LOCAL_RANK": "1"}, RankEnvironment(9, 16, 1, 8, 1, 2, "slurm")),
        ({**srun(9), "RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}, RankEnvironment(9, 16, 1, 8, 1, 2, "slurm")),
        ({**mpirun(13), **horovodrun(9)}, RankEnvironment(9, 16, 1, 8, 1, 2, "horovod")),
    ],
)
def test_place(environ: dict[str, str], expected: RankEnvironment) -> None:
    assert rank_environment(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set though other variables of torchrun are"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({**torchrun(0, 1, 2), "RANK": "2"}, "RANK = 2 cannot be with WORLD_SIZE = 2"),
        ({**torchrun(0, 1, 2), "RANK": "-1"}, "RANK = -1 cannot be"),
        ({**torchrun(0, 1, 2), "RANK": ""}, 'RANK = "": must be a whole number'),
        ({**torchrun(0, 1, 2), "WORLD_SIZE": "two"}, 'WORLD_SIZE = "two": must be a whole number'),
        ({**torchrun(0, 1, 2), "WORLD_SIZE": "0"}, "with WORLD_SIZE = 0"),
        ({**torchrun(0, 1, 2), "LOCAL_RANK": "2"}, "LOCAL_RANK = 2 cannot be with LOCAL_WORLD_SIZE = 2"),
        ({**torchrun(0, 1, 2), "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE = 4, but WORLD_SIZE = 2"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set though other variables of mpirun are"),
        ({**mpirun(0), "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}, "OMPI_COMM_WORLD_LOCAL_SIZE = 0"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "HOROVOD_LOCAL_RANK is not set"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is not set though other variables of srun are"),
        ({**srun(0), "SLURM_PROCID": "16"}, "SLURM_PROCID = 16 cannot be with SLURM_STEP_NUM_TASKS = 16"),
        ({**srun(0), "SLURM_LOCALID": "8"}, "SLURM_LOCALID = 8 cannot be with SLURM_STEP_TASKS_PER_NODE = 8"),
        ({**srun(0), "SLURM_STEP_NUM_TASKS": "12"}, r"SLURM_STEP_TASKS_PER_NODE = 8\(x2\), but SLURM_STEP_NUM_TASKS"),
        ({**srun(0), "SLURM_NODEID": "2"}, "SLURM_NODEID = 2, but SLURM_STEP_TASKS_PER_NODE"),
        ({**srun(0), "SLURM_STEP_TASKS_PER_NODE": "8x2"}, 'SLURM_STEP_TASKS_PER_NODE = "8x2": not understood'),
        ({k: v for k, v in srun(0).items() if "PER_NODE" not in k}, "SLURM_STEP_TASKS_PER_NODE is not set"),
        ({k: v for k, v in srun(0).items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
    ],
)
def test_incomplete_and_contradictory_environments_name_the_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rank_environment(environ)


def test_master_address_is_as_exported() -> None:
    environ = torchrun(0, 2, 8)
    assert master_address(environ, rank_environment(environ)) == ("node0", 29500)


def test_master_address_of_srun_is_its_first_node() -> None:
    host, port = master_address(srun(9), rank_environment(srun(9)))
    assert host == "dgx07" and 12000 <= port < 30000
    assert (host, port) == master_address(srun(0), rank_environment(srun(0)))
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        assert master_address({**srun(0), name: "4712"}, rank_environment(srun(0))) != (host, port)
    exported = {**srun(0), "MASTER_ADDR": "10.0.0.1"}
    assert master_address(exported, rank_environment(exported)) == ("10.0.0.1", port)
    exported = {**srun(0), "MASTER_PORT": "1234"}
    assert master_address(exported, rank_environment(exported)) == ("dgx07", 1234)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (mpirun(0), "MASTER_ADDR and MASTER_PORT not set: export the first node's address"),
        (mpirun(0, 1, 2), "MASTER_ADDR and MASTER_PORT not set: start ranks by --ranks N"),
        ({**mpirun(0), "MASTER_ADDR": "h"}, "^MASTER_PORT not set"),
        ({**torchrun(0, 1, 2), "MASTER_PORT": "x"}, 'MASTER_PORT = "x": must be a whole number'),
        ({**torchrun(0, 1, 2), "MASTER_PORT": "70000"}, "MASTER_PORT = 70000: must be a port"),
        ({**srun(0), "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "names no host: export MASTER_ADDR"),
    ],
)
def test_missing_or_wrong_master_address(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        master_address(environ, rank_environment(environ))


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("dgx07", "dgx07"),
        ("dgx[07-09,12],login1", "dgx07"),
        ("dgx[12]", "dgx12"),
        ("a,b", "a"),
        ("node-1.cluster.example,node-2", "node-1.cluster.example"),
        ("rack[1-2]-node[03-04]", "rack1-node03"),
        ("dgx[1-2]-ib,x", "dgx1-ib"),
        ("gpu[001-128]", "gpu001"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", ",", "[1-2", "dgx[07", "dgx[]"])
def test_first_host_of_nonsense(node_list: str) -> None:
    with pytest.raises(UserError, match="export MASTER_ADDR"):
        first_host(node_list)
