"""Pushing: errors that an engine hides in its text are found, what broke is tried again, the digest is checked."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from containers import transfer_errors
from containers.credentials import store_credentials
from containers.engine import ImageFacts
from containers.errors import ContainerError, EngineError
from containers.names import ImageReference, parse_reference
from containers.publish import check_registry
from containers.pull_engine import DockerImages, Event, EventStream, problem
from containers.push import PushSettings, choose_local, push
from containers.tokens import Credentials
from tests.containers.daemons import busybox_layer, import_image
from tests.containers.engine_double import EngineDouble
from tests.containers.fault_proxy import Fault, fault_proxy
from tests.containers.pulling import FAST, Said, noise
from tests.containers.registry_double import MadeImage, RegistryDouble, make_image, registry_double

TAG = "26.11-cpu-py3"
_numbers = itertools.count(1)


@dataclass
class _Events:
    events: Sequence[Event]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def stop(self) -> None:
        pass


@dataclass
class PushingDouble(EngineDouble):
    """Says what dockerd was heard to say, one list of events a push."""

    says: list[Sequence[Event]] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)

    def push(self, repository: str, tag: str, credentials: Credentials | None) -> EventStream:
        self.pushed.append(f"{repository}:{tag}")
        return _Events(self.says.pop(0))


@pytest.fixture
def server() -> Iterator[RegistryDouble]:
    with registry_double() as state:
        yield state


@pytest.fixture
def image(server: RegistryDouble) -> MadeImage:
    made = make_image([b"a", b"b"])
    server.add("roadfuse/lane", TAG, made)
    return made


def engine_with(image: MadeImage, says: list[Sequence[Event]]) -> PushingDouble:
    engine = PushingDouble(says=says)
    engine._hold(image.config, ())
    engine.tag(image.image_id, "roadfuse/lane", TAG)
    return engine


def good(image: MadeImage) -> list[Event]:
    return [
        {"status": "The push refers to repository [x]"},
        {"status": "Preparing", "id": "aaa", "progressDetail": {}},
        {"status": "Layer already exists", "id": "aaa"},
        {"status": "Pushing", "id": "bbb", "progressDetail": {"current": 1, "total": 2000}},
        {"status": "Pushed", "id": "bbb", "progressDetail": {}},
        {"status": f"{TAG}: digest: {image.digest} size: 1"},
        {"progressDetail": {}, "aux": {"Tag": TAG, "Digest": image.digest, "Size": 1}},
    ]


def push_it(engine: PushingDouble, server: RegistryDouble, said: Said | None = None) -> Any:
    target = ImageReference(server.address, "roadfuse/lane", TAG)
    settings = PushSettings({"DOCKER_CONFIG": "/nonexistent"}, policy=FAST)
    return push(f"roadfuse/lane:{TAG}", target, settings, engine, said or Said())


def test_a_push_ends_at_a_digest_that_the_registry_has(server: RegistryDouble, image: MadeImage) -> None:
    said = Said()
    engine = engine_with(image, [good(image)])
    pushed = push_it(engine, server, said)
    assert str(pushed.reference) == f"{server.address}/roadfuse/lane:{TAG}@{image.digest}"
    assert (pushed.num_layers_there, pushed.num_layers, pushed.size_bytes) == (1, 2, image.size)
    assert engine.pushed == [f"{server.address}/roadfuse/lane:{TAG}"]
    assert said.lines == ["aaa: is in the registry", "bbb: pushed, 2 kB unpacked"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("unauthorized: authentication required", transfer_errors.AuthenticationFailed),
        ("denied: requested access to the resource is denied", transfer_errors.AccessDenied),
        ("no basic auth credentials", transfer_errors.AuthenticationFailed),
        ("write /x: no space left on device", transfer_errors.DiskFull),
        ("something new", EngineError),
    ],
)
def test_errors_in_the_text_are_errors(
    server: RegistryDouble, image: MadeImage, message: str, kind: type[ContainerError]
) -> None:
    engine = engine_with(image, [[{"errorDetail": {"message": message}, "error": message}]])
    with pytest.raises(kind, match=message):
        push_it(engine, server)
    assert len(engine.pushed) == 1


@pytest.mark.parametrize(
    "message",
    [
        "received unexpected HTTP status: 503 Service Unavailable",
        'Put "http://x/v2/": dial tcp 127.0.0.1:1: connect: connection refused',
        "write tcp: connection reset by peer",
        "toomanyrequests: slow down",
    ],
)
def test_what_may_pass_is_tried_again(server: RegistryDouble, image: MadeImage, message: str) -> None:
    failed: list[Event] = [{"error": message}]
    said = Said()
    engine = engine_with(image, [failed, failed, good(image)])
    assert push_it(engine, server, said).reference.digest == image.digest
    assert len([line for line in said.lines if "again in" in line]) == 2
    with pytest.raises(ContainerError, match=r"after 3 attempts; what arrived is not sent again"):
        push_it(engine_with(image, [failed] * 3), server)


def test_a_push_without_a_digest_or_with_another_is_none(server: RegistryDouble, image: MadeImage) -> None:
    with pytest.raises(EngineError, match="without a digest"):
        push_it(engine_with(image, [good(image)[:-2]]), server)
    other = make_image([b"other"])
    server.add("roadfuse/lane", "other", other)
    with pytest.raises(EngineError, match="another image"):
        push_it(engine_with(image, [good(other)]), server)
    with pytest.raises(transfer_errors.NotFound):
        push_it(engine_with(image, [good(make_image([b"never arrived"]))]), server)


def test_what_is_not_there_or_has_no_place_to_go_is_named(server: RegistryDouble, image: MadeImage) -> None:
    engine = engine_with(image, [])
    settings = PushSettings({}, policy=FAST)
    target = ImageReference(server.address, "roadfuse/lane", TAG)
    with pytest.raises(ContainerError, match="has none"):
        push("roadfuse/sign:26.11-py3", target, settings, engine, Said())
    with pytest.raises(ContainerError, match="must name a registry and a tag"):
        push(f"roadfuse/lane:{TAG}", replace(target, registry=""), settings, engine, Said())


def test_a_registry_that_would_refuse_is_named_before_anything_is_built(
    server: RegistryDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    reference = f"{server.address}/org/lane:26.11-cpu-py3"
    check_registry(reference)
    server.users = {"$oauthtoken": "nvapi-right"}
    with pytest.raises(transfer_errors.AccessDenied, match=f"containers login {server.address}"):
        check_registry(reference)
    store_credentials(server.address, Credentials("$oauthtoken", "nvapi-wrong"), {"DOCKER_CONFIG": str(tmp_path)})
    with pytest.raises(transfer_errors.AuthenticationFailed, match="make a new key"):
        check_registry(reference)
    store_credentials(server.address, Credentials("$oauthtoken", "nvapi-right"), {"DOCKER_CONFIG": str(tmp_path)})
    check_registry(reference)


def test_the_newest_release_of_a_name_is_chosen() -> None:
    def facts(*tags: str) -> ImageFacts:
        return ImageFacts("sha256:0", tags, (), "linux/amd64", 1, "")

    images = [facts("x/lane:test", "postgres:15"), facts("roadfuse/sign:26.12-py3"), facts("roadfuse/lane:26.11-py3")]
    images.append(facts("roadfuse/lane:26.10-py3"))
    assert choose_local("lane", images) == parse_reference("roadfuse/lane:26.11-py3")
    with pytest.raises(ContainerError, match="python -m containers build train"):
        choose_local("train", images)
    with pytest.raises(ContainerError, match='did you mean "lane"'):
        choose_local("lan", images)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("filesystem layer verification failed for digest sha256:0", transfer_errors.CorruptBlob),
        ("manifest verification failed for digest sha256:0", transfer_errors.CorruptBlob),
        ("unexpected EOF", transfer_errors.Interrupted),
        (
            "pull access denied for x, repository does not exist or may require a login",
            transfer_errors.AccessDenied,
        ),
        ("manifest for x not found: manifest unknown", transfer_errors.NotFound),
        ("toomanyrequests: You have reached your pull rate limit", transfer_errors.TooManyRequests),
        ("net/http: TLS handshake timeout", transfer_errors.Stalled),
        ("failed to register layer: Error processing tar file: no space left on device", transfer_errors.DiskFull),
    ],
)
def test_the_engines_words_have_their_types(message: str, kind: type[ContainerError]) -> None:
    found = problem(message, "unix:///x")
    assert type(found) is kind
    assert "unix:///x" in str(found) and message in str(found)


# A real engine and registry.


@pytest.fixture
def local_image(docker_client: Any, engine: Any) -> Iterator[tuple[str, str]]:
    """A reference in the engine without a registry, and the image's ID."""
    number = next(_numbers)
    repository = f"roadfuse/push-{number}"
    layer = busybox_layer({"data": noise(5000 + number, 3_000_000)})
    image_id = import_image(docker_client, layer, repository, TAG)
    yield f"{repository}:{TAG}", image_id
    store = DockerImages(engine)
    for facts in store.images():
        if facts.image_id == image_id:
            for name in (*facts.tags, *facts.digests):
                store.remove(name)


@pytest.mark.services
def test_a_real_push_goes_on_where_it_broke(registry: Any, engine: Any, local_image: tuple[str, str]) -> None:
    source, image_id = local_image
    settings = PushSettings({"DOCKER_CONFIG": "/nonexistent"}, policy=replace(FAST, attempts=5))
    with fault_proxy(registry.address) as proxy:
        target = replace(parse_reference(source), registry=proxy.address)
        # The last step fails once, after the layers are there; the engine itself does not try that again.
        proxy.faults.append(Fault("/manifests/", "status", times=2, status=503))
        said = Said()
        pushed = push(source, target, settings, DockerImages(engine), said)
        assert pushed.image_id == image_id and pushed.num_layers_there == pushed.num_layers == 1
        assert "again in" in said.text
        again = push(source, target, settings, DockerImages(engine), Said())
        assert again.reference == pushed.reference and again.num_layers_there == 1
        proxy.faults[:] = [Fault("/v2/", "status", status=401)]
        with pytest.raises((transfer_errors.AuthenticationFailed, transfer_errors.AccessDenied)):
            push(source, target, settings, DockerImages(engine), Said())


@pytest.mark.services
def test_the_push_command_prints_the_digest(
    registry: Any, dockerd: Any, engine: Any, local_image: tuple[str, str], tmp_path: Path
) -> None:
    _, image_id = local_image
    store = DockerImages(engine)
    store.tag(image_id, "roadfuse/sign", TAG)
    argv = [sys.executable, "-m", "containers", "push", "sign", "--registry", f"{registry.address}/team"]
    environment = {**os.environ, **dockerd.client_environment}
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    facts = store.image(f"{registry.address}/team/sign:{TAG}")
    assert facts is not None and facts.image_id == image_id
    (digest,) = [name.partition("@")[2] for name in facts.digests]
    assert ended.stdout.startswith(f"{registry.address}/team/sign:{TAG}@{digest} image ID {image_id}")
    store.remove(f"roadfuse/sign:{TAG}")
