"""How a controller leaves a night that has not ended: its jobs go on, or are asked to end and go on later."""

from __future__ import annotations

import time
from collections.abc import Callable

from sweeps.launchers.launcher import LauncherError
from sweeps.night.clock import StopSignals
from sweeps.night.events import ControllerStopped, EndAsked
from sweeps.night.run import NightRun

CANCEL_WINDOW_SECONDS = 4.0
"""For a second Ctrl-C."""
MOST_SECONDS_TO_END = 120.0


def leave(run: NightRun, stop: StopSignals, cpu_seconds: float) -> None:
    """Write down that this controller stops, and say how the night is taken up again."""
    out = len(run.state.out)
    if out and stop.cause.startswith("SIGINT") and not stop.cancel_jobs:
        run.say(f"stopping; {out} jobs go on. Ctrl-C once more within {CANCEL_WINDOW_SECONDS:.0f} s ends them too")
        _wait_until(lambda: stop.cancel_jobs, CANCEL_WINDOW_SECONDS)
    if stop.cancel_jobs:
        _end_jobs(run)
    run.record(ControllerStopped(run.clock.now(), stop.cause, cpu_seconds))
    fate = "jobs were asked to end, and go on from their checkpoints" if stop.cancel_jobs else "jobs go on"
    run.say(f"stopped ({stop.cause}): {fate}; take up the night again with --resume --night {run.night.night}")


def _end_jobs(run: NightRun) -> None:
    """Ended, not cancelled: the night that goes on takes them up from their checkpoints."""
    asked = [(job.name, job.live) for job in run.state.out.values() if job.live is not None and job.live.id is not None]
    attempts = [attempt for _, attempt in asked]

    def all_ended() -> bool:
        statuses = run.launcher.poll()
        return all(statuses[a.name].state in ("ended", "lost") for a in attempts if a.name in statuses)

    now = run.clock.now()
    run.record(*(EndAsked(now, name, attempt.number) for name, attempt in asked))
    try:
        for attempt in attempts:
            run.launcher.cancel(attempt.name)
        if not _wait_until(all_ended, MOST_SECONDS_TO_END):
            run.say("some jobs have not ended yet")
    except LauncherError as error:
        run.say(f"launcher: {error}; jobs may go on")


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
