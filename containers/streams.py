"""Output of a container to our own output, live and to the byte: bars that redraw, characters cut between chunks."""

from __future__ import annotations

import threading
from typing import BinaryIO


class WholeCharacters:
    """Hands bytes on at once, but for the begin of a character whose end has not come yet.

    Two streams that share a terminal would else cut each other's characters. Bytes that are no UTF-8 pass as they are.

    >>> whole = WholeCharacters()
    >>> whole.feed("50 € ".encode()[:4]), whole.feed("50 € ".encode()[4:]), whole.end()
    (b'50 ', b'\\xe2\\x82\\xac ', b'')
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        data = self._held + chunk
        held = _open_bytes(data)
        self._held = data[len(data) - held :] if held else b""
        return data[: len(data) - held]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held


class Relay:
    """Both streams of a container to two of ours, whichever thread writes. One that is closed drops what comes."""

    def __init__(self, out: BinaryIO, errors: BinaryIO) -> None:
        self._files = (out, errors)
        self._whole = (WholeCharacters(), WholeCharacters())
        self._lock = threading.Lock()
        self._closed = [False, False]
        self.num_dropped_bytes = 0

    def write(self, out: bytes | None, errors: bytes | None) -> None:
        for index, chunk in enumerate((out, errors)):
            if chunk:
                self._write(index, self._whole[index].feed(chunk))

    def end(self) -> None:
        for index, whole in enumerate(self._whole):
            self._write(index, whole.end())

    def _write(self, index: int, data: bytes) -> None:
        """Flushed at once: a bar that redraws itself never ends its line."""
        if not data:
            return
        with self._lock:
            if not self._closed[index]:
                try:
                    self._files[index].write(data)
                    self._files[index].flush()
                    return
                except (OSError, ValueError):
                    # Whoever read it has gone; a training of hours does not end for that.
                    self._closed[index] = True
            self.num_dropped_bytes += len(data)


def _open_bytes(data: bytes) -> int:
    """How many bytes at the end begin a character of UTF-8 without ending it."""
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        length = 2 if byte & 0b1110_0000 == 0b1100_0000 else 3 if byte & 0b1111_0000 == 0b1110_0000 else 0
        length = 4 if byte & 0b1111_1000 == 0b1111_0000 else length
        return count if length > count else 0
    return 0
