"""A real Slurm on this host, started by a test: munged, slurmctld, slurmd with emulated GPUs, and accounting."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import pytest

NEEDED = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sinfo")
NEEDED_FOR_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")
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
ReturnToService={return_to_service}
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/{scheduler}
SchedulerParameters={scheduler_parameters}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
MaxJobCount=50000
MaxArraySize=10001
SlurmdTimeout=15
NodeName=DEFAULT Boards=1 SocketsPerBoard=2 ThreadsPerCore=1 State=UNKNOWN
NodeName=node[0-{last}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first_node_port}-{last_node_port}] {resources}
PartitionName=DEFAULT Nodes=ALL MaxTime=1-00:00:00 DefaultTime=10 State=UP
PartitionName={partition} Default=YES PriorityTier=10
PartitionName=scavenge PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
"""
_BACKFILL = (
    "bf_interval=5,bf_max_job_test=2000,sched_interval=2,sched_min_interval=20000,batch_sched_delay=0,"
    "default_queue_depth=1000"
)
_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
"""
_DBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={dbd_port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_accounting
"""
_SQL_INIT = """
CREATE DATABASE slurm_accounting;
CREATE USER 'slurm'@'localhost' IDENTIFIED BY 'slurm';
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_accounting.* TO 'slurm'@'localhost';
GRANT ALL ON slurm_accounting.* TO 'slurm'@'127.0.0.1';
"""


def missing(accounting: bool = False) -> list[str]:
    """Programs of Slurm that are not installed, and "root" where we are not."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    needed = (*NEEDED, *(NEEDED_FOR_ACCOUNTING if accounting else ()))
    absent = [name for name in needed if shutil.which(name, path=path) is None]
    return absent + ([] if os.geteuid() == 0 else ["root"])


def need(accounting: bool = False) -> None:
    """Skip the test where Slurm cannot be started; where CI is set that is a failure."""
    absent = missing(accounting)
    if not absent:
        return
    lacking = f"Slurm cannot be started here, missing: {', '.join(absent)}"
    if os.environ.get("CI"):
        pytest.fail(lacking)
    pytest.skip(lacking)


@contextmanager
def slurm_cluster(
    folder: Path,
    num_nodes: int,
    port: int | None = None,
    gpus_per_node: int = 0,
    accounting: bool = False,
    scheduler: Literal["backfill", "builtin"] = "backfill",
    return_to_service: int = 2,
) -> Iterator[dict[str, str]]:
    """Yield the environment in which srun and its kin talk to a cluster of `num_nodes` idle nodes.

    With GPUs the nodes have 64 cores and the partitions nightly and scavenge, of which nightly preempts the other.
    `scheduler` builtin: strictly first in, first out. Ports: `port`, one more a node, and two more for accounting;
    without it, free ones.
    """
    port = _free_ports(num_nodes + 3) if port is None else port
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    first = port + 1
    resources = "CPUs=16 CoresPerSocket=8 RealMemory=16000"
    if gpus_per_node:
        resources = f"CPUs=64 CoresPerSocket=32 RealMemory=512000 Gres=gpu:h100:{gpus_per_node}"
    values: dict[str, object] = {"folder": folder, "port": port, "last": num_nodes - 1, "resources": resources}
    values |= {"first_node_port": first, "last_node_port": first + num_nodes - 1, "scheduler": scheduler}
    values |= {"return_to_service": return_to_service, "partition": "nightly" if gpus_per_node else "all"}
    values |= {"dbd_port": first + num_nodes, "sql_port": first + num_nodes + 1}
    backfill = scheduler == "backfill"
    values["scheduler_parameters"] = _BACKFILL if backfill else "sched_interval=2,sched_min_interval=20000"
    text = _CONF.format(**values)
    if gpus_per_node:
        _make_gpus(folder, gpus_per_node)
        text += "GresTypes=gpu\n"
    text += _ACCOUNTING.format(**values) if accounting else ""
    conf.write_text(text)
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env=environment)
    # A folder that others may write to is refused unless forced; this one is the test's own.
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
    with ExitStack() as stack:
        _start(stack, [munged], environment, folder)
        _wait_for((folder / "munge.socket").exists, "munged's socket")
        if accounting:
            _start_accounting(stack, environment, folder, values)
        commands = [["slurmctld", "-D", "-c", "-f", str(conf)]]
        commands += [["slurmd", "-D", "-f", str(conf), "-N", f"node{n}"] for n in range(num_nodes)]
        _start(stack, commands, environment, folder)
        try:
            _wait_for(lambda: _idle_nodes(environment) >= num_nodes, f"{num_nodes} idle nodes")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{_account_of(folder, environment)}") from None
        try:
            yield environment
        finally:
            _end_jobs(environment)


def _end_jobs(environment: dict[str, str]) -> None:
    """Of a test that failed: their processes would outlive the daemons."""
    for _ in range(20):
        listed = subprocess.run(
            ["squeue", "--noheader", "--format=%i"], env=environment, capture_output=True, text=True, check=False
        )
        jobs = listed.stdout.split()
        if not jobs:
            return
        subprocess.run(["scancel", *jobs], env=environment, capture_output=True, check=False)
        time.sleep(0.5)


def _make_gpus(folder: Path, count: int) -> None:
    """Device files that stand for GPUs, since Slurm drains a node whose GPUs have none."""
    devices = folder / "gpus"
    devices.mkdir()
    for index in range(count):
        subprocess.run(["mknod", "-m", "666", str(devices / f"nvidia{index}"), "c", "1", "3"], check=True)
    files = f"{devices}/nvidia[0-{count - 1}]" if count > 1 else f"{devices}/nvidia0"
    (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={files}\n")


def _start_accounting(stack: ExitStack, environment: dict[str, str], folder: Path, values: dict[str, object]) -> None:
    """slurmdbd over a MariaDB of its own."""
    data = folder / "mariadb"
    initial = folder / "initial.sql"
    initial.write_text(_SQL_INIT)
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal"]
    install += ["--user=root", "--skip-test-db"]
    subprocess.run(install, check=True, env=environment, capture_output=True)
    database = ["mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", f"--port={values['sql_port']}"]
    database += [f"--socket={folder}/mariadb.socket", "--bind-address=127.0.0.1", f"--init-file={initial}"]
    database += [f"--pid-file={folder}/mariadb.pid", "--innodb-flush-log-at-trx-commit=0"]
    _start(stack, [database], environment, folder)
    # slurmdbd reads the file beside slurm.conf, and refuses one that others can read.
    conf = folder / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(_DBD_CONF.format(**values))
    _wait_for((folder / "mariadb.socket").exists, "MariaDB's socket")
    _start(stack, [["slurmdbd", "-D"]], environment, folder)
    register = ["sacctmgr", "--immediate", "add", "cluster", "test"]

    def is_registered() -> bool:
        return subprocess.run(register, env=environment, capture_output=True, check=False).returncode == 0

    _wait_for(is_registered, "slurmdbd")


def _start(stack: ExitStack, commands: list[list[str]], environment: dict[str, str], folder: Path) -> None:
    """Daemons in the foreground, ended together and waited for when the stack closes."""
    processes: list[subprocess.Popen[bytes]] = []
    stack.callback(_end, processes)
    with (folder / "daemons.log").open("ab") as log:
        for command in commands:
            processes.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on, below those that the kernel gives to clients."""
    for _ in range(100):
        first = random.randrange(10_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise TimeoutError(f"no {count} free ports in a row in 100 attempts")


def _account_of(folder: Path, environment: dict[str, str]) -> str:
    """What the nodes and the daemons say, for the message of a cluster that did not come up."""
    nodes = subprocess.run(["sinfo", "-N", "-l"], env=environment, capture_output=True, text=True, check=False)
    logs = [f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(folder.glob("*.log"))[:6]]
    return "\n".join([nodes.stdout, nodes.stderr, *logs])


def _idle_nodes(environment: dict[str, str]) -> int:
    listed = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env=environment, capture_output=True, text=True, check=False
    )
    return len(set(listed.stdout.split()))


def _wait_for(condition: Callable[[], bool], what: str, timeout_seconds: float = 120) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after {timeout_seconds:.0f} s")
        time.sleep(0.2)
