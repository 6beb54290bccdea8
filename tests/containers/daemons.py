"""A real dockerd and a real docker-registry on this host, started by a test for itself alone and ended with it."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENGINE_PROGRAMS = ("dockerd", "containerd", "runc", "docker-init", "ip")
REGISTRY_PROGRAMS = ("docker-registry",)
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
START_SECONDS = 60.0


def missing(programs: Sequence[str]) -> list[str]:
    """Which of these are not installed, and "root" where we are not."""
    absent = [name for name in programs if shutil.which(name, path=PATH) is None]
    return absent + ([] if os.geteuid() == 0 else ["root"])


@dataclass
class DockerDaemon:
    """An engine with its own images, containers, socket and bridge; nothing of another one is touched."""

    folder: Path
    bridge: str
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables with which a command of ours, or docker's, talks to this engine and reads no user's settings."""
        settings = self.folder / "client"
        settings.mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        return {**clean, "DOCKER_HOST": self.host, "DOCKER_CONFIG": str(settings)}

    @property
    def log(self) -> str:
        return (self.folder / "dockerd.log").read_text(errors="replace")

    def start(self) -> None:
        (self.folder / "daemon.json").write_text("{}")
        self._forget_dead_containerd()
        # No iptables and no forwarding: neither this host's rules nor another engine's are changed.
        command = ["dockerd", "--config-file", f"{self.folder}/daemon.json", "--data-root", f"{self.folder}/data"]
        command += ["--exec-root", f"{self.folder}/exec", "-p", f"{self.folder}/docker.pid", "-H", self.host]
        command += ["--bridge", self.bridge, "--iptables=false", "--ip-forward=false", "--ip-masq=false"]
        command += [*self.arguments]
        with (self.folder / "dockerd.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self.environment)
            )
        try:
            wait_for(self._answers, "answer of dockerd", START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """As a service manager does: its containers are ended with it."""
        self.end(signal.SIGTERM, timeout_seconds)

    def end(self, by: signal.Signals, timeout_seconds: float = 30.0) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(by)
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def client(self) -> Any:
        """A docker.DockerClient of the SDK; to be closed by who asked for it."""
        import docker

        return docker.DockerClient(base_url=self.host, timeout=60)

    def _forget_dead_containerd(self) -> None:
        """That of a killed dockerd: where nobody buries the dead, its successor takes it for alive and waits."""
        record = self.folder / "exec/containerd/containerd.pid"
        try:
            state = Path(f"/proc/{record.read_text().strip()}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            state = "X"
        if state in "ZX":
            record.unlink(missing_ok=True)

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"dockerd ended with code {self.process.returncode}: {self.log[-1500:]}")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            try:
                connection.connect(f"{self.folder}/docker.sock")
                connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
                return b" 200 " in connection.recv(64)
            except OSError:
                return False


@contextmanager
def docker_daemon(arguments: Sequence[str] = (), programs_first: Path | None = None) -> Iterator[DockerDaemon]:
    """Start one in a folder of its own, which goes with it.

    `programs_first` is a folder that its PATH begins with, e.g. for a stub of NVIDIA's runtime hook.
    """
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))
    environment = {**os.environ, "PATH": f"{programs_first}:{PATH}" if programs_first else PATH}
    try:
        with _bridge() as bridge:
            daemon = DockerDaemon(folder, bridge, environment, arguments)
            daemon.start()
            try:
                yield daemon
            finally:
                _end_containers(daemon)
                daemon.stop()
    finally:
        _remove_folder(folder)


def _end_containers(daemon: DockerDaemon) -> None:
    """At once, rather than by the daemon's own patience of ten seconds for each."""
    if daemon.process is None or daemon.process.poll() is not None:
        with suppress(Exception):
            daemon.start()  # To end what a killed one left.
    with suppress(Exception):
        client = daemon.client()
        for container in client.api.containers(all=True, quiet=True):
            with suppress(Exception):
                client.api.remove_container(container["Id"], force=True, v=True)
        client.close()


@contextmanager
def _bridge() -> Iterator[str]:
    """A network bridge of a name and a subnet that nobody uses."""
    number = os.getpid() * 7
    for attempt in range(50):
        number = (number + 1) % 65536
        name = f"brt{os.getpid() % 100000}x{attempt}"
        subnet = f"10.{200 + number % 50}.{number // 50 % 250}"
        taken = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout
        if f" {subnet}." in taken:
            continue
        made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True)
        if made.returncode == 0:
            break
        if "exists" not in made.stderr:
            raise RuntimeError(f"no bridge can be made here: {made.stderr.strip()}")
    else:
        raise RuntimeError("no free name for a bridge")
    try:
        subprocess.run(["ip", "addr", "add", f"{subnet}.1/24", "dev", name], check=True)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], check=False)


def _remove_folder(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class RegistryServer:
    """docker-registry on a free port of the loopback, over plain HTTP, as engines allow there."""

    folder: Path
    port: int
    environment: Mapping[str, str]
    """REGISTRY_… variables lay over its configuration."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def blobs(self) -> Path:
        """sha256/xx/DIGEST/data."""
        return self.folder / "data/docker/registry/v2/blobs"

    @property
    def log(self) -> str:
        return (self.folder / "registry.log").read_text(errors="replace")

    def start(self) -> None:
        configuration = self.folder / "registry.yml"
        configuration.write_text(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n"
            f"    rootdirectory: {self.folder}/data\n  delete:\n    enabled: true\n"
            f"http:\n  addr: {self.address}\n"
        )
        with (self.folder / "registry.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["docker-registry", "serve", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": PATH, "OTEL_TRACES_EXPORTER": "none", **self.environment},
            )
        try:
            wait_for(self._answers, "answer of docker-registry", START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"docker-registry ended with code {self.process.returncode}: {self.log[-1500:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/v2/", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 401
        except OSError:
            return False


@contextmanager
def docker_registry(environment: Mapping[str, str] | None = None) -> Iterator[RegistryServer]:
    """Start an empty one; REGISTRY_… variables in `environment` give it authentication."""
    folder = Path(tempfile.mkdtemp(prefix="registry-"))
    try:
        server = RegistryServer(folder, free_port(), environment or {})
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def busybox_layer(files: Mapping[str, bytes] | None = None) -> bytes:
    """A tar of a whole tiny system: busybox from Debian's busybox-static with its commands, and these files."""
    busybox = shutil.which("busybox", path=PATH)
    if busybox is None:
        raise FileNotFoundError("busybox: apt-get install busybox-static")
    commands = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for folder in ("bin", "etc", "tmp", "proc", "sys", "dev", "home", "run"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        _add(archive, "bin/busybox", Path(busybox).read_bytes(), 0o755)
        for command in commands:
            if command != "busybox":
                entry = tarfile.TarInfo(f"bin/{command}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                archive.addfile(entry)
        _add(archive, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", 0o644)
        _add(archive, "etc/group", b"root:x:0:\n", 0o644)
        for name, data in (files or {}).items():
            _add(archive, name, data, 0o755)
    return content.getvalue()


def import_image(client: Any, layer: bytes, repository: str, tag: str, changes: Sequence[str] = ()) -> str:
    """Make an image of one layer in the engine; returns its ID."""
    client.api.import_image_from_data(layer, repository=repository, tag=tag, changes=["ENV PATH=/bin", *changes])
    return str(client.api.inspect_image(f"{repository}:{tag}")["Id"])


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after {timeout_seconds:.0f} s")
        time.sleep(0.05)
