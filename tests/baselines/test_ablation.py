"""Each row of the ablation leaves out what it says, runs are of one length in time, and what was done is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from perception.config import flatten
from perception.errors import UserError
from pipelines.lane import lane_small
from tests.baselines.__main__ import main
from tests.baselines.ablation import ROWS, SHOWN, Result, ablate, row_configuration, run_lengths, table


def test_a_row_differs_in_its_part_alone() -> None:
    reference = flatten(row_configuration("all", 1, 800, []))
    assert (reference["train.seed"], reference["train.num_samples"]) == (1, 800)
    assert reference["train.num_threads_per_rank"] == 1
    for name, row in ROWS.items():
        config = flatten(row_configuration(name, 1, 800, []))
        changed = {field for field, value in config.items() if value != reference[field]}
        assert changed == {text.partition("=")[0] for text in row.assignments}, name
        assert bool(changed) == (name != "all")


def test_the_reference_is_the_model_that_is_published() -> None:
    config, published = row_configuration("all", 0, 800, []), lane_small()
    assert (config.model, config.augment, config.optim) == (published.model, published.augment, published.optim)


def test_lengths_are_of_one_time_and_of_whole_steps(tmp_path: Path) -> None:
    (tmp_path / "seconds_a_sample.json").write_text(json.dumps({"all": 0.015, "low-resolution": 0.005}))
    assert run_lengths(["all", "low-resolution"], 240, tmp_path, []) == {"all": 16_000, "low-resolution": 48_000}
    assert run_lengths(["all"], 0.001, tmp_path, []) == {"all": 8}


def recorded(out: Path, row: str, seed: int, f1: float) -> None:
    folder = out / f"{row}-seed{seed}-16000"
    folder.mkdir(parents=True)
    result = Result(row, seed, 16_000, 1_340_000, dict.fromkeys(SHOWN, f1))
    (folder / "ablation.json").write_text(json.dumps(asdict(result)))


def test_what_was_done_is_told_and_not_done_again(tmp_path: Path) -> None:
    (tmp_path / "seconds_a_sample.json").write_text(json.dumps({"all": 0.015, "no-ema": 0.015}))
    for seed, f1 in ((0, 0.7), (1, 0.8)):
        recorded(tmp_path, "all", seed, f1)
        recorded(tmp_path, "no-ema", seed, f1 - 0.1)
    before = sorted(tmp_path.iterdir())
    lines = table(ablate(["all", "no-ema"], [0, 1], 240, tmp_path, 1, []))
    assert sorted(tmp_path.iterdir()) == before
    assert lines[2].startswith("|  | lane-small | 16000 | 0.750 ± 0.071 |  |")
    assert lines[3].startswith("| EMA | none | 16000 | 0.650 ± 0.071 | -0.100 -0.100 |")


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "seconds_a_sample.json").write_text(json.dumps({"all": 0.015}))
    recorded(tmp_path, "all", 0, 0.7)
    (tmp_path / "all-seed0-16000" / "ablation.json").write_text('{"row": "all"')
    with pytest.raises(UserError, match=r"ablation\.json: not a result of this program"):
        ablate(["all"], [0], 240, tmp_path, 1, [])


def test_an_unknown_row_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "no-emma", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == 'row "no-emma" is unknown; did you mean "no-ema"?\n'


@pytest.mark.slow
def test_rows_are_measured_trained_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [
        "data.num_train_scenes=8", "data.num_validation_scenes=4", f"data.cache_folder={tmp_path / 'cache'}",
        "data.scene_height=64", "data.scene_width=160", "model.input_height=64", "model.input_width=160",
    ]  # fmt: skip
    out = tmp_path / "out"
    arguments = ["ablate", "all", "fpn", "--out", str(out), "--seeds", "2", "--processor-seconds", "0.5"]
    assert main([*arguments, *(f"--set={text}" for text in sets)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split(":")[0] in ("1 of 4", "2 of 4", "3 of 4", "4 of 4") for line in lines) == 4
    assert [line.split(" | ")[1] for line in lines[-2:]] == ["lane-small", ROWS["fpn"].title]
    seconds = json.loads((out / "seconds_a_sample.json").read_text())
    assert all(0.0001 < value < 0.5 for value in seconds.values()) and len(seconds) == 2
    parameters = [json.loads(path.read_text())["num_parameters"] for path in sorted(out.glob("*/ablation.json"))]
    assert parameters[0] == parameters[1] < parameters[2] == parameters[3]
