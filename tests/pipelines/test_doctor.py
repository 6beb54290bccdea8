"""What `doctor` finds, in a whole environment and in a bare Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import doctor

REPOSITORY = Path(__file__).parents[2]


def run_doctor(python: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pipelines", "doctor", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_whole_environment_can_train() -> None:
    answer = run_doctor(sys.executable, "--json")
    report = json.loads(answer.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert answer.returncode == 0 and report["ok"], answer.stdout
    assert found["torch"]["state"] == "ok" and "gloo" in found["engine torch"]["value"]
    assert {"python", "processor", "cores", "memory", "/dev/shm", "open files", "network", "docker"} <= set(found)


def test_a_bare_python_is_told_what_to_do(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    answer = run_doctor(tmp_path / "bare" / "bin" / "python")
    assert answer.returncode == 1 and answer.stderr == ""
    lines = answer.stdout.splitlines()
    torch = next(index for index, line in enumerate(lines) if line.startswith("X  torch"))
    assert "No module named 'torch'" in lines[torch] and lines[torch + 1].strip() == "→ `make setup`"
    assert lines[-1].startswith("training cannot run")


def test_help_imports_nothing_heavy() -> None:
    program = "import sys, pipelines.doctor; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'pynvml')))"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0


def test_table_is_aligned_and_puts_the_cure_below() -> None:
    findings = [doctor.Finding("a", "fine"), doctor.Finding("longer", "bad", "broken", "mend it")]
    assert doctor.table(findings) == [
        "ok a       fine",
        "X  longer  bad",
        "           → mend it",
        "",
        "training cannot run: 1 broken (X), 0 to mend (!)",
    ]


@pytest.mark.slow
def test_every_fault_names_a_cure() -> None:
    for finding in doctor.examine():
        assert finding.state in ("ok", "note") or finding.cure, finding
