"""Push the images of a build, and pin in the lock file what the registry then holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from containers.engine import DockerEngine
from containers.errors import ContainerError
from containers.lock import LockedImage, update_lock
from containers.names import parse_reference


def check_registry(text: str) -> None:
    """Before minutes of building: raise where nothing can be pushed as this reference, for want of a registry, of its
    answer or of a key."""
    from containers.credentials import find_credentials
    from containers.registry import Registry, endpoints
    from containers.retry import RetryPolicy

    reference = parse_reference(text)
    if not reference.registry:
        raise ContainerError(
            f"--registry: {text} would be of no registry; give HOST[:PORT][/ORG[/TEAM]], e.g. 127.0.0.1:5000/org"
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    credentials = find_credentials(reference.registry, os.environ, say)
    endpoint = endpoints(reference.registry, "", ())[-1]
    Registry(endpoint, credentials, RetryPolicy(attempts=3), say).check_login()


def push_and_lock(
    engine: DockerEngine, references: Mapping[str, str], lock: Path, say: Callable[[str], None]
) -> list[LockedImage]:
    """`references` by name. Everything is pushed before anything is pinned."""
    from containers.progress import progress_for
    from containers.pull_engine import DockerImages
    from containers.push import PushSettings, push

    locked = []
    for name, text in references.items():
        reference = parse_reference(text)
        say(f"pushing {name} ...")
        pushed = push(text, reference, PushSettings(os.environ), DockerImages(engine), progress_for(sys.stderr))
        facts = engine.image(pushed.image_id)
        assert facts is not None, f"{text} was pushed and is gone"
        print(f"{name}: {pushed.reference}", flush=True)
        digest = pushed.reference.digest
        locked.append(LockedImage(name, text, digest, facts.image_id, facts.platform, facts.size_bytes, facts.created))
    update_lock(lock, locked)
    say(f"pinned {', '.join(references)} in {lock}")
    return locked
