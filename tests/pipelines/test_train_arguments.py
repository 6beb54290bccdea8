"""`train`: what its arguments mean, before anything is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perception.config import RunConfig, to_json
from perception.errors import UserError
from pipelines import launch, train
from pipelines.__main__ import main
from pipelines.configs import named_config


class Started:
    """What would have been started."""

    def __init__(self) -> None:
        self.trained: list[tuple[RunConfig, Path, bool, int]] = []
        self.launched: list[tuple[list[str], int, str, str, Path]] = []
        self.exit_code = 0
        self.begins = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    record = Started()

    def train_as_rank(config: RunConfig, folder: Path, resume: bool, rank: int) -> int:
        record.trained.append((config, folder, resume, rank))
        return record.exit_code

    def launch_ranks(
        argv: Sequence[str], ranks: int, engine: str, transport: str, _: Mapping[str, str], failures: Path
    ) -> int:
        record.launched.append((list(argv), ranks, engine, transport, failures))
        if record.begins:
            failures.parent.mkdir(parents=True, exist_ok=True)
            (failures.parent / "config.json").write_text("{}")
        return record.exit_code

    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "_train_as_rank", train_as_rank)
    monkeypatch.setattr(launch, "launch_ranks", launch_ranks)
    monkeypatch.chdir(tmp_path)
    return record


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def run_of(folder: Path, config: RunConfig) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    return folder


def test_one_rank_trains_in_this_process(started: Started, tmp_path: Path) -> None:
    code = main(["train", "lane-small", "--data", "/d", "--out", "a", "--set", "train.seed=4"])
    ((config, folder, resume, rank),) = started.trained
    assert (code, folder, resume, rank) == (0, Path("a"), False, 0) and started.launched == []
    assert (config.name, config.data.source, config.train.seed) == ("lane-small", "/d", 4)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_named_by_model_and_time(started: Started) -> None:
    main(["train", "lane-small"])
    folder = started.trained[0][1]
    assert folder.parent == Path("runs") and folder.name.startswith("lane-small-20")


def test_several_ranks_are_launched_with_what_was_asked(started: Started) -> None:
    options = ["--data", "/d", "--ranks", "3", "--engine", "torch", "--set", "distributed.transport=gloo"]
    assert main(["train", "lane", "--out", "a", *options, "--set", "optim.lr=1"]) == 0
    ((argv, ranks, engine, transport, failures),) = started.launched
    assert (ranks, engine, transport, failures) == (3, "torch", "gloo", Path("a/ranks"))
    expected = ["-m", "pipelines", "train", "lane", "--out", "a", "--engine", "torch", "--data", "/d"]
    sets = ["distributed.transport=gloo", "optim.lr=1"]
    assert argv == [sys.executable, *expected, *(word for value in sets for word in ("--set", value))]
    assert started.trained == []


def test_a_launched_rank_understands_its_argv(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["train", "lane", "--out", "a", "--ranks", "2", "--engine", "torch", "--set", "distributed.transport=gloo"])
    as_rank(monkeypatch, 1, 2)
    Path("a/config.json").unlink()
    main(started.launched[0][0][3:])
    config, folder, resume, rank = started.trained[0]
    assert (config.distributed.engine, config.distributed.transport) == ("torch", "gloo")
    assert (folder, resume, rank) == (Path("a"), False, 1)


def test_ranks_of_another_launcher_join_it(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 2, 4)
    assert main(["train", "lane", "--out", "a"]) == 0
    assert main(["train", "lane", "--out", "a", "--ranks", "4"]) == 0
    assert [rank for *_, rank in started.trained] == [2, 2] and started.launched == []
    with pytest.raises(UserError, match="--ranks 3, but torchrun started 4 ranks: leave --ranks out"):
        main(["train", "lane", "--out", "a", "--ranks", "3"])


def test_an_incomplete_launcher_is_told(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="WORLD_SIZE is not set"):
        main(["train", "lane"])
    assert started.trained == []


def test_a_folder_that_holds_a_run_is_refused(started: Started) -> None:
    run_of(Path("a"), named_config("lane"))
    for ranks in ("1", "2"):
        with pytest.raises(UserError, match="a: holds a run already; add --resume"):
            main(["train", "lane", "--out", "a", "--ranks", ranks])
    assert started.trained == [] and started.launched == []


def test_resume_takes_the_runs_own_configuration(started: Started) -> None:
    stored = replace(named_config("lane-small"), train=replace(named_config("lane-small").train, seed=77))
    run_of(Path("a"), stored)
    for model in ([], ["lane-small"]):
        assert main(["train", *model, "--resume", "--out", "a"]) == 0
        assert started.trained.pop() == (stored, Path("a"), True, 0)
    main(["train", "--resume", "--out", "a", "--set", "train.num_samples=9"])
    assert started.trained[0][0].train.num_samples == 9
    main(["train", "--resume", "--out", "a", "--ranks", "2", "--engine", "torch"])
    argv = started.launched[0][0]
    assert argv[3:9] == ["train", "--out", "a", "--engine", "torch", "--resume"]


def test_resume_that_cannot_be(started: Started) -> None:
    with pytest.raises(UserError, match="--resume needs --out"):
        main(["train", "lane", "--resume"])
    with pytest.raises(UserError, match=r"a/config\.json: not found; --resume goes on with a run folder"):
        main(["train", "--resume", "--out", "a"])
    run_of(Path("a"), named_config("lane-small"))
    with pytest.raises(UserError, match=r'model "lane": leave it out with --resume, a/config\.json is of lane-small'):
        main(["train", "lane", "--resume", "--out", "a"])
    Path("a/config.json").write_text("{")
    with pytest.raises(UserError, match=r"a/config\.json: not JSON"):
        main(["train", "--resume", "--out", "a"])
    assert started.trained == []


def test_engines_that_cannot_be_are_told_before_any_rank_starts(started: Started) -> None:
    with pytest.raises(UserError, match="solo cannot have 2 ranks"):
        main(["train", "lane", "--ranks", "2", "--engine", "solo"])
    assert started.launched == []


def test_scaling_is_measured_first_and_kept(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.bench import scaling

    asked: list[Any] = []

    def measure(config: RunConfig, ranks: int, folder: Path) -> dict[str, Any]:
        asked.append((config.name, ranks, folder))
        folder.mkdir(parents=True)
        return {"scaling_factor": 1.9}

    monkeypatch.setattr(scaling, "measure_scaling", measure)
    main(["train", "lane", "--ranks", "2", "--engine", "torch", "--out", "r/a", "--measure-scaling"])
    assert asked == [("lane", 2, Path("r/a"))] and len(started.launched) == 1
    assert json.loads(Path("r/a/scaling.json").read_text()) == {"scaling_factor": 1.9}
    assert "--measure-scaling" not in started.launched[0][0]


def test_a_trace_is_asked_for_by_a_word_of_its_own(started: Started) -> None:
    main(["train", "lane", "--out", "a", "--trace-steps", "4"])
    assert started.trained[0][0].train.trace_steps == 4


def test_what_was_chosen_for_the_user_is_not_recorded_as_asked_for(started: Started) -> None:
    main(["train", "lane", "--out", "a", "--ranks", "2"])
    assert not {"--engine", "--set"} & set(started.launched[0][0])


def test_ranks_default_to_those_of_the_run(started: Started) -> None:
    started.begins = False  # the stand-in for ranks would write a configuration of its own
    config = named_config("lane")
    run_of(Path("a"), replace(config, distributed=replace(config.distributed, engine="torch", num_ranks=2)))
    main(["train", "--resume", "--out", "a"])
    main(["train", "a/config.json", "--out", "b"])
    main(["train", "a/config.json", "--out", "c", "--ranks", "3"])
    assert [ranks for _, ranks, *_ in started.launched] == [2, 2, 3]


def test_scaling_of_one_rank_cannot_be_measured(started: Started) -> None:
    with pytest.raises(UserError, match="--measure-scaling goes with --ranks of at least 2"):
        main(["train", "lane", "--out", "a", "--measure-scaling"])


def test_scaling_is_not_measured_again_on_resumption(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    """`make train ARGS=--resume` passes both."""
    run_of(Path("a"), named_config("lane"))
    main(["train", "--out", "a", "--measure-scaling", "--ranks", "2", "--resume", "--engine", "torch"])
    assert "for new runs" in capsys.readouterr().out and len(started.launched) == 1
    assert not Path("a/scaling.json").exists()


@pytest.mark.parametrize(
    ("code", "begins", "recorded"),
    [
        (0, True, False),
        (75, True, False),
        (2, True, True),
        (2, False, False),
        (1, True, True),
        (1, False, False),
        (137, True, True),
    ],
)
def test_a_crash_of_the_ranks_is_recorded_as_the_result(
    code: int, begins: bool, recorded: bool, started: Started
) -> None:
    started.exit_code, started.begins = code, begins
    assert main(["train", "lane", "--ranks", "2", "--engine", "torch", "--out", "a"]) == code
    result = Path("a/result.json")
    assert result.exists() == recorded
    if recorded:
        told = json.loads(result.read_text())
        assert told["status"] == "failed" and str(code) in told["cause"] and "ranks/" in told["cause"]


def test_the_ranks_own_result_is_kept(started: Started) -> None:
    started.exit_code = 1
    Path("a").mkdir()
    Path("a/result.json").write_text('{"status": "diverged"}')
    main(["train", "lane", "--ranks", "2", "--engine", "torch", "--out", "a"])
    assert json.loads(Path("a/result.json").read_text()) == {"status": "diverged"}
