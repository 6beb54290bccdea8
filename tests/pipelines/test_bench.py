"""`bench scaling`: what it starts, in which order, and what it makes of the figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perception.config import RunConfig, from_json
from perception.errors import UserError
from pipelines.__main__ import main
from pipelines.bench import scaling as bench
from pipelines.configs import named_config


class Measured:
    """Stands for the processes: 10 images/s alone, 19 together, 20 for two that share nothing, faster each round."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.configs: list[RunConfig] = []

    def independent(self, config: Path, count: int, seconds: float, folder: Path) -> float:
        self.calls.append(("independent", count))
        self.configs.append(from_json(config.read_text(), str(config)))
        return 10.0 * count + len(self.calls)

    def ranks(self, path: Path, config: RunConfig, ranks: int, seconds: float, folder: Path) -> float:
        self.calls.append(("ranks", ranks))
        self.configs.append(from_json(path.read_text(), str(path)))
        return 19.0 + len(self.calls)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    stand_in = Measured()
    monkeypatch.setattr(bench, "_independent", stand_in.independent)
    monkeypatch.setattr(bench, "_ranks", stand_in.ranks)
    return stand_in


def test_variants_are_interleaved_and_medians_compared(measured: Measured, tmp_path: Path) -> None:
    figures = bench.measure_scaling(named_config("lane-small"), 2, tmp_path, rounds=3, seconds=1.0)
    assert measured.calls == [("ranks", 2), ("independent", 1), ("independent", 2)] * 3
    # Second round's values: 19 + 4, 10 + 5, 20 + 6.
    assert figures["images_per_second"] == {"one rank": 15, "2 ranks": 23, "2 independent processes": 26}
    assert figures["scaling_factor"] == pytest.approx(23 / 15)
    assert figures["ratio_to_limit"] == pytest.approx(23 / 26)
    assert (figures["ranks"], figures["rounds"], figures["seconds"]) == (2, 3, 1.0)
    assert figures["images_per_second_by_round"]["2 ranks"] == [20, 23, 26]


def test_every_variant_has_a_ranks_threads(measured: Measured, tmp_path: Path) -> None:
    config = named_config("lane-small")
    bench.measure_scaling(replace(config, train=replace(config.train, num_threads_per_rank=3)), 2, tmp_path, rounds=1)
    assert [c.train.num_threads_per_rank for c in measured.configs] == [3, 3, 3]
    assert [c.distributed.engine for c in measured.configs] == [config.distributed.engine, "solo", "solo"]
    bench.measure_scaling(config, 1000, tmp_path, rounds=1)
    assert {c.train.num_threads_per_rank for c in measured.configs[3:]} == {1}


def test_the_command_prints_and_writes_the_figures(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scaling.json"
    options = ["--ranks", "2", "--rounds", "1", "--seconds", "0.5", "--engine", "torch", "--set", "train.seed=9"]
    assert main(["bench", "scaling", "lane-small", *options, "--json", str(path)]) == 0
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures["rounds"] == 1 and {config.train.seed for config in measured.configs} == {9}
    shown = capsys.readouterr().out
    assert "scaling factor 1.67 of 2; 87% of the machine's limit" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lane", "--ranks", "1"], "--ranks of at least 2"),
        (["lane", "--rounds", "0"], "--rounds of at least 1"),
        (["lane", "--seconds", "0"], "--seconds above 0"),
        (["lan"], 'model "lan" is unknown; did you mean "lane"?'),
        (["lane", "--json", "none/a.json"], "--json none/a.json: folder none does not exist"),
        (["lane", "--engine", "solo"], "solo cannot have 2 ranks"),
        (["lane", "--engine", "torch", "--set", "distributed.transport=mpi"], "mpi needs distributed.engine = horovod"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: list[str], message: str, measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main(["bench", "scaling", *arguments])
    assert measured.calls == []


def test_a_folder_that_cannot_be_made(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made .*give another by --out"):
        bench.measure_scaling(named_config("lane-small"), 2, tmp_path / "file")


@pytest.mark.slow
def test_a_failed_process_is_told_and_none_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The configuration names data that are not there."""
    config = named_config("lane-small")
    config = replace(config, data=replace(config.data, source=str(tmp_path / "none")))
    with pytest.raises(UserError, match="failed with exit code 2; its message is above"):
        bench.measure_scaling(config, 2, tmp_path, rounds=1, seconds=0.1)
    assert "data folder does not exist" in capfd.readouterr().err
