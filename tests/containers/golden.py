"""Recorded text of what an engine, a builder or Slurm is told."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "containers"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = "UPDATE_GOLDEN=1 python -m pytest tests/containers -k golden"
    assert text == path.read_text(), f"if the change is meant: {command}"
