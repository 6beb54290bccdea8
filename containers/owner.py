"""Whose container is it, and does its owner still live: what tells a container left behind from a running one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

RUN_LABEL = "org.roadfuse.run"
OWNER_LABEL = "org.roadfuse.run.owner"
REAPER_LABEL = "org.roadfuse.run.reaper"


@dataclass(frozen=True)
class Process:
    """One process for all time: its number alone comes again."""

    host: str
    boot: str
    pid: int
    started: int
    """Ticks since boot."""

    def __str__(self) -> str:
        return f"{self.host} {self.boot} {self.pid} {self.started}"


def this_host() -> tuple[str, str]:
    """Name, and identity of its boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return socket.gethostname(), boot


def process(pid: int) -> Process | None:
    """None where there is none, or it has ended and only its parent has not noticed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else Process(*this_host(), pid, int(fields[19]))


def this_process() -> Process:
    found = process(os.getpid())
    assert found is not None
    return found


def parse_process(text: str) -> Process | None:
    words = text.split(" ")
    if len(words) != 4 or not (words[2].isdigit() and words[3].isdigit()):
        return None
    return Process(words[0], words[1], int(words[2]), int(words[3]))


def lives(text: str) -> bool:
    """Of a label's text. Of another host, or unreadable: assumed to live, since nothing here can tell."""
    owner = parse_process(text)
    if owner is None:
        return text != ""
    host, boot = this_host()
    if owner.host != host:
        return True
    return owner.boot == boot and process(owner.pid) == owner
