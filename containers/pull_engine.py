"""What pulling, pushing and pruning need of a container engine, and docker's adapter for it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from containers.engine import DockerEngine, ImageFacts
from containers.errors import ContainerError, EngineError
from containers.tokens import Credentials
from containers.transfer_errors import (
    AccessDenied,
    AuthenticationFailed,
    CorruptBlob,
    DiskFull,
    Interrupted,
    NotFound,
    ServerFailure,
    Stalled,
    TooManyRequests,
    Unreachable,
)

Event = Mapping[str, Any]


class EngineAway(EngineError):
    """It does not answer, or stopped to in the middle: there is no use in asking it another way."""


class EventStream(Protocol):
    """The engine's events of one operation; `stop` may be called by another thread, and ends the operation."""

    def __iter__(self) -> Iterator[Event]: ...

    def stop(self) -> None: ...


class ImageStore(Protocol):
    """Every call raises EngineError where the engine is away or refuses."""

    host: str

    def image(self, reference: str) -> ImageFacts | None: ...

    def images(self) -> list[ImageFacts]: ...

    def names(self) -> list[str]: ...

    def layer_chains(self) -> list[tuple[str, ...]]: ...

    def wants_sizes(self) -> bool: ...

    def used_image_ids(self) -> set[str]: ...

    def pull(self, reference: str, platform: str, credentials: Credentials | None) -> EventStream: ...

    def push(self, repository: str, tag: str, credentials: Credentials | None) -> EventStream: ...

    def load(self, archive: Iterable[bytes]) -> EventStream: ...

    def tag(self, image_id: str, repository: str, tag: str) -> None: ...

    def remove(self, reference: str) -> None: ...


class DockerImages:
    """On the connection of a DockerEngine."""

    def __init__(self, engine: DockerEngine) -> None:
        self.host = engine.host
        self._engine = engine
        self._api = engine.api

    def image(self, reference: str) -> ImageFacts | None:
        return self._engine.image(reference)

    def images(self) -> list[ImageFacts]:
        """All that have a name, the newest first."""
        with self._errors("cannot list images"):
            listed = self._api.images(quiet=True)
        facts = [self._engine.image(image_id) for image_id in dict.fromkeys(listed)]
        return sorted((image for image in facts if image), key=lambda image: image.created, reverse=True)

    def names(self) -> list[str]:
        """Every tag and every digest that an image is known by, in one request."""
        with self._errors("cannot list images"):
            rows = self._api.images()
        return [str(name) for row in rows for key in ("RepoTags", "RepoDigests") for name in row.get(key) or ()]

    def layer_chains(self) -> list[tuple[str, ...]]:
        """The digests of each image's unpacked layers, from the lowest up."""
        chains = []
        with self._errors("cannot list images"):
            ids = dict.fromkeys(self._api.images(quiet=True))
        for one in ids:
            # One that is gone meanwhile has none.
            with self._errors(f"cannot look at image {one}", missing_is_none=True):
                chains.append(tuple((self._api.inspect_image(one).get("RootFS") or {}).get("Layers") or ()))
        return chains

    def wants_sizes(self) -> bool:
        """It keeps images as containerd does, which compares the size of a layer with its manifest's."""
        with self._errors("cannot be asked how it keeps images"):
            status = self._api.info().get("DriverStatus") or []
        return any("snapshotter" in str(value) for row in status for value in row)

    def used_image_ids(self) -> set[str]:
        """Of containers that run or could be started again."""
        with self._errors("cannot list containers"):
            return {str(row["ImageID"]) for row in self._api.containers(all=True)}

    def pull(self, reference: str, platform: str, credentials: Credentials | None) -> EventStream:
        repository, at, digest = reference.partition("@")
        # The engine's API takes a digest where it takes a tag.
        parameters = {"fromImage": repository, "tag": digest, "platform": platform}
        if not at:
            raise ValueError(f"{reference}: an engine verifies nothing that it pulls by tag")
        return self._stream("/images/create", parameters, _registry_auth(credentials), None)

    def push(self, repository: str, tag: str, credentials: Credentials | None) -> EventStream:
        return self._stream(f"/images/{repository}/push", {"tag": tag}, _registry_auth(credentials), None)

    def load(self, archive: Iterable[bytes]) -> EventStream:
        return self._stream("/images/load", {"quiet": "1"}, {"Content-Type": "application/x-tar"}, archive)

    def tag(self, image_id: str, repository: str, tag: str) -> None:
        with self._errors(f"cannot name an image {repository}:{tag}"):
            self._api.tag(image_id, repository, tag, force=True)

    def remove(self, reference: str) -> None:
        """A name, and the image with the last of its names. One that is gone is no error."""
        with self._errors(f"cannot remove {reference}", missing_is_none=True):
            self._api.remove_image(reference)

    def _stream(
        self, path: str, parameters: Mapping[str, str], headers: Mapping[str, str], body: Iterable[bytes] | None
    ) -> EventStream:
        """Not by the SDK's own calls: their streams cannot be ended from outside."""
        import requests

        url = f"{self._api.base_url}/v{self._api.api_version}{path}"
        with self._errors("cannot be asked"):
            answer: requests.Response = self._api.post(
                url, params=dict(parameters), headers=dict(headers), data=body, stream=True, timeout=(10.0, None)
            )
        if answer.status_code >= 400:
            with answer:
                try:
                    message = str(answer.json().get("message", ""))
                except (ValueError, AttributeError):
                    message = answer.text[:200]
            raise problem(message or f"status {answer.status_code}", self.host)
        return _DockerStream(answer, self.host)

    @contextmanager
    def _errors(self, doing: str, missing_is_none: bool = False) -> Iterator[None]:
        import docker
        import requests

        try:
            yield
        except docker.errors.APIError as error:
            if not (missing_is_none and error.status_code == 404):
                raise EngineError(f"the engine at {self.host} {doing}: {_one_line(error.explanation)}") from None
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise EngineAway(f"the engine at {self.host} {doing} ({type(error).__name__}): is it running?") from None


class _DockerStream:
    def __init__(self, answer: Any, host: str) -> None:
        self._answer = answer
        self._host = host
        self._stopped = False

    def __iter__(self) -> Iterator[Event]:
        """Until the engine ends it. Raises EngineError where it breaks off."""
        import requests

        rest = b""
        try:
            for chunk in self._answer.iter_content(None):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        event = json.loads(line)
                        if isinstance(event, dict):
                            yield event
            if rest.strip():
                yield json.loads(rest)
        except (requests.RequestException, ValueError, OSError):
            if not self._stopped:
                raise EngineAway(
                    f"the engine at {self._host} broke off: is it running? (journalctl -u docker)"
                ) from None
        finally:
            self._answer.close()

    def stop(self) -> None:
        self._stopped = True
        # Only this wakes up a thread that waits for the next event.
        with suppress(Exception):
            self._answer.raw.shutdown()


def problem(message: str, host: str) -> ContainerError:
    """What an engine's error text means. Its status is nearly always 500, and its streams have none."""
    text = _one_line(message)
    low = text.lower()
    for words, kind, cure in _PROBLEMS:
        if any(word in low for word in words):
            return kind(f"the engine at {host}: {text}: {cure}")
    return EngineError(f"the engine at {host}: {text}")


_PROBLEMS: tuple[tuple[tuple[str, ...], type[ContainerError], str], ...] = (
    (
        ("no space left on device", "disk quota exceeded"),
        DiskFull,
        "free some where it keeps images (docker system df)",
    ),
    (("toomanyrequests", "too many requests"), TooManyRequests, "try again later, or log in for a higher limit"),
    (
        ("verification failed", "digest did not match", "digest mismatch"),
        CorruptBlob,
        "what came was altered on the way",
    ),
    # Before "unauthorized", which the same message may hold.
    (
        ("access denied", "requested access to the resource is denied", "insufficient_scope", "denied:"),
        AccessDenied,
        "log in as a user who has access (python -m containers login REGISTRY)",
    ),
    (
        ("unauthorized", "authentication required", "no basic auth credentials", "incorrect username or password"),
        AuthenticationFailed,
        "python -m containers login REGISTRY",
    ),
    (("manifest unknown", "not found", "no such image", "does not exist"), NotFound, "check the name and the tag"),
    (("unexpected http status: 5", "blob upload unknown", "internal server error"), ServerFailure, "try again later"),
    (("timeout", "deadline exceeded"), Stalled, "try again later"),
    (
        ("connection refused", "no such host", "network is unreachable", "no route to host"),
        Unreachable,
        "is it running?",
    ),
    (("unexpected eof", "connection reset", "broken pipe", ": eof"), Interrupted, "try again"),
)


def _registry_auth(credentials: Credentials | None) -> dict[str, str]:
    """Always said, if only that there is none: the SDK would look for keys of its own."""
    if credentials is None:
        fields = {}
    elif credentials.is_identity_token:
        fields = {"identitytoken": credentials.secret}
    else:
        fields = {"username": credentials.user, "password": credentials.secret}
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(fields).encode()).decode("ascii")}


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
