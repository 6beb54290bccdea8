"""Blobs on their way from registries into the cache, several at once, followed by whoever needs their bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO

from containers.blob_cache import BlobCache, PartialBlob
from containers.manifests import Descriptor
from containers.progress import Progress
from containers.registry import Registry, in_turn
from containers.retry import RetryPolicy
from containers.transfer_errors import (
    CorruptBlob,
    DiskFull,
    Interrupted,
    NotFound,
    Stalled,
    TransferError,
    TransferStopped,
)

_PIECE_BYTES = 1 << 20
_STOP_SECONDS = 1.0
_POLL_SECONDS = 0.1
"""Of what another process writes."""


class BlobTransfer:
    """One blob, and how much of it may be read from the cache."""

    def __init__(self, descriptor: Descriptor, cache: BlobCache) -> None:
        self.descriptor = descriptor
        self._cache = cache
        self._changed = threading.Condition()
        self._received = 0
        self._generation = 0
        self._done = False
        self._error: TransferError | None = None
        self.fetched_bytes = 0
        """Over the network, by us, what came twice counted twice."""

    @property
    def done(self) -> bool:
        return self._done

    @property
    def error(self) -> TransferError | None:
        return self._error

    def advance(self, received: int) -> None:
        with self._changed:
            before, self._received = self._received, received
            # Readers are woken for pieces that are worth it, not for every packet.
            if received // _PIECE_BYTES != before // _PIECE_BYTES or received >= self.descriptor.size - 1:
                self._changed.notify_all()

    def restart(self) -> None:
        """What was read so far is of no use."""
        with self._changed:
            self._received = 0
            self._generation += 1
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._received = self.descriptor.size
            self._done = True
            self._changed.notify_all()

    def fail(self, error: TransferError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self) -> None:
        """Until it is whole and verified. Raises what it failed of."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error is not None)
            if self._error is not None:
                raise self._error

    def follow(self, offset: int) -> Iterator[tuple[IO[bytes], int, int]]:
        """The blob from `offset` on as it comes: a file, and from where how many of its bytes can be read.

        The last byte is held back until the whole is verified, so that nobody takes a damaged blob for a complete
        one. Raises CorruptBlob where what was read turned out wrong, or whatever the transfer failed of.
        """
        generation = self._generation
        file: IO[bytes] | None = None
        try:
            position = offset
            while position < self.descriptor.size:
                limit = self._wait_beyond(position, generation)
                if file is None:
                    file = self._open()
                    self._wait_beyond(position, generation)  # Still the file that was meant.
                yield file, position, limit - position
                position = limit
        finally:
            if file is not None:
                file.close()

    def _wait_beyond(self, position: int, generation: int) -> int:
        """How far it can be read, once that is beyond `position`."""

        def limit() -> int:
            return self.descriptor.size if self._done else min(self._received, self.descriptor.size - 1)

        def worth_it() -> bool:
            whole = limit() // _PIECE_BYTES > position // _PIECE_BYTES
            return limit() > position and (whole or self._received >= self.descriptor.size - 1)

        with self._changed:
            self._changed.wait_for(lambda: worth_it() or self._error is not None or self._generation != generation)
            if self._error is not None:
                raise self._error
            if self._generation != generation:
                raise CorruptBlob(f"blob {self.descriptor.digest[:19]}… is fetched anew")
            return limit()

    def _open(self) -> IO[bytes]:
        for _ in range(3):  # It may move from one to the other between the two.
            for path in (self._cache.partial_path(self.descriptor.digest), self._cache.path(self.descriptor.digest)):
                with suppress(FileNotFoundError):
                    return path.open("rb")
        raise CorruptBlob(f"blob {self.descriptor.digest[:19]}… vanished from the cache")


class Transfers:
    """Fetches blobs in the order they are asked for, `num_parallel` at a time, from the first registry that can."""

    def __init__(
        self,
        cache: BlobCache,
        registries: Sequence[Registry],
        policy: RetryPolicy,
        progress: Progress,
        stopping: threading.Event,
        num_parallel: int = 4,
    ) -> None:
        self._cache = cache
        self._registries = registries
        self._policy = policy
        self._progress = progress
        self._stopping = stopping
        self._num_parallel = num_parallel
        self._lock = threading.Lock()
        self._transfers: dict[str, BlobTransfer] = {}
        self._queue: list[BlobTransfer] = []
        self._num_working = 0
        self.last_activity = time.monotonic()

    @property
    def fetched_bytes(self) -> int:
        with self._lock:
            return sum(transfer.fetched_bytes for transfer in self._transfers.values())

    def start(self, descriptors: Sequence[Descriptor]) -> list[BlobTransfer]:
        """Have these fetched, after those that were asked for before."""
        with self._lock:
            for descriptor in descriptors:
                if descriptor.digest not in self._transfers:
                    transfer = self._transfers[descriptor.digest] = BlobTransfer(descriptor, self._cache)
                    self._queue.append(transfer)
            while self._num_working < min(self._num_parallel, self._num_working + len(self._queue)):
                self._num_working += 1
                # Not kept from ending the process: what a thread was fetching is gone on with by the next pull.
                threading.Thread(target=self._work, daemon=True, name="blob-transfer").start()
            return [self._transfers[descriptor.digest] for descriptor in descriptors]

    def fetch(self, descriptors: Sequence[Descriptor]) -> None:
        """Have these in the cache. Raises the first failure."""
        for transfer in self.start(descriptors):
            transfer.wait()

    def settle(self) -> None:
        """Until nothing is under way. Raises the first failure."""
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.wait()

    def again(self, descriptor: Descriptor) -> None:
        """Forget what is known of a blob that is no longer in the cache."""
        with self._lock:
            self._transfers.pop(descriptor.digest, None)

    def raise_failure(self) -> None:
        with self._lock:
            failed = [transfer.error for transfer in self._transfers.values() if transfer.error is not None]
        # What was merely stopped says less than why.
        for error in sorted(failed, key=lambda error: isinstance(error, TransferStopped)):
            raise error

    def stop(self) -> None:
        """What is under way stays in the cache as far as it came."""
        self._stopping.set()
        with self._lock:
            for transfer in self._queue:
                transfer.fail(TransferStopped("stopped"))
            self._queue.clear()
        # Those that wait for a registry are not waited for: they end with its next byte, or with the process.
        deadline = time.monotonic() + _STOP_SECONDS
        while self._num_working and time.monotonic() < deadline:
            time.sleep(0.01)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._num_working -= 1
                    return
                transfer = self._queue.pop(0)
            try:
                self._bring(transfer)
            except TransferError as error:
                transfer.fail(error)
            except BaseException as error:
                transfer.fail(TransferError(f"blob {transfer.descriptor.digest[:19]}…: {error!r}"))
                raise

    def _bring(self, transfer: BlobTransfer) -> None:
        """By fetching it, or by waiting for whoever fetches it already."""
        descriptor = transfer.descriptor
        phase = "cached"
        size_seen, inode_seen, seen_at = -1, 0, time.monotonic()
        while not self._cache.has(descriptor):
            self._raise_if_stopped()
            with self._cache.writing(descriptor.digest) as held:
                if held and not self._cache.has(descriptor):
                    self._fetch(transfer)
                    phase = "fetched"
                    break
            with suppress(FileNotFoundError):
                state = self._cache.partial_path(descriptor.digest).stat()
                if inode_seen not in (0, state.st_ino):
                    transfer.restart()
                inode_seen = state.st_ino
                if state.st_size != size_seen:
                    size_seen, seen_at = state.st_size, time.monotonic()
                    self._advanced(transfer, "shared", size_seen)
            # It may have been asked to wait, by a registry that has enough of us.
            if time.monotonic() - seen_at > 2 * self._policy.stall_seconds + self._policy.longest_retry_after_seconds:
                raise Stalled(
                    f"blob {descriptor.digest[:19]}…: another process holds it and fetches nothing: "
                    "end that one, or wait for it"
                )
            self._stopping.wait(_POLL_SECONDS)
        self._cache.used(descriptor.digest)
        # Said first: once it is finished the engine may be done with it before we get to say so.
        self._progress.layer(descriptor.digest, phase, descriptor.size)
        transfer.finish()

    def _fetch(self, transfer: BlobTransfer) -> None:
        """From one registry after the other; each goes on where the one before failed."""
        descriptor = transfer.descriptor
        if not self._registries:
            raise NotFound(f"blob {descriptor.digest[:19]}… is neither in the cache nor in what was given")
        with self._cache.open_partial(descriptor) as partial:
            transfer.advance(partial.size)
            in_turn(
                self._registries, lambda registry: self._fetch_from(registry, partial, transfer), self._progress.say
            )

    def _fetch_from(self, registry: Registry, partial: PartialBlob, transfer: BlobTransfer) -> None:
        """Attempt by attempt, as long as they bring something."""
        num_failures = num_corrupt = 0
        while True:
            before = partial.size
            self._raise_if_stopped()
            try:
                self._attempt(registry, partial, transfer)
                return
            except TransferStopped:
                raise
            except CorruptBlob as error:
                transfer.restart()
                num_corrupt += 1
                registry.pause(error, num_corrupt)
            except DiskFull:
                raise
            except TransferError as error:
                progressed = partial.size - before >= self._policy.progress_bytes
                num_failures = 1 if progressed else num_failures + 1
                registry.pause(error, num_failures)

    def _attempt(self, registry: Registry, partial: PartialBlob, transfer: BlobTransfer) -> None:
        descriptor, source = transfer.descriptor, str(registry.endpoint)
        if partial.size < descriptor.size:
            with registry.blob(descriptor.digest, partial.size) as answer:
                # From a registry that does not resume, what is there comes again.
                num_known = partial.size - answer.starts_at
                for chunk in answer.chunks:
                    self._raise_if_stopped()
                    transfer.fetched_bytes += len(chunk)
                    new = chunk[num_known:] if num_known else chunk
                    num_known -= len(chunk) - len(new)
                    if new:
                        partial.append(new, source)
                    self._advanced(transfer, "fetching", partial.size)
        if partial.size < descriptor.size:
            raise Interrupted(
                f"{source}: blob {descriptor.digest[:19]}… was cut after {partial.size} of {descriptor.size} bytes"
            )
        partial.finish(source)

    def _advanced(self, transfer: BlobTransfer, phase: str, received: int) -> None:
        self.last_activity = time.monotonic()
        transfer.advance(received)
        self._progress.layer(transfer.descriptor.digest, phase, received)

    def _raise_if_stopped(self) -> None:
        if self._stopping.is_set():
            raise TransferStopped("stopped")
