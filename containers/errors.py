"""The one exception of this folder that means "the user can mend this": a single line on stderr, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ContainerError(Exception):
    """The message is one line: what is wrong, where, and what to do."""

    exit_code = 2


class EngineError(ContainerError):
    """The container engine is away, or refused what was asked of it."""

    exit_code = 125


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint such as `; did you mean "lane"?`, or the allowed names.

    >>> nearest("lan", ["lane", "sign"])
    '; did you mean "lane"?'
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; allowed: {', '.join(names)}" if names else ""
