"""A job of a sweep in a container by NVIDIA's pyxis and enroot, on a real Slurm, from a real registry."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sweeps.job import Job
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience
from sweeps.planning.plan import SlurmSettings
from tests import slurm_cluster
from tests.containers import daemons
from tests.sweeps.waiting import wait_until

pytestmark = pytest.mark.services

TAG = "26.11-cpu-py3"
ENTRY_POINT = b'#!/bin/sh\nexport FROM_ENTRY_POINT=yes\nexec "$@"\n'
# Each rank tells what it sees. The first start waits until it is asked to stop, the second ends.
RANK = """
trap 'exit 75' USR2
folder=$PWD
cd "$1"
{ cat /which; echo; echo "$folder"; id -u; env; } >"rank$SLURM_PROCID"
[ -e asked ] && exit 7
touch "ready$SLURM_PROCID"
while :; do sleep 0.2; done
"""


def find_pyxis() -> tuple[str, str]:
    """enroot and pyxis's plug-in, which Debian has no packages of; skips where one is missing, in CI too."""
    enroot = shutil.which("enroot")
    prefix = Path(enroot).resolve().parents[1] if enroot else Path("/usr/local")
    folders = [
        prefix / "lib/slurm",
        Path("/usr/local/lib/slurm"),
        Path("/usr/lib/slurm"),
        *Path("/usr/lib").glob("*/slurm*"),
    ]
    plugin = next((folder / "spank_pyxis.so" for folder in folders if (folder / "spank_pyxis.so").exists()), None)
    if enroot is None or plugin is None:
        pytest.skip(
            "needs NVIDIA's enroot on PATH and pyxis built for this Slurm, PREFIX/lib/slurm/spank_pyxis.so: "
            "not among Debian's packages, so this is skipped in CI too"
        )
    return enroot, str(plugin)


def push(client: Any, repository: str, which: bytes) -> str:
    """A tiny image of this content under the one tag; returns its digest."""
    # Debian's has such a profile, which takes away the image's own PATH in a login shell.
    profile = b"export PATH=/bin:/of/the/profile\n"
    layer = daemons.busybox_layer({"which": which, "entry.sh": ENTRY_POINT, "etc/profile": profile})
    changes = ['ENTRYPOINT ["/entry.sh"]', "ENV OMP_NUM_THREADS=1", "ENV HOME=/home"]
    daemons.import_image(client, layer, repository, TAG, changes)
    events = list(client.images.push(repository, tag=TAG, stream=True, decode=True))
    return str(next(event["aux"]["Digest"] for event in events if "aux" in event))


def test_a_job_runs_in_its_pinned_image_on_two_ranks_and_is_preempted(
    tmp_path: Path, docker_client: Any, registry: daemons.RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    enroot, plugin = find_pyxis()
    slurm_cluster.need()
    repository = f"{registry.address}/org/pyxis"
    digest = push(docker_client, repository, b"pinned")
    assert push(docker_client, repository, b"moved") != digest
    # Its files go to the test's folder. pyxis takes no such settings from a job: they are the node's.
    kept = {name: tmp_path / "enroot" / name.lower() for name in ("CACHE", "CONFIG", "DATA", "RUNTIME", "TEMP")}
    for folder in kept.values():
        folder.mkdir(parents=True)
    wrapper = tmp_path / "bin/enroot"
    wrapper.parent.mkdir()
    exports = [f"export ENROOT_{name}_PATH={folder}" for name, folder in kept.items()]
    wrapper.write_text("\n".join(["#!/bin/sh", *exports, f'ENROOT_ALLOW_HTTP=yes exec {enroot} "$@"', ""]))
    wrapper.chmod(0o755)
    cluster_folder, work, run = tmp_path / "slurm", tmp_path / "work", tmp_path / "run"
    for folder in (cluster_folder, work, run):
        folder.mkdir()
    (cluster_folder / "plugstack.conf").write_text(f"required {plugin} runtime_path={tmp_path}/pyxis\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/of/this/host")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    job = Job(
        "run",
        ("sh", "-c", RANK, "sh", str(run)),
        run,
        ranks_per_node=2,
        time_limit_seconds=600,
        environment={"OMP_NUM_THREADS": "3"},
        image=f"{repository}:{TAG}@{digest}",
    )

    def log() -> str:
        return (run / "job.log").read_text() if (run / "job.log").exists() else "no log"

    with slurm_cluster.slurm_cluster(cluster_folder, 1) as cluster:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster[name])
        settings = SlurmSettings(container="pyxis", grace_seconds=30)
        launcher = SlurmLauncher(settings, tmp_path / "launcher", SlurmPatience(poll=0.5))
        id = launcher.submit(job)
        wait_until(lambda: (run / "ready0").exists() and (run / "ready1").exists(), "two ranks", log)
        (run / "asked").touch()
        subprocess.run(["scancel", "--batch", "--signal=USR2", id], check=True)
        wait_until(lambda: launcher.poll()[job.name].state in ("ended", "lost"), "the end of the job", log)
        status = launcher.poll()[job.name]
    assert (status.exit_code, status.num_starts) == (7, 2), log()
    for rank in range(2):
        which, started_in, uid, *variables = (run / f"rank{rank}").read_text().splitlines()
        assert (which, started_in, uid) == ("pinned", str(work), str(os.getuid()))
        seen = dict(line.split("=", 1) for line in variables if "=" in line)
        told = {"OMP_NUM_THREADS": "3", "PERCEPTION_IMAGE_DIGEST": digest, "PYTHONSAFEPATH": "1", "PATH": "/bin"}
        told |= {"FROM_ENTRY_POINT": "yes", "HOME": "/home", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2"}
        assert {name: seen.get(name) for name in told} == told and "PYTHONPATH" not in seen
        assert (run / f"rank{rank}").stat().st_uid == os.getuid()
    assert list(kept["DATA"].iterdir()) == []
