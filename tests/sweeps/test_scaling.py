"""`python -m sweeps scaling`: the table, the picture, the JSON and the exit code, from records on the disk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps import scaling
from sweeps.ledger import scaling_chart
from sweeps.ledger.history import History
from sweeps.ledger.ledger import latest_rows, scaling_table
from sweeps.ledger.scaling_text import curve
from sweeps.record import JobRecord
from tests.ranks import ROOT
from tests.sweeps.simulated_nights import Noise, Slowdown, night_name, scaling_job, simulated_nights
from tests.sweeps.test_history import DAY, night_record


def record(root: Path, nights: Sequence[Sequence[JobRecord]]) -> None:
    history = History(root)
    for number, jobs in enumerate(nights):
        history.append_night(night_record(jobs[0].night, number * DAY), jobs)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    return scaling.run(parser.parse_args(words))


def calm_nights(count: int, slowdowns: Sequence[Slowdown] = ()) -> list[list[JobRecord]]:
    return simulated_nights(count, 0, Noise(0.005, 0.005), slowdowns)


def test_the_table_of_the_newest_night() -> None:
    alone = {"data": 0.04, "exposed_allreduce": 0.0, "straggler": 0.0}
    shares = {"data": 0.04, "exposed_allreduce": 0.02, "straggler": 0.03}
    jobs = [
        scaling_job(night, ranks, speed * run / 100, lost_scaling=shares if ranks > 1 else alone)
        for night, speeds in (("2026-11-29", (80.0, 152.0, 560.0)), ("2026-11-30", (80.0, 148.0, 588.0)))
        for ranks, speed in zip((1, 2, 8), speeds, strict=True)
        for run in (99, 100, 102)
    ]
    jobs += [scaling_job("2026-11-28", 16, 500.0, num_nodes=2, model="sign", image="sha256:" + "a" * 64)]
    lines = scaling.table(scaling_table(jobs))
    assert [line for line in lines if line not in curve(latest_rows(scaling_table(jobs[:-1])))] == [
        "lane-small, night 2026-11-30 (8 x NVIDIA H100, no image)",
        "ranks  images/s     scaling factor  of ideal   data  all-reduce  stragglers  compute  change",
        "    1      80.0                  1                                                    +0.0 %",
        "    2     148.0  1.85 [1.80, 1.91]    92.5 %  0.3 %       2.0 %       3.0 %    2.2 %  -2.6 %",
        "    8     588.0  7.35 [7.13, 7.57]    91.9 %  0.3 %       2.0 %       3.0 %    2.8 %  +5.0 %",
        "  intervals by rank sums over runs, 90 % confidence",
        "  data to compute: what is missing to the ideal, by cause",
        "  change of images/s since night 2026-11-29",
        "",
        "sign, night 2026-11-28 (8 x NVIDIA H100, image sha256:aaaaaaaaaaaa)",
        "        ranks  images/s  scaling factor  of ideal  data  all-reduce  stragglers  compute  change",
        "16 on 2 nodes     500.0         unknown",
        "  scaling factor unknown: nothing ran on one rank; add 1 to scaling.ranks of the plan",
    ]


def test_the_curve_is_drawn_with_the_ideal_and_the_seven_of_eight_line() -> None:
    jobs = [scaling_job("n", ranks, speed) for ranks, speed in ((1, 10.0), (2, 19.0), (4, 36.0), (8, 70.0))]
    drawn = curve(scaling_table(jobs))
    golden = Path(__file__).parents[1] / "golden" / "sweeps" / "scaling_curve.txt"
    assert "\n".join(drawn) + "\n" == golden.read_text(), f"where the change is meant: write this output to {golden}"
    # 7 of 8 ranks lie on the lower line, and what is above the ideal at its edge.
    assert drawn[3].rstrip().endswith("o")
    assert curve(scaling_table([scaling_job("n", 1, 10.0), scaling_job("n", 8, 99.0)]))[1].rstrip().endswith("o")
    assert curve(scaling_table(jobs[:1])) == [] and curve(scaling_table(jobs[1:])) == []


def test_single_runs_have_no_interval() -> None:
    lines = scaling.table(scaling_table([scaling_job("n", ranks, ranks * 9.0) for ranks in (1, 2)]))
    assert "  no interval where each number of ranks ran once: give scaling.repeats of the plan 3 or more" in lines
    assert "    2      18.0            2.00   100.0 %  0.0 %       0.0 %       0.0 %    0.0 %" in lines


def test_quiet_nights_end_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, calm_nights(6))
    assert run("--root", str(tmp_path)) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"lane-small, night {night_name(5)} (8 x NVIDIA H100, no image)"
    assert output[-1] == "no regression"


def test_a_new_regression_ends_with_1_and_a_known_one_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nights = calm_nights(8, [Slowdown("straggler", 0.3, 6)])
    record(tmp_path, nights[:7])
    assert run("--root", str(tmp_path)) == 1
    output = capsys.readouterr().out
    assert (
        f"new regression: lane-small since night {night_name(6)}; cause: a slow rank (stragglers); revision" in output
    )
    assert "8 ranks: scaling factor" in output
    History(tmp_path).append_night(night_record(nights[7][0].night, 7 * DAY), nights[7])
    assert run("--root", str(tmp_path)) == 0
    assert f"known regression: lane-small since night {night_name(6)}" in capsys.readouterr().out
    # Out of sight of what is compared.
    assert run("--root", str(tmp_path), "--nights", "2") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no regression"


def test_one_model_is_chosen_and_a_misspelt_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nights = calm_nights(2)
    record(tmp_path, [[*jobs, scaling_job(jobs[0].night, 1, 50.0, model="sign")] for jobs in nights])
    assert run("--root", str(tmp_path), "--model", "sign") == 0
    output = capsys.readouterr().out
    assert "sign, night" in output and "lane-small" not in output
    with pytest.raises(UserError, match=r'--model lane-smal: .*; did you mean "lane-small"'):
        run("--root", str(tmp_path), "--model", "lane-smal")


def test_mistakes_are_named(tmp_path: Path) -> None:
    for words, said in [
        (["--root", str(tmp_path / "none")], "records: holds no night's jobs; run `python -m sweeps nightly PLAN`"),
        (["--nights", "0"], "--nights 0: must be 1 or more"),
        (["--chart", "curve.pdf"], "--chart curve.pdf: the name must end in .png or .svg"),
        (["--chart", str(tmp_path / "none" / "curve.png")], "none does not exist; make it first"),
        (["--json", str(tmp_path / "none" / "curve.json")], "none does not exist; make it first"),
    ]:
        with pytest.raises(UserError) as caught:
            run("--root", str(tmp_path), *words) if "--root" not in words else run(*words)
        assert said in str(caught.value)


def test_runs_and_nights_that_are_left_out_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nights = calm_nights(3)
    failed = [dataclasses.replace(job, status="failed") for job in nights[1][:2]]
    record(tmp_path, [nights[0], [*nights[1][2:], *failed], nights[2]])
    damaged = tmp_path / "records" / f"night={night_name(2)}" / "jobs.parquet"
    damaged.write_bytes(b"PAR1")
    assert run("--root", str(tmp_path)) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"note: {damaged.parent}: left out (")
    assert "2 scaling runs left out: ended as failed" in output


def test_many_damaged_nights_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, calm_nights(7))
    for path in sorted(tmp_path.rglob("night.parquet"))[:6]:
        path.write_bytes(b"")
    assert run("--root", str(tmp_path)) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 4 and notes[3] == "note: 3 more nights left out like these"


def test_a_night_without_scaling_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, [[dataclasses.replace(calm_nights(1)[0][0], kind="trial")]])
    assert run("--root", str(tmp_path), "--chart", str(tmp_path / "curve.svg")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no scaling run is recorded; a plan's [models.scaling] asks for them",
        "no regression",
        f"{tmp_path / 'curve.svg'}: not drawn, as no scaling run is recorded",
    ]
    assert not (tmp_path / "curve.svg").exists()


def test_the_json_holds_every_figure(tmp_path: Path) -> None:
    nights = calm_nights(6, [Slowdown("data", 0.3, 5)])
    record(tmp_path, nights)
    assert run("--root", str(tmp_path), "--json", str(tmp_path / "scaling.json")) == 1
    values = json.loads((tmp_path / "scaling.json").read_text())
    rows = scaling_table([job for jobs in nights for job in jobs])
    assert len(values["rows"]) == len(rows) == 24
    for written, row in zip(values["rows"], rows, strict=True):
        assert written["scaling_factor"] == row.scaling_factor and written["lost"] == row.lost
        assert written["ratio_to_ideal"] == row.ratio_to_ideal and written["night"] == row.night
    assert {found["cause"] for found in values["regressions"]} == {"data"}
    assert values["left_out"] == {} and values["notes"] == []


@pytest.mark.slow
def test_the_picture_shows_the_curve_and_both_lines(tmp_path: Path) -> None:
    """Whatever the names hold: they are text, and no part of the picture's markup."""
    name = 'lane $x^2$ & <script>"</script>'
    jobs = [dataclasses.replace(job, model=name) for night in calm_nights(3) for job in night]
    others = [scaling_job("2026-11-01", 16, 9.0, model="alone", num_nodes=2, lost_scaling={})]
    path = tmp_path / "curve.svg"
    scaling_chart.draw(scaling_table([*jobs, *others]), path)
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    # Letters are drawn as outlines; each text stands beside them as a comment.
    text = path.read_text()
    for said in ("ideal", "seven of eight", "measured", "all-reduce", "stragglers", "not measured", "$x^2$"):
        assert f"{said}" in text, said
    again = tmp_path / "again.svg"
    scaling_chart.draw(scaling_table([*jobs, *others]), again)
    assert again.read_text() == text, "the same figures give the same file"
    scaling_chart.draw(scaling_table(jobs), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.svg", "curve.png", "curve.svg"]


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_is_a_users_mistake(small_disk: Path) -> None:
    rows = scaling_table([job for night in calm_nights(2) for job in night])
    with (small_disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), bytes(4096))
    with pytest.raises(UserError, match=r"curve.png: cannot be written \(No space left on device\)"):
        scaling_chart.draw(rows, small_disk / "curve.png")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_asking_for_help_imports_no_engine() -> None:
    program = (
        "import sys, sweeps.scaling, sweeps.targets_command, sweeps.ledger.change_points, sweeps.ledger.history\n"
        "import sweeps.ledger.node_health\n"
        "heavy = ('torch', 'duckdb', 'matplotlib', 'ruptures', 'numpy', 'optuna')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_ends_with_1_on_a_regression_and_2_on_a_mistake(tmp_path: Path) -> None:
    record(tmp_path, calm_nights(5, [Slowdown("straggler", 0.4, 4)]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words, code, said in [((), 1, ""), (("--model", "lane-smal"), 2, "error: --model lane-smal: no job of the")]:
        argv = [sys.executable, "-m", "sweeps", "scaling", "--root", str(tmp_path), *words]
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code and done.stderr.startswith(said)
        assert len(done.stderr.splitlines()) == (code == 2)
