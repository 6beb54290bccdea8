"""A pull whose engine goes away or is full, one that is killed or told to end, two at once: real processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from containers import transfer_errors
from containers.engine import DockerEngine
from containers.errors import EngineError
from containers.lock import update_lock
from containers.pull_engine import DockerImages
from tests.containers.daemons import docker_daemon, wait_for
from tests.containers.fault_proxy import BLOBS, Fault
from tests.containers.pulling import locked, noise
from tests.containers.registry_double import MadeImage, digest_of, make_image
from tests.containers.sites import TAG, Site, assert_held, attempt, double_site, real_site

_numbers = itertools.count(501)
"""Others than those of test_pull_faults.py: no test finds another one's layers in the engine."""


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


@pytest.mark.services
def test_an_engine_whose_disk_is_full_is_named_and_what_was_fetched_is_kept(
    registry: Any, dockerd: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(docker_daemon(["--data-root", str(disk)]))
            engine = stack.enter_context(DockerEngine(own.host))
            site = stack.enter_context(real_site(registry.address, DockerImages(engine), next(_numbers)))
            site.image = make_image([noise(next(_numbers) + 93_000, 48_000_000)])
            site.upload(site.repository, TAG, site.image)
            with pytest.raises(transfer_errors.DiskFull, match=r"the engine at unix://.*no space left on device"):
                attempt(site, tmp_path)
            assert site.holds_nothing()
            assert site.proxy.blob_bytes == site.image.size
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


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
        # Whoever runs the tests in the background, as CI may, has Ctrl-C ignored in all that they start.
        process = subprocess.Popen(["env", "--default-signal=INT", *argv], env=environment)
        wait_for(lambda: site.proxy.blob_bytes > 500_000, "the first bytes", 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        partial = sum(path.stat().st_size for path in (tmp_path / "cache/partial").iterdir())
    assert partial > 300_000
    assert not (tmp_path / "bundle.tar").exists() and not list(tmp_path.glob(".bundle*"))
    assert (tmp_path / "cache/blobs/sha256" / digest_of(site.image.config).removeprefix("sha256:")).exists()
