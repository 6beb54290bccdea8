"""The one exception that means "the user can mend this".

A command turns it into a single line on stderr and exit code 2; anything else
keeps its traceback and exit code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in input or set-up: the message names the file, the field and the cure."""


class MissingListError(UserError):
    """A data set has no official list for a split: not a broken list, simply none."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint such as `; did you mean "lane-small"?` or the allowed names.

    >>> nearest("lane-smal", ["lane", "lane-small"])
    '; did you mean "lane-small"?'
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; allowed: {', '.join(names)}"
