"""`nightly PLAN`: one night from its plan to the morning's report; run again, it goes on or writes the report anew."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception.errors import UserError, nearest

if TYPE_CHECKING:
    from sweeps.launchers.launcher import Launcher
    from sweeps.ledger.history import History
    from sweeps.night.clock import StopSignals, SystemClock
    from sweeps.night.night import Found, NightFolder
    from sweeps.planning.plan import Plan

EXIT_STOPPED = 75
"""Stopped by a signal: to be taken up with --resume."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="e.g. sweeps/plans/nightly.toml")
    parser.add_argument("--root", type=Path, help="folder of all nights; by default the plan's")
    parser.add_argument("--night", default="", help="name of the night; by default today's UTC date")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the unfinished night of this plan, or the one named"
    )
    parser.add_argument("--replay", default="", metavar="NIGHT", help="first try what that night tried, in its order")


def run(options: argparse.Namespace) -> int:
    """0; 1 after regressions or where no job succeeded; 2 a user's mistake; 75 stopped, to be resumed."""
    from sweeps.planning.plan import load_plan

    plan = load_plan(options.plan)
    root = (options.root or Path(plan.root)).absolute()
    if options.resume and options.replay:
        raise UserError("--replay: begins a night, --resume goes on with one: give one of them")
    return run_night(plan, root, options.night, options.resume, options.replay)


def run_night(plan: Plan, root: Path, name: str = "", resume: bool = False, replay: str = "") -> int:
    """The whole of it, under the lock of this plan."""
    from sweeps.ledger.history import History
    from sweeps.night.night import NightLock, find_nights

    lock = NightLock(root, plan.name)
    line = lock.take()
    if line:
        say(line)
    try:
        history = History(root)
        every = find_nights(root)
        mine = [found for found in every if found.plan_name == plan.name]
        chosen = _chosen(every, mine, name, resume)
        if replay and chosen is not None:
            raise UserError(f"--replay: night {name} is there already; give another --night")
        suggestions = _suggestions(every, plan, replay) if replay else {}
        if chosen is not None and chosen.is_closed:
            say(f"night {chosen.folder.name} has ended already: its records and its report are written again")
            return finish(chosen.folder, history)
        for found in mine:
            if not found.is_closed and found is not chosen:
                _close_overrun(found, history)
        return _run(plan, root, chosen, name, history, replay, suggestions)
    finally:
        lock.release()


def say(text: str) -> None:
    """One line, with the time, at once."""
    _print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}")


def _print(text: str) -> None:
    # A terminal that was closed, or a log on a full disk, is no reason to leave jobs alone.
    with contextlib.suppress(OSError):
        print(text, flush=True)


def finish(folder: NightFolder, history: History) -> int:
    """Of a closed night: records, report, retention, notification. Done again it does the same again."""
    from sweeps.night.journal import read_journal
    from sweeps.night.notify import notify
    from sweeps.night.retention import apply_retention, protected_folders
    from sweeps.night.state import fold
    from sweeps.planning.plan import load_plan
    from sweeps.report.build import make_report, write_report_files
    from sweeps.report.terminal import summary_of
    from sweeps.search.importances import importances_of

    state = fold(read_journal(folder.journal))
    assert state.closed is not None
    night, jobs = state.closed, state.records
    plan = load_plan(folder.plan)
    history.append_night(night, jobs)
    report = make_report(night, jobs, history, importances_of(folder.search, plan, night.night, say))
    paths = write_report_files(folder.path, report)
    _print(summary_of(report))
    say(f"report: {paths.html}")
    root = folder.path.parent
    past = history.jobs(nights=60)
    removal = apply_retention(root, plan.retention, jobs, past, protected_folders(root, history.nights(), past))
    for line in (removal.line(), *removal.problems):
        say(line)
    title = f"{plan.name}, night {night.night}"
    for line in notify(plan.notify, title, paths.headline, report.exit_code != 0, os.environ, folder.told):
        say(line)
    return report.exit_code


def make_launcher(plan: Plan, folder: NightFolder) -> Launcher:
    # Controllers alone need them.
    secret_variables = (plan.search.url_variable, *plan.notify.url_variables)
    if plan.launcher == "slurm":
        from sweeps.launchers.slurm import SlurmLauncher

        return SlurmLauncher(plan.slurm, folder.launcher, secret_variables=secret_variables)
    from sweeps.launchers.local import LocalLauncher

    return LocalLauncher(plan.local.slots, folder.launcher, secret_variables=secret_variables)


def _chosen(every: list[Found], mine: list[Found], name: str, resume: bool) -> Found | None:
    """The night that is taken up; None: a new one is begun."""
    if name:
        found = next((one for one in every if one.folder.name == name), None)
        if found is None:
            if resume:
                names = ", ".join(one.folder.name for one in mine[-5:]) or "there is none"
                raise UserError(f"--resume --night {name}: no such night; the last ones of this plan: {names}")
            return None
        if found not in mine:
            raise UserError(f"--night {name}: is a night of plan {found.plan_name}; give another name")
        if not found.is_closed and not resume:
            raise UserError(f"--night {name}: is not finished; add --resume to go on with it")
        return found
    if not resume:
        return None
    unfinished = [one for one in mine if not one.is_closed]
    if unfinished:
        return unfinished[-1]
    if not mine:
        raise UserError("--resume: there is no night of this plan yet; leave it out")
    return mine[-1]


def _suggestions(every: list[Found], plan: Plan, night: str) -> dict[str, list[dict[str, Any]]]:
    """Of the night that is to be replayed: read before anything is begun."""
    from sweeps.night.replay import check_replay, suggestions_of

    folders = {found.folder.name: found.folder for found in every}
    if night not in folders:
        raise UserError(f"--replay {night}: no such night{nearest(night, folders)}")
    suggestions = suggestions_of(folders[night].journal)
    check_replay(plan, suggestions, night)
    return suggestions


def _run(
    plan: Plan,
    root: Path,
    chosen: Found | None,
    name: str,
    history: History,
    replay: str,
    suggestions: Mapping[str, list[dict[str, Any]]],
) -> int:
    from sweeps.launchers.launcher import LauncherError
    from sweeps.night.clock import StopSignals, SystemClock
    from sweeps.night.night import begin_night, new_folder
    from sweeps.night.replay import enqueue
    from sweeps.planning.host import check_here
    from sweeps.planning.plan import load_plan
    from sweeps.search.storage import choose_storage

    clock = SystemClock()
    stop = StopSignals(clock)
    stop.listen()
    if chosen is None:
        # Before anything is begun that would have to be closed.
        check_here(plan)
        choose_storage(plan.search.storage, plan.search.url_variable, Path(), os.environ)
        folder = new_folder(root, name, clock.now())
        try:
            launcher = make_launcher(plan, folder)
            if replay:
                enqueue(suggestions, plan, folder.search, replay, say)
            begin_night(folder, plan, launcher, history, clock.now(), say)
        except (UserError, LauncherError) as error:
            if not folder.journal.exists():
                shutil.rmtree(folder.path, ignore_errors=True)
            raise UserError(f"no night was begun: {error}") from None
        say(f"night {folder.name} of plan {plan.name}: {folder.path}")
    else:
        folder = chosen.folder
        if folder.plan.read_text(encoding="utf-8") != plan.text:
            say(f"{plan.path}: has changed since the night began; it goes on by its own copy, {folder.plan}")
        plan = load_plan(folder.plan)
        launcher = make_launcher(plan, folder)
        say(f"night {folder.name} of plan {plan.name} goes on: {folder.path}")
    if not _drive(plan, folder, launcher, history, clock, stop, overran=False):
        return EXIT_STOPPED
    return finish(folder, history)


def _close_overrun(found: Found, history: History) -> None:
    """What still runs of an earlier night is ended, and its report written, before the next one begins."""
    from sweeps.night.clock import StopSignals, SystemClock
    from sweeps.planning.plan import load_plan

    folder = found.folder
    say(f"night {folder.name} was never closed: its jobs are ended and its report is written")
    try:
        plan = load_plan(folder.plan)
        launcher = make_launcher(plan, folder)
        clock = SystemClock()
        if _drive(plan, folder, launcher, history, clock, StopSignals(clock), overran=True):
            finish(folder, history)
    except UserError as error:
        say(f"night {folder.name} cannot be closed: {error}")


def _drive(
    plan: Plan,
    folder: NightFolder,
    launcher: Launcher,
    history: History,
    clock: SystemClock,
    stop: StopSignals,
    overran: bool,
) -> bool:
    """Until the night is closed (True) or a signal stopped the controller (False)."""
    from sweeps.night.controller import Controller
    from sweeps.night.failures import classify
    from sweeps.night.night import close, close_overrun, take_up

    night_run = take_up(folder, plan, launcher, history, clock, say)
    try:
        if overran:
            close_overrun(night_run)
        rules = night_run.plan.failures
        controller = Controller(night_run, lambda folder, status: classify(folder, status, rules=rules), stop)
        if not controller.drive():
            return False
        close(night_run, controller.cpu_seconds)
        return True
    finally:
        for trials in night_run.trials.values():
            trials.search.close()
        night_run.journal.close()
        launcher.close()
