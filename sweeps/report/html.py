"""The page: the report's figures and pictures through one template, everything from outside escaped."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from sweeps.ledger.level_shifts import MIN_NIGHTS
from sweeps.report import figures, search_figures, wording
from sweeps.report.accounts import CAUSE_NAMES
from sweeps.report.build import Report
from sweeps.report.headline import CAUSE_WORDS, metric_name, quantity_name
from sweeps.report.leaderboard import better_of
from sweeps.report.noise import LEVEL

_FOLDER = Path(__file__).parent
SCRIPT = """
document.querySelectorAll('button.copy').forEach(function (button) {
  button.hidden = false;
  button.addEventListener('click', function () {
    var code = button.parentNode.querySelector('code');
    getSelection().selectAllChildren(code);
    var done = function () { button.textContent = 'copied'; };
    if (navigator.clipboard) { navigator.clipboard.writeText(code.textContent).then(done); }
    else if (document.execCommand('copy')) { done(); }
  });
});
"""
"""All that the page runs: its text alone is allowed by the page's policy, which forbids everything else."""


def page_of(report: Report) -> str:
    """A whole HTML file that needs nothing from outside itself."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        # The template's own name ends in .html, so that everything it prints is escaped.
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    for name in (
        "number", "signed", "score", "signed_score", "percent", "signed_percent", "hours", "duration", "clock",
        "short", "count", "joined",
    ):  # fmt: skip
        environment.filters[name] = getattr(wording, name)
    environment.filters["metric"] = metric_name
    environment.filters["quantity"] = quantity_name
    environment.filters["setting"] = _setting
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    boards = {board.model: board for board in report.boards}
    return environment.get_template("template.html").render(
        report=report,
        style=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")),
        script=Markup(SCRIPT),
        script_digest=digest,
        level=LEVEL,
        better_of=better_of,
        min_nights=MIN_NIGHTS,
        cause_words=CAUSE_WORDS,
        cause_names=CAUSE_NAMES,
        night_figures=_marked(figures.night_figures(report)),
        board_figures={model: _marked(figures.board_figures(board)) for model, board in boards.items()},
        board_sparkline={model: Markup(figures.board_sparkline(board)) for model, board in boards.items()},
        scaling_figures=[_marked(figures.scaling_figures(series)) for series in report.scaling.series],
        regression_figures=[_marked(figures.regression_figures(group)) for group in report.regressions],
        failure_sparklines=[
            Markup(figures.counts_sparkline("jobs that failed so, night by night", group.num_by_night))
            for group in report.failures.groups
        ],
        search_figures={s.model: _marked(search_figures.search_figures(s, boards[s.model])) for s in report.searches},
    )


def _marked(found: list[figures.Figure]) -> list[dict[str, Any]]:
    """The SVG is markup: `charts` has escaped the texts in it."""
    from markupsafe import Markup

    return [{"title": figure.title, "svg": Markup(figure.svg), "note": figure.note} for figure in found]


def _shown(value: Any) -> Any:
    """What an expression of the template prints: characters that hide or turn text around are spelt out."""
    from markupsafe import Markup

    return wording.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _setting(value: Any) -> str:
    """A parameter's value as it would be given by --set."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
