"""From a name or a reference to the image in the engine that is run: the one that the lock pins, or none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from containers.engine import Engine, ImageFacts
from containers.errors import ContainerError
from containers.images_plan import LABEL_PREFIX
from containers.lock import Lock
from containers.names import IMAGES, ImageReference, is_short_name, parse_reference


@dataclass(frozen=True)
class ChosenImage:
    facts: ImageFacts
    digest: str
    """For a run's records: REPOSITORY@sha256:…, or the image's ID where it was never in a registry."""
    note: str = ""
    """What the user should know, e.g. that nothing pins it."""

    @property
    def variant(self) -> str:
        return self.facts.environment.get("ROADFUSE_VARIANT", "")

    @property
    def cuda_version(self) -> str:
        labelled = self.facts.labels.get(f"{LABEL_PREFIX}.version.cuda", "")
        return self.facts.environment.get("CUDA_VERSION", "") or labelled


def choose_image(engine: Engine, text: str, lock: Lock, lock_path: Path) -> ChosenImage:
    """Raises ContainerError for one that is not here, with how to get it, or is another than the lock pins."""
    if is_short_name(text):
        return _by_name(engine, text, lock, lock_path)
    reference = parse_reference(text)
    pinned = [image for image in lock.images.values() if reference.tag and image.reference == reference.tagged]
    facts = engine.image(reference.pinned if reference.digest else reference.tagged)
    if facts is None:
        raise ContainerError(f"image {text}: is not on this machine; get it by `python -m containers pull {text}`")
    if pinned and not reference.digest and facts.image_id != pinned[0].image_id:
        raise ContainerError(
            f"image {text}: is {facts.image_id} on this machine, but {lock_path} pins {pinned[0].image_id}; get that "
            f"one by `python -m containers pull {pinned[0].name}`, or name this one by its digest"
        )
    return ChosenImage(facts, image_digest(facts, lock, reference))


def _by_name(engine: Engine, name: str, lock: Lock, lock_path: Path) -> ChosenImage:
    if name in lock.images:
        locked = lock.images[name]
        facts = engine.image(locked.image_id)
        if facts is None:
            raise ContainerError(
                f'image "{name}": {locked.reference}, pinned by {lock_path}, is not on this machine; get it by '
                f"`python -m containers pull {name}`"
            )
        return ChosenImage(facts, locked.pinned.pinned)
    built = engine.images(f"{LABEL_PREFIX}.image={name}")
    if not built:
        if name not in IMAGES:
            lock.image(name, lock_path)
        raise ContainerError(
            f'image "{name}": {lock_path} pins none, and none was built here; build it by '
            f"`python -m containers build {name}`, or give a reference by --image"
        )
    shown = built[0].tags[0] if built[0].tags else built[0].image_id
    return ChosenImage(
        built[0], image_digest(built[0], lock, None), f"{name} is not pinned: taking {shown}, built here"
    )


def image_digest(facts: ImageFacts, lock: Lock, reference: ImageReference | None) -> str:
    """Of the registry that was asked for, if it came from there; else of any; else the image's own ID."""
    locked = lock.of_id(facts.image_id)
    if reference is not None:
        same = [digest for digest in facts.digests if digest.startswith(f"{reference.full_repository}@")]
        if same:
            return same[0]
    if locked is not None:
        return locked.pinned.pinned
    return facts.digests[0] if facts.digests else facts.image_id
