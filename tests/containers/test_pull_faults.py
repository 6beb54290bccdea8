"""Every fault that a pull can meet, against doubles and against a real dockerd and registry: recovery, or the right
error and nothing that passes for an image."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from containers import handover, transfer_errors
from containers.engine import DockerEngine
from containers.errors import EngineError
from containers.lock import update_lock
from containers.manifests import Manifest, Platform, WrongPlatform
from containers.offer import Offer
from containers.pull import Pulled, pull
from containers.pull_engine import DockerImages
from containers.retry import RetryPolicy
from containers.transfer import Transfers
from tests.containers.daemons import docker_daemon, wait_for
from tests.containers.fault_proxy import BLOBS, MANIFESTS, Fault
from tests.containers.pulling import FAST, Said, lock_of, locked, noise, settings
from tests.containers.registry_double import MadeImage, digest_of, make_image
from tests.containers.sites import TAG, Site, double_site, real_site

AMD64 = Platform("linux", "amd64")
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


def attempt(site: Site, folder: Path, said: Said | None = None, policy: RetryPolicy = FAST) -> Pulled:
    return pull(site.reference, settings(folder, policy=policy), site.store, AMD64, said or Said())


def assert_held(site: Site, pulled: Pulled) -> None:
    facts = site.store.image(site.reference)
    assert facts is not None
    assert facts.image_id == pulled.image_id == site.image.image_id
    assert f"{site.parsed.full_repository}@{site.image.digest}" in facts.digests
    assert not [name for name in (*facts.tags, *facts.digests) if "handover" in name]


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
    with pytest.raises(transfer_errors.Unreachable, match=r"127\.0\.0\.1:1.*refused"):
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


@pytest.mark.services
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_goes_away_is_named_and_what_was_fetched_serves_it_later(
    by: signal.Signals, registry: Any, dockerd: Any, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(docker_daemon())
        engine = stack.enter_context(DockerEngine(own.host))
        site = stack.enter_context(real_site(registry.address, DockerImages(engine), next(_numbers)))
        site.proxy.faults.append(Fault(BLOBS, "slow", bytes_per_second=150_000))

        def end_it() -> None:
            wait_for(lambda: site.proxy.blob_bytes > 100_000, "bytes")
            own.end(by)

        ending = threading.Thread(target=end_it)
        ending.start()
        with pytest.raises(EngineError):
            attempt(site, tmp_path)
        ending.join()
        own.start()
        site.proxy.faults.clear()
        before = site.proxy.blob_bytes
        assert site.holds_nothing()
        assert_held(site, attempt(site, tmp_path))
        assert site.proxy.blob_bytes - before < site.image.size - 50_000


# Real processes, killed and at once.


def command(site: Site, folder: Path, arguments: list[str], host: str = "") -> tuple[list[str], dict[str, str]]:
    lock = folder / "lock.json"
    update_lock(lock, [locked("lane", site.reference, site.image)])
    environment = {**os.environ, "DOCKER_CONFIG": str(folder / "docker"), "ROADFUSE_IMAGE_CACHE": str(folder / "cache")}
    environment |= {"DOCKER_HOST": host} if host else {}
    return [sys.executable, "-m", "containers", *arguments, "--lock", str(lock)], environment


def big_image(seed: int) -> MadeImage:
    return make_image([noise(seed, 1_500_000), noise(seed + 1, 500_000)])


def kill_at_90_percent_then_again(site: Site, run: Callable[[], subprocess.Popen[bytes]]) -> float:
    """The share of the bytes that the second start transfers."""
    # The largest layer stands still shortly before its end, so that there is an end to be killed before.
    site.proxy.faults.append(Fault(BLOBS, "hang", after_bytes=1_400_000, smallest_bytes=1_000_000))
    process = run()
    try:
        wait_for(lambda: site.proxy.blob_bytes >= 0.9 * site.image.size, "nine tenths", 60)
        time.sleep(0.5)  # For what is on its way to be written.
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    site.proxy.faults.clear()
    before = site.proxy.blob_bytes
    assert before < site.image.size
    assert run().wait(120) == 0
    return (site.proxy.blob_bytes - before) / site.image.size


@pytest.mark.slow
def test_a_fetch_killed_at_90_percent_is_gone_on_with(tmp_path: Path) -> None:
    with double_site() as site:
        site.image = big_image(31)
        site.upload(site.repository, TAG, site.image)
        argv, environment = command(site, tmp_path, ["save", "lane", str(tmp_path / "bundle.tar"), "--quiet"])
        share = kill_at_90_percent_then_again(site, lambda: subprocess.Popen(argv, env=environment))
    assert share <= 0.15


@pytest.mark.services
def test_a_pull_killed_at_90_percent_is_gone_on_with(registry: Any, dockerd: Any, engine: Any, tmp_path: Path) -> None:
    with real_site(registry.address, DockerImages(engine), next(_numbers)) as site:
        site.image = big_image(41)
        site.upload(site.repository, TAG, site.image)
        argv, environment = command(site, tmp_path, ["pull", "lane", "--quiet"], dockerd.host)
        share = kill_at_90_percent_then_again(site, lambda: subprocess.Popen(argv, env=environment))
        facts = site.store.image(site.reference)
        assert facts is not None and facts.image_id == site.image.image_id
        left = [name for image in site.store.images() for name in image.digests if "handover" in name]
    assert share <= 0.15
    assert not left


def two_at_once(site: Site, argv: list[list[str]], environment: dict[str, str]) -> None:
    site.proxy.faults.append(Fault(BLOBS, "slow", bytes_per_second=2_000_000))
    processes = [subprocess.Popen(one, env=environment) for one in argv]
    assert [process.wait(60) for process in processes] == [0, 0]


@pytest.mark.slow
def test_two_fetches_at_once_share_layers(tmp_path: Path) -> None:
    with double_site() as site:
        site.image = big_image(51)
        site.upload(site.repository, TAG, site.image)
        commands = [command(site, tmp_path, ["save", "lane", str(tmp_path / f"{n}.tar"), "--quiet"]) for n in (1, 2)]
        two_at_once(site, [argv for argv, _ in commands], commands[0][1])
        assert site.proxy.blob_bytes == site.image.size
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()


@pytest.mark.services
def test_two_pulls_at_once_share_layers(registry: Any, dockerd: Any, engine: Any, tmp_path: Path) -> None:
    with real_site(registry.address, DockerImages(engine), next(_numbers)) as site:
        site.image = big_image(61)
        site.upload(site.repository, TAG, site.image)
        argv, environment = command(site, tmp_path, ["pull", "lane", "--quiet"], dockerd.host)
        two_at_once(site, [argv, argv], environment)
        facts = site.store.image(site.reference)
        assert facts is not None and facts.image_id == site.image.image_id
        assert not [name for name in facts.digests if "handover" in name]
        assert site.proxy.blob_bytes == site.image.size


@pytest.mark.slow
def test_on_a_terminal_bars_are_drawn(tmp_path: Path) -> None:
    with double_site() as site:
        site.image = big_image(81)
        site.upload(site.repository, TAG, site.image)
        site.proxy.faults.append(Fault(BLOBS, "slow", bytes_per_second=1_000_000))
        argv, environment = command(site, tmp_path, ["save", "lane", str(tmp_path / "bundle.tar")])
        ours, theirs = pty.openpty()
        shown = b""
        with open(ours, "rb", buffering=0) as screen:  # noqa: PTH123
            process = subprocess.Popen(argv, env={**environment, "TERM": "xterm"}, stdout=theirs, stderr=theirs)
            os.close(theirs)
            with contextlib.suppress(OSError):  # How a terminal ends.
                while piece := screen.read(4096):
                    shown += piece
            assert process.wait(30) == 0
    text = shown.decode()
    assert re.search(r"fetching +\[#+ +\] [0-9.]+ MB of 1\.5 MB", text)
    assert re.search(r"[0-9.]+ MB of 2\.0 MB, [0-9.]+ [kM]B/s, [0-9]+ s left", text)
    assert "\x1b[3A\x1b[J" in text
    assert text.splitlines()[-1].endswith("bundle.tar: lane, 2.0 MB")


@pytest.mark.slow
def test_ctrl_c_ends_a_pull_at_once_and_keeps_what_came(tmp_path: Path) -> None:
    with double_site() as site:
        site.image = big_image(71)
        site.upload(site.repository, TAG, site.image)
        site.proxy.faults.append(Fault(BLOBS, "slow", bytes_per_second=1_000_000))
        argv, environment = command(site, tmp_path, ["save", "lane", str(tmp_path / "bundle.tar"), "--quiet"])
        process = subprocess.Popen(argv, env=environment)
        wait_for(lambda: site.proxy.blob_bytes > 500_000, "the first bytes", 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        partial = sum(path.stat().st_size for path in (tmp_path / "cache/partial").iterdir())
    assert partial > 300_000
    assert not (tmp_path / "bundle.tar").exists() and not list(tmp_path.glob(".bundle*"))
    assert (tmp_path / "cache/blobs/sha256" / digest_of(site.image.config).removeprefix("sha256:")).exists()
