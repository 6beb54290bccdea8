"""After a build: push its images, and pin in the lock file what the registry then holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from containers.engine import DockerEngine
from containers.lock import LockedImage, update_lock
from containers.names import parse_reference


def push_and_lock(engine: DockerEngine, references: Mapping[str, str], lock: Path) -> list[LockedImage]:
    """`references` by name. Everything is pushed before anything is pinned."""
    from containers.progress import progress_for
    from containers.pull_engine import DockerImages
    from containers.push import PushSettings, push

    locked = []
    for name, text in references.items():
        reference = parse_reference(text)
        pushed = push(text, reference, PushSettings(os.environ), DockerImages(engine), progress_for(sys.stderr))
        facts = engine.image(pushed.image_id)
        assert facts is not None, f"{text} was pushed and is gone"
        print(f"{name}: {pushed.reference}", flush=True)
        digest = pushed.reference.digest
        locked.append(LockedImage(name, text, digest, facts.image_id, facts.platform, facts.size_bytes, facts.created))
    update_lock(lock, locked)
    return locked
