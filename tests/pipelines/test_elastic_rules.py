"""The rules of elastic training, without ranks: who died, which batch is kept, what is recorded and asked for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perception.config import TrainConfig, to_json
from perception.data.stream import micro_batches
from perception.distributed import failure
from perception.errors import UserError
from perception.generations import Generation, begin_generation, end_generation, read_generations, record_first_step
from perception.stopping import CHANGE_SIGNAL, STOP_SIGNALS, StopRequest
from pipelines import elastic
from pipelines.__main__ import main
from pipelines.configs import named_config
from pipelines.elastic import WantedRanks, lost_ranks, resized, visible_devices
from pipelines.launch import Ended
from pipelines.rank_report import End, Outcome, RankEnd


@pytest.mark.parametrize(
    ("global_batch", "most", "ranks", "expected"),
    [
        (0, 5, 7, (105, 3)),  # not asked for: as configured
        (40, 5, 8, (40, 1)),
        (40, 5, 4, (40, 2)),
        (24, 6, 3, (24, 2)),
        (40, 5, 7, (40, 2)),  # shares of 6 and 5
        (8, 2, 3, (8, 2)),
        (8, 2, 8, (8, 1)),
    ],
)
def test_the_global_batch_is_kept(global_batch: int, most: int, ranks: int, expected: tuple[int, int]) -> None:
    from perception.training_run import fit_to_ranks

    train = replace(TrainConfig(), global_batch=global_batch, batch_size_per_rank=most, accumulation=3)
    fitted = fit_to_ranks(train, ranks)
    assert (fitted.global_batch_on(ranks), fitted.accumulation) == expected
    assert fitted.batch_size_per_rank == most
    count = fitted.global_batch_on(ranks)
    shares = [micro_batches(count, rank, ranks, fitted.accumulation) for rank in range(ranks)]
    assert sum(end - start for share in shares for start, end in share) == count
    assert all(0 < end - start <= most for share in shares for start, end in share)


def test_a_global_batch_below_the_number_of_ranks_is_refused() -> None:
    from perception.training_run import fit_to_ranks

    with pytest.raises(UserError, match=r"train\.global_batch = 4 cannot be shared by 5 ranks"):
        fit_to_ranks(replace(TrainConfig(), global_batch=4), 5)


def end(status: int, time: float, kind: End = End.STATUS, by_launcher: bool = False) -> RankEnd:
    return RankEnd(kind, status, time, by_launcher)


@pytest.mark.parametrize(
    ("ends", "words", "lost"),
    [
        # The neighbour's exception is told first: the dead rank's memory took a while to go.
        ([end(1, 1.0), end(-9, 2.0), end(-9, 3.0, by_launcher=True)], {0: "Connection closed by peer"}, [1]),
        ([end(-9, 1.0), end(-6, 1.1), end(-9, 1.2)], {}, [0, 2]),
        ([end(-6, 1.0), end(1, 1.1)], {1: "HorovodInternalError"}, [0]),
        ([end(7, 1.0), end(1, 1.1)], {1: "Connection reset by peer"}, [0]),
        ([end(0, 1.0, End.VANISHED), end(-9, 9.0, by_launcher=True)], {}, [0]),
        ([end(1, 1.0), end(1, 1.0)], {0: "Connection reset by peer", 1: "Connection reset by peer"}, []),
        ([end(1, 1.0), end(-9, 1.2)], {0: "RuntimeError: rank 1 is gone: its process has ended"}, [1]),
        ([end(1, 1.0), end(-6, 1.1)], {0: "ValueError: broken"}, None),
        ([end(2, 1.0), end(-9, 3.0, by_launcher=True)], {0: "error: x.json: mend it"}, None),
        ([end(0, 1.0), end(0, 1.0)], {}, None),
        ([end(75, 1.0), end(75, 1.0)], {}, None),
    ],
)
def test_who_died(ends: list[RankEnd], words: dict[int, str], lost: list[int] | None, tmp_path: Path) -> None:
    for rank in range(len(ends)):
        failure.pid_file(tmp_path, rank).write_text("1\n")
    for rank, text in words.items():
        failure.traceback_file(tmp_path, rank).write_text(f"{text}\n")
    assert lost_ranks(Ended(Outcome(1), tuple(ends), (), False), tmp_path) == lost


def test_a_command_that_never_became_a_rank_is_not_tried_again(tmp_path: Path) -> None:
    assert lost_ranks(Ended(Outcome(1), (end(1, 1.0), end(1, 1.0)), (), False), tmp_path) is None


def test_an_orderly_end_with_an_error_is_no_death(tmp_path: Path) -> None:
    """As of a run that diverged."""
    for rank in range(2):
        failure.pid_file(tmp_path, rank).write_text("1\n")
        failure.clean_exit_file(tmp_path, rank).write_text("")
    assert lost_ranks(Ended(Outcome(1), (end(1, 1.0), end(1, 1.0)), (), False), tmp_path) is None


def test_ranks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "ranks.json"
    order.write_text('{"ranks": 3}')
    wanted = WantedRanks(order, 2, 4)
    assert (wanted.ranks, wanted.urgent) == (3, False)
    order.write_text('{"ranks": 4}')
    wanted.look()
    assert wanted.ranks == 3, "it may be half-written"
    wanted.look()
    assert (wanted.ranks, wanted.urgent) == (4, True)
    wanted.urgent = False
    os.utime(order, (1, 1))
    for _ in range(2):
        wanted.look()
    assert wanted.urgent, "touched: asked again"
    capsys.readouterr()
    for text in ('{"ranks": 5}', '{"ranks": 1}', '{"ranks": true}', '{"ranks": "3"}', "[3]", "{", "3", ""):
        order.write_text(text)
        for _ in range(3):
            wanted.look()
        assert wanted.ranks == 4
        assert capsys.readouterr().out.count("ignored; must hold") == 1, text


def test_places_of_dead_ranks_are_left_out_and_come_back() -> None:
    assert resized([0, 1, 3], 4, 4) == [0, 1, 2, 3]
    assert resized([1, 3], 3, 4) == [0, 1, 3]
    assert resized([0, 1, 2, 3], 2, 4) == [0, 1]
    assert visible_devices({}, [0, 1, 2]) == {}
    assert visible_devices({}, [0, 2, 3]) == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [0, 2]) == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, [0, 2]) == {}


def test_the_record_of_generations(tmp_path: Path) -> None:
    def generation(ranks: int, first_step: int) -> Generation:
        return Generation(ranks, 8, 2, 1, first_step)

    assert read_generations(tmp_path) == [] and record_of(tmp_path, generation(4, 1)) is None
    begin_generation(tmp_path, generation(3, 21))
    assert record_first_step(tmp_path) is None, "nobody saw the first one end"
    end_generation(tmp_path, "rank 1 of 3 died", time.time() - 5)
    assert record_of(tmp_path, generation(2, 31)) == pytest.approx(5, abs=1)
    end_generation(tmp_path, "preempted", time.time(), 50)
    # The checkpoint of step 50 was damaged, that of step 25 is whole.
    begin_generation(tmp_path, generation(4, 26))
    spans = [(old.first_step, old.last_step) for old in read_generations(tmp_path)]
    assert spans == [(1, 20), (21, 25), (31, 30), (26, None)]
    causes = [old.cause for old in read_generations(tmp_path)]
    assert causes == ["ended without a word: killed, or its host went down", "rank 1 of 3 died", "preempted", ""]


def record_of(folder: Path, generation: Generation) -> float | None:
    begin_generation(folder, generation)
    return record_first_step(folder)


def test_a_change_waits_for_a_commit_and_a_stop_does_not() -> None:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, CHANGE_SIGNAL)}
    stop = StopRequest()
    try:
        stop.listen()
        signal.raise_signal(CHANGE_SIGNAL)
        assert [step for step in range(1, 41) if stop.is_due(step, 20)] == [20, 40] and not stop.requested
        assert stop.cause == "the number of ranks changes"
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_due(21, 20) and stop.cause == "SIGTERM received"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "4", "--elastic-min-ranks", "5"], "--elastic-min-ranks 5: must be from 1 to --ranks, 4"),
        (["--ranks", "4", "--elastic-min-ranks", "0"], "--elastic-min-ranks 0: must be from 1 to --ranks, 4"),
        (["--ranks", "1", "--elastic-min-ranks", "1"], "goes with --ranks of at least 2"),
        (["--resume-if-possible"], "--resume-if-possible needs --out"),
        (["--commit-every-steps", "0"], "train.checkpoint_every_steps = 0: must be above 0"),
    ],
)
def test_arguments_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["train", "lane-small", *words])


def test_ranks_of_another_launcher_are_restarted_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=r"torchrun started the ranks.*--resume-if-possible"):
        main(["train", "lane-small", "--out", "a", "--elastic-min-ranks", "1"])


@pytest.mark.parametrize("resume", [False, True])
def test_what_each_generation_of_ranks_is_asked_for(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def train_elastically(argv: Callable[[int, bool], list[str]], _: Any, folder: Path, ranks: int, least: int) -> int:
        asked.extend([argv(4, True), argv(3, False), argv(1, False), folder, ranks, least])
        return 0

    monkeypatch.setattr(elastic, "train_elastically", train_elastically)
    begun = named_config("lane-small")
    begun = replace(begun, distributed=replace(begun.distributed, num_ranks=2))
    (tmp_path / "config.json").write_text(to_json(begun))
    words = ["--resume", "--out", str(tmp_path)] if resume else ["lane-small", "--out", "new"]
    assert main(["train", *words, "--ranks", "4", "--elastic-min-ranks", "2", "--commit-every-steps", "50"]) == 0
    first, later, alone, folder, ranks, least = asked
    assert (folder, ranks, least) == (tmp_path if resume else Path("new"), 4, 2)
    for argv in (first, later, alone):
        assert "train.checkpoint_every_steps=50" in argv
        # lane-small takes 4 a rank; a run that was begun on two ranks keeps its global batch.
        assert f"train.global_batch={4 * (2 if resume else 4)}" in argv
        assert ("--resume" in argv) == resume
    assert ["--resume-if-possible" in argv for argv in (first, later, alone)] == [False, not resume, not resume]
    assert "--ranks" not in later and alone[-2:] == ["--ranks", "1"]
