"""Pulling with a registry and an engine in this process: what is resolved, refused, kept, named and said."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from containers import handover, transfer_errors
from containers.errors import ContainerError
from containers.manifests import BadManifest, Platform, WrongPlatform
from containers.pull import describe, pull
from tests.containers.engine_double import EngineDouble
from tests.containers.pulling import Said, lock_of, locked, noise, settings
from tests.containers.registry_double import (
    MadeImage,
    RegistryDouble,
    digest_of,
    image_of_layers,
    make_image,
    make_layer,
    registry_double,
)

AMD64 = Platform("linux", "amd64")
TAG = "26.11-cpu-py3"


@pytest.fixture
def server() -> Iterator[RegistryDouble]:
    with registry_double() as state:
        yield state


@pytest.fixture
def image(server: RegistryDouble) -> MadeImage:
    made = make_image([noise(1, 200_000), b"text " * 40_000, noise(2, 50_000)])
    server.add("roadfuse/lane", TAG, made)
    return made


@pytest.fixture
def engine() -> EngineDouble:
    return EngineDouble()


def reference(server: RegistryDouble, tag: str = TAG) -> str:
    return f"{server.address}/roadfuse/lane:{tag}"


def test_a_pull_ends_at_a_digest_and_the_engine_knows_it(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    said = Said()
    pulled = pull(reference(server), settings(tmp_path), engine, AMD64, said)
    assert pulled.reference.digest == image.digest
    assert pulled.image_id == image.image_id
    assert pulled.fetched_bytes == image.size == server.sent_blob_bytes
    assert not pulled.was_there
    facts = engine.held[image.image_id]
    assert facts.tags == (reference(server),)
    # By the name of the real registry alone: the passing name is gone.
    assert facts.digests == (f"{server.address}/roadfuse/lane@{image.digest}",)
    assert "is not in lock.json" in said.text
    assert image.digest in describe(pulled)
    assert {said.phases[digest_of(layer)] for layer in image.layers} == {"done"}


def test_an_image_that_is_there_is_not_fetched_again(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    pull(reference(server), settings(tmp_path), engine, AMD64, Said())
    before = server.sent_blob_bytes
    pulled = pull(reference(server), settings(tmp_path), engine, AMD64, Said())
    assert pulled.was_there
    assert server.sent_blob_bytes == before


@pytest.mark.parametrize("by_us", [True, False])
def test_layers_that_the_engine_has_are_not_fetched(
    by_us: bool, server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    """Whether they came through here, and are known unpacked, or by the engine's own pull, as they are."""
    contents = [noise(1, 200_000), b"text " * 40_000, noise(3, 150_000)]
    other = make_image(contents)
    server.add("roadfuse/base", TAG, other)
    if by_us:
        pull(f"{server.address}/roadfuse/base:{TAG}", settings(tmp_path / "before"), engine, AMD64, Said())
    else:
        list(engine.pull(f"{server.address}/roadfuse/base@{other.digest}", str(AMD64), None))
    assert other.image_id in engine.held
    said = Said()
    pulled = pull(reference(server), settings(tmp_path), engine, AMD64, said)
    assert pulled.fetched_bytes == len(image.config) + len(image.layers[2])
    assert [said.phases[digest_of(layer)] for layer in image.layers] == ["there", "there", "done"]


def test_large_layers_reach_the_engine_unpacked_and_verified_by_the_images_own_digests(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    pull(reference(server), settings(tmp_path), engine, AMD64, Said())
    diff_ids = json.loads(image.config)["rootfs"]["diff_ids"]
    # The second is too small to be worth it.
    assert engine.layers == {diff_ids[0], digest_of(image.layers[1]), digest_of(image.layers[2])}


@pytest.mark.parametrize(("compares_sizes", "unpack"), [(True, True), (False, False)])
def test_an_engine_that_compares_sizes_or_a_user_who_says_so_gets_layers_as_they_are(
    compares_sizes: bool, unpack: bool, server: RegistryDouble, image: MadeImage, tmp_path: Path
) -> None:
    engine = EngineDouble(compares_sizes=compares_sizes)
    pull(reference(server), settings(tmp_path, unpack=unpack), engine, AMD64, Said())
    assert engine.layers == {digest_of(layer) for layer in image.layers}


def test_an_engine_that_does_not_take_unpacked_layers_is_given_them_as_they_are(
    server: RegistryDouble, image: MadeImage, tmp_path: Path
) -> None:
    engine = EngineDouble(takes_unpacked=False)
    said = Said()
    assert pull(reference(server), settings(tmp_path), engine, AMD64, said).image_id in engine.held
    assert "unsupported media type" in said.text
    assert server.sent_blob_bytes == image.size


def test_a_layer_that_is_said_to_be_gzip_and_is_not_still_arrives(
    server: RegistryDouble, engine: EngineDouble, tmp_path: Path
) -> None:
    """Registries hold such images, and engines, which look at the bytes, take them."""
    tar = make_layer({"data": noise(4, 200_000)})
    made = image_of_layers([tar], [digest_of(tar)])
    server.add("roadfuse/lane", TAG, made)
    assert pull(reference(server), settings(tmp_path), engine, AMD64, Said()).image_id == made.image_id


@settings_of_hypothesis(deadline=None, max_examples=30)
@given(
    members=st.lists(st.binary(max_size=3000), min_size=1, max_size=4),
    zeros=st.sampled_from([0, 1, 5_000_000]),
    cuts=st.lists(st.integers(1, 400), max_size=8),
)
def test_any_gzip_in_any_pieces_is_unpacked(members: list[bytes], zeros: int, cuts: list[int]) -> None:
    content = [*members, bytes(zeros)]
    packed = b"".join(gzip.compress(member) for member in content)
    pieces, rest = [], packed
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    unpacked = list(handover.unpack_gzip(pieces))
    assert b"".join(unpacked) == b"".join(content)
    assert max(map(len, unpacked), default=0) <= 4 << 20
    with pytest.raises(zlib.error):
        list(handover.unpack_gzip([packed[:-1]]))


def test_the_cache_serves_an_emptied_engine(server: RegistryDouble, image: MadeImage, tmp_path: Path) -> None:
    pull(reference(server), settings(tmp_path), EngineDouble(), AMD64, Said())
    pulled = pull(reference(server), settings(tmp_path), EngineDouble(), AMD64, Said())
    assert pulled.fetched_bytes == 0


def test_a_blob_damaged_in_the_cache_is_fetched_anew(server: RegistryDouble, image: MadeImage, tmp_path: Path) -> None:
    pull(reference(server), settings(tmp_path), EngineDouble(), AMD64, Said())
    layer = image.layers[0]
    path = tmp_path / "cache/blobs/sha256" / digest_of(layer).removeprefix("sha256:")
    path.write_bytes(b"\0" * len(layer))
    said = Said()
    engine = EngineDouble()
    pulled = pull(reference(server), settings(tmp_path), engine, AMD64, said)
    assert pulled.fetched_bytes == len(layer)
    assert image.image_id in engine.held
    assert "1 in the cache, removed" in said.text


def test_a_name_of_the_lock_file_is_pulled_by_digest_although_its_tag_has_moved(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    lock = lock_of(locked("lane", reference(server), image))
    server.add("roadfuse/lane", TAG, make_image([noise(9, 1000)]))
    pulled = pull("lane", settings(tmp_path, lock), engine, None, Said())
    assert pulled.image_id == image.image_id
    assert engine.held[image.image_id].tags == (reference(server),)


def test_a_moved_tag_is_refused_because_of_the_lock(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    lock = lock_of(locked("lane", reference(server), image))
    other = make_image([noise(9, 1000)])
    server.add("roadfuse/lane", TAG, other)
    with pytest.raises(transfer_errors.LockMismatch) as caught:
        pull(reference(server), settings(tmp_path, lock), engine, None, Said())
    new = f"{reference(server)}@{other.digest}"
    for words in (image.digest, "containers pull lane;", f"containers pull {new}", f"lock lane {new}"):
        assert words in str(caught.value)
    assert not engine.held
    assert server.sent_blob_bytes == 0
    # What it says to do to take the new one does so.
    assert pull(new, settings(tmp_path, lock), engine, AMD64, Said()).image_id == other.image_id


def test_a_manifest_with_another_configuration_than_the_lock_is_refused(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    wrong = replace(locked("lane", reference(server), image), image_id=digest_of(b"another"))
    with pytest.raises(transfer_errors.LockMismatch, match="image ID"):
        pull("lane", settings(tmp_path, lock_of(wrong)), engine, None, Said())
    assert not engine.held


def test_a_locked_image_that_is_there_needs_no_network(image: MadeImage, tmp_path: Path) -> None:
    engine = EngineDouble()
    engine._hold(image.config, ("x/y@sha256:0",))
    lock = lock_of(locked("lane", f"127.0.0.1:1/roadfuse/lane:{TAG}", image))
    pulled = pull("lane", settings(tmp_path, lock), engine, None, Said())
    assert pulled.was_there
    assert engine.held[image.image_id].tags == (f"127.0.0.1:1/roadfuse/lane:{TAG}",)


def test_of_an_index_the_asked_platform_is_taken_and_said(
    server: RegistryDouble, engine: EngineDouble, tmp_path: Path
) -> None:
    images = {"linux/amd64": make_image([b"amd"]), "linux/arm64": make_image([b"arm"], "arm64")}
    index_digest = server.add_index("roadfuse/lane", TAG, images)
    said = Said()
    pulled = pull(reference(server), settings(tmp_path), engine, Platform("linux", "arm64"), said)
    assert pulled.image_id == images["linux/arm64"].image_id
    assert pulled.reference.digest == index_digest
    assert f"taken for linux/arm64: {images['linux/arm64'].digest}" in said.text
    with pytest.raises(WrongPlatform, match="linux/amd64, linux/arm64"):
        pull(reference(server), settings(tmp_path), engine, Platform("linux", "s390x"), Said())


def test_an_index_whose_part_is_locked_fits_the_lock(
    server: RegistryDouble, engine: EngineDouble, tmp_path: Path
) -> None:
    images = {"linux/amd64": make_image([b"amd"]), "linux/arm64": make_image([b"arm"], "arm64")}
    server.add_index("roadfuse/lane", TAG, images)
    lock = lock_of(locked("lane", reference(server), images["linux/amd64"]))
    assert pull(reference(server), settings(tmp_path, lock), engine, None, Said()).platform == "linux/amd64"


def test_a_single_image_of_another_platform_is_refused_before_its_layers(
    server: RegistryDouble, engine: EngineDouble, tmp_path: Path
) -> None:
    made = make_image([noise(1, 100_000)], "arm64")
    server.add("roadfuse/lane", TAG, made)
    with pytest.raises(WrongPlatform, match="is an image for linux/arm64, not for linux/amd64"):
        pull(reference(server), settings(tmp_path), engine, AMD64, Said())
    assert server.sent_blob_bytes == len(made.config)


def test_an_engine_that_does_not_see_our_loopback_gets_the_image_whole(
    server: RegistryDouble, image: MadeImage, tmp_path: Path
) -> None:
    for engine in (EngineDouble(sees_loopback=False), EngineDouble(host="tcp://elsewhere:2376")):
        pulled = pull(reference(server), settings(tmp_path), engine, AMD64, Said())
        assert pulled.image_id in engine.held
        assert engine.held[pulled.image_id].tags == (reference(server),)


def test_names_left_by_a_killed_pull_are_taken_away(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    dead, alive = 2**22 + 1, 1
    left = f"127.0.0.1:9/roadfuse-handover-{dead}-ab@sha256:{'0' * 64}"
    busy = f"127.0.0.1:9/roadfuse-handover-{alive}-ab@sha256:{'0' * 64}"
    assert handover.abandoned(left) and not handover.abandoned(busy)
    engine._hold(make_image([b"old"]).config, (left, busy))
    pull(reference(server), settings(tmp_path), engine, AMD64, Said())
    digests = [digest for facts in engine.images() for digest in facts.digests]
    assert left not in digests and busy in digests


def test_mirrors_are_asked_in_order_and_what_they_lack_comes_from_the_registry(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    with registry_double() as mirror:
        mirror.add("cache/roadfuse/lane", TAG, image)
        del mirror.blobs[digest_of(image.layers[1])]
        said = Said()
        mirrors = ("127.0.0.1:1", f"{mirror.address}/cache")
        pulled = pull(reference(server), settings(tmp_path, mirrors=mirrors), engine, AMD64, said)
    assert pulled.image_id == image.image_id
    assert server.sent_blob_bytes == len(image.layers[1])
    assert "127.0.0.1:1/roadfuse/lane" in said.text and "trying the next" in said.text
    # What a mirror said of a tag is not taken to the registry: the engine knows the image by name and ID alone.
    assert engine.held[image.image_id].tags == (reference(server),)


def test_a_mirror_that_lies_about_a_digest_is_passed_over(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    with registry_double() as mirror:
        mirror.add("roadfuse/lane", TAG, image)
        mirror.manifests["roadfuse/lane", image.digest] = image.manifest.replace(b"2", b"3", 1)
        lock = lock_of(locked("lane", reference(server), image))
        said = Said()
        pulled = pull("lane", settings(tmp_path, lock, mirrors=(mirror.address,)), engine, None, said)
    assert pulled.image_id == image.image_id
    assert "it was altered at the registry or on the way" in said.text


def test_a_reference_without_a_tag_gets_a_name_even_where_the_engine_cannot_ask(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    with registry_double() as mirror:
        mirror.add("roadfuse/lane", TAG, image)
        text = f"127.0.0.1:1/roadfuse/lane@{image.digest}"
        pull(text, settings(tmp_path, mirrors=(mirror.address,)), engine, AMD64, Said())
    assert engine.held[image.image_id].tags == (f"127.0.0.1:1/roadfuse/lane:pinned-{image.digest[7:19]}",)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "not an object"),
        (b'{"schemaVersion": 1}', "schema 1"),
        (b'{"schemaVersion": 2}', "neither an image manifest nor an index"),
        (b'{"schemaVersion": 2, "config": {"digest": "sha256:../../etc", "size": 1}, "layers": []}', "hexadecimal"),
        (b'{"schemaVersion": 2, "config": {"digest": "sha256:' + b"0" * 64 + b'", "size": -1}, "layers": []}', "size"),
        (b'{"schemaVersion": 2, "config": {}, "layers": {}}', "layers: not a list"),
    ],
)
def test_what_is_no_manifest_is_named(raw: bytes, words: str) -> None:
    from containers.manifests import parse

    with pytest.raises(BadManifest, match=words) as caught:
        parse(raw, "", "x/y:1")
    assert str(caught.value).startswith("x/y:1") and "\n" not in str(caught.value)


def test_layers_that_do_not_fit_the_configuration_are_refused(
    server: RegistryDouble, engine: EngineDouble, tmp_path: Path
) -> None:
    made = make_image([b"a", b"b"])
    manifest = json.loads(made.manifest)
    manifest["layers"].pop()
    server.add("roadfuse/lane", TAG, replace(made, manifest=json.dumps(manifest).encode()))
    with pytest.raises(BadManifest, match="1 layers in the manifest, 2 in the configuration"):
        pull(reference(server), settings(tmp_path), engine, AMD64, Said())


@pytest.mark.parametrize(
    ("text", "words"),
    [("roadfuse/lane:1", "names no registry"), ("lane", "pins no image"), ("x.io/a/b:latest", "latest")],
)
def test_what_cannot_be_pulled_is_refused_in_one_line(
    text: str, words: str, engine: EngineDouble, tmp_path: Path
) -> None:
    with pytest.raises(ContainerError, match=words) as caught:
        pull(text, settings(tmp_path), engine, None, Said())
    assert "\n" not in str(caught.value)


def test_another_platform_than_the_locked_one_is_refused(
    server: RegistryDouble, image: MadeImage, engine: EngineDouble, tmp_path: Path
) -> None:
    lock = lock_of(locked("lane", reference(server), image))
    with pytest.raises(transfer_errors.LockMismatch, match="you ask for linux/arm64"):
        pull("lane", settings(tmp_path, lock), engine, Platform("linux", "arm64"), Said())


def test_help_answers_without_the_heavy_libraries() -> None:
    script = (
        "import sys\n"
        "from containers.__main__ import main\n"
        "for command in ('pull', 'push', 'list', 'prune', 'login', 'save', 'load'):\n"
        "    try:\n"
        "        main([command, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0\n"
        "heavy = {'docker', 'requests', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
