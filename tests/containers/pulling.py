"""What tests of pulling share: settings for the impatient, and image contents that do not compress."""

from __future__ import annotations

import random
from pathlib import Path

from containers.lock import Lock, LockedImage
from containers.pull import PullSettings
from containers.retry import RetryPolicy
from tests.containers.registry_double import MadeImage

FAST = RetryPolicy(
    attempts=3,
    first_delay_seconds=0.01,
    longest_delay_seconds=0.05,
    longest_retry_after_seconds=2.0,
    connect_seconds=10.0,
    stall_seconds=10.0,
    engine_stall_seconds=60.0,
)


class Said:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.phases: dict[str, str] = {}
        self.most: dict[str, int] = {}

    def layers(self, sizes: dict[str, int]) -> None:
        self.phases |= dict.fromkeys(sizes, "waiting")

    def layer(self, digest: str, phase: str, received_bytes: int) -> None:
        self.phases[digest] = phase
        self.most[digest] = max(self.most.get(digest, 0), received_bytes)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def locked(name: str, reference: str, image: MadeImage, platform: str = "linux/amd64") -> LockedImage:
    return LockedImage(name, reference, image.digest, image.image_id, platform, image.size, "2026-11-01T00:00:00Z")


def lock_of(*images: LockedImage) -> Lock:
    return Lock({image.name: image for image in images})


def settings(folder: Path, lock: Lock | None = None, policy: RetryPolicy = FAST, **other: object) -> PullSettings:
    """With a cache and docker's config in `folder`, and no key of the user's."""
    environment = {"DOCKER_CONFIG": str(folder / "docker"), "PATH": "/usr/bin:/bin"}
    fields = {"cache_folder": folder / "cache", "environment": environment, "policy": policy, **other}
    return PullSettings(lock or Lock(), Path("lock.json"), **fields)  # type: ignore[arg-type]
