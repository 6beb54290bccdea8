"""From nothing to a trained model: images built, pushed, pinned, pulled into an empty engine, trained in, as outside.

Minutes: one build for all tests. Packages and Horovod's wheel come from the user's cache where they are there.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from containers.debian_base import MOUNT_POINTS
from containers.engine import DockerEngine, ImageFacts
from containers.images_plan import make_plan
from containers.lock import read_lock
from containers.names import parse_release
from tests.containers import daemons
from tests.containers.conftest import needs
from tests.pipelines import training_runs

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["base", "train", "lane", "sign"]
BUILD_SECONDS = 2400
PROGRAMS = [*daemons.ENGINE_PROGRAMS, *daemons.REGISTRY_PROGRAMS, "docker", "mmdebstrap"]


@dataclass(frozen=True)
class Built:
    """What one `build all --push` made, and an engine that then pulled `lane` by its digest and nothing else."""

    lock: Path
    logs: Path
    output: str
    builder: daemons.DockerDaemon
    puller: daemons.DockerDaemon

    def facts(self, name: str) -> ImageFacts:
        with DockerEngine(self.builder.host) as engine:
            found = engine.image(read_lock(self.lock).images[name].image_id)
        assert found is not None
        return found


def containers(daemon: daemons.DockerDaemon, *words: str, timeout_seconds: float = 300) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "containers", *words],
        cwd=ROOT,
        env=daemon.client_environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    needs(PROGRAMS, "docker.io docker-registry mmdebstrap iproute2")
    folder = tmp_path_factory.mktemp("images")
    lock, logs = folder / "lock.json", folder / "logs"
    with daemons.docker_registry() as registry, daemons.docker_daemon() as builder:
        words = ["--registry", registry.address, "--push", "--lock", str(lock), "--logs", str(logs)]
        # Of the host's network: these tests' engines change no rules of this machine's firewall.
        output = containers(builder, "build", "all", "--network", "host", *words, timeout_seconds=BUILD_SECONDS)
        with daemons.docker_daemon() as puller:
            pulled = containers(puller, "pull", "lane", "--lock", str(lock), "--cache", str(folder / "blobs"))
            # pytest shows it with a failure, and by -rP: what took how long.
            print(output, pulled, sep="\n")
            yield Built(lock, logs, output, builder, puller)


@pytest.mark.timeout(BUILD_SECONDS + 300)
def test_all_images_are_built_pushed_and_pinned(built: Built) -> None:
    lock = read_lock(built.lock)
    assert sorted(lock.images) == sorted(NAMES)
    for name in NAMES:
        locked = lock.images[name]
        facts = built.facts(name)
        assert re.fullmatch(r"127\.0\.0\.1:\d+/roadfuse/" + name + r":\d\d\.\d\d-cpu-py3", locked.reference)
        assert (facts.image_id, facts.platform) == (locked.image_id, locked.platform)
        assert f"{locked.pinned.full_repository}@{locked.digest}" in facts.digests
        # Sizes are said.
        assert re.search(re.escape(locked.reference) + r"  [\d,]+ MB  " + locked.image_id, built.output)
    assert lock.images["base"].size_bytes < lock.images["train"].size_bytes < 2_500_000_000


def test_an_empty_engine_has_the_image_by_its_digest(built: Built) -> None:
    locked = read_lock(built.lock).images["lane"]
    with DockerEngine(built.puller.host) as engine:
        facts = engine.image(locked.pinned.pinned)
    assert facts is not None and facts.image_id == locked.image_id


def test_labels_say_what_is_in_it(built: Built) -> None:
    """Compared with what the image answers itself, by other means than those that wrote the labels."""
    facts = built.facts("lane")
    program = (
        "import torch, horovod, numpy, platform, json;"
        "print(json.dumps([torch.__version__, horovod.__version__, numpy.__version__, platform.python_version()]))"
    )
    with DockerEngine(built.builder.host) as engine:
        answer = json.loads(engine.output(facts.image_id, ["/opt/roadfuse/bin/python", "-c", program]))
        mpi = engine.output(facts.image_id, ["/opt/roadfuse/bin/mpirun", "--version"]).decode()
        # The places where a build step mounts its tools stay as empty folders.
        tools = "find /sbom-tool /horovod /project /sbom /run/build /build -type f 2>/dev/null | wc -l"
        left = engine.output(facts.image_id, ["sh", "-c", tools]).decode().strip()
    labels = {name.removeprefix("org.roadfuse."): value for name, value in facts.labels.items()}
    found = [labels[f"version.{name}"] for name in ("torch", "horovod", "numpy", "python")]
    assert found == answer
    assert labels["version.openmpi"] in mpi.splitlines()[0].split()
    assert (labels["image"], labels["variant"]) == ("lane", "cpu") and labels["version.system"].startswith("debian 12")
    standard = facts.labels["org.opencontainers.image.version"]
    assert f":{standard}" in facts.tags[0]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert facts.labels["org.opencontainers.image.revision"].removesuffix("-dirty") == head.strip()
    assert facts.user == "10001:10001"
    # What only the build needs is not in the image.
    assert left == "0"


def test_the_list_of_contents_is_whole(built: Built) -> None:
    listed = json.loads((built.logs / "lane.sbom.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    names = {part["name"] for part in listed["components"]}
    assert {"torch", "horovod", "roadfuse", "numpy", "openmpi", "libc6", "python3.11", "bash"} <= names
    facts = built.facts("lane")
    with DockerEngine(built.builder.host) as engine:
        rows = engine.output(facts.image_id, ["dpkg-query", "--show", "--showformat=${Package}\n"]).decode().split()
        freeze = ["/opt/roadfuse/bin/python", "-m", "pip", "list", "--format=json"]
        python = {row["name"] for row in json.loads(engine.output(facts.image_id, freeze))}
    assert set(rows) <= names
    normal = {name.lower().replace("_", "-").replace(".", "-") for name in names}
    assert {name.lower().replace("_", "-").replace(".", "-") for name in python} <= normal


def test_no_setting_or_name_of_the_builder_is_in_the_image(built: Built) -> None:
    """Neither in its record nor in its history."""
    client = built.builder.client()
    try:
        image_id = read_lock(built.lock).images["lane"].image_id
        text = json.dumps([client.api.inspect_image(image_id), client.api.history(image_id)])
    finally:
        client.close()
    assert os.uname().nodename not in text
    for variable in ("PIP_INDEX_URL", "PIP_CERT", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        assert variable not in text


def test_layers_tell_neither_the_day_nor_the_machine_of_the_build(built: Built) -> None:
    """Else another build would give others. In an engine's folders a removal is a device with a time of its own."""
    facts = built.facts("lane")
    client = built.builder.client()
    try:
        driver = client.api.inspect_image(facts.image_id)["GraphDriver"]
    finally:
        client.close()
    if driver["Name"] != "overlay2":
        pytest.skip(f"knows no folders of layers with the storage driver {driver['Name']}")
    release = parse_release(facts.labels["org.opencontainers.image.version"])
    latest = make_plan(False, None, release, datetime.date.max).source_date_epoch
    layers = [Path(driver["Data"]["UpperDir"]), *map(Path, driver["Data"]["LowerDir"].split(":"))]
    young = [path for layer in layers for path in layer.rglob("*") if path.lstat().st_mtime > latest]
    assert young == []
    assert [(layers[-1] / name).stat().st_size for name in MOUNT_POINTS] == [0] * len(MOUNT_POINTS)


# Training


# Each container draws its scenes anew: few will do.
TINY = {**training_runs.TINY, "data.num_train_scenes": 16, "data.num_validation_scenes": 4, "train.num_samples": 40}


def tiny_words() -> list[str]:
    words = ["train", "--data", "generated", "--ranks", "2"]
    for name, value in TINY.items():
        words += ["--set", f"{name}={json.dumps(value)}"]
    return words


def run_argv(built: Built, *words: str, command: list[str]) -> list[str]:
    return [sys.executable, "-m", "containers", "run", "lane", "--lock", str(built.lock), *words, "--", *command]


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


@pytest.mark.timeout(600)
def test_a_training_equals_the_same_run_outside(built: Built, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    argv = run_argv(
        built, "--out", str(inside), "--user", "4242:77", "--env", "OMP_NUM_THREADS=1", command=tiny_words()
    )
    done = subprocess.run(argv, cwd=ROOT, env=built.puller.client_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "roadfuse: this image is for CPUs" in done.stderr
    words = ["train", "lane-small", *tiny_words()[1:], "--out", str(outside)]
    here = training_runs.run([sys.executable, "-m", "pipelines", *words], tmp_path / "cache")
    assert here.returncode == 0, here.stdout + here.stderr
    first, second = result(inside), result(outside)
    assert first["status"] == second["status"] == "finished"
    assert first["checkpoint"]["weights_sha256"] == second["checkpoint"]["weights_sha256"]
    assert first["metrics"] == second["metrics"]
    # The run folder is the caller's, and says in which image the run was.
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in [inside, *inside.rglob("*")]}
    assert owners == {(4242, 77)}
    environment = json.loads((inside / "environment.json").read_text())
    assert environment["image_digest"] == read_lock(built.lock).images["lane"].pinned.pinned
    assert Path(first["checkpoint"]["path"]).is_file() or (inside / first["checkpoint"]["path"]).is_file()


@pytest.mark.timeout(600)
def test_sigterm_during_training_writes_a_checkpoint_and_the_run_goes_on(built: Built, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    out = tmp_path / "run"
    long = ["--set", "train.num_samples=1600"]
    words = ["--out", str(out), "--user", "4242:77", "--env", "OMP_NUM_THREADS=1"]
    argv = run_argv(built, *words, command=[*tiny_words(), *long])
    process = subprocess.Popen(
        argv, cwd=ROOT, env=built.puller.client_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = out / "metrics.jsonl"
    daemons.wait_for(
        lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0), "a step", 180
    )
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 75, output + errors
    preempted = result(out)
    assert preempted["status"] == "preempted" and any((out / "checkpoints").iterdir())
    done = subprocess.run(
        run_argv(built, *words, command=["train", "--resume"]),
        cwd=ROOT,
        env=built.puller.client_environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert result(out)["status"] == "finished"
    assert preempted["samples"] < result(out)["samples"] == 1600


@pytest.mark.timeout(300)
def test_any_number_trains_without_an_account(built: Built) -> None:
    """As an engine that is not ours may start it: two ranks by Open MPI, a user whom nobody knows."""
    client = built.puller.client()
    try:
        image_id = read_lock(built.lock).images["lane"].image_id
        out = client.containers.run(
            image_id, [*tiny_words(), "--out", "/workspace/run", "--engine", "horovod"],
            user="31337:31337", shm_size="1g", environment={"OMP_NUM_THREADS": "1"}, stderr=True, remove=True,
        )  # fmt: skip
    finally:
        client.close()
    assert b"I have no name" not in out


def test_a_secret_becomes_a_variable_of_the_command_alone(built: Built) -> None:
    argv = run_argv(built, "--secret", "MY_KEY", command=["sh", "-c", 'printf %s "$MY_KEY" | sha256sum'])
    key = "a b\n\nc\n"
    environment = {**built.puller.client_environment, "MY_KEY": key}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    expected = subprocess.run(["sha256sum"], input=key, capture_output=True, text=True, check=True).stdout
    assert (done.returncode, done.stdout) == (0, expected)


def test_nothing_is_left(built: Built) -> None:
    time.sleep(0.5)
    for daemon in (built.builder, built.puller):
        client = daemon.client()
        try:
            assert client.api.containers(all=True) == []
            tags = [tag for image in client.api.images() for tag in image["RepoTags"] or []]
        finally:
            client.close()
        assert not [tag for tag in tags if "unlabelled" in tag]
