"""The lock file: which image, to the bit, each name stands for. Whoever pulls or runs by name gets that one."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from containers.errors import ContainerError, nearest
from containers.names import ImageReference, parse_reference

LOCK_FILE = Path(__file__).with_name("lock.json")
LOCK_FORMAT = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9_]+(?:/v[0-9]+)?")


@dataclass(frozen=True)
class LockedImage:
    name: str
    """What people call it: lane."""
    reference: str
    """With its tag, without a digest: REGISTRY/ORG/NAME:TAG."""
    digest: str
    """Of the manifest in the registry, that of `platform` where the tag is an index of several."""
    image_id: str
    """Of the image's configuration: what an engine calls it, also where it was loaded from a file."""
    platform: str
    """e.g. linux/amd64."""
    size_bytes: int
    """Unpacked, as the engine counts it."""
    created: str
    """UTC, ISO 8601."""

    @property
    def pinned(self) -> ImageReference:
        """Tag and digest; pulling goes by the digest."""
        return parse_reference(self.reference).with_digest(self.digest)


@dataclass(frozen=True)
class Lock:
    images: Mapping[str, LockedImage] = field(default_factory=dict)
    """By name."""

    def image(self, name: str, path: Path = LOCK_FILE) -> LockedImage:
        """Raises ContainerError for a name that is not pinned."""
        if name in self.images:
            return self.images[name]
        hint = "; it pins none yet (`make images REGISTRY=HOST:PORT/ORG` builds, pushes and pins ours)"
        if self.images:
            hint = nearest(name, self.images)
        end = " Or" if hint.endswith("?") else ";"
        raise ContainerError(
            f'{path}: pins no image "{name}"{hint}{end} pin one that was pulled or pushed by '
            f"`python -m containers lock {name} REFERENCE`"
        )

    def of_id(self, image_id: str) -> LockedImage | None:
        return next((image for image in self.images.values() if image.image_id == image_id), None)


def read_lock(path: Path = LOCK_FILE) -> Lock:
    """An absent file pins nothing. Raises ContainerError for one that is damaged, by line or by field."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Lock()
    except (OSError, UnicodeDecodeError) as error:
        raise ContainerError(f"{path}: cannot be read ({error}); restore it") from None
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ContainerError(f"{path}: line {error.lineno} is not JSON ({error.msg}); restore the file") from None
    return _lock_of(raw, path)


def write_lock(path: Path, lock: Lock) -> None:
    """Replace the file as a whole, or leave it as it is."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(lock_text(lock))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ContainerError(f"{path}: cannot be written ({error.strerror}); give another by --lock FILE") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def update_lock(path: Path, images: Iterable[LockedImage]) -> Lock:
    """Pin these, keep what else is pinned. Two updates at once both get in. Returns what the file then holds."""
    with _held(path):
        lock = Lock({**read_lock(path).images, **{image.name: image for image in images}})
        write_lock(path, lock)
    return lock


def lock_text(lock: Lock) -> str:
    """Sorted, so that a change shows as what it is."""
    images = {name: dataclasses.asdict(lock.images[name]) for name in sorted(lock.images)}
    for image in images.values():
        del image["name"]
    return json.dumps({"format": LOCK_FORMAT, "images": images}, indent=2) + "\n"


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """The file is replaced, so that which is locked is its folder's."""
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ContainerError(f"{path}: its folder cannot be opened ({error.strerror}); make it first") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock_of(raw: object, path: Path) -> Lock:
    if not isinstance(raw, dict) or not isinstance(raw.get("images"), dict):
        raise ContainerError(f'{path}: has no field "images" with an object in it; restore the file')
    if raw.get("format") != LOCK_FORMAT:
        raise ContainerError(f"{path}: field format is {raw.get('format')!r}, this version reads {LOCK_FORMAT}")
    return Lock({name: _image_of(name, row, path) for name, row in raw["images"].items()})


def _image_of(name: str, row: object, path: Path) -> LockedImage:
    where = f"{path}: images.{name}"
    if not isinstance(row, dict):
        raise ContainerError(f"{where} is not an object; pin it anew by `python -m containers lock {name} REFERENCE`")
    wanted = {f.name: (int if f.type == "int" else str) for f in dataclasses.fields(LockedImage) if f.name != "name"}
    unknown = sorted(set(row) - set(wanted))
    if unknown:
        raise ContainerError(f"{where}.{unknown[0]} is unknown{nearest(unknown[0], wanted)}")
    for key, kind in wanted.items():
        if key not in row:
            raise ContainerError(
                f"{where}.{key} is missing; pin it anew by `python -m containers lock {name} REFERENCE`"
            )
        if not isinstance(row[key], kind) or isinstance(row[key], bool):
            raise ContainerError(f"{where}.{key} is {row[key]!r}, which is no {kind.__name__}")
    for key in ("digest", "image_id"):
        if not _DIGEST.fullmatch(row[key]):
            raise ContainerError(f'{where}.{key} is "{row[key]}", not sha256: and 64 hexadecimal digits')
    if not _PLATFORM.fullmatch(row["platform"]):
        raise ContainerError(f'{where}.platform is "{row["platform"]}", not e.g. linux/amd64')
    if row["size_bytes"] < 0:
        raise ContainerError(f"{where}.size_bytes is {row['size_bytes']}, must be 0 or more")
    try:
        reference = parse_reference(row["reference"])
    except ContainerError as error:
        raise ContainerError(f"{where}.reference: {error}") from None
    if reference.digest or not reference.tag:
        raise ContainerError(f'{where}.reference is "{reference}": must have a tag, and its digest in field digest')
    return LockedImage(name, **row)
