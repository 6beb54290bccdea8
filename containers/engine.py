"""What is used of a container engine, and docker's adapter: the SDK's exceptions and shapes end here."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from containers.errors import ContainerError, EngineError

TIMEOUT_SECONDS = 60.0
"""For an answer of the engine to a request that is not a stream."""
_HEADER = struct.Struct(">BxxxL")
"""Of a frame of output: which stream, how many bytes."""
_STDERR = 2


@dataclass(frozen=True)
class ImageFacts:
    """An image as the engine holds it."""

    image_id: str
    """sha256:… of its configuration."""
    tags: tuple[str, ...]
    digests: tuple[str, ...]
    """REPOSITORY@sha256:…, of each registry that it was pulled from or pushed to; none where it was loaded."""
    platform: str
    """e.g. linux/amd64."""
    size_bytes: int
    created: str
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


@dataclass(frozen=True)
class ContainerFacts:
    """A container as it stands."""

    container_id: str
    name: str
    image_id: str
    state: str
    """created, running, paused, restarting, removing, exited or dead."""
    exit_code: int
    """0 while it runs."""
    out_of_memory: bool
    """Something in it was killed for want of memory: not always its first process."""
    error: str
    """Why the engine could not start it."""
    labels: Mapping[str, str]
    memory_limit_bytes: int
    """0: none of its own."""

    @property
    def ended(self) -> bool:
        return self.state in ("exited", "dead")


class Output(Protocol):
    """Live output of a container, and its errors, until it ends. Ends as quietly when the engine goes away: ask it
    about the container then. To be closed."""

    def __iter__(self) -> Iterator[tuple[bytes | None, bytes | None]]: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """What `run` needs. Every call raises EngineError where the engine is away or refuses."""

    host: str

    def image(self, reference: str) -> ImageFacts | None: ...

    def images(self, label: str) -> list[ImageFacts]: ...

    def runtimes(self) -> tuple[str, ...]: ...

    def create(self, name: str, settings: Mapping[str, Any]) -> str: ...

    def read_file(self, container_id: str, path: str) -> bytes | None: ...

    def put_archive(self, container_id: str, folder: str, archive: bytes) -> None: ...

    def attach(self, container_id: str) -> Output: ...

    def start(self, container_id: str) -> None: ...

    def signal(self, container_id: str, name: str) -> None: ...

    def container(self, container_id: str) -> ContainerFacts | None: ...

    def containers(self, label: str) -> list[ContainerFacts]: ...

    def kills(self, container_id: str, since: float, until: float) -> int: ...

    def remove(self, container_id: str) -> None: ...


class DockerEngine:
    """By the docker SDK. `host` is e.g. unix:///run/docker.sock; the default is DOCKER_HOST or docker's own."""

    def __init__(self, host: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        import docker

        self.host = host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        try:
            # Not from_env(): that follows the context of the user's command line client, which may be another engine.
            self.api: Any = docker.APIClient(
                base_url=self.host, version="auto", timeout=timeout_seconds, tls=_tls(self.host)
            )
        except Exception as error:
            raise _engine_error(error, self.host, "cannot be reached") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.api.close()

    def image(self, reference: str) -> ImageFacts | None:
        with self._errors(f"cannot look at image {reference}", missing_is_none=True):
            return _image_facts(self.api.inspect_image(reference))
        return None

    def images(self, label: str) -> list[ImageFacts]:
        """Those with this label (NAME or NAME=VALUE), the newest first."""
        with self._errors("cannot list images"):
            listed = self.api.images(filters={"label": label}, quiet=True)
            facts = [self.image(image_id) for image_id in dict.fromkeys(listed)]
            return sorted((image for image in facts if image), key=lambda image: image.created, reverse=True)

    def tag(self, image: str, reference: str) -> None:
        repository, _, tag = reference.rpartition(":")
        with self._errors(f"cannot call {image} {reference}"):
            self.api.tag(image, repository, tag)

    def untag(self, reference: str) -> None:
        """Drop the name, and the image where that was its last one and nothing is built on it."""
        with self._errors(f"cannot remove {reference}", missing_is_none=True, conflict_is_none=True):
            self.api.remove_image(reference, noprune=True)

    def import_tar(self, path: str, reference: str, changes: Sequence[str]) -> None:
        """Make an image of one layer from a tar of a whole system."""
        repository, _, tag = reference.rpartition(":")
        with self._errors(f"cannot import {path}"):
            answer = self.api.import_image_from_file(path, repository=repository, tag=tag, changes=list(changes))
        # Errors come in the text of a good answer.
        for line in str(answer).splitlines():
            if '"error"' in line:
                raise EngineError(f"the engine at {self.host} cannot import {path}: {_one_line(line)}")

    def output(self, image: str, command: Sequence[str]) -> bytes:
        """Standard output of a program in the image, run without its entry point, network or user's settings."""
        settings = {"Image": image, "Entrypoint": list(command), "Cmd": [], "HostConfig": {"NetworkMode": "none"}}
        container_id = self.create("", settings)
        try:
            with contextlib.closing(self.attach(container_id)) as output:
                self.start(container_id)
                parts = list(output)
            facts = self._ended(container_id)
        finally:
            self.remove(container_id)
        if facts is None or facts.exit_code != 0:
            errors = b"".join(error or b"" for _, error in parts).decode(errors="replace")
            code = facts.exit_code if facts else "unknown"
            raise EngineError(f"{' '.join(command)} in {image} ended with code {code}: {_one_line(errors)[-500:]}")
        return b"".join(out or b"" for out, _ in parts)

    def _ended(self, container_id: str) -> ContainerFacts | None:
        """Output ends a moment before the state changes."""
        with self._errors("cannot wait for a container"):
            self.api.wait(container_id)
        return self.container(container_id)

    def runtimes(self) -> tuple[str, ...]:
        with self._errors("cannot be asked for its runtimes"):
            return tuple(self.api.info().get("Runtimes") or ())

    def create(self, name: str, settings: Mapping[str, Any]) -> str:
        """`settings` as the engine's API takes them: see `run_options.container_settings`."""
        with self._errors(f"cannot make container {name}"):
            return str(self.api.create_container_from_config(dict(settings), name or None)["Id"])

    def read_file(self, container_id: str, path: str) -> bytes | None:
        """None where it is absent, or no file."""
        with self._errors(f"cannot read {path} of a container", missing_is_none=True):
            chunks, _ = self.api.get_archive(container_id, path)
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                for entry in archive:
                    file = archive.extractfile(entry)
                    if file is not None:
                        return file.read()
        return None

    def put_archive(self, container_id: str, folder: str, archive: bytes) -> None:
        with self._errors(f"cannot write to {folder} of a container"):
            self.api.put_archive(container_id, folder, archive)

    def attach(self, container_id: str) -> Output:
        parameters = {"stdout": 1, "stderr": 1, "stream": 1, "logs": 0}
        with self._errors("cannot attach to a container"):
            return DockerOutput(self.api.attach_socket(container_id, params=parameters))

    def start(self, container_id: str) -> None:
        with self._errors("cannot start the container"):
            self.api.start(container_id)

    def signal(self, container_id: str, name: str) -> None:
        """One that ended meanwhile is no error."""
        with self._errors(f"cannot send {name}", missing_is_none=True, conflict_is_none=True):
            self.api.kill(container_id, name)

    def container(self, container_id: str) -> ContainerFacts | None:
        with self._errors("cannot look at a container", missing_is_none=True):
            return _container_facts(self.api.inspect_container(container_id))
        return None

    def containers(self, label: str) -> list[ContainerFacts]:
        with self._errors("cannot list containers"):
            listed = self.api.containers(all=True, filters={"label": label})
        facts = [self.container(row["Id"]) for row in listed]
        return [container for container in facts if container]

    def kills(self, container_id: str, since: float, until: float) -> int:
        """How many signals were sent to it through the engine between these seconds of the epoch."""
        with self._errors("cannot be asked for its events"):
            filters = {"container": container_id, "event": "kill"}
            # As text, with fractions: of whole seconds, `until` would lie ahead, and the engine waits for it.
            rows = self.api.events(since=f"{since:.6f}", until=f"{until:.6f}", filters=filters, decode=True)
            with contextlib.closing(rows):
                return sum(1 for _ in rows)

    def remove(self, container_id: str) -> None:
        """With its volumes, killed if it runs; one that is gone, or being removed, is no error."""
        with self._errors("cannot remove a container", missing_is_none=True, conflict_is_none=True):
            self.api.remove_container(container_id, force=True, v=True)

    @contextlib.contextmanager
    def _errors(self, doing: str, missing_is_none: bool = False, conflict_is_none: bool = False) -> Iterator[None]:
        try:
            yield
        except ContainerError:
            raise
        except Exception as error:
            status = getattr(error, "status_code", None)
            if (missing_is_none and status == 404) or (conflict_is_none and status == 409):
                return
            raise _engine_error(error, self.host, doing) from None


class DockerOutput:
    """Frames of both streams from a socket. The SDK's own reader never closes it, and waits for whole frames."""

    def __init__(self, file: Any) -> None:
        # It owns the connection.
        self._response: Any = getattr(file, "_response", None)
        self._socket: socket.socket = getattr(file, "_sock", file)
        # A program may be silent for hours.
        self._socket.settimeout(None)

    def __iter__(self) -> Iterator[tuple[bytes | None, bytes | None]]:
        with contextlib.suppress(OSError):
            while len(header := self._read(_HEADER.size)) == _HEADER.size:
                stream, left = _HEADER.unpack(header)
                while left:
                    chunk = self._socket.recv(min(left, 65_536))
                    if not chunk:
                        return
                    left -= len(chunk)
                    yield (None, chunk) if stream == _STDERR else (chunk, None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        response, self._response = self._response, None
        if response is not None:
            response.close()
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (chunk := self._socket.recv(size - len(data))):
            data += chunk
        return data


def _engine_error(error: Exception, host: str, doing: str) -> EngineError:
    """One line from whatever the SDK raised."""
    import docker.errors
    import requests.exceptions

    if isinstance(error, docker.errors.APIError):
        return EngineError(f"the engine at {host} {doing}: {_one_line(str(error.explanation or error))}")
    text = _one_line(str(error))
    if "Permission denied" in text:
        return EngineError(f"the engine at {host} refuses this user: join the group docker, or use root")
    if isinstance(error, requests.exceptions.ReadTimeout):
        return EngineError(f"the engine at {host} {doing}: no answer in time; is it overloaded?")
    if isinstance(error, (docker.errors.DockerException, requests.exceptions.RequestException, OSError)):
        return EngineError(
            f"no container engine answers at {host}: start it (systemctl start docker), or name another by DOCKER_HOST"
        )
    raise error


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _tls(host: str) -> Any:
    """As docker's own client: by DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, for hosts over TCP."""
    import docker

    folder = os.environ.get("DOCKER_CERT_PATH")
    if not host.startswith("tcp://") or not (folder or os.environ.get("DOCKER_TLS_VERIFY")):
        return False
    folder = folder or os.path.expanduser("~/.docker")  # noqa: PTH111
    return docker.tls.TLSConfig(
        client_cert=(f"{folder}/cert.pem", f"{folder}/key.pem"),
        ca_cert=f"{folder}/ca.pem",
        verify=bool(os.environ.get("DOCKER_TLS_VERIFY")),
    )


def _image_facts(row: Mapping[str, Any]) -> ImageFacts:
    configuration = row.get("Config") or {}
    variant = f"/{row['Variant']}" if row.get("Variant") else ""
    return ImageFacts(
        image_id=row["Id"],
        tags=tuple(row.get("RepoTags") or ()),
        digests=tuple(row.get("RepoDigests") or ()),
        platform=f"{row.get('Os', '')}/{row.get('Architecture', '')}{variant}",
        size_bytes=int(row.get("Size") or 0),
        created=str(row.get("Created") or ""),
        environment=_environment(configuration.get("Env") or ()),
        labels=dict(configuration.get("Labels") or {}),
        user=str(configuration.get("User") or ""),
    )


def _container_facts(row: Mapping[str, Any]) -> ContainerFacts:
    state = row["State"]
    return ContainerFacts(
        container_id=row["Id"],
        name=str(row.get("Name", "")).lstrip("/"),
        image_id=str(row.get("Image", "")),
        state=str(state.get("Status", "")),
        exit_code=int(state.get("ExitCode") or 0),
        out_of_memory=bool(state.get("OOMKilled")),
        error=_one_line(str(state.get("Error") or "")),
        labels=dict((row.get("Config") or {}).get("Labels") or {}),
        memory_limit_bytes=int((row.get("HostConfig") or {}).get("Memory") or 0),
    )


def _environment(rows: Sequence[str]) -> dict[str, str]:
    pairs = (row.partition("=") for row in rows)
    return {name: value for name, _, value in pairs}
