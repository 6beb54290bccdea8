"""Tells people in the morning, by Apprise, where the plan names environment variables that hold its URLs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sweeps.planning.plan import Notify

Send = Callable[[str, str, str], bool]
"""URL, title, text → whether it was delivered."""


def notify(
    settings: Notify,
    title: str,
    text: str,
    has_problems: bool,
    environment: Mapping[str, str],
    send: Send | None = None,
) -> list[str]:
    """A line on each that was told or could not be; never a URL, which holds secrets. Nothing here ends a night."""
    if not settings.url_variables or (settings.only_problems and not has_problems):
        return []
    lines = []
    for variable in settings.url_variables:
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
    return lines


def _send_by_apprise(url: str, title: str, text: str) -> bool:
    import apprise

    service = apprise.Apprise()
    return bool(service.add(url)) and bool(service.notify(body=text, title=title))
