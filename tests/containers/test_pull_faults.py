"""Every fault that a pull can meet, against doubles and against a real dockerd and registry: recovery, or the right
error and nothing that passes for an image."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from containers import handover, transfer_errors
from containers.manifests import Manifest, WrongPlatform
from containers.offer import Offer
from containers.pull import pull
from containers.pull_engine import DockerImages
from containers.transfer import Transfers
from tests.containers.fault_proxy import BLOBS, MANIFESTS, Fault
from tests.containers.pulling import FAST, Said, lock_of, locked, noise, settings
from tests.containers.registry_double import digest_of, make_image
from tests.containers.sites import AMD64, TAG, Site, assert_held, attempt, double_site, real_site

LAYERS = 10_000
"""Bodies at least this long are layers here."""
_numbers = itertools.count(1)


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.services)])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param == "double":
        with double_site() as made:
            yield made
    else:
        registry = request.getfixturevalue("registry")
        store = DockerImages(request.getfixturevalue("engine"))
        with real_site(registry.address, store, next(_numbers)) as made:
            yield made


def test_without_faults_each_byte_comes_once(site: Site, tmp_path: Path) -> None:
    said = Said()
    pulled = attempt(site, tmp_path, said)
    assert_held(site, pulled)
    assert site.proxy.blob_bytes == site.image.size
    # Nothing was tried again or another way.
    assert [line for line in said.lines if "is not in lock.json" not in line] == []


@pytest.mark.parametrize("by_us", [True, False])
def test_layers_that_another_image_has_brought_are_not_fetched(by_us: bool, site: Site, tmp_path: Path) -> None:
    """Whether they came through here, and are known unpacked, or by the engine's own pull, as they are."""
    shared = [noise(next(_numbers) + 90_000, 250_000), noise(next(_numbers) + 91_000, 150_000)]
    base, image = make_image([*shared, b"base"]), make_image([*shared, noise(next(_numbers) + 92_000, 200_000)])
    name = f"{site.parsed.full_repository}:26.10-cpu-py3"
    site.upload(site.repository, "26.10-cpu-py3", base)
    if by_us:
        pull(name, settings(tmp_path / "before"), site.store, AMD64, Said())
    else:
        list(site.store.pull(f"{site.parsed.full_repository}@{base.digest}", str(AMD64), None))
    assert site.store.image(base.image_id) is not None
    site.image = image
    site.upload(site.repository, TAG, image)
    before, said = site.proxy.blob_bytes, Said()
    assert_held(site, attempt(site, tmp_path, said))
    assert site.proxy.blob_bytes - before == len(image.config) + len(image.layers[2])
    assert [said.phases[digest_of(layer)] for layer in image.layers] == ["there", "there", "done"]
    assert [line for line in said.lines if "is not in lock.json" not in line] == []
    for made in (base, image):
        facts = site.store.image(made.image_id)
        assert facts is not None
        for one in (*facts.tags, *facts.digests):
            site.store.remove(one)


def test_cut_once_is_gone_on_with(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "cut", times=1, after_bytes=100_000, smallest_bytes=200_000))
    said = Said()
    assert_held(site, attempt(site, tmp_path, said))
    assert site.proxy.blob_bytes == site.image.size
    assert 206 in [status for _, path, status in site.proxy.requests if "/blobs/" in path]
    assert "again in" in said.text


def test_cut_always_but_a_little_later_each_time_gets_there(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "cut", after_bytes=70_000, smallest_bytes=LAYERS))
    assert_held(site, attempt(site, tmp_path))
    assert site.proxy.blob_bytes == site.image.size


def test_cut_always_is_an_error_and_what_came_is_kept(site: Site, tmp_path: Path) -> None:
    site.proxy.faults += [
        Fault(BLOBS, "cut", times=1, after_bytes=200_000, smallest_bytes=250_000),
        Fault(BLOBS, "cut", after_bytes=0, smallest_bytes=LAYERS),
    ]
    with pytest.raises(transfer_errors.Interrupted, match="after 3 attempts"):
        attempt(site, tmp_path)
    assert site.holds_nothing()
    site.proxy.faults.clear()
    before = site.proxy.blob_bytes
    assert_held(site, attempt(site, tmp_path))
    assert site.proxy.blob_bytes - before < site.image.size - 200_000


def test_a_registry_that_comes_back_is_waited_for(site: Site, tmp_path: Path) -> None:
    upstream, site.proxy.upstream = site.proxy.upstream, "127.0.0.1:1"
    back = threading.Timer(0.5, setattr, (site.proxy, "upstream", upstream))
    back.start()
    policy = replace(FAST, attempts=20, longest_delay_seconds=0.2)
    assert_held(site, attempt(site, tmp_path, policy=policy))
    back.join()


def test_a_registry_that_is_away_is_named(site: Site, tmp_path: Path) -> None:
    text = f"127.0.0.1:1/{site.repository}:{TAG}"
    with pytest.raises(transfer_errors.Unreachable, match=r"127\.0\.0\.1:1/\S+: Connection refused: is its name right"):
        pull(text, settings(tmp_path), site.store, AMD64, Said())
    assert site.holds_nothing()


def test_a_flipped_bit_is_found_and_the_blob_fetched_anew(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "flip", times=1, after_bytes=1000, smallest_bytes=LAYERS))
    said = Said()
    assert_held(site, attempt(site, tmp_path, said))
    assert "it was altered at the registry or on the way" in said.text


def test_a_blob_that_stays_wrong_is_an_error(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "flip", after_bytes=1000, smallest_bytes=LAYERS))
    with pytest.raises(transfer_errors.CorruptBlob, match="it was altered"):
        attempt(site, tmp_path)
    assert site.holds_nothing()


def test_a_blob_that_is_too_short_is_an_error(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "short", after_bytes=0, smallest_bytes=LAYERS))
    with pytest.raises(transfer_errors.Interrupted, match="was cut after 0 of"):
        attempt(site, tmp_path)
    assert site.holds_nothing()


@pytest.mark.parametrize("path", [BLOBS, MANIFESTS])
def test_too_many_requests_is_waited_for_as_long_as_asked(site: Site, tmp_path: Path, path: str) -> None:
    fault = Fault(path, "status", times=1, status=429, headers={"Retry-After": "1"})
    site.proxy.faults.append(fault)
    started = time.monotonic()
    assert_held(site, attempt(site, tmp_path))
    assert fault.num_done == 1
    assert time.monotonic() - started > 1.0


@pytest.mark.parametrize("path", [BLOBS, MANIFESTS])
def test_too_many_requests_for_an_hour_is_an_error_at_once(site: Site, tmp_path: Path, path: str) -> None:
    body = b'{"errors":[{"code":"TOOMANYREQUESTS","message":"pull rate limit"}]}'
    headers = {"Retry-After": "3600"}
    site.proxy.faults.append(Fault(path, "status", status=429, headers=headers, body=body))
    with pytest.raises(transfer_errors.TooManyRequests, match=r"pull rate limit.*3600 s, more than the 2 s"):
        attempt(site, tmp_path)
    assert site.holds_nothing()


@pytest.mark.parametrize("path", [BLOBS, MANIFESTS])
def test_failures_of_the_registry_are_retried_then_named(site: Site, tmp_path: Path, path: str) -> None:
    site.proxy.faults.append(Fault(path, "status", status=500))
    with pytest.raises(transfer_errors.ServerFailure, match=r"answers 500 \(after 3 attempts\)"):
        attempt(site, tmp_path)
    assert site.holds_nothing()
    site.proxy.faults[:] = [Fault(path, "status", times=2, status=503)]
    assert_held(site, attempt(site, tmp_path))


def test_a_hang_is_noticed_and_gone_on_with(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "hang", times=1, after_bytes=65_536, smallest_bytes=200_000))
    said = Said()
    assert_held(site, attempt(site, tmp_path, said, replace(FAST, stall_seconds=1.0, attempts=10)))
    assert "no byte for" in said.text
    assert site.proxy.blob_bytes == site.image.size


def test_hanging_always_is_an_error(site: Site, tmp_path: Path) -> None:
    site.proxy.faults.append(Fault(BLOBS, "hang", after_bytes=0, smallest_bytes=LAYERS))
    with pytest.raises(transfer_errors.Stalled, match="no byte for"):
        attempt(site, tmp_path, policy=replace(FAST, stall_seconds=0.5, attempts=2))
    assert site.holds_nothing()


def test_a_missing_tag_is_named(site: Site, tmp_path: Path) -> None:
    with pytest.raises(transfer_errors.NotFound, match=r"has no 26\.12-cpu-py3"):
        pull(site.reference.replace("26.11", "26.12"), settings(tmp_path), site.store, AMD64, Said())


def test_another_platform_is_refused(site: Site, tmp_path: Path) -> None:
    site.upload(site.repository, "26.10-cpu-py3", make_image([noise(5, 1000)], "arm64"))
    with pytest.raises(WrongPlatform, match="is an image for linux/arm64"):
        pull(site.reference.replace("26.11", "26.10"), settings(tmp_path), site.store, AMD64, Said())


def test_a_manifest_altered_on_the_way_is_refused_where_a_digest_is_asked(site: Site, tmp_path: Path) -> None:
    altered = site.image.manifest.replace(b'"size": ', b'"size":  ', 1)
    site.proxy.faults.append(Fault(MANIFESTS, "replace", body=altered))
    lock = lock_of(locked("lane", site.reference, site.image))
    with pytest.raises(transfer_errors.CorruptBlob, match="manifest with digest"):
        pull("lane", settings(tmp_path, lock), site.store, None, Said())
    assert site.holds_nothing()
    assert site.proxy.blob_bytes == 0


def test_a_manifest_altered_under_its_tag_is_refused_because_of_the_lock(site: Site, tmp_path: Path) -> None:
    other = make_image([noise(77, 1000)])
    site.upload(site.repository, "other", other)
    site.proxy.faults.append(Fault(f"{MANIFESTS}{TAG}", "replace", body=other.manifest))
    lock = lock_of(locked("lane", site.reference, site.image))
    with pytest.raises(transfer_errors.LockMismatch, match="then lock lane"):
        pull(site.reference, settings(tmp_path, lock), site.store, None, Said())
    assert site.holds_nothing()
    # Without a lock there is nothing to compare with: that is what a lock is for.
    assert pull(site.reference, settings(tmp_path), site.store, AMD64, Said()).image_id == other.image_id


def test_a_full_disk_is_named_and_nothing_fetched(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("containers.blob_cache._ROOM_LEFT_BYTES", 1 << 60)
    with pytest.raises(transfer_errors.DiskFull, match="ROADFUSE_IMAGE_CACHE"):
        attempt(site, tmp_path)
    assert site.proxy.blob_bytes == len(site.image.config)


def test_a_disk_that_fills_in_the_middle_is_named_and_what_came_is_kept(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room was there when it was looked for, and another took it."""
    monkeypatch.setattr("containers.blob_cache._ROOM_LEFT_BYTES", -(1 << 40))
    with double_site() as site:
        site.image = make_image([noise(91, 2_000_000)])
        site.upload(site.repository, TAG, site.image)
        cache = small_disk / "cache"
        with pytest.raises(transfer_errors.DiskFull, match="the disk is full"):
            pull(site.reference, settings(tmp_path, cache_folder=cache), site.store, AMD64, Said())
        assert site.holds_nothing()
        kept = sum(path.stat().st_size for path in (cache / "partial").iterdir())
        assert kept > 500_000
        # On a larger disk it goes on from there.
        shutil.copytree(cache, tmp_path / "larger")
        before = site.proxy.blob_bytes
        assert_held(
            site, pull(site.reference, settings(tmp_path, cache_folder=tmp_path / "larger"), site.store, AMD64, Said())
        )
        assert site.proxy.blob_bytes - before == len(site.largest) - kept


def test_an_engine_elsewhere_gets_the_image_whole(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("containers.deliver.is_local", lambda host: False)
    assert_held(site, attempt(site, tmp_path))
    assert site.proxy.blob_bytes == site.image.size


def test_an_engine_in_another_network_gets_the_image_whole(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rootless engine has a loopback of its own, where nobody answers."""
    serve = handover.serve

    @contextlib.contextmanager
    def unreachable(manifest: Manifest, offer: Offer, transfers: Transfers) -> Iterator[handover.Handover]:
        with serve(manifest, offer, transfers) as served:
            _, _, rest = served.reference.partition("/")
            yield replace(served, reference=f"127.0.0.1:1/{rest}")

    monkeypatch.setattr("containers.handover.serve", unreachable)
    said = Said()
    assert_held(site, attempt(site, tmp_path, said))
    assert "it does not see this process, so the image is sent to it whole" in said.text


class _Mute:
    """An engine's stream that says nothing until it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def __iter__(self) -> Iterator[dict[str, str]]:
        self.stopped.wait(60)
        return iter(())

    def stop(self) -> None:
        self.stopped.set()


def test_an_engine_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with double_site() as site:
        mute = _Mute()
        monkeypatch.setattr(site.store, "pull", lambda reference, platform, credentials: mute)
        with pytest.raises(transfer_errors.Stalled, match="says nothing"):
            attempt(site, tmp_path, policy=replace(FAST, engine_stall_seconds=0.5))
        assert mute.stopped.is_set()
