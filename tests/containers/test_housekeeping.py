"""What is listed and what is removed: never what the lock file or a container needs, nor what is another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from containers.engine import ImageFacts
from containers.errors import ContainerError
from containers.listing import (
    ListedImage,
    is_ours,
    local_images,
    natural,
    parse_repository,
    parse_time,
    remote_images,
    table,
)
from containers.lock import Lock, LockedImage, update_lock
from containers.names import ImageReference
from containers.prune import Decision, InUse, PrunePolicy, decide, keep_shared, lines, parse_size
from containers.pull_engine import DockerImages
from containers.registry import Endpoint, Registry
from tests.containers.pulling import FAST, lock_of, locked, noise
from tests.containers.registry_double import RegistryDouble, digest_of, make_image, make_index, registry_double
from tests.containers.sites import put_manifest, upload_image

DAY = 86400.0
NOW = 20_000 * DAY
LANE = "nvcr.io/roadfuse/lane"


def listed(
    tag: str, days: float | None, number: int, repository: str = LANE, parts: tuple[str, ...] = ()
) -> ListedImage:
    registry, _, path = repository.partition("/")
    digest, image_id = digest_of(b"manifest %d" % number), digest_of(b"image %d" % number)
    created = None if days is None else NOW - days * DAY
    reference = ImageReference(registry, path, tag, digest)
    return ListedImage(reference, image_id, 1_000_000, created, ("linux/amd64",), parts)


def pin(image: ListedImage, name: str = "lane") -> LockedImage:
    reference = image.reference
    return LockedImage(
        name, reference.tagged, reference.digest, image.image_id, "linux/amd64", 1, "2026-11-01T00:00:00Z"
    )


def removed(decisions: list[Decision]) -> list[str]:
    return [one.image.reference.tag for one in decisions if one.remove]


def test_both_the_number_and_the_age_decide() -> None:
    images = [listed(f"26.{11 - place:02d}-py3", 10 + 25 * place, place) for place in range(5)]
    assert removed(decide(images, Lock(), InUse(), PrunePolicy(2, 61), NOW)) == ["26.08-py3", "26.07-py3"]
    assert removed(decide(images, Lock(), InUse(), PrunePolicy(2, 100), NOW)) == ["26.07-py3"]
    assert removed(decide(images, Lock(), InUse(), PrunePolicy(5, 0), NOW)) == []
    assert len(removed(decide(images, Lock(), InUse(), PrunePolicy(0, 0), NOW))) == 5


def test_each_name_keeps_its_own_last_ones() -> None:
    images = [listed("a", 90, 1), listed("b", 91, 2), listed("a", 92, 3, "nvcr.io/roadfuse/sign")]
    decisions = decide(images, Lock(), InUse(), PrunePolicy(1, 30), NOW)
    assert [one.image.reference.tagged for one in decisions if one.remove] == [f"{LANE}:b"]


def test_what_is_needed_is_kept_and_said_why() -> None:
    images = [listed(f"t{number}", 100 + number, number) for number in range(5)] + [listed("odd", None, 9)]
    lock = lock_of(pin(images[1]), replace(pin(images[2], "sign"), digest=digest_of(b"?"), image_id=digest_of(b"!")))
    in_use = InUse(frozenset({images[3].image_id}), frozenset({images[4].reference.digest}))
    decisions = decide(images, lock, in_use, PrunePolicy(0, 30), NOW)
    reasons = {one.image.reference.tag: one.reason for one in decisions}
    assert removed(decisions) == ["t0"]
    assert reasons == {
        "t0": "100 days old, not among the last 0",
        "t1": "the lock file pins lane to it",
        "t2": "the lock file names its tag",
        "t3": "a container uses it",
        "t4": "a container uses it",
        "odd": "of unknown age",
    }


def test_an_index_with_a_locked_part_is_kept() -> None:
    part = listed("part", 200, 1)
    index = listed("index", 100, 2, parts=(part.reference.digest,))
    lock = lock_of(replace(pin(part), reference=f"{LANE}:else"))
    assert removed(decide([index], lock, InUse(), PrunePolicy(0, 30), NOW)) == []


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_the_policy_nothing_needed_goes(data: st.DataObject) -> None:
    days = data.draw(st.lists(st.none() | st.integers(0, 400), max_size=8))
    images = [listed(f"t{number}", day, number) for number, day in enumerate(days)]
    pinned = [image for image in images if data.draw(st.booleans())]
    used = frozenset(image.image_id for image in images if data.draw(st.booleans()))
    policy = PrunePolicy(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 300)))
    lock = lock_of(*(pin(image, f"name-{image.reference.tag}") for image in pinned))
    decisions = decide(images, lock, InUse(used), policy, NOW)
    assert sorted(one.image.reference.tag for one in decisions) == sorted(image.reference.tag for image in images)
    assert all(one.reason for one in decisions)
    for one in decisions:
        if one.remove:
            assert one.image not in pinned and one.image.image_id not in used
            assert one.image.created_seconds is not None
            assert NOW - one.image.created_seconds >= policy.older_than_days * DAY
    kept = len(decisions) - len(removed(decisions))
    assert kept >= min(policy.keep_last, len(images))


def test_a_digest_with_a_kept_name_is_not_deleted_under_another() -> None:
    old, same = listed("old", 100, 1), listed("kept", 1, 1)
    index = listed("index", 1, 3, parts=(listed("part", 100, 2).reference.digest,))
    decisions = decide([old, same, index, listed("part", 100, 2)], Lock(), InUse(), PrunePolicy(0, 30), NOW)
    assert sorted(removed(decisions)) == ["old", "part"]
    assert removed(keep_shared(decisions)) == []


def test_the_dry_run_says_so() -> None:
    decisions = decide([listed("a", 100, 1), listed("b", 1, 2)], Lock(), InUse(), PrunePolicy(1, 30), NOW)
    assert lines(decisions, apply=False) == [
        f"keeps {LANE}:b, 1.0 MB: among the last 1",
        f"would remove {LANE}:a, 1.0 MB: 100 days old, not among the last 1",
        "would remove 1 of 2 names",
        "nothing was removed: --apply does it",
    ]
    assert lines(decisions, apply=True)[-1] == "removed 1 of 2 names"


@pytest.mark.parametrize("text", ["", "G", "-1", "20 Gi", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ContainerError, match="must be a number"):
        parse_size(text)


def facts(number: int, *tags: str, digests: tuple[str, ...] = ()) -> ImageFacts:
    image_id = digest_of(b"image %d" % number)
    return ImageFacts(image_id, tags, digests, "linux/amd64", 5_000_000, "2024-10-03T00:00:00.123456789Z")


def test_local_images_with_their_digests() -> None:
    digest = digest_of(b"m")
    images = [
        facts(1, f"{LANE}:26.11-py3", digests=(f"{LANE}@{digest}", f"other.io/x@{digest_of(b'o')}")),
        facts(2, "postgres:latest", "roadfuse/sign:26.10-cpu-py3"),
    ]
    ours = local_images(images, lambda reference: is_ours(reference, Lock()))
    assert [str(image.reference) for image in ours] == [f"{LANE}:26.11-py3@{digest}", "roadfuse/sign:26.10-cpu-py3"]
    assert [image.reference.tagged for image in local_images(images, lambda reference: True)][1] == "postgres:latest"
    lock = lock_of(LockedImage("lane", f"{LANE}:26.11-py3", digest, digest_of(b"image 1"), "linux/amd64", 1, ""))
    assert table(ours, lock, NOW) == [
        "IMAGE                            SIZE    AGE   PLATFORM     IMAGE ID      LOCK  DIGEST",
        f"nvcr.io/roadfuse/lane:26.11-py3  5.0 MB  23 h  linux/amd64  {digest_of(b'image 1')[7:19]}  lane  {digest}",
        f"roadfuse/sign:26.10-cpu-py3      5.0 MB  23 h  linux/amd64  {digest_of(b'image 2')[7:19]}  -     -",
    ]


def test_images_of_others_are_not_ours() -> None:
    lock = lock_of(LockedImage("tool", "x.io/a/tool:1", digest_of(b"1"), digest_of(b"2"), "linux/amd64", 1, ""))
    assert is_ours(ImageReference("x.io", "a/tool", "2"), lock)
    assert is_ours(ImageReference("y.io", "team/lane", "26.11-py3"), lock)
    assert not is_ours(ImageReference("nvcr.io", "nvidia/pytorch", "26.07-py3"), lock)
    assert not is_ours(ImageReference("", "roadfuse/lane", "test"), lock)


def test_repositories_are_named_shortly_or_in_full() -> None:
    lock = lock_of(pin(listed("26.11-py3", 1, 1)))
    whole = ImageReference("nvcr.io", "roadfuse/lane")
    assert parse_repository("lane", lock) == whole == parse_repository(LANE, lock)
    assert parse_repository(f"{LANE}:26.11-py3", lock) == whole
    assert parse_repository("127.0.0.1:5000/a/b", lock) == ImageReference("127.0.0.1:5000", "a/b")
    with pytest.raises(ContainerError, match="must be REGISTRY/ORG/NAME"):
        parse_repository("roadfuse/lane", lock)


def test_times_and_order() -> None:
    assert parse_time("0001-01-01T00:00:00Z") is None and parse_time("") is None
    assert parse_time("2024-10-04T01:00:00+01:00") == 20_000 * DAY
    assert sorted(["26.9-py3", "26.10-py3", "26.10-cpu-py3"], key=natural) == ["26.9-py3", "26.10-cpu-py3", "26.10-py3"]


@pytest.fixture
def server() -> Iterator[RegistryDouble]:
    with registry_double() as state:
        yield state


def test_remote_images_with_sizes_ages_and_platforms(server: RegistryDouble) -> None:
    amd64, arm64 = make_image([noise(1, 1000)]), make_image([noise(2, 3000)], "arm64", "2026-10-01T00:00:00Z")
    server.add("roadfuse/lane", "26.9-py3", amd64)
    server.add_index("roadfuse/lane", "26.10-py3", {"linux/amd64": amd64, "linux/arm64": arm64})
    registry = Registry(Endpoint(server.address, "roadfuse/lane", True), None, FAST, lambda line: None)
    repository = ImageReference(server.address, "roadfuse/lane")
    images, num_tags = remote_images(repository, registry, None)
    assert num_tags == 2
    index, single = images
    assert (index.reference.tag, index.platforms) == ("26.10-py3", ("linux/amd64", "linux/arm64"))
    assert index.size_bytes == amd64.size + arm64.size and index.parts == (amd64.digest, arm64.digest)
    assert (single.reference.digest, single.image_id, single.size_bytes) == (amd64.digest, amd64.image_id, amd64.size)
    assert single.created_seconds == parse_time("2026-11-01T00:00:00Z") == index.created_seconds
    assert len(remote_images(repository, registry, 1)[0]) == 1


def command(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "containers", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_remote_prune_by_command_deletes_only_what_it_said(server: RegistryDouble, tmp_path: Path) -> None:
    images = [make_image([noise(seed, 100)], created=f"2020-0{seed}-01T00:00:00Z") for seed in range(1, 5)]
    for number, image in enumerate(images):
        server.add("roadfuse/lane", f"20.0{number + 1}-py3", image)
    lock_path = tmp_path / "lock.json"
    reference = f"{server.address}/roadfuse/lane"
    update_lock(lock_path, [locked("lane", f"{reference}:20.01-py3", images[0])])
    environment = {"DOCKER_CONFIG": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/none"}
    arguments = ["prune", "--remote", reference, "--keep-last", "1", "--lock", str(lock_path)]
    dry = command(arguments, environment)
    assert dry.returncode == 0, dry.stderr
    assert "nothing was removed" in dry.stdout and "no container of this machine is taken into account" in dry.stderr
    assert len([1 for _, tag in server.manifests if ":" not in tag]) == 4
    done = command([*arguments, "--apply"], environment)
    assert done.returncode == 0, done.stderr
    assert sorted(tag for _, tag in server.manifests if ":" not in tag) == ["20.01-py3", "20.04-py3"]
    assert "the lock file pins lane to it" in done.stdout


def test_the_cache_is_pruned_by_command(tmp_path: Path) -> None:
    from containers.blob_cache import BlobCache
    from containers.manifests import Descriptor

    cache = BlobCache(tmp_path / "cache")
    data = noise(1, 5000)
    cache.put(Descriptor(digest_of(data), len(data), ""), [data], "test")
    arguments = ["prune", "--cache", str(cache.root), "--cache-size", "1K", "--lock", str(tmp_path / "lock.json")]
    assert "would remove 1 blobs of 5 kB" in command(arguments, {}).stdout
    assert "removed 1 blobs of 5 kB, keeps 0 B" in command([*arguments, "--apply"], {}).stdout
    assert cache.blobs() == []


@pytest.mark.services
def test_real_images_are_listed_and_pruned(
    registry: Any, dockerd: Any, engine: Any, docker_client: Any, tmp_path: Path
) -> None:
    repository = f"{registry.address}/roadfuse/lane"
    images = [make_image([noise(seed, 1000)], created=f"2020-0{seed}-01T00:00:00Z") for seed in range(1, 6)]
    tags = [f"20.0{number + 1}-cpu-py3" for number in range(5)]
    for tag, image in zip(tags, images, strict=True):
        upload_image(registry.address, "roadfuse/lane", tag, image)
    index = make_index({"linux/amd64": images[0]})
    with requests.Session() as session:
        put_manifest(
            session,
            registry.address,
            "roadfuse/lane",
            "19.01-cpu-py3",
            index,
            "application/vnd.oci.image.index.v1+json",
        )
    lock_path = tmp_path / "lock.json"
    update_lock(lock_path, [locked("lane", f"{repository}:{tags[1]}", images[1])])
    environment = {**dockerd.client_environment, "ROADFUSE_IMAGE_CACHE": str(tmp_path / "cache")}
    common = ["--lock", str(lock_path)]
    names = [f"{repository}:{tag}" for tag in tags]
    pulled = command(["pull", *names, "--platform", "linux/amd64", *common], environment)
    assert pulled.returncode == 0, pulled.stderr
    container = docker_client.api.create_container(f"{repository}:{tags[2]}", command=["/layer-0"])
    try:
        shown = command(["list", *common], environment).stdout
        assert f"{repository}:{tags[0]}" in shown and images[0].digest in shown
        remote = command(["list", "--remote", "lane", *common], environment).stdout
        assert all(tag in remote for tag in [*tags, "19.01-cpu-py3"]) and images[4].digest in remote
        arguments = ["prune", repository, "--keep-last", "1", *common]
        assert "would remove 2 of 5 names" in command(arguments, environment).stdout
        done = command([*arguments, "--apply"], environment)
        assert done.returncode == 0, done.stderr
        left = {tag for facts in DockerImages(engine).images() for tag in facts.tags if tag.startswith(repository)}
        # Pinned by the lock file, used by a container that does not even run, and the last one.
        assert left == {f"{repository}:{tags[number]}" for number in (1, 2, 4)}
        remote_arguments = ["prune", "--remote", repository, "--keep-last", "1", *common, "--apply"]
        done = command(remote_arguments, environment)
        assert done.returncode == 0, done.stderr
        remote = command(["list", "--remote", "lane", *common], environment).stdout
        assert [tag in remote for tag in tags] == [False, True, True, False, True]
        assert "19.01-cpu-py3" not in remote
    finally:
        docker_client.api.remove_container(container["Id"], force=True)
        for facts in DockerImages(engine).images():
            for name in (*facts.tags, *facts.digests):
                if name.startswith(repository):
                    DockerImages(engine).remove(name)
