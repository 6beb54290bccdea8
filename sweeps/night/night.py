"""A night's folder: begun, found again, locked against a second controller, and brought to its end."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perception.errors import UserError
from perception.run_folder import git_revision, write_atomic
from sweeps.night.budget import Limits, deadline_utc
from sweeps.night.champions import best_known
from sweeps.night.clock import Clock
from sweeps.night.events import CancelAsked, ClosingBegun, ControllerStopped, NightClosed, NightOpened
from sweeps.night.journal import Journal, read_journal
from sweeps.night.planned_jobs import planner
from sweeps.night.run import NightRun
from sweeps.night.state import NightState, fold
from sweeps.night.trials import ModelTrials, NoSearch, Search
from sweeps.planning.plan import Plan
from sweeps.record import NightRecord
from sweeps.search.population_search import PopulationSearch

if TYPE_CHECKING:
    from sweeps.launchers.launcher import Launcher
    from sweeps.ledger.history import History

OVERRAN = "overran (closed by the next night)"
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class NightFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def plan(self) -> Path:
        """Copy of the plan as the night began with it; it goes on by this one."""
        return self.path / "plan.toml"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def search(self) -> Path:
        return self.path / "search" / "journal.log"

    @property
    def launcher(self) -> Path:
        return self.path / "launcher"

    @property
    def told(self) -> Path:
        """By which variables people have been notified."""
        return self.path / "notified.txt"

    @property
    def jobs(self) -> Path:
        """Run folders."""
        return self.path / "jobs"


class NightLock:
    """Held by the one controller of a plan in a root; a process that dies lets go of it."""

    def __init__(self, root: Path, plan_name: str) -> None:
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", plan_name)
        self.path = root / f".lock-{plain}"
        self._descriptor = -1

    def take(self) -> str:
        """Returns a line on an earlier holder that died with it, or nothing. Raises UserError where one holds it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be made ({error.strerror}); give another --root") from None
        before = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise UserError(
                f"{self.path}: a night of this plan is running ({before or 'its process is not known'}); "
                "see it by `python -m sweeps status`, or wait for its end"
            ) from None
        self._descriptor = descriptor
        began = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {began}\n".encode(), 0)
        return f"an earlier controller ended without letting go of its lock ({before})" if before else ""

    def is_held(self) -> bool:
        """Whether a controller of this plan lives; takes nothing."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Found:
    """A night that is there already."""

    folder: NightFolder
    plan_name: str
    is_closed: bool
    started_utc: float


def find_nights(root: Path) -> list[Found]:
    """All nights of a root, oldest first; folders without a journal that was begun are none."""
    found = []
    for journal in sorted(root.glob("*/journal.jsonl")):
        first, last = _first_and_last(journal)
        night = first.get("night")
        if first.get("event") == NightOpened.__name__ and isinstance(night, dict):
            closed = last.get("event") == NightClosed.__name__
            folder = NightFolder(journal.parent.absolute())
            found.append(Found(folder, str(night["plan"]), closed, float(night["started_utc"])))
    return sorted(found, key=lambda one: (one.started_utc, one.folder.name))


def new_folder(root: Path, name: str, now_utc: float) -> NightFolder:
    """Make the folder of a new night: `name`, or today's UTC date, with .2, .3 where there was one today."""
    date = f"{datetime.datetime.fromtimestamp(now_utc, datetime.UTC):%Y-%m-%d}"
    names = [name] if name else [date, *(f"{date}.{number}" for number in range(2, 1000))]
    for one in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", one) or one == "records":
            raise UserError(f"--night {one}: use letters, digits, dots and dashes, e.g. {date}")
        try:
            (root / one).mkdir(parents=True)
        except FileExistsError:
            # Begun and never opened: a controller was killed between the two.
            if name and not (root / one / "journal.jsonl").exists():
                return NightFolder((root / one).absolute())
            continue
        except OSError as error:
            raise UserError(f"{root / one}: cannot be made ({error.strerror}); give another --root") from None
        return NightFolder((root / one).absolute())
    raise UserError(f"{root / names[-1]}: is there already; give another --night")


def begin_night(
    folder: NightFolder, plan: Plan, launcher: Launcher, history: History, now_utc: float, say: Callable[[str], None]
) -> None:
    """Write the plan's copy and the journal's first event."""
    write_atomic(folder.plan, plan.text)
    champions = {}
    past = history.jobs(nights=60)
    for line in history.left_out:
        say(f"history: {line}")
    for model in plan.models:
        if model.population.size:
            continue
        champion = best_known(past, model, plan.name, planner(model, folder.jobs).is_comparable)
        if champion is None:
            continue
        fitted, notes = model.space.fitted(champion.parameters)
        if model.space.problem(fitted):
            say(f"{model.model}: the champion of {champion.night} is of another space ({notes[0]}): left out")
            continue
        champions[model.model] = dict(fitted)
        say(f"{model.model}: champion so far: {champion.value:.4g} ({champion.job} of {champion.night})")
    budget = plan.budget
    night = NightRecord(
        night=folder.name,
        plan=plan.name,
        plan_text=plan.text,
        launcher=launcher.name,
        num_slots=launcher.num_slots(),
        hardware=launcher.hardware(),
        image=plan.image,
        git_revision=git_revision() or "",
        started_utc=now_utc,
        budget_rank_seconds=budget.rank_hours * 3600 or None,
        deadline_utc=deadline_utc(now_utc, budget.deadline, budget.max_minutes or None, plan.path),
        champions=champions,
    )
    journal = Journal(folder.journal)
    journal.append([NightOpened(now_utc, night)])
    journal.close()


def take_up(
    folder: NightFolder, plan: Plan, launcher: Launcher, history: History, clock: Clock, say: Callable[[str], None]
) -> NightRun:
    """Fold the journal, open it for writing, and open the searches; also of a night that was just begun."""
    journal = Journal(folder.journal)
    if journal.cut_bytes:
        say(f"{folder.journal}: {journal.cut_bytes} bytes of a half-written last line are cut off")
    state = fold(read_journal(folder.journal))
    if state.night is None:
        raise UserError(f"{folder.journal}: does not begin with a night; begin another one")
    return NightRun(
        night=state.night,
        plan=plan,
        folder=folder.path,
        state=state,
        journal=journal,
        launcher=launcher,
        trials=open_trials(folder, plan, state.night, state, history, say),
        planners={model.model: planner(model, folder.jobs) for model in plan.models},
        limits=Limits(plan.budget.max_jobs or None, state.night.budget_rank_seconds, state.night.deadline_utc),
        clock=clock,
        say=say,
    )


def open_trials(
    folder: NightFolder,
    plan: Plan,
    night: NightRecord,
    state: NightState,
    history: History,
    say: Callable[[str], None],
) -> dict[str, ModelTrials]:
    """A search for each model that has a space; the champion is its first trial."""
    from sweeps.night.opening import open_model_search

    opened = {}
    for model in plan.models:
        if model.population.size:
            # Its first member begins with the model's own configuration, as far as that lies in the space.
            own, _ = model.space.fitted({**planner(model, folder.jobs).defaults, **model.overrides})
            population = PopulationSearch(model, state, [] if model.space.problem(own) else [own])
            opened[model.model] = ModelTrials(model, population, population.can_ask)
            continue
        search: Search = NoSearch()
        if model.space.parameters:
            comparable = planner(model, folder.jobs).is_comparable
            search = open_model_search(folder.search, plan, model, night, history, comparable, say)
        opened[model.model] = ModelTrials(model, search)
    return opened


def close_overrun(run: NightRun) -> None:
    """Have the jobs of a night that no controller looks after any more end; `Controller.drive` sees to the rest."""
    if run.state.closing:
        return
    now = run.clock.now()
    asked = [CancelAsked(now, job.name, OVERRAN) for job in run.state.out.values() if not job.cancel_cause]
    run.record(ClosingBegun(now, OVERRAN), *asked)


def finished_record(run: NightRun, cpu_seconds: float) -> NightRecord:
    """What is kept of a night whose jobs have all ended."""
    state = run.state
    return dataclasses.replace(
        run.night,
        ended_utc=run.clock.now(),
        closing=state.closing,
        num_planned=len(state.jobs),
        num_controller_starts=state.num_controller_starts,
        controller_cpu_seconds=state.controller_cpu_seconds + cpu_seconds,
        notes=(*state.notes, *_node_notes(state)),
    )


def close(run: NightRun, cpu_seconds: float) -> NightRecord:
    record = finished_record(run, cpu_seconds)
    now = run.clock.now()
    run.record(ControllerStopped(now, run.state.closing, cpu_seconds), NightClosed(now, record))
    return record


def _node_notes(state: NightState) -> list[str]:
    return [f"node {node} is excluded: {cause}" for node, cause in state.excluded_nodes.items()]


def _first_and_last(path: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The first and the last whole line of a journal as JSON objects; {} where there is none."""
    try:
        with path.open("rb") as file:
            first = file.readline()
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}, {}
    # After the last newline comes nothing, or half a line.
    return _object(first), _object(lines[-2] if len(lines) > 1 else b"")


def _object(line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
