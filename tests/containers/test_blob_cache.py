"""The cache: whatever order bytes come in and wherever it breaks off, what is whole is right; who writes is alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from containers.blob_cache import BlobCache, default_cache_folder
from containers.errors import ContainerError
from containers.manifests import Descriptor
from containers.progress import NoProgress
from containers.registry import Endpoint, Registry
from containers.transfer import Transfers
from containers.transfer_errors import CorruptBlob, DiskFull, NotFound, TransferError
from tests.containers.pulling import FAST, Said, noise
from tests.containers.registry_double import digest_of, registry_double


def descriptor(data: bytes) -> Descriptor:
    return Descriptor(digest_of(data), len(data), "")


def registry_of(address: str) -> Registry:
    return Registry(Endpoint(address, "a/b", plain_http=True), None, FAST, lambda line: None)


@settings(deadline=None, max_examples=60)
@given(data=st.binary(min_size=1, max_size=300), cuts=st.lists(st.integers(1, 300), max_size=6), noisy=st.booleans())
def test_pieces_over_several_lives_make_the_blob(
    data: bytes, cuts: list[int], noisy: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = BlobCache(tmp_path_factory.mktemp("cache"))
    wanted = descriptor(data)
    position = 0
    for length in [*cuts, len(data)]:
        with cache.writing(wanted.digest) as held, cache.open_partial(wanted) as partial:
            assert held and partial.size == position == cache.partial_bytes(wanted.digest)
            piece = data[position : position + length]
            partial.append(piece, "test")
            position += len(piece)
    assert not cache.has(wanted)
    if noisy:
        # What a crash of the machine can leave.
        path = cache.partial_path(wanted.digest)
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with cache.writing(wanted.digest), cache.open_partial(wanted) as partial:
        if noisy:
            with pytest.raises(CorruptBlob):
                partial.finish("test")
            assert cache.partial_bytes(wanted.digest) == 0 and not cache.has(wanted)
            partial.append(data, "test")
        partial.finish("test")
    assert cache.has(wanted) and cache.read(wanted) == data
    assert cache.partial_bytes(wanted.digest) == 0


def test_a_longer_or_another_blob_is_none(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    for wrong in (b"longer than it", b"othe", b"sho"):
        with pytest.raises(CorruptBlob):
            cache.put(descriptor(b"four"), [wrong], "test")
        assert not cache.has(descriptor(b"four"))
    cache.put(descriptor(b"four"), [b"fo", b"ur"], "test")
    assert cache.read(descriptor(b"four")) == b"four"


def test_damage_is_found_and_removed(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    cache.put(descriptor(b"four"), [b"four"], "test")
    assert not cache.drop_if_damaged(descriptor(b"four"))
    cache.path(digest_of(b"four")).write_bytes(b"FOUR")
    with pytest.raises(CorruptBlob, match="damaged on disk"):
        cache.read(descriptor(b"four"))
    assert not cache.has(descriptor(b"four"))


def test_one_writes_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    digest = digest_of(b"x")
    script = (
        "import sys, time, pathlib; from containers.blob_cache import BlobCache\n"
        f"with BlobCache(pathlib.Path({str(tmp_path)!r})).writing({digest!r}) as held:\n"
        "    print(held, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        with cache.writing(digest) as held:
            assert not held
        process.kill()
        process.wait()
        with cache.writing(digest) as held:
            assert held
            with cache.writing(digest) as again:
                assert not again


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_pruning_removes_the_longest_unused_first_and_nothing_needed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = BlobCache(tmp_path_factory.mktemp("cache"))
    sizes = data.draw(st.lists(st.integers(1, 50), max_size=6))
    blobs = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, blob in enumerate(blobs):
        cache.put(descriptor(blob), [blob], "test")
        os.utime(cache.path(digest_of(blob)), (1000 + number, 1000 + number))
    needed = {digest_of(blob) for blob in blobs if data.draw(st.booleans())}
    keep = data.draw(st.integers(0, 200))
    would = cache.prune(keep, needed, apply=False)
    assert all(cache.has(descriptor(blob)) for blob in blobs)
    pruned = cache.prune(keep, needed, apply=True)
    assert pruned == would
    left = [blob for blob in blobs if cache.has(descriptor(blob))]
    assert sum(map(len, left)) == pruned.kept_bytes
    assert needed <= {digest_of(blob) for blob in left}
    removable = [blob for blob in blobs if digest_of(blob) not in needed]
    gone = [blob for blob in removable if blob not in left]
    assert gone == removable[: len(gone)]
    assert pruned.kept_bytes <= keep or len(gone) == len(removable)
    if gone:
        assert pruned.kept_bytes + len(gone[-1]) > keep


def test_nothing_is_pruned_during_a_pull(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    cache.put(descriptor(b"x"), [b"x"], "test")
    with cache.in_use(), cache.in_use():
        with pytest.raises(ContainerError, match="a pull is using it"):
            cache.prune(0, (), apply=True)
        assert len(cache.prune(0, (), apply=False).removed) == 1
    assert len(cache.prune(0, (), apply=True).removed) == 1
    assert not cache.has(descriptor(b"x"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="ROADFUSE_IMAGE_CACHE"):
        BlobCache(tmp_path / "file" / "cache").check_room(1)


def test_the_folder_is_the_users_choice() -> None:
    assert default_cache_folder({"ROADFUSE_IMAGE_CACHE": "/a"}) == Path("/a")
    assert default_cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/roadfuse/images")
    assert default_cache_folder({}) == Path.home() / ".cache/roadfuse/images"


# Transfers into the cache.


def test_readers_follow_a_blob_but_never_get_its_end_unverified(tmp_path: Path) -> None:
    data = noise(1, 400_000)
    wrong = data[:-1] + bytes([data[-1] ^ 1])
    with registry_double() as server:
        server.blobs[digest_of(data)] = wrong
        cache = BlobCache(tmp_path)
        transfers = Transfers(cache, [registry_of(server.address)], FAST, NoProgress(), threading.Event())
        (transfer,) = transfers.start([descriptor(data)])
        received = b""
        with pytest.raises(TransferError):
            for file, position, count in transfer.follow(0):
                received += os.pread(file.fileno(), count, position)
        assert len(received) < len(data)
        server.blobs[digest_of(data)] = data
        transfers.again(descriptor(data))
        (transfer,) = transfers.start([descriptor(data)])
        received = b"".join(os.pread(file.fileno(), count, position) for file, position, count in transfer.follow(7))
    assert received == data[7:]


def test_a_registry_that_does_not_resume_costs_bytes_not_truth(tmp_path: Path) -> None:
    data = noise(2, 300_000)
    with registry_double() as server:
        server.ignores_range = True
        server.blobs[digest_of(data)] = data
        cache = BlobCache(tmp_path)
        with cache.writing(digest_of(data)), cache.open_partial(descriptor(data)) as partial:
            partial.append(data[:123_456], "test")
        transfers = Transfers(cache, [registry_of(server.address)], FAST, NoProgress(), threading.Event())
        transfers.fetch([descriptor(data)])
    assert cache.read(descriptor(data)) == data
    assert transfers.fetched_bytes == len(data)


def test_an_empty_blob_is_one(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    Transfers(cache, [registry_of("127.0.0.1:1")], FAST, NoProgress(), threading.Event()).fetch([descriptor(b"")])
    assert cache.has(descriptor(b""))


def test_without_a_registry_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither in the cache nor"):
        Transfers(BlobCache(tmp_path), (), FAST, NoProgress(), threading.Event()).fetch([descriptor(b"x")])


def test_many_blobs_come_in_order_a_few_at_a_time(tmp_path: Path) -> None:
    blobs = [noise(seed, 20_000) for seed in range(12)]
    with registry_double() as server:
        server.blobs |= {digest_of(blob): blob for blob in blobs}
        said = Said()
        stopping = threading.Event()
        transfers = Transfers(BlobCache(tmp_path), [registry_of(server.address)], FAST, said, stopping, 1)
        transfers.fetch([descriptor(blob) for blob in blobs])
        asked = [path.rpartition("/")[2] for _, path, _ in server.requests]
    assert asked == [digest_of(blob) for blob in blobs]
    assert set(said.phases.values()) == {"fetched"}
