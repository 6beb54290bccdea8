"""`python -m sweeps report`: a report written again from the records, its exit code, and users' mistakes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps import report_command
from sweeps.planning.plan import study_name
from sweeps.report.terminal import COLUMNS
from sweeps.search.search import open_search
from sweeps.search.storage import Storage
from tests.sweeps.made_up_nights import Planted, empty_night, history, job_of, keep
from tests.sweeps.night_cases import make_plan


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report_command.add_arguments(parser)
    return report_command.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nights")
    keep(folder, history(5, 90, planted=Planted(slower_data=0.2), num_nodes=4))
    return folder


def test_the_newest_night_is_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--root", str(root)) == 1
    shown = capsys.readouterr().out
    assert (root / "2026-11-03" / "report.html").is_file() and (root / "2026-11-03" / "report.json").is_file()
    assert "lane-small on 8 ranks: scaling factor" in shown
    assert f"wrote {root / '2026-11-03' / 'report.html'}" in shown
    assert all(len(line) <= COLUMNS for line in shown.splitlines() if not line.startswith("wrote "))


def test_an_earlier_night_is_reported_by_name(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--root", str(root), "--night", "2026-11-02") == 0
    assert "exit code 0: no new regression, and jobs succeeded" in capsys.readouterr().out


def test_what_mattered_is_told_by_the_nights_own_search_while_it_is_there(tmp_path: Path) -> None:
    plan = make_plan({"sampler": "random"})
    night = dataclasses.replace(empty_night(), plan_text=plan.text)
    journal = tmp_path / night.night / "search" / "journal.log"
    search = open_search(
        plan.models[0].space, ["maximize"], Storage(journal=journal), study_name(plan.models[0]), "random"
    )
    jobs = []
    for number in range(12):
        suggestion = search.ask()
        assert suggestion is not None
        parameters = dict(suggestion.parameters)
        search.tell(suggestion.number, [float(str(parameters["optim.lr"]))], "complete")
        jobs.append(job_of(night, f"j{number}", trial=number, parameters=parameters, objective=parameters["optim.lr"]))
    keep(tmp_path, [(night, jobs)])

    def source() -> str:
        assert run("--root", str(tmp_path)) == 0
        figures = json.loads((tmp_path / night.night / "report.json").read_text())
        return str(figures["searches"][0]["importance_source"])

    assert source() == "by the search's own study (PED-ANOVA)"
    journal.unlink()
    assert source().startswith("from the records of 12 trials")


def test_a_night_where_nothing_succeeded_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night = empty_night()
    keep(tmp_path, [(night, [job_of(night, "a", status="failed", failure="code", objective=None)])])
    assert run("--root", str(tmp_path)) == 1
    assert "exit code 1: no job succeeded" in capsys.readouterr().out


def test_a_damaged_record_of_another_night_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, history(3, 40, num_nodes=4))
    (tmp_path / "records" / "night=2026-10-31" / "jobs.parquet").write_bytes(b"PAR1 no more")
    run("--root", str(tmp_path))
    capsys.readouterr()
    page = (tmp_path / "2026-11-01" / "report.html").read_text()
    assert "night=2026-10-31: left out" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--root", "none"], "--root none: there is no such folder"),
        (["--root", "."], "holds no records of a night"),
        (["--root", "ROOT", "--night", "2026-11-30"], r"--night 2026-11-30: not among the records .* did you mean"),
        (["--root", "ROOT", "--nights", "0"], "--nights 0: the night itself is one; give 1 or more"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        run(*[str(root) if word == "ROOT" else word for word in arguments])
    assert "\n" not in str(raised.value)


def test_a_disk_without_room_is_said(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(small_disk, history(1, 40, num_nodes=4))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"0" * 512)
    with pytest.raises(UserError, match=r"cannot be (written|made) \(No space left on device\)"):
        run("--root", str(small_disk))
    assert not (small_disk / "2026-10-30" / "report.html").exists()


def test_arguments_are_known_without_heavy_imports() -> None:
    heavy = "torch optuna docker duckdb matplotlib jinja2 scipy numpy"
    code = (
        "import argparse, sys; from sweeps import report_command; "
        "report_command.add_arguments(argparse.ArgumentParser()); "
        f"print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
