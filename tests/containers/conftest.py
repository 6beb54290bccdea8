"""What tests of containers share: an engine, a registry and a tiny image, each real, started once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from containers.engine import DockerEngine
from tests.containers import daemons

TINY = "roadfuse/tiny:26.11-cpu-py3"


def needs(programs: Sequence[str], packages: str) -> None:
    """Skip where a program is missing; fail in CI, where all of them must be there."""
    absent = daemons.missing(programs)
    if absent:
        reason = f"needs {', '.join(absent)}: apt-get install {packages}, as root"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def dockerd() -> Iterator[daemons.DockerDaemon]:
    """An engine that tests share: they name their images and containers, and leave no container behind."""
    needs([*daemons.ENGINE_PROGRAMS, "busybox"], "docker.io iproute2 busybox-static")
    with daemons.docker_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="session")
def docker_client(dockerd: daemons.DockerDaemon) -> Iterator[Any]:
    """The SDK's own client of `dockerd`, to look from outside."""
    client = dockerd.client()
    yield client
    client.close()


@pytest.fixture(scope="session")
def engine(dockerd: daemons.DockerDaemon) -> Iterator[DockerEngine]:
    """Our adapter on `dockerd`."""
    with DockerEngine(dockerd.host) as engine:
        yield engine


@pytest.fixture(scope="session")
def registry() -> Iterator[daemons.RegistryServer]:
    needs(daemons.REGISTRY_PROGRAMS, "docker-registry")
    with daemons.docker_registry() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_image(docker_client: Any) -> str:
    """Reference of an image of 2 MB with busybox's commands, in `dockerd`."""
    repository, tag = TINY.split(":")
    daemons.import_image(docker_client, daemons.busybox_layer(), repository, tag)
    return TINY
