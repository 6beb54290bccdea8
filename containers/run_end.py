"""How a container ended, told apart: by itself, by us, for want of memory, by someone else, with its engine. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from containers.engine import ContainerFacts

ENGINE_LOST = 125
"""Exit code where the engine went away and with it the answer; docker's own clients use it so."""


@dataclass(frozen=True)
class Watched:
    """What the client saw and did while the container ran."""

    num_signals_sent: int = 0
    """Through the engine, whichever."""
    forced_after_seconds: float | None = None
    """After which it was killed, since it did not end when told to."""
    engine_was_away: bool = False
    num_kills: int | None = None
    """Signals that reached it through the engine, ours and others'; None: not known."""


def explain_end(facts: ContainerFacts, watched: Watched) -> list[str]:
    """Lines for standard error; none where the program ended by itself, whose own words tell."""
    code = facts.exit_code
    lines = []
    if watched.engine_was_away:
        lines.append("the engine was stopped or restarted meanwhile, and output of that time is lost")
    limit = f" (its limit is {facts.memory_limit_bytes / 2**20:,.0f} MiB)" if facts.memory_limit_bytes else ""
    if facts.out_of_memory and code == 128 + signal.SIGKILL:
        lines.append(f"out of memory: the kernel killed the container's program{limit}; more by --memory, or train "
                     "with a smaller batch or fewer loader workers")  # fmt: skip
    elif facts.out_of_memory and code != 0:
        lines.append(f"out of memory: the kernel killed a process in the container{limit}, and it ended with {code}")
    elif facts.out_of_memory:
        lines.append(f"the kernel killed a process in the container for want of memory{limit}; it went on without")
    elif watched.forced_after_seconds is not None:
        lines.append(f"killed, since it had not ended {watched.forced_after_seconds:.0f} s after it was told to")
    elif code == 128 + signal.SIGKILL and watched.num_kills is not None:
        if watched.num_kills > watched.num_signals_sent:
            lines.append("killed from outside, through the engine (docker kill, docker stop or docker rm)")
        elif not watched.engine_was_away:
            lines.append("killed from outside, not through the engine: it, or a process in it, by SIGKILL of a user "
                         "or of the host")  # fmt: skip
    elif code > 128 and watched.num_kills is not None and watched.num_kills > watched.num_signals_sent:
        lines.append(f"told to end from outside, through the engine ({_signal_name(code - 128)})")
    elif code in (128 + signal.SIGSEGV, 128 + signal.SIGBUS, 128 + signal.SIGILL, 128 + signal.SIGABRT):
        cure = ": is /dev/shm full? (--shm-size)" if code == 128 + signal.SIGBUS else ""
        lines.append(f"crashed by {_signal_name(code - 128)}{cure}")
    return lines


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
