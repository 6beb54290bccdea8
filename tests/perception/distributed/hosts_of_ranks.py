"""Ranks on hosts of their own: network namespaces joined by a bridge, one of whose links is then cut.

unshare --net python hosts_of_ranks.py FOLDER ENGINE NUM_HOSTS RANKS_PER_HOST CUT_HOST TIMEOUT_SECONDS

Prints JSON: for each rank its exit code (null if it had to be ended), its standard error and the
seconds from the cut to its end. Needs root; the namespaces end with the processes in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.perception.distributed import failing_rank
from tests.ranks import ROOT

LAUNCHERS_SECONDS = 40
"""Beyond the ranks' own timeout, before they are ended by force."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def make_host(host: int) -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, with one card, eth0, wired to the bridge by link<host>."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    own = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
        time.sleep(0.01)
    ip("link", "add", f"link{host}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
    ip("link", "set", f"link{host}", "master", "bridge", "up")
    for words in (
        ["addr", "add", f"{address(host)}/24", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["nsenter", "--target", str(holder.pid), "--net", "ip", *words], check=True)
    return holder


def start_rank(
    folder: Path, engine: str, rank: int, per_host: int, hosts: Sequence[int], timeout_seconds: str
) -> subprocess.Popen[bytes]:
    host, local = divmod(rank, per_host)
    place = {"RANK": rank, "WORLD_SIZE": per_host * len(hosts), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in {**place, "GROUP_RANK": host}.items()},
        **{"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"},
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    settings = [f"engine={engine}", "transport=gloo", f"timeout_seconds={timeout_seconds}"]
    argv = [sys.executable, failing_rank.__file__, str(folder), "cut", "-1", "100000", *settings]
    with (folder / f"rank{rank}.errors").open("w") as errors:
        return subprocess.Popen(
            ["nsenter", "--target", str(hosts[host]), "--net", *argv], env=environment, stdout=errors, stderr=errors
        )


def wait_for_steps(folder: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        # Empty for a moment, while it is written.
        steps = [path.read_text() for path in folder.glob("rank*.step")]
        if len(steps) == len(ranks) and all(step and int(step) >= 5 for step in steps):
            return
        if any(rank.poll() is not None for rank in ranks):
            break
        time.sleep(0.1)
    shown = "".join(path.read_text() for path in sorted(folder.glob("rank*.errors")))
    raise SystemExit(f"the ranks did not begin to train:\n{shown}")


def main(folder: Path, engine: str, num_hosts: int, per_host: int, cut: int, timeout_seconds: str) -> None:
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("link", "set", "bridge", "up")
    holders: list[subprocess.Popen[bytes]] = []
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(num_hosts):
            holders.append(make_host(host))
        pids = [holder.pid for holder in holders]
        for rank in range(num_hosts * per_host):
            ranks.append(start_rank(folder, engine, rank, per_host, pids, timeout_seconds))
        wait_for_steps(folder, ranks)
        ip("link", "set", f"link{cut}", "down")
        began = time.monotonic()
        ended: dict[int, float] = {}
        while len(ended) < len(ranks) and time.monotonic() - began < float(timeout_seconds) + LAUNCHERS_SECONDS:
            for number, process in enumerate(ranks):
                if number not in ended and process.poll() is not None:
                    ended[number] = time.monotonic() - began
            time.sleep(0.1)
        rows = [
            {
                "exit_code": process.poll(),
                "shown": (folder / f"rank{number}.errors").read_text(),
                "seconds": ended.get(number),
            }
            for number, process in enumerate(ranks)
        ]
        print(json.dumps(rows))
    finally:
        for process in [*ranks, *holders]:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6])
