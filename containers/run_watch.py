"""One container from making to removing: its output live, our signals to it, and how it ended. Nothing stays behind."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from containers.engine import ContainerFacts, Engine, Output
from containers.errors import ContainerError, EngineError
from containers.owner import OWNER_LABEL, REAPER_LABEL, RUN_LABEL, lives, process, this_process
from containers.preflight import explain_start
from containers.reaper import Reaper
from containers.run_end import ENGINE_LOST, Watched, explain_end
from containers.run_options import RunSettings, container_settings
from containers.streams import Relay
from containers.user_mapping import account_archive, group_with, passwd_with

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""After these the container must end within the grace."""
_SETTLE_SECONDS = 5.0
_LOOK_SECONDS = 0.05

Events = queue.SimpleQueue[signal.Signals | None]
"""Signals to us; None: the container's output has ended."""


@dataclass(frozen=True)
class Patience:
    grace_seconds: float = 120.0
    """After a signal to end, before SIGKILL: a training writes a checkpoint."""
    engine_seconds: float = 30.0
    """For an engine that went away to come back: a restart."""


def run_container(
    engine: Engine, settings: RunSettings, name: str, patience: Patience, relay: Relay, say: Callable[[str], None]
) -> int:
    """Make it, run it, remove it; returns the exit code of its command.

    125: the engine was lost, and with it the answer. Called in the main thread: signals are handed on from here.
    """
    reaper = Reaper(engine.host, name, str(this_process()), patience.grace_seconds, settings.secrets)
    with _signals() as events:
        return _run(engine, settings, name, reaper, patience, relay, say, events)


def remove_stale(engine: Engine) -> list[str]:
    """Containers of runs on this host whose client was killed, and whose reaper too; returns their names."""
    removed = []
    for container in engine.containers(RUN_LABEL):
        labels = container.labels
        if not lives(labels.get(OWNER_LABEL, "")) and not lives(labels.get(REAPER_LABEL, "")):
            engine.remove(container.container_id)
            removed.append(container.name)
    return removed


def _run(
    engine: Engine,
    settings: RunSettings,
    name: str,
    reaper: Reaper,
    patience: Patience,
    relay: Relay,
    say: Callable[[str], None],
    events: Events,
) -> int:
    labels = {RUN_LABEL: name, OWNER_LABEL: str(this_process()), REAPER_LABEL: str(process(reaper.pid) or "")}
    try:
        created = container_settings(replace(settings, labels={**settings.labels, **labels}))
        container_id = engine.create(name, created)
    except BaseException:
        # It may have been made all the same, by an answer that came too late.
        reaper.leave()
        raise
    began = time.time()
    try:
        _add_account(engine, container_id, settings)
        with closing(engine.attach(container_id)) as output:
            try:
                engine.start(container_id)
            except EngineError as error:
                raise explain_start(error, settings.command[0] if settings.command else "its command") from None
            facts, watched = _watch(engine, container_id, output, patience, relay, say, events)
        relay.end()
        if facts is None:
            say(_lost(name, watched))
            return ENGINE_LOST if watched.engine_was_away else 128 + signal.SIGKILL
        watched = replace(watched, num_kills=_kills(engine, container_id, began))
        for line in explain_end(facts, watched):
            say(line)
        return facts.exit_code
    finally:
        if _remove(engine, container_id, name, say):
            reaper.dismiss()
        else:
            reaper.leave()


def _add_account(engine: Engine, container_id: str, settings: RunSettings) -> None:
    passwd, group = (
        (engine.read_file(container_id, path) or b"").decode(errors="replace") for path in ("/etc/passwd", "/etc/group")
    )
    user = settings.user
    archive = account_archive(passwd_with(passwd, user), group_with(group, user), user)
    engine.put_archive(container_id, "/", archive)


def _watch(
    engine: Engine,
    container_id: str,
    output: Output,
    patience: Patience,
    relay: Relay,
    say: Callable[[str], None],
    events: Events,
) -> tuple[ContainerFacts | None, Watched]:
    """Until it has ended, or nobody can tell (None)."""
    watched = Watched()
    deadline: float | None = None
    _start_reading(output, relay, events)
    while True:
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            say(f"no end {patience.grace_seconds:.0f} s after it was told to: killing it")
            _send(engine, container_id, "SIGKILL", say)
            watched = replace(
                watched,
                forced_after_seconds=patience.grace_seconds,
                num_signals_sent=watched.num_signals_sent + 1,
            )
            deadline = None
            continue
        if event is None:
            facts, away = _settled(engine, container_id, patience, say, events)
            watched = replace(watched, engine_was_away=watched.engine_was_away or away)
            if facts is None or facts.ended:
                return facts, watched
            # It runs on: only the connection broke, or the engine was restarted under it.
            say("the connection to the container broke; output goes on from here")
            try:
                _start_reading(engine.attach(container_id), relay, events)
            except EngineError:
                time.sleep(_LOOK_SECONDS)
                events.put(None)
            continue
        # A terminal that goes away ends a program, without a word; ours is told so that it can save its work.
        forwarded = signal.SIGTERM if event == signal.SIGHUP else event
        _send(engine, container_id, forwarded.name, say)
        watched = replace(watched, num_signals_sent=watched.num_signals_sent + 1)
        if event in ENDING and deadline is None and watched.forced_after_seconds is None:
            say(f"{event.name}: told the container, which has {patience.grace_seconds:.0f} s to end")
            deadline = time.monotonic() + patience.grace_seconds


def _settled(
    engine: Engine, container_id: str, patience: Patience, say: Callable[[str], None], events: Events
) -> tuple[ContainerFacts | None, bool]:
    """How it stands once its output has ended, and whether the engine was away in between."""
    away = False
    begin = time.monotonic()
    while True:
        try:
            facts = engine.container(container_id)
        except EngineError as error:
            if not away:
                away = True
                say(f"{error}; waiting {patience.engine_seconds:.0f} s for it to come back")
                begin = time.monotonic()
            if time.monotonic() - begin > patience.engine_seconds or _told_to_end(events):
                return None, True
        else:
            # Output ends a moment before the state changes.
            if facts is None or facts.ended or time.monotonic() - begin > _SETTLE_SECONDS:
                return facts, away
        time.sleep(_LOOK_SECONDS)


def _told_to_end(events: Events) -> bool:
    try:
        return events.get_nowait() in ENDING
    except queue.Empty:
        return False


def _start_reading(output: Output, relay: Relay, events: Events) -> None:
    def read() -> None:
        with closing(output):
            for out, errors in output:
                relay.write(out, errors)
        events.put(None)

    threading.Thread(target=read, name="container output", daemon=True).start()


def _send(engine: Engine, container_id: str, name: str, say: Callable[[str], None]) -> None:
    try:
        engine.signal(container_id, name)
    except EngineError as error:
        say(f"{name} could not be handed on: {error}")


def _kills(engine: Engine, container_id: str, began: float) -> int | None:
    try:
        return engine.kills(container_id, began, time.time())
    except EngineError:
        return None


def _lost(name: str, watched: Watched) -> str:
    if watched.engine_was_away:
        return (
            f"the engine is lost, and with it how container {name} ends; it is removed once the engine is back. "
            "Look at the run folder: what was trained is in its checkpoints"
        )
    return f"container {name} was removed from outside while it ran (docker rm)"


def _remove(engine: Engine, container_id: str, name: str, say: Callable[[str], None]) -> bool:
    try:
        engine.remove(container_id)
        return True
    except ContainerError as error:
        say(f"container {name} is not removed yet: {error}")
        return False


@contextmanager
def _signals() -> Iterator[Events]:
    """Ours as events, until the end of the block."""
    events: Events = queue.SimpleQueue()

    def handle(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in FORWARDED}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
