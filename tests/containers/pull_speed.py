"""How long a pull takes beside `docker pull`, in rounds one after the other: python -m tests.containers.pull_speed

Needs root, docker.io and docker-registry. The image has layers that compress and layers that do not; both ways start
from an emptied engine, ours from an emptied cache too, and both end with a verified image.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from containers.engine import DockerEngine
from containers.pull_engine import DockerImages
from tests.containers.daemons import PATH, DockerDaemon, docker_daemon, docker_registry
from tests.containers.registry_double import MadeImage, digest_of, make_layers_image
from tests.containers.sites import upload_image

TAG = "26.11-cpu-py3"
_FILE_BYTES = 2_000_000


def content(seed: int, size: int, compressible: bool) -> dict[str, bytes]:
    """Files of one layer."""
    draw = random.Random(seed)
    files = {}
    for number in range(max(1, size // _FILE_BYTES)):
        data = draw.randbytes(_FILE_BYTES // 2).hex().encode() if compressible else draw.randbytes(_FILE_BYTES)
        files[f"data/{seed}/{number}"] = data
    return files


def example(num_layers: int, unpacked_bytes: int) -> MadeImage:
    """Half of its layers compress to half their size."""
    each = unpacked_bytes // num_layers
    return make_layers_image([content(number, each, number % 2 == 0) for number in range(num_layers)])


def empty(daemon: DockerDaemon, image_id: str) -> None:
    with DockerEngine(daemon.host) as engine:
        store = DockerImages(engine)
        for facts in store.images():
            if facts.image_id == image_id:
                for name in (*facts.tags, *facts.digests):
                    store.remove(name)
        assert store.image(image_id) is None


def processor_seconds(daemon: DockerDaemon) -> float:
    """Of the engine, of what it has started, and of the commands that we have run."""
    assert daemon.process is not None
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    engine = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return engine + ours.ru_utime + ours.ru_stime


def timed(argv: Sequence[str], environment: dict[str, str], daemon: DockerDaemon) -> tuple[float, float]:
    """Seconds by the clock and by the processors."""
    os.sync()  # What the round before has left to write is not this one's.
    before, started = processor_seconds(daemon), time.perf_counter()
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return seconds, processor_seconds(daemon) - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="unpacked")
    parser.add_argument("--docker", default="/usr/bin/docker", help="the client that ours is compared with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    image = example(options.layers, int(options.gigabytes * 1e9))
    print(f"{options.gigabytes} GB unpacked, {image.size / 1e9:.2f} GB in {options.layers} layers", flush=True)
    rows = []
    cache = Path(tempfile.mkdtemp(prefix="pull-speed-"))
    try:
        with docker_registry() as registry, docker_daemon() as daemon:
            upload_image(registry.address, "roadfuse/speed", TAG, image)
            environment = {**daemon.client_environment, "PATH": PATH, "ROADFUSE_IMAGE_CACHE": str(cache / "blobs")}
            reference = f"{registry.address}/roadfuse/speed"
            docker = [options.docker, "pull", "--quiet", f"{reference}@{image.digest}"]
            ours = [sys.executable, "-m", "containers", "pull", f"{reference}:{TAG}", "--quiet"]
            ours += ["--platform", "linux/amd64", "--lock", str(cache / "lock.json")]
            for number in range(options.rounds):
                seconds = {}
                # In turn, who is first.
                for name, argv in [("docker", docker), ("ours", ours)][:: 1 if number % 2 == 0 else -1]:
                    empty(daemon, image.image_id)
                    shutil.rmtree(cache / "blobs", ignore_errors=True)
                    seconds[name], seconds[f"{name}_processor"] = timed(argv, environment, daemon)
                rows.append({**seconds, "ratio": seconds["docker"] / seconds["ours"]})
                print(json.dumps({name: round(value, 3) for name, value in rows[-1].items()}), flush=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    ratios = sorted(row["ratio"] for row in rows)
    print(f"docker's time over ours: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"image": digest_of(image.manifest), "rounds": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
