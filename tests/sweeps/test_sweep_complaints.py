"""What users of other sweeps complain of, and no other test is about."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sweeps.job import Job
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience
from sweeps.planning.plan import SlurmSettings
from sweeps.planning.space import Parameter, SearchSpace
from sweeps.search import search as search_module
from sweeps.search.search import open_search
from sweeps.search.storage import Storage

DAY_SECONDS = 86_400
# What sbatch was given it keeps; squeue has forgotten the job; sacct looks no further back than it is told to, which is
# today's midnight by default.
PROGRAMS = {
    "sbatch": 'for word; do script="$word"; done\nsed -n "s/^#SBATCH --job-name=//p" "$script" > "$STATE/name"\necho 7',
    "squeue": "echo '{\"jobs\": []}'",
    "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1",
    "sacct": 'since=$(date -d "$(date +%F)" +%s)\n'
    'for word; do case "$word" in --starttime=*) since=$(date -d "${word#*=}" +%s);; esac; done\n'
    'read -r submitted < "$STATE/submitted"; read -r name < "$STATE/name"\n'
    '[ "$submitted" -lt "$since" ] ||\n'
    'echo "7|$name|COMPLETED|0:0|dgx01|$submitted|$submitted|$((submitted + 5))|None|"',
}


@pytest.mark.parametrize("days_before", [0, 1, 3])
def test_a_job_that_ended_before_midnight_is_known_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days_before: int
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\nSTATE={tmp_path}\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    launcher = SlurmLauncher(SlurmSettings(), tmp_path / "slurm", SlurmPatience(poll=0, accounting=0))
    now = time.time()
    submitted = now - days_before * DAY_SECONDS
    (tmp_path / "submitted").write_text(f"{int(submitted)}\n")
    monkeypatch.setattr(time, "time", lambda: submitted)
    launcher.submit(Job("a", ("true",), tmp_path / "run"))
    monkeypatch.setattr(time, "time", lambda: now)
    status = launcher.poll()["a"]
    assert (status.state, status.exit_code) == ("ended", 0)


def test_importance_is_of_the_newest_trials_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes with tens of thousands of trials, and a report would wait for it every morning."""
    monkeypatch.setattr(search_module, "MOST_TRIALS_FOR_IMPORTANCE", 15)
    space = SearchSpace((Parameter("x", "float", 0.0, 1.0), Parameter("y", "float", 0.0, 1.0)))
    search = open_search(space, ["maximize"], Storage(journal=tmp_path / "journal.log"), "s", "random", seed=1)
    for number in range(30):
        suggestion = search.ask()
        assert suggestion is not None
        x, y = suggestion.parameters["x"], suggestion.parameters["y"]
        assert isinstance(x, float) and isinstance(y, float)
        # Of the old trials y decides, of the newest x.
        search.tell(suggestion.number, [y if number < 15 else x], "complete")
    found = search.importance()
    assert found.num_trials == 15 and found.shares["x"] > 0.8


def test_trials_that_run_keep_parallel_suggestions_from_being_the_same(tmp_path: Path) -> None:
    """Over few values, near an optimum that is known: without counting what runs as bad, a third would be repeated."""
    space = SearchSpace((Parameter("x", "int", 0.0, 39.0), Parameter("y", "int", 0.0, 3.0)))
    search = open_search(space, ["maximize"], Storage(journal=tmp_path / "journal.log"), "s", "tpe", seed=0)
    for _ in range(20):
        suggestion = search.ask()
        assert suggestion is not None
        x, y = suggestion.parameters["x"], suggestion.parameters["y"]
        assert isinstance(x, int) and isinstance(y, int)
        search.tell(suggestion.number, [-abs(x - 20) - abs(y - 1)], "complete")
    outstanding = [search.ask() for _ in range(16)]
    assert len({tuple(one.parameters.values()) for one in outstanding if one is not None}) >= 14
