"""Start real ranks from a test: a script under the project's own launcher, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_LAUNCH = """
import json, os, sys
from pathlib import Path
from pipelines.launch import launch_ranks
argv, ranks, engine, transport, folder = json.loads(sys.argv[1])
sys.exit(launch_ranks(argv, ranks, engine, transport, os.environ, Path(folder)))
"""


@dataclass(frozen=True)
class Launched:
    exit_code: int
    output: str
    errors: str


def launch_script(
    script: Path,
    arguments: list[str],
    ranks: int,
    engine: str,
    transport: str,
    folder: Path,
    timeout_seconds: float = 240,
    environment: dict[str, str] | None = None,
) -> Launched:
    """Run `script` as ranks (one plain process for engine solo) and wait for the end."""
    argv = [sys.executable, str(script), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    if engine != "solo":
        argv = [sys.executable, "-c", _LAUNCH, json.dumps([argv, ranks, engine, transport, str(folder / "failures")])]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    return Launched(done.returncode, done.stdout, done.stderr)


def read_reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote to rank0.json, rank1.json, ..."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
