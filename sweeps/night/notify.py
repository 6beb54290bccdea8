"""Tells people in the morning, by Apprise, where the plan names environment variables that hold its URLs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from perception.errors import UserError
from perception.run_folder import write_atomic
from sweeps.planning.plan import Notify

Send = Callable[[str, str, str], bool]
"""URL, title, text → whether it was delivered."""


def notify(
    settings: Notify,
    title: str,
    text: str,
    has_problems: bool,
    environment: Mapping[str, str],
    told: Path,
    send: Send | None = None,
) -> list[str]:
    """A line on each that was told or could not be; never a URL, which holds secrets. Nothing here ends a night.

    `told`: a file of the variables by which people have been told, who are not told again when a report is made anew.
    """
    if not settings.url_variables or (settings.only_problems and not has_problems):
        return []
    lines = []
    known = told.read_text(encoding="utf-8").split() if told.exists() else []
    for variable in settings.url_variables:
        if variable in known:
            lines.append(f"notification by {variable}: was sent already")
            continue
        url = environment.get(variable, "")
        if not url:
            lines.append(f"notification: environment variable {variable} is not set: nobody was told by it")
            continue
        try:
            delivered = (send or _send_by_apprise)(url, title, text)
        except ImportError:
            lines.append("notification: apprise is not installed: pip install apprise")
            break
        except Exception as error:  # Whatever a service's plug-in raises; its text may hold the URL.
            lines.append(f"notification by {variable} failed ({type(error).__name__})")
            continue
        lines.append(f"notification by {variable}: " + ("sent" if delivered else "not delivered"))
        if delivered:
            known.append(variable)
            with contextlib.suppress(UserError):  # A full disk: then they may be told twice.
                write_atomic(told, "\n".join(known) + "\n")
    return lines


def _send_by_apprise(url: str, title: str, text: str) -> bool:
    import apprise

    service = apprise.Apprise()
    return bool(service.add(url)) and bool(service.notify(body=text, title=title))
