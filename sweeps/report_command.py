"""`python -m sweeps report`: a night's report written again from the records, and its summary on the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from perception.errors import UserError, nearest

if TYPE_CHECKING:
    from sweeps.night.night import NightFolder
    from sweeps.record import NightRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path("nights"), help="folder of all nights (default: nights)")
    parser.add_argument("--night", default="", help="its name, e.g. 2026-11-30 (default: the newest with records)")
    parser.add_argument("--nights", type=int, default=30, help="of the history that the page draws on (default: 30)")
    parser.add_argument("--open", choices=("yes", "no"), default="no", help="show the page in a browser (default: no)")


def run(options: argparse.Namespace) -> int:
    """0; 1 after regressions or where no job succeeded; 2 is the user's mistake, raised."""
    from sweeps.ledger.history import History
    from sweeps.night.night import NightFolder
    from sweeps.report.build import make_report, write_report_files
    from sweeps.report.terminal import summary_of

    if options.nights < 1:
        raise UserError(f"--nights {options.nights}: the night itself is one; give 1 or more")
    if not options.root.is_dir():
        raise UserError(f"--root {options.root}: there is no such folder; give the one that nights are written to")
    history = History(options.root)
    nights = history.nights()
    if not nights:
        raise UserError(f"{options.root}: holds no records of a night; a night's end writes them")
    names = [night.night for night in nights]
    name = options.night or names[-1]
    if name not in names:
        raise UserError(f"--night {name}: not among the records of {options.root}{nearest(name, names)}")
    night = nights[names.index(name)]
    folder = options.root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); give another --root") from None
    importances = _importances(NightFolder(folder), night)
    report = make_report(night, history.jobs(nights=[name]), history, importances, options.nights)
    paths = write_report_files(folder, report)
    print(summary_of(report))
    print(f"\nwrote {paths.html} and {paths.json}")
    if options.open == "yes":
        import webbrowser

        if not webbrowser.open(paths.html.resolve().as_uri()):
            print(f"no browser can be started here; open {paths.html} in one")
    return report.exit_code


def _importances(folder: NightFolder, night: NightRecord) -> dict[str, dict[str, float]] | None:
    """As at the night's end, where its search is still there; else they are made from the records."""
    from sweeps.planning.plan_text import parse_plan
    from sweeps.search.importances import importances_of

    if not folder.search.exists():
        return None
    try:
        plan = parse_plan(night.plan_text, f"plan of night {night.night}")
    except UserError:
        return None
    return importances_of(folder.search, plan, night.night, print)
