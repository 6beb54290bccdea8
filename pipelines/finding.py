"""One thing that `doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "broken"]
"""note: missing, and fine without; warning: training works, but slower or not everywhere; broken: it does not."""

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    name: str
    value: str
    state: State = "ok"
    cure: str = ""
    """What to do; empty where nothing has to be done."""
