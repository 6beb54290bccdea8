"""Which of many settings is fastest, found by few short measurements in turn: the search, blind to what is measured.

Settings are changed one group of fields after another: engine first, then buckets, then the rest. Within a stage
all ways are measured in interleaved turns, and the slower half is dropped until one is left (successive halving,
Karnin, Koren and Somekh 2013, Jamieson and Talwalkar 2016). The one left at the end then meets the defaults in new
turns: figures by which it was chosen would flatter it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perception.errors import UserError
from pipelines.bench.intervals import Interval, paired_ratio
from pipelines.tuned_settings import Value, as_assignments

TURNS_A_RUNG = 2
MOST_DUEL_ROUNDS, LEAST_DUEL_ROUNDS = 25, 7
LEAST_GAIN = 1.01
DUEL_SHARE = 0.3
"""Of the time, what is kept for the last comparison."""
RULE = (
    f"taken if, over at least {LEAST_DUEL_ROUNDS} interleaved rounds after the search, the median of the defaults' "
    f"step time over its own is at least {LEAST_GAIN:g} and the 95 % bootstrap interval of that median lies above 1; "
    "else the defaults stay"
)

NOT_TRIED = "not tried, no time was left"

Settings = Mapping[str, Value]
"""Dotted names → values, where they differ from the defaults; empty: the defaults."""


class TimeIsOver(Exception):
    """Raised by a measurement that the end of the time cut short."""


@dataclass(frozen=True)
class Bench:
    """What the search needs of the world; settings are known by their label."""

    measure: Callable[[Settings], float]
    """Seconds of a step in one turn. Raises UserError if these settings fail, TimeIsOver."""
    drop: Callable[[Settings], None]
    """These will not be measured soon."""
    start_seconds: Callable[[], float]
    """What it takes to begin with settings that were not measured yet."""
    turn_seconds: Callable[[], float]
    clock: Callable[[], float]
    """Seconds since the beginning."""
    say: Callable[[str], None]


@dataclass
class Trial:
    """One way that was tried, or was to be."""

    settings: Settings
    stage: str
    seconds: list[float] = field(default_factory=list)
    """Step seconds of each turn."""
    failure: str = ""
    """Why it was given up; empty if it ran."""


@dataclass
class Found:
    """The outcome."""

    settings: Settings
    reason: str
    trials: list[Trial] = field(default_factory=list)
    duel: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Step seconds of the defaults and of their challenger, by round."""
    gain: Interval | None = None
    """The challenger's speed over the defaults'."""


@dataclass(frozen=True)
class Stage:
    """Fields that are changed together."""

    name: str
    ways: Callable[[Settings], Sequence[Settings]]
    """What to try around the best so far."""
    until: float
    """Share of the search's time at which it ends."""


def search(stages: Sequence[Stage], bench: Bench, seconds: float) -> Found:
    """Find settings within `seconds`. Raises UserError if the defaults fail."""
    found = Found({}, "")
    best: Settings = {}
    try:
        for stage in stages:
            best = _halve(stage, best, bench, seconds * (1 - DUEL_SHARE) * stage.until, found)
        if not best:
            left_out = sum(trial.failure == NOT_TRIED for trial in found.trials)
            found.reason = "no other settings were faster in the search"
            if left_out:
                found.reason += f", which had no time for {left_out}: give more --seconds to try them"
            return found
        bench.say(f"the fastest is {label(best)}; now against the defaults")
        _duel(best, bench, seconds, found)
    except TimeIsOver:
        bench.say("the time is over")
    _decide(best, found)
    return found


def label(settings: Settings) -> str:
    return " ".join(text.partition(".")[2] for text in as_assignments(settings)) or "defaults"


def _halve(stage: Stage, best: Settings, bench: Bench, deadline: float, found: Found) -> Settings:
    """The fastest of the stage's ways and the best so far."""
    ways = [way for way in stage.ways(best) if way != best]
    if not ways:
        return best
    trials = [Trial(best, stage.name), *(Trial(way, stage.name) for way in ways)]
    found.trials += trials
    bench.say(f"{stage.name}: {', '.join(_change(trial, best) for trial in trials)}")
    alive = _begin(trials, bench, deadline)
    left_out = [_change(trial, best) for trial in trials if trial.failure == NOT_TRIED]
    if left_out:
        bench.say(f"  no time for {', '.join(left_out)}")
    rung = 0
    while len(alive) > 1 and not (rung and bench.clock() + len(alive) * bench.turn_seconds() > deadline):
        for number in range(TURNS_A_RUNG):
            shift = number % len(alive)
            for trial in alive[shift:] + alive[:shift]:
                _take_turn(trial, bench)
        alive = [trial for trial in alive if not trial.failure]
        # All that are left were measured in the same rounds.
        alive.sort(key=lambda trial: statistics.median(trial.seconds))
        bench.say("  ms a step: " + ", ".join(f"{_change(t, best)} {_milliseconds(t.seconds)}" for t in alive))
        kept = math.ceil(len(alive) / 2)
        _drop(alive[kept:], bench)
        alive = alive[:kept]
        rung += 1
    _drop(alive[1:], bench)
    return alive[0].settings if alive else {}


def _begin(trials: Sequence[Trial], bench: Bench, deadline: float) -> list[Trial]:
    """Those that can be started and that time is left for; their first turn, in which memory is still cold, is lost."""
    alive: list[Trial] = []
    for number, trial in enumerate(trials):
        # A rung of all that run by then must fit too.
        needed = bench.start_seconds() + TURNS_A_RUNG * (len(alive) + 1) * bench.turn_seconds()
        if number and bench.clock() + needed > deadline:
            trial.failure = NOT_TRIED
            continue
        _take_turn(trial, bench)
        trial.seconds.clear()
        if not trial.failure:
            alive.append(trial)
    return alive


def _take_turn(trial: Trial, bench: Bench) -> None:
    if trial.failure:
        return
    try:
        trial.seconds.append(bench.measure(trial.settings))
    except UserError as error:
        if not trial.settings:
            raise
        trial.failure = f"failed: {error}"
        bench.say(f"  {label(trial.settings)}: {trial.failure}")
        bench.drop(trial.settings)


def _drop(trials: Sequence[Trial], bench: Bench) -> None:
    """All but the defaults, which are needed at the end."""
    for trial in trials:
        if trial.settings:
            bench.drop(trial.settings)


def _duel(best: Settings, bench: Bench, seconds: float, found: Found) -> None:
    defaults, challengers = found.duel
    for number in range(MOST_DUEL_ROUNDS):
        if number and bench.clock() + 2 * bench.turn_seconds() > seconds:
            break
        if number % 2:
            challenger, default = bench.measure(best), bench.measure({})
        else:
            default, challenger = bench.measure({}), bench.measure(best)
        defaults.append(default)
        challengers.append(challenger)


def _decide(best: Settings, found: Found) -> None:
    defaults, challengers = found.duel
    rounds = len(defaults)
    if rounds:
        found.gain = paired_ratio(defaults, challengers)
    if found.gain is None or rounds < LEAST_DUEL_ROUNDS:
        found.reason = (
            f"{rounds} rounds of the {LEAST_DUEL_ROUNDS} that are needed fitted into the time: give more --seconds"
        )
    elif found.gain.value < LEAST_GAIN or found.gain.low <= 1:
        found.reason = f"{label(best)} is {found.gain} times as fast: no more than noise, or too little to matter"
    else:
        found.settings = best
        found.reason = f"{found.gain} times as fast as the defaults over {rounds} rounds"


def _change(trial: Trial, best: Settings) -> str:
    """For people: only what a stage changes of the best so far."""
    if not best or trial.settings == best or best.keys() - trial.settings.keys():
        return label(trial.settings)
    return f"+ {label({name: value for name, value in trial.settings.items() if best.get(name) != value})}"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"
