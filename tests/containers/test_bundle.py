"""Bundles: what is saved is loaded, without network, and only if it is what the lock file pins."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers.bundle import BLOBS, CONTENTS, save
from containers.bundle_load import load
from containers.engine import ImageFacts
from containers.errors import ContainerError
from containers.lock import Lock, LockedImage, update_lock
from containers.pull_engine import DockerImages
from containers.transfer_errors import CorruptBlob, LockMismatch, NotFound
from tests.containers.engine_double import EngineDouble
from tests.containers.pulling import Said, lock_of, locked, noise, settings
from tests.containers.registry_double import MadeImage, RegistryDouble, digest_of, make_image, registry_double
from tests.containers.sites import upload_image

TAG = "26.11-cpu-py3"
SHARED = noise(1, 50_000)


@pytest.fixture
def server() -> Iterator[RegistryDouble]:
    with registry_double() as state:
        yield state


@pytest.fixture
def images(server: RegistryDouble) -> dict[str, MadeImage]:
    made = {"lane": make_image([SHARED, noise(2, 9000)]), "sign": make_image([SHARED, noise(3, 9000)])}
    for name, image in made.items():
        server.add(f"roadfuse/{name}", TAG, image)
    return made


@pytest.fixture
def lock(server: RegistryDouble, images: dict[str, MadeImage]) -> Lock:
    rows = (locked(name, f"{server.address}/roadfuse/{name}:{TAG}", image) for name, image in images.items())
    return lock_of(*rows)


@pytest.fixture
def bundle(lock: Lock, tmp_path: Path) -> Path:
    path = tmp_path / "images.tar"
    assert save(["lane", "sign"], path, settings(tmp_path / "here", lock), Said()) == path.stat().st_size
    return path


def load_there(path: Path, lock: Lock, folder: Path, engine: EngineDouble) -> list[tuple[LockedImage, ImageFacts]]:
    return load(path, lock, Path("lock.json"), folder / "there", engine, Said())


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The same bundle with members changed, or left out where None is returned."""
    target = path.with_name("changed.tar")
    with tarfile.open(path) as old, tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            data = change(member.name, file.read())
            if data is not None:
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))
    return target


def test_what_was_saved_is_loaded_without_network(
    server: RegistryDouble, images: dict[str, MadeImage], lock: Lock, bundle: Path, tmp_path: Path
) -> None:
    before = len(server.requests)
    engine = EngineDouble()
    loaded = load_there(bundle, lock, tmp_path, engine)
    assert [(row.name, facts.image_id) for row, facts in loaded] == [
        ("lane", images["lane"].image_id),
        ("sign", images["sign"].image_id),
    ]
    for name, image in images.items():
        assert engine.held[image.image_id].tags == (f"{server.address}/roadfuse/{name}:{TAG}",)
    assert len(server.requests) == before
    # And once more, where all is there.
    assert len(load_there(bundle, lock, tmp_path, engine)) == 2


def test_a_bundle_is_an_oci_layout_with_each_blob_once(bundle: Path, images: dict[str, MadeImage]) -> None:
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
        assert names[:3] == [CONTENTS, "oci-layout", "index.json"]
        index = json.loads(archive.extractfile("index.json").read())  # type: ignore[union-attr]
        for name in names[3:]:
            data = archive.extractfile(name).read()  # type: ignore[union-attr]
            assert name == BLOBS + digest_of(data).removeprefix("sha256:")
    assert len(names) == len(set(names))
    assert [row["digest"] for row in index["manifests"]] == [images["lane"].digest, images["sign"].digest]
    blobs = {digest_of(blob) for image in images.values() for blob in (image.manifest, image.config, *image.layers)}
    assert {f"sha256:{name.removeprefix(BLOBS)}" for name in names[3:]} == blobs


def test_the_same_images_give_the_same_bytes(lock: Lock, bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.tar"
    save(["lane", "sign"], again, settings(tmp_path / "elsewhere", lock), Said())
    assert again.read_bytes() == bundle.read_bytes()


@pytest.mark.parametrize("field", ["digest", "image_id"])
def test_another_image_than_the_locked_one_is_refused_before_it_is_read(
    field: str, lock: Lock, bundle: Path, tmp_path: Path
) -> None:
    other = replace(lock.images["sign"], **{field: digest_of(b"another")})
    engine = EngineDouble()
    with pytest.raises(LockMismatch, match="holds sign as"):
        load_there(bundle, Lock({**lock.images, "sign": other}), tmp_path, engine)
    assert not engine.held
    assert not list((tmp_path / "there").glob("blobs/sha256/*"))


def test_an_image_that_is_not_locked_is_refused(lock: Lock, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match='pins no image "sign"'):
        load_there(bundle, Lock({"lane": lock.images["lane"]}), tmp_path, EngineDouble())


def test_contents_that_lie_about_an_image_are_refused(
    images: dict[str, MadeImage], lock: Lock, bundle: Path, tmp_path: Path
) -> None:
    """It says lane and is sign: both are in the file, and both are whole."""

    with tarfile.open(bundle) as archive:
        rows = json.loads(archive.extractfile(CONTENTS).read())["images"]  # type: ignore[union-attr]
    rows[0]["manifest"] = images["sign"].digest
    fixed = json.dumps({"format": 1, "images": rows}).encode()
    changed = rewritten(bundle, lambda name, data: fixed if name == CONTENTS else data)
    engine = EngineDouble()
    with pytest.raises(LockMismatch, match="has the image ID"):
        load_there(changed, lock, tmp_path, engine)
    assert not engine.held


def test_a_damaged_blob_is_found(images: dict[str, MadeImage], lock: Lock, bundle: Path, tmp_path: Path) -> None:
    victims = [images["lane"].layers[0], images["lane"].config, images["lane"].manifest]
    for number, victim in enumerate(victims):

        def flip(name: str, data: bytes, victim: bytes = victim) -> bytes:
            return data[:-1] + bytes([data[-1] ^ 1]) if data == victim else data

        engine = EngineDouble()
        with pytest.raises(CorruptBlob):
            load_there(rewritten(bundle, flip), lock, tmp_path / str(number), engine)
        assert not engine.held


def test_a_missing_blob_is_found(images: dict[str, MadeImage], lock: Lock, bundle: Path, tmp_path: Path) -> None:
    lacking = rewritten(bundle, lambda name, data: None if data == images["lane"].layers[1] else data)
    engine = EngineDouble()
    with pytest.raises(NotFound, match="neither in the cache nor in what was given"):
        load_there(lacking, lock, tmp_path, engine)
    assert not engine.held
    lacking = rewritten(bundle, lambda name, data: None if data == images["lane"].manifest else data)
    with pytest.raises(ContainerError, match="lacks the manifest of lane"):
        load_there(lacking, lock, tmp_path, engine)


def test_every_cut_of_the_file_is_noticed(lock: Lock, bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    for length in range(0, len(data) - 20 * 512, len(data) // 23):
        short = tmp_path / "short.tar"
        short.write_bytes(data[:length])
        engine = EngineDouble()
        with pytest.raises(ContainerError):
            load_there(short, lock, tmp_path / str(length), engine)
        assert not engine.held


def test_what_is_no_bundle_is_named(lock: Lock, tmp_path: Path) -> None:
    other = tmp_path / "other.tar"
    with tarfile.open(other, "w") as archive:
        entry = tarfile.TarInfo("../../etc/passwd")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(ContainerError, match="is no bundle of"):
        load_there(other, lock, tmp_path, EngineDouble())
    with pytest.raises(ContainerError, match="is no file"):
        load_there(tmp_path / "absent.tar", lock, tmp_path, EngineDouble())


def test_a_blob_damaged_in_the_cache_is_not_saved(lock: Lock, images: dict[str, MadeImage], tmp_path: Path) -> None:
    made = settings(tmp_path, lock)
    path = tmp_path / "a.tar"
    save(["lane"], path, made, Said())
    layer = images["lane"].layers[0]
    (tmp_path / "cache/blobs/sha256" / digest_of(layer)[7:]).write_bytes(b"\0" * len(layer))
    before = path.read_bytes()
    with pytest.raises(CorruptBlob, match="save again"):
        save(["lane"], path, made, Said())
    assert path.read_bytes() == before and not list(tmp_path.glob(".a.tar*"))
    save(["lane"], path, made, Said())
    assert path.read_bytes() == before


def test_a_name_that_is_not_locked_cannot_be_saved(lock: Lock, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match='pins no image "lan"; did you mean "lane"'):
        save(["lan"], tmp_path / "x.tar", settings(tmp_path, lock), Said())


@pytest.mark.services
def test_a_bundle_reaches_a_real_engine_that_has_no_registry(
    registry: Any, dockerd: Any, engine: Any, tmp_path: Path
) -> None:
    image = make_image([noise(811, 100_000), noise(812, 5000)])
    upload_image(registry.address, "roadfuse/bundled", TAG, image)
    reference = f"{registry.address}/roadfuse/bundled:{TAG}"
    lock_path = tmp_path / "lock.json"
    update_lock(lock_path, [locked("lane", reference, image)])
    environment = {**os.environ, **dockerd.client_environment}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "containers", *arguments, "--lock", str(lock_path)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)

    saved = command("save", "lane", str(tmp_path / "lane.tar"), "--cache", str(tmp_path / "here"))
    assert saved.returncode == 0, saved.stderr
    store = DockerImages(engine)
    for cache in ("there", "elsewhere"):
        assert store.image(image.image_id) is None
        loaded = command("load", str(tmp_path / "lane.tar"), "--cache", str(tmp_path / cache))
        assert loaded.returncode == 0, loaded.stderr
        assert f"{reference}@{image.digest} image ID {image.image_id}" in loaded.stdout
        facts = store.image(reference)
        assert facts is not None and facts.image_id == image.image_id
        assert not [name for name in facts.digests if "handover" in name]
        store.remove(reference)
    other = replace(locked("lane", reference, image), image_id=digest_of(b"?"))
    update_lock(lock_path, [other])
    refused = command("load", str(tmp_path / "lane.tar"), "--cache", str(tmp_path / "there"))
    assert refused.returncode == 2 and "refused" in refused.stderr
    assert store.image(image.image_id) is None
