"""`bench predict`: its tables, its figures in JSON, its messages, and its prediction of ranks on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perception.cores import available_cores
from perception.errors import UserError
from perception.scaling.profile import GradientReady, StepProfile, write_profile
from pipelines.__main__ import main
from pipelines.bench.predict import gpu_counts
from tests.ranks import ROOT

BENCH = ["bench", "predict"]


def test_a_table_from_one_gpu_to_many_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--model", "resnet50", "--node", "dgx-a100", "--nodes", "1..128", "--json", str(path)]
    assert main([*BENCH, *arguments]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert rows[0]["scaling_factor"] == 1.0
    factors = [row["scaling_factor"] for row in rows]
    assert factors == sorted(factors)
    for row in rows:
        assert f"{row['scaling_factor']:.2f}" in printed
    # What is assumed and what is left out is said.
    assert "assumed" in printed
    assert "input not counted" in printed
    assert "fitted to" in printed


def test_a_measured_rate_is_the_base_and_input_bounds_a_node(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--model", "vgg16", "--node", "dgx-v100", "--nodes", "2", "--batch", "64", "--json", str(path)]
    assert main([*BENCH, *arguments, "--images-per-second", "400", "--input-images-per-second", "1600"]) == 0
    figures = json.loads(path.read_text())
    assert figures["profile"]["batch_size_per_rank"] / 400 == pytest.approx(
        sum(figures["profile"][f"{part}_seconds"] for part in ("forward", "backward", "optimizer"))
    )
    (row,) = figures["rows"]
    assert row["ranks"] == 16
    assert row["ranks"] * 64 / row["step_seconds"] == pytest.approx(2 * 1600)


def test_a_recorded_profile_keeps_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gradients = tuple(GradientReady(f"p{index}", 250_000, 4, 0.002 * (index + 1)) for index in range(10))
    profile = StepProfile("mine", "some GPU", "amp", 8, 0.01, 0.02, 0.001, gradients)
    recorded, figures = tmp_path / "recorded.json", tmp_path / "figures.json"
    write_profile(recorded, profile)
    arguments = ["--model", str(recorded), "--nodes", "1..2", "--jitter-fraction", "0", "--json", str(figures)]
    assert main([*BENCH, *arguments]) == 0
    rows = json.loads(figures.read_text())["rows"]
    assert rows[0]["step_seconds"] == pytest.approx(0.031)
    assert all(row["jitter_seconds"] == 0 for row in rows)
    assert "recorded on some GPU" in capsys.readouterr().out


def test_the_project_s_own_model_is_predicted_from_its_layers(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert main([*BENCH, "--model", "lane", "--node", "dgx-h200", "--nodes", "1", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["profile"]["gradient_bytes"] == 4 * 11_601_234
    assert "assumed" in figures["profile"]["source"]


def test_published_figures_mark_what_was_fitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    assert main([*BENCH, "--published", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        (line,) = (line for line in lines if line.startswith(row["name"] + " ") and f" {row['ranks']} " in line)
        assert ("fitted here" in line) == bool(row["fits"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "give --model, or --published"),
        (["--model", "lane-smal"], 'did you mean "lane-small"'),
        (["--model", "none.json"], "none.json: cannot be read"),
        (["--model", "resnet50", "--node", "dgx-h10"], "dgx-h100"),
        (["--model", "resnet50", "--network", "nrd"], "ndr"),
        (["--model", "resnet50", "--nodes", "some"], "--nodes some"),
        (["--model", "resnet50", "--nodes", "8..2"], "must rise"),
        (["--model", "resnet50", "--nodes", "0"], "between 1"),
        (["--model", "resnet50", "--batch", "0"], "--batch 0"),
        (["--model", "resnet50", "--images-per-second", "-1"], "--images-per-second"),
        (["--model", "resnet50", "--jitter-fraction", "2"], "--jitter-fraction"),
        (["--model", "resnet50", "--json", "none/f.json"], "folder none does not exist"),
        (["--model", "lane-small", "--here", "--ranks", "1"], "at least 2"),
    ],
)
def test_mistakes_are_named(arguments: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        main([*BENCH, *arguments])


def test_numbers_of_gpus() -> None:
    assert gpu_counts("1..128", 8)[-1] == 1024
    assert gpu_counts("1..3", 4) == [1, 2, 4, 8, 12]
    assert gpu_counts("2..5", 6) == [12, 24, 30]
    assert gpu_counts("1,3", 8) == [8, 24]
    assert gpu_counts("1..1", 8) == [1, 2, 4, 8]


def test_help_needs_no_torch() -> None:
    code = "import sys, pipelines.bench.predict, pipelines.bench.predict_here; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_ranks_on_this_host_take_as_long_as_predicted(tmp_path: Path) -> None:
    if os.getloadavg()[0] > available_cores() / 2:
        pytest.skip(f"the host is busy (load {os.getloadavg()[0]:.1f}): nothing measured now would mean anything")
    path = tmp_path / "figures.json"
    arguments = ["--here", "--model", "lane-small", "--ranks", "2", "--rounds", "7", "--json", str(path)]
    command = [sys.executable, "-m", "pipelines", *BENCH, *arguments, "--set", "distributed.engine=torch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    figures = json.loads(path.read_text())
    assert len(figures["rounds"]) == 7
    assert figures["constants"]["engine"] == "torch"
    assert 0.9 < figures["ratio"] < 1.1, done.stdout
