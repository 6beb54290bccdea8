"""A real Slurm on this host, started by a test: munged, slurmctld and several slurmd with emulated GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NEEDED = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sinfo")
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
KillWait=5
NodeName=DEFAULT CPUs=16 Boards=1 SocketsPerBoard=2 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=16000 State=UNKNOWN
NodeName=node[0-{last}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first_node_port}-{last_node_port}]
PartitionName=all Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP
"""


def missing() -> list[str]:
    """Programs of Slurm that are not installed, and "root" where we are not."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return absent + ([] if os.geteuid() == 0 else ["root"])


@contextmanager
def slurm_cluster(folder: Path, num_nodes: int, port: int = 16817) -> Iterator[dict[str, str]]:
    """Yield the environment in which srun and its kin talk to a cluster of `num_nodes` idle nodes."""
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    first = port + 1
    values = {"folder": folder, "port": port, "last": num_nodes - 1}
    values |= {"first_node_port": first, "last_node_port": first + num_nodes - 1}
    conf.write_text(_CONF.format(**values))
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env=environment)
    # A folder that others may write to is refused unless forced; this one is the test's own.
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
    commands = [munged, ["slurmctld", "-D", "-c", "-f", str(conf)]]
    commands += [["slurmd", "-D", "-f", str(conf), "-N", f"node{n}"] for n in range(num_nodes)]
    with ExitStack() as stack:
        for command in commands:
            stack.enter_context(_daemon(command, environment, folder))
            if command is munged:
                _wait_for((folder / "munge.socket").exists, "munged's socket")
        _wait_for(lambda: _idle_nodes(environment) == num_nodes, f"{num_nodes} idle nodes")
        yield environment


@contextmanager
def _daemon(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle_nodes(environment: dict[str, str]) -> int:
    listed = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=environment, capture_output=True, text=True, check=False
    )
    return len(listed.stdout.split())


def _wait_for(condition, what: str, timeout_seconds: float = 60) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after {timeout_seconds:.0f} s")
        time.sleep(0.2)
