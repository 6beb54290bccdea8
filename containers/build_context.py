"""The folder that `docker build` sees: this project's files, Python packages, nothing of the machine beside them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from containers.errors import ContainerError

PROJECT = ("pyproject.toml", "README.md", "LICENSE", "perception", "pipelines")
"""What the project's wheel is made of."""
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


@contextmanager
def build_context(
    cache: Path,
    repository: Path,
    requirements: Mapping[str, str],
    wheels: Path,
    sbom_wheels: Path,
    horovod_wheels: Sequence[Path],
    epoch: int,
) -> Iterator[Path]:
    """Lay it out in `cache`, always at the same place: BuildKit then asks only for what changed.

    Files of the project get the time `epoch`, which is theirs in the images too. One build at a time.
    """
    context = cache / "context"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "context.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ContainerError(f"{lock.name}: another build of images runs; wait for its end") from None
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        try:
            images = Path(__file__).with_name("images")
            shutil.copy(images / "Dockerfile", context / "Dockerfile")
            shutil.copytree(images, context / "images", ignore=shutil.ignore_patterns("__pycache__", "Dockerfile"))
            shutil.copytree(repository / "tools", context / "tools", ignore=_LEFT_OUT)
            (context / "requirements").mkdir()
            for name, text in requirements.items():
                (context / "requirements" / name).write_text(text)
            _copy_project(repository, context / "project")
            for path in [*context.rglob("*"), context]:
                _make_equal(path, epoch)
            _link_files(wheels, context / "wheels")
            _link_files(sbom_wheels, context / "sbom-wheels")
            (context / "horovod-wheels").mkdir()
            for folder in horovod_wheels:
                _link_files(folder, context / "horovod-wheels" / folder.name)
            yield context
        finally:
            shutil.rmtree(context, ignore_errors=True)


def _copy_project(repository: Path, folder: Path) -> None:
    folder.mkdir()
    for name in PROJECT:
        path = repository / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=_LEFT_OUT)
        elif path.is_file():
            shutil.copy(path, folder / name)
        else:
            raise ContainerError(f"{path}: not found; images are built in a checkout of the project")


def _make_equal(path: Path, epoch: int) -> None:
    """Whoever checked it out, and when."""
    path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else 0o644)
    os.utime(path, (epoch, epoch))


def _link_files(source: Path, target: Path) -> None:
    """Without a copy where the file system allows: torch's wheels are large."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)
