"""`tune MODEL`: the fastest settings of the all-reduce layer for a model on this host, by a short measured search.

What is measured is the model's real training step on random images; the file that it writes is taken by
`train MODEL --tuned`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception.config import RunConfig, override
from perception.cores import available_cores
from perception.distributed.environment import rank_environment
from perception.errors import UserError
from perception.run_folder import check_folder_of, package_versions, write_json
from pipelines.configs import CONFIGS, named_config
from pipelines.tuned_settings import PLACEMENT, Key, as_assignments, default_folder, key_of

if TYPE_CHECKING:
    from pipelines.bench.allreduce import Plan
    from pipelines.bench.allreduce_variants import Variant
    from pipelines.bench.rank_group import RankGroup
    from pipelines.tune_search import Found, Settings, Stage

BUCKETS_MIB = ((0.25, 1.0), (1.0, 25.0), (4.0, 100.0), (1024.0, 1024.0))
"""(first, others) to try; the last is all in one bucket."""
CYCLES_MILLISECONDS = (2.5, 10.0)
"""Beside the 1 or 20 that the layer takes by itself."""
TURN_SHARE = 1 / 200
"""Of the time, what the steps of one turn take."""
SLACK = 1.1
"""Past this many times --seconds a measurement is cut short."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"one of {', '.join(CONFIGS)}, or a config.json")
    parser.add_argument("--ranks", type=int, default=2, help="as the training will have (default 2)")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for the search (default 120)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of the user's cache folder")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as in train; settings given are not searched"
    )


def run(options: argparse.Namespace) -> int:
    config = override(named_config(options.model), options.set)
    _check(options, config)
    from pipelines.bench.scaling import stopped_well
    from pipelines.tune_search import RULE

    began = time.perf_counter()
    key = key_of(config, options.ranks, num_hosts=1)
    path = options.out or default_folder() / key.file_name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: cannot be made ({error.strerror}); give another by --out") from None
    held = {text.partition("=")[0].strip() for text in options.set}
    print(
        f"tune {key.model}: {key.num_parameters / 1e6:.2f} million parameters, images of "
        f"{key.input_size[0]}x{key.input_size[1]}, {config.train.batch_size_per_rank} a rank, {key.ranks} ranks; "
        f"{options.seconds:g} s",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="tune-") as folder, stopped_well():
        found, started = tune(config, options.ranks, options.seconds, held, Path(folder), began)
    write_json(path, _document(key, config, found, started, time.perf_counter() - began, RULE))
    shown = ", ".join(as_assignments(found.settings)) or "the defaults"
    print(f"best: {shown}; {found.reason}\n{path}: written; train {options.model} --ranks {key.ranks} --tuned takes it")
    return 0


def tune(
    config: RunConfig, ranks: int, seconds: float, held: set[str], folder: Path, began: float
) -> tuple[Found, datetime.datetime]:
    """Search within `seconds` of `began` (time.perf_counter); fields in `held` keep their values. Prints progress.

    Returns what was found and when the search started. No process is left, however it ends.
    Raises UserError if the defaults cannot be measured.
    """
    from pipelines.tune_search import Bench, search

    started = datetime.datetime.now(datetime.UTC)
    measuring = Measuring(config, ranks, seconds, folder)
    bench = Bench(
        measuring.measure,
        measuring.drop,
        lambda: measuring.start_seconds,
        lambda: measuring.turn_seconds,
        lambda: time.perf_counter() - began,
        lambda line: print(line, flush=True),
    )
    try:
        with _cut_short(began + SLACK * seconds - time.perf_counter()):
            found = search(stages(config, ranks, held), bench, seconds)
    finally:
        measuring.close()
    if not measuring.turn_seconds:
        raise UserError(f"{seconds:g} s were over before the defaults had run a turn: give more --seconds")
    return found, started


def stages(config: RunConfig, ranks: int, held: set[str]) -> list[Stage]:
    """What is tried here: engines that are installed, then buckets, then what is left; fields in `held` stay."""
    from pipelines.tune_search import Stage

    def ways(best: Settings, *changes: dict[str, Any]) -> list[Settings]:
        """`best` with each change, without what is held or the default."""
        every = []
        for change in changes:
            if held.isdisjoint(change):
                merged = {**best, **change}
                every.append({name: value for name, value in merged.items() if value != _value(config, name)})
        return [way for number, way in enumerate(every) if way not in every[:number]]

    def engines(best: Settings) -> list[Settings]:
        found: list[dict[str, Any]] = []
        default = _placement(config, ranks)
        reductions = ("auto", "engine") if "distributed.local_reduction" not in held else (None,)
        # The likelier first: time may not suffice for all.
        for way in reductions:
            for placement in _installed() if held.isdisjoint(PLACEMENT) else (default,):
                placed = dict(zip(PLACEMENT, placement, strict=True)) if placement != default else {}
                found.append(placed | ({"distributed.local_reduction": way} if way else {}))
        return ways(best, *found)

    def buckets(best: Settings) -> list[Settings]:
        names = ("distributed.first_bucket_mib", "distributed.bucket_mib")
        return ways(best, *(dict(zip(names, sizes, strict=True)) for sizes in BUCKETS_MIB))

    def rest(best: Settings) -> list[Settings]:
        now = override(config, as_assignments(best))
        changes: list[dict[str, Any]] = []
        if _placement(now, ranks)[0] == "horovod":
            changes += [{"distributed.horovod_cycle_time_milliseconds": cycle} for cycle in CYCLES_MILLISECONDS]
        if now.distributed.local_reduction == "engine" and now.distributed.wire_format == "fp32":
            # In shared memory nothing travels.
            changes += [{"distributed.wire_format": "fp16"}]
        most = _threads(config, ranks)
        changes += [{"train.num_threads_per_rank": count} for count in sorted({1, most // 2, most - 1} - {0, most, -1})]
        return ways(best, *changes)

    return [Stage("engine", engines, 0.6), Stage("buckets", buckets, 0.85), Stage("the rest", rest, 1.0)]


class Measuring:
    """Processes for each settings, started when first measured, stopped (SIGSTOP) while others are."""

    def __init__(self, config: RunConfig, ranks: int, seconds: float, folder: Path) -> None:
        self._config, self._ranks, self._folder = config, ranks, folder
        self._seconds = max(0.05, seconds * TURN_SHARE)
        """Of the steps of a turn."""
        self._steps = self._warm_up_steps = 0
        self._most = 0
        """Groups that memory has room for."""
        self._alive: dict[str, tuple[Variant, RankGroup]] = {}
        """By label, the one that was measured last at the end."""
        self._num_started = 0
        self._starts: deque[float] = deque(maxlen=5)
        self._turns: deque[float] = deque(maxlen=9)

    @property
    def start_seconds(self) -> float:
        """As the last ones took."""
        return statistics.median(self._starts) if self._starts else 0.0

    @property
    def turn_seconds(self) -> float:
        """As the last ones took, with all that is around the steps."""
        return statistics.median(self._turns) if self._turns else 0.0

    def measure(self, settings: Settings) -> float:
        from pipelines.bench.allreduce_rounds import take_turn
        from pipelines.tune_search import label

        name = label(settings)
        began = time.perf_counter()
        if name not in self._alive:
            self._start(name, settings)
            self._starts.append(time.perf_counter() - began)
            began = time.perf_counter()
        variant, group = self._alive[name] = self._alive.pop(name)
        group.resume()
        turn = take_turn(variant, group, self._steps, self._warm_up_steps)
        group.pause()
        self._turns.append(time.perf_counter() - began)
        return turn.step_seconds

    def drop(self, settings: Settings) -> None:
        from pipelines.tune_search import label

        name = label(settings)
        if name in self._alive:
            self._alive[name][1].kill()
            del self._alive[name]

    def close(self) -> None:
        for _, group in self._alive.values():
            group.kill()
        self._alive.clear()

    def _start(self, name: str, settings: Settings) -> None:
        from pipelines.bench.allreduce_rounds import start_group
        from pipelines.bench.allreduce_variants import Candidate, Variant

        while self._most and len(self._alive) >= self._most:
            oldest = next(iter(self._alive))
            self._alive.pop(oldest)[1].kill()
        self._num_started += 1
        config = override(self._config, as_assignments(settings))
        engine, transport = _placement(config, self._ranks)
        channels_last, reduction = config.train.channels_last, config.distributed.local_reduction
        variant = Variant(
            f"settings{self._num_started}", "ours", engine, transport, reduction, channels_last=channels_last
        )
        group = start_group(_plan(config, self._ranks), variant, Candidate(), self._folder)
        self._alive[name] = (variant, group)
        prepared = group.ask({"do": "prepare"})
        if not self._steps:
            self._set_lengths(prepared)

    def _set_lengths(self, prepared: list[dict[str, Any]]) -> None:
        """The first that runs, the defaults, says how long a turn is and how much memory a group takes."""
        import psutil

        from pipelines.bench.allreduce_rounds import MEMORY_SHARE

        step_seconds = statistics.mean(answer["step_seconds"] for answer in prepared)
        self._steps = max(1, round(self._seconds / step_seconds))
        self._warm_up_steps = max(1, self._steps // 4)
        needed = self._ranks * max(answer["private_bytes"] for answer in prepared) * 1.3
        self._most = max(2, int(MEMORY_SHARE * psutil.virtual_memory().available / needed))


def _plan(config: RunConfig, ranks: int) -> Plan:
    from pipelines.bench.allreduce import Plan

    config = dataclasses.replace(
        config,
        augment=dataclasses.replace(config.augment, enabled=False),
        # A stopped process must not find its time out when it goes on.
        distributed=dataclasses.replace(config.distributed, timeout_seconds=1800.0, stall_warning_seconds=0.0),
    )
    return Plan(
        model=config.task,
        ranks=ranks,
        rounds=0,
        steps=None,
        seconds=0.0,
        batch_size=config.train.batch_size_per_rank,
        threads=_threads(config, ranks),
        precision=config.train.precision,
        image_size=(config.model.input_height, config.model.input_width),
        variants=(),
        processes="kept",
        seed=config.train.seed,
        config=config,
    )


def _check(options: argparse.Namespace, config: RunConfig) -> None:
    place = rank_environment(os.environ)
    if place.size > 1:
        raise UserError(f"tune starts the ranks itself, on this host: do not start it by {place.launcher}")
    if options.ranks < 2:
        raise UserError(f"--ranks {options.ranks}: must be at least 2; one rank reduces nothing")
    if not options.seconds > 0:
        raise UserError(f"--seconds {options.seconds:g}: must be above 0")
    check_folder_of("--out", options.out)
    if _placement(config, options.ranks)[1] == "nccl":
        raise UserError("tune measures on processors only, and training here takes GPUs: set CUDA_VISIBLE_DEVICES=''")


def _placement(config: RunConfig, ranks: int) -> tuple[str, str]:
    from perception.distributed.choice import choose_launch

    return choose_launch(config.distributed, ranks)


def _installed() -> list[tuple[str, str]]:
    """Engines and transports that can run here."""
    from pipelines.bench.allreduce_variants import chosen_variants

    variants, _ = chosen_variants(2, ["ours"])
    return list(dict.fromkeys((v.engine, v.transport) for v in variants if v.method == "ours"))


def _threads(config: RunConfig, ranks: int) -> int:
    return config.train.num_threads_per_rank or max(1, available_cores() // ranks)


def _value(config: RunConfig, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


@contextmanager
def _cut_short(seconds: float) -> Iterator[None]:
    """Raise TimeIsOver inside after `seconds`."""
    from pipelines.tune_search import TimeIsOver

    def over(*_: object) -> None:
        raise TimeIsOver

    earlier = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _document(
    key: Key, config: RunConfig, found: Found, started: datetime.datetime, seconds: float, rule: str
) -> dict[str, Any]:
    default, challenger = found.duel
    return {
        "key": dataclasses.asdict(key),
        "settings": dict(found.settings),
        "reason": found.reason,
        "rule": rule,
        "gain": None if found.gain is None else dataclasses.asdict(found.gain),
        "date": f"{started:%Y-%m-%dT%H:%M:%SZ}",
        "seconds": round(seconds, 1),
        "batch_size_per_rank": config.train.batch_size_per_rank,
        "precision": config.train.precision,
        "final_rounds": {"default_step_seconds": default, "challenger_step_seconds": challenger},
        "tried": [dataclasses.asdict(trial) for trial in found.trials],
        "versions": package_versions(),
        "command": shlex.join(["python", "-m", "pipelines", *sys.argv[1:]]),
    }
