"""Runs that end before their last sample on purpose: a target reached, or an order of who watches them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perception.config import override
from perception.errors import UserError
from perception.stopping import StopOrder
from pipelines.configs import named_config
from pipelines.train import target_assignments
from tests.pipelines import training_runs as runs


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_target_is_settings_of_the_run() -> None:
    config = override(named_config("lane-small"), ["train.num_samples=40000"])
    aimed = override(config, target_assignments("f1=0.8", config, 2))
    assert (aimed.train.target_metric, aimed.train.target_value) == ("culane_f1_50", 0.8)
    # Twenty evaluations of 40,000 samples in steps of 8.
    assert aimed.train.evaluate_every_steps == 250
    own = override(config, ["train.evaluate_every_steps=7"])
    assert override(own, target_assignments("culane_mf1=0.4", own, 2)).train.evaluate_every_steps == 7


@pytest.mark.parametrize("text", ["f1", "f1=", "f1=high", "f1=nan", "=0.8x"])
def test_a_target_that_is_none_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"--target .*f1=0\.8"):
        target_assignments(text, named_config("lane-small"), 1)


def test_the_nearest_metric_is_named() -> None:
    config = named_config("sign")
    with pytest.raises(UserError, match=r'did you mean "ap50_superclass"'):
        override(config, target_assignments("ap50_superclas=0.5", config, 1))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stop": "now"}', '{"cause": "x"}', "\x00\xff"])
def test_a_file_that_is_no_order_stops_nothing(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "control.json"
    path.write_text(text, encoding="latin-1")
    order = StopOrder(path, listens=True)
    assert not order.is_given() and not order.is_given()
    assert capsys.readouterr().out.count("control.json: no order to stop") == 1


def test_an_order_is_read_by_the_first_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    order = StopOrder(path, listens=True)
    assert not order.is_given()
    path.write_text('{"stop": "pruned", "cause": "rung 1"}')
    assert order.is_given() and order.cause == "rung 1"
    assert not StopOrder(path, listens=False).is_given()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_order_ends_all_ranks_after_the_same_step(tmp_path: Path, cache: Path, ranks: int) -> None:
    """The order is there from the begin: the run ends after its first step, with a checkpoint, and stays ended."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "control.json").write_text(json.dumps({"stop": "pruned", "cause": "worse than the rest"}))
    done = runs.train(out, cache, ranks, train__num_samples=40)
    assert done.returncode == 0, done.stdout + done.stderr
    result = runs.result(out)
    assert (result["status"], result["cause"], result["steps"]) == ("pruned", "worse than the rest", 1)
    assert (out / result["checkpoint"]["path"]).is_file() and result["metrics"] == {}
    if ranks == 1:
        again = runs.train(out, cache, ranks, resume=True)
        assert again.returncode == 0 and "has ended already" in again.stdout
        (out / "control.json").unlink()
        done = runs.train(out, cache, ranks, resume=True)
        assert done.returncode == 0 and runs.result(out)["status"] == "finished"


@pytest.mark.slow
def test_a_run_ends_at_the_evaluation_that_reaches_its_target(tmp_path: Path, cache: Path) -> None:
    """Any value is at least 0: the first evaluation is the last."""
    out = tmp_path / "run"
    aim = {"target_metric": "culane_f1_50", "target_value": 0, "evaluate_every_steps": 3}
    done = runs.train(out, cache, train__num_samples=40, **{f"train__{name}": value for name, value in aim.items()})
    assert done.returncode == 0, done.stdout + done.stderr
    result = runs.result(out)
    assert (result["status"], result["steps"], result["samples"]) == ("target_reached", 3, 6)
    assert result["target"]["reached_samples"] == 6 and 0 < result["target"]["reached_seconds"] <= result["seconds"]
    assert "culane_f1_50" in result["metrics"] and (out / "validation.png").is_file()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines if "validation/culane_f1_50" in line] == [6]
    again = runs.train(out, cache, resume=True)
    assert again.returncode == 0 and "has ended already" in again.stdout


@pytest.mark.slow
def test_a_target_that_is_not_reached_is_told(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    done = runs.train(out, cache, train__num_samples=8, train__target_metric="culane_f1_50", train__target_value=1.1)
    assert done.returncode == 0, done.stdout + done.stderr
    result = runs.result(out)
    assert result["status"] == "finished"
    assert result["target"] == {
        "metric": "culane_f1_50",
        "value": 1.1,
        "reached_seconds": None,
        "reached_samples": None,
    }
