"""Small real training runs for tests: generated scenes, a narrow network, a few seconds each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "data.num_train_scenes": 100,
    "data.num_validation_scenes": 12,
    "data.scene_height": 128,
    "data.scene_width": 320,
    "model.backbone_widths": [8, 16, 24, 32],
    "model.backbone_blocks": [1, 1, 1, 1],
    "model.input_height": 64,
    "model.input_width": 160,
    "train.batch_size_per_rank": 2,
    "train.log_every_steps": 1,
    "train.num_threads_per_rank": 1,
}


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}


def command(*words: str, settings: dict[str, Any] | None = None) -> list[str]:
    argv = [sys.executable, "-m", "pipelines", *words]
    for name, value in (settings or {}).items():
        argv += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return argv


def run(argv: list[str], cache: Path, timeout_seconds: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=ROOT, env=environment(cache), capture_output=True, text=True, timeout=timeout_seconds, check=False
    )


def train(
    out: Path, cache: Path, ranks: int = 1, engine: str | None = None, resume: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Train lane-small in its tiny form; double underscores in a setting's name stand for dots."""
    chosen = {} if resume else {**TINY, **{name.replace("__", "."): value for name, value in settings.items()}}
    words = ["train", *([] if resume else ["lane-small"]), "--out", str(out), "--ranks", str(ranks)]
    words += ["--engine", engine] if engine else []
    words += ["--resume"] if resume else []
    return run(command(*words, settings=chosen), cache)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Records of training steps, by step."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def start_and_signal(
    argv: list[str], cache: Path, out: Path, step: int, number: signal.Signals, whole_session: bool
) -> tuple[int, str]:
    """Start, wait until `step` was logged, send a signal (to the launcher, or to all processes), return its end."""
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    log = out / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        last = log.read_text().splitlines()[-1:] if log.exists() else []
        with contextlib.suppress(json.JSONDecodeError):
            if last and json.loads(last[0])["step"] >= step:
                break
        time.sleep(0.01)
    if process.poll() is None:
        if whole_session:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output
