"""Elastic training on this host: ranks die, leave and come back, and the run goes on from its last commit.

A commit is a checkpoint. Every change of the number of ranks ends a generation of ranks and launches the next, which
takes up the last commit: weights and place in the sample order go back together, so that within the history of the
final weights no sample of an epoch is left out or seen twice.

- A rank that leaves no word has died: by a signal, the kernel, os._exit. The run goes on without it. An exception or a
  UserError would come again in the next generation, and ends the run; so do `FRUITLESS_LIMIT` deaths without a commit
  between them.
- A smaller generation goes back to all ranks at its first commit. A return that died before it had committed is tried
  again after twice as many commits as the last time.
- `ranks.json` in the run folder, e.g. {"ranks": 3}, asks for another number from the next commit on, for as long as it
  is there; touching it asks again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from perception.config import DistributedConfig
from perception.distributed import failure
from perception.distributed.choice import choose_launch
from perception.generations import end_generation, generations_json, read_generations
from perception.run_folder import RunFolder, write_json
from pipelines.launch import FORWARDED_SIGNALS, Ended, Patience, run_ranks, show, signals_as_bytes
from pipelines.rank_report import INNOCENT, End, is_consequence

FRUITLESS_LIMIT = 3
"""Generations in a row that may die without a new commit."""

# Survivors have nothing to save, and every second of waiting for them is lost.
_PATIENCE = Patience(grace=1.0, terminate=1.0)
_SECONDS_BETWEEN_LOOKS = 0.25


def train_elastically(
    argv: Callable[[int, bool], Sequence[str]],
    distributed: DistributedConfig,
    folder: Path,
    ranks: int,
    min_ranks: int,
) -> int:
    """Run generations of ranks until the run ends; returns its exit code.

    `argv(ranks, first)`: the command of a rank, which takes up the last commit unless `first`. Exit codes are those of
    `launch_ranks`; 75 also where fewer than `min_ranks` are left or a stop was asked for: the run can be resumed.
    """
    wanted = WantedRanks(folder / "ranks.json", min_ranks, ranks)
    state = _State(RunFolder(folder), ranks, min_ranks, wanted, list(range(wanted.ranks)), last_commit(folder))
    first = True
    with signals_as_bytes() as signals:
        while True:
            size, earlier, commit_before = len(state.slots), len(read_generations(folder)), last_commit(folder)
            failures = state.folder.failures / f"generation-{earlier + 1}"
            watch = _Watch(folder, size, wanted, state.commits_to_wait, earlier, commit_before)
            environment = {**os.environ, **visible_devices(os.environ, state.slots)}
            engine, transport = _launch_by(distributed, size)
            ended = run_ranks(
                argv(size, first),
                size,
                engine,
                transport,
                environment,
                failures,
                _PATIENCE,
                signals,
                watch.wants_change,
            )
            first = False
            code = ended.outcome.exit_code
            if asked := [*ended.stop_signals, *_waiting_signals(signals)]:
                return _stopped(state.folder, ended, asked)
            if code == failure.EXIT_PREEMPTED and ended.change_asked:
                _resize(state)
                continue
            if code in INNOCENT:
                return code
            final = _after_failure(state, ended, failures, earlier, last_commit(folder) > commit_before)
            if final is not None:
                return final


@dataclass
class _State:
    """What one generation leaves to the next."""

    folder: RunFolder
    most: int
    least: int
    wanted: WantedRanks
    slots: list[int]
    """Places on this host that have a rank; a GPU each, where there are any."""
    commit_at_launch: int
    fruitless: int = 0
    """Generations in a row that died without a commit."""
    commits_to_wait: int = 1
    """Before ranks come back."""
    returning: bool = False
    """This generation has more ranks than the one before."""


def _resize(state: _State) -> None:
    before = len(state.slots)
    state.slots = resized(state.slots, state.wanted.ranks, state.most)
    state.returning = len(state.slots) > before
    commit = last_commit(state.folder.path)
    _say(f"going on with {len(state.slots)} ranks instead of {before} from step {commit}")


def _after_failure(state: _State, ended: Ended, failures: Path, earlier: int, progress: bool) -> int | None:
    """The exit code of a run that has ended by it; None where the next generation is to start."""
    folder, outcome = state.folder, ended.outcome
    cause = outcome.lines[-1].partition("; logs: ")[0] if outcome.lines else ""
    told = not cause or _told_by_ranks(folder)
    if not told and len(read_generations(folder.path)) > earlier:
        end_generation(folder.path, cause, _unix_time_of_death(ended))
    lost = lost_ranks(ended, failures)
    if lost is None:
        show(outcome)
        return outcome.exit_code if told else _give_up(folder, outcome.exit_code, cause)
    commit, size = last_commit(folder.path), len(state.slots)
    state.fruitless = 0 if progress else state.fruitless + 1
    state.commits_to_wait = 2 * state.commits_to_wait if state.returning and not progress else 1
    state.returning = False
    if state.fruitless == FRUITLESS_LIMIT:
        _complain(f"given up: {FRUITLESS_LIMIT} generations in a row died without a new commit")
        show(outcome)
        return _give_up(folder, outcome.exit_code, f"{cause}; {FRUITLESS_LIMIT} times without a new commit")
    show(outcome)
    left = size - len(lost)
    if left < state.least:
        few = f"{left} of {size} ranks left, fewer than --elastic-min-ranks {state.least}"
        _complain(f"{few}; go on from step {commit} with --resume --out {folder.path} --ranks {state.most}")
        # Whoever starts a run again on 75 must not do so for ever.
        code = failure.EXIT_PREEMPTED if commit > state.commit_at_launch else outcome.exit_code
        return _give_up(folder, code, f"{cause}; {few}")
    # Of rank 0, which met the death of another; the run has not ended.
    folder.remove_result()
    state.slots = [slot for rank, slot in enumerate(state.slots) if rank not in lost][: state.wanted.ranks]
    _say(f"{cause}; going on with {len(state.slots)} of {state.wanted.ranks} ranks from step {commit}")
    return None


class WantedRanks:
    """How many ranks the run should have: `most`, or what a file asks for."""

    def __init__(self, path: Path, least: int, most: int) -> None:
        self._path, self._least, self._most = path, least, most
        self._believed = self._read = (0, "")
        self.ranks = most
        self.urgent = False
        """Asked for since the last change: no more commits are waited for than one."""
        for _ in range(2):
            self.look()
        self.urgent = False

    def look(self) -> None:
        """Read the file. It counts once it was read twice alike: it may be half-written."""
        try:
            current = (self._path.stat().st_mtime_ns, self._path.read_text(errors="replace"))
        except OSError:
            current = (0, "")
        last, self._read = self._read, current
        if current == self._believed or current != last:
            return
        self._believed = current
        asked = self._most if current == (0, "") else _asked_ranks(current[1])
        if asked is None or not self._least <= asked <= self._most:
            _say(f'{self._path}: ignored; must hold {{"ranks": N}} with N from {self._least} to {self._most}')
            return
        self.ranks, self.urgent = asked, True
        _say(f"{asked} ranks are asked for by {self._path}")


class _Watch:
    """Looks into the run folder while a generation runs, and says when to change the number of ranks."""

    def __init__(
        self, folder: Path, ranks: int, wanted: WantedRanks, commits_to_wait: int, earlier: int, commit: int
    ) -> None:
        self._folder, self._ranks, self._wanted, self._earlier = folder, ranks, wanted, earlier
        self._commits_left, self._commit = commits_to_wait, commit
        self._trains = False
        self._looked = time.monotonic()

    def wants_change(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = now
        self._wanted.look()
        if not self._trains:
            # Before its first step a rank does not listen yet.
            generations = read_generations(self._folder)
            begun = len(generations) > self._earlier
            self._trains = begun and generations[-1].first_step_unix_seconds is not None
        commit = last_commit(self._folder)
        if commit > self._commit:
            self._commit, self._commits_left = commit, self._commits_left - 1
        if self._ranks == self._wanted.ranks:
            self._wanted.urgent = False
            return False
        # The next commit is the last of this generation.
        return self._trains and (self._wanted.urgent or self._commits_left <= 1)


def last_commit(folder: Path) -> int:
    """Step of the newest checkpoint that is whole, by its record; 0 without any."""
    steps = [path.stem.removeprefix("step-") for path in RunFolder(folder).checkpoints.glob("step-*.json")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def lost_ranks(ended: Ended, failures: Path) -> list[int] | None:
    """Ranks that the next generation does without; None where there is to be none, as the run has ended.

    Empty where ranks lost each other and none of them died: the network failed, or one of them hung.
    """
    own = [rank for rank, end in enumerate(ended.ends) if end.failed and not end.by_launcher]
    if not own:
        return None
    cause = min(own, key=lambda rank: (is_consequence(rank, failures), ended.ends[rank].time, rank))
    if not _died(ended, cause, failures):
        return [] if is_consequence(cause, failures) else None
    # A library may abort a survivor when it loses its neighbour.
    others = [rank for rank in own if _died(ended, rank, failures) and ended.ends[rank].status != -signal.SIGABRT]
    return sorted({cause, *others})


def _died(ended: Ended, rank: int, failures: Path) -> bool:
    """It left no word: an exception leaves a traceback, an orderly end its mark."""
    end = ended.ends[rank]
    if end.kind is End.STATUS and end.status >= 0:
        if end.status == failure.EXIT_USER_ERROR or not failure.pid_file(failures, rank).exists():
            return False  # Before it was a rank: its command is wrong, and stays so.
        if failure.clean_exit_file(failures, rank).exists():
            return False
    return not failure.traceback_file(failures, rank).exists()


def resized(slots: Sequence[int], ranks: int, most: int) -> list[int]:
    """`ranks` of the `most` places on this host: those in use stay, the others come back."""
    idle = [slot for slot in range(most) if slot not in slots]
    return sorted([*slots, *idle][:ranks])


def visible_devices(environ: Mapping[str, str], slots: Sequence[int]) -> dict[str, str]:
    """Environment by which ranks take the GPUs of `slots`: a dead rank's GPU may be what killed it."""
    if list(slots) == list(range(len(slots))):
        return {}
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(slot) for slot in range(max(slots) + 1)] if listed is None else listed.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot] for slot in slots)} if max(slots) < len(devices) else {}


def _launch_by(distributed: DistributedConfig, ranks: int) -> tuple[str, str]:
    engine, transport = choose_launch(distributed, ranks)
    # A single rank speaks to nobody; it is started as one of torch's.
    return ("torch", "gloo") if engine == "solo" else (engine, transport)


def _asked_ranks(text: str) -> int | None:
    with suppress(ValueError, KeyError, TypeError):
        asked = json.loads(text)["ranks"]
        return asked if type(asked) is int else None
    return None


def _waiting_signals(signals: socket.socket) -> list[signal.Signals]:
    """Those that arrived when all ranks had ended."""
    with suppress(BlockingIOError):
        numbers = signals.recv(64, socket.MSG_DONTWAIT)
        return [signal.Signals(number) for number in numbers if number in FORWARDED_SIGNALS]
    return []


def _stopped(folder: RunFolder, ended: Ended, asked: Sequence[signal.Signals]) -> int:
    """End as preempted wherever there is something to resume from, even if ranks were only starting."""
    code, commit = ended.outcome.exit_code, last_commit(folder.path)
    told_by_ranks = code == failure.EXIT_PREEMPTED and ended.stop_signals
    if code == 0 or told_by_ranks or not commit or asked.count(signal.SIGINT) > 1:
        show(ended.outcome)
        return code if folder.result.exists() else _give_up(folder, code, f"stopped by {asked[0].name}")
    _complain(f"stopped by {asked[0].name}; go on from step {commit} with --resume --out {folder.path}")
    return _give_up(folder, failure.EXIT_PREEMPTED, f"{asked[0].name} received while the ranks changed")


def _told_by_ranks(folder: RunFolder) -> bool:
    """The ranks wrote a result of more than rank 0's last error, which may be only its neighbour's end."""
    try:
        return str(json.loads(folder.result.read_text())["status"]) != "failed"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _give_up(folder: RunFolder, code: int, cause: str) -> int:
    """Write the result that no rank could write."""
    if folder.config.exists():
        status = "preempted" if code == failure.EXIT_PREEMPTED else "failed"
        generations = generations_json(folder.path)
        write_json(folder.result, {"status": status, "cause": cause, "metrics": {}, "generations": generations})
    return code


def _unix_time_of_death(ended: Ended) -> float:
    """The launcher's clock is monotonic; that of the record is not."""
    now = time.monotonic()
    return time.time() - (
        now - min((end.time for end in ended.ends if end.failed and not end.by_launcher), default=now)
    )


def _say(line: str) -> None:
    print(f"elastic: {line}", flush=True)


def _complain(line: str) -> None:
    sys.stdout.flush()
    print(f"elastic: {line}", file=sys.stderr, flush=True)
