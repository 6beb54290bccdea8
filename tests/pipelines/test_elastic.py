"""Ranks die, leave and come back: the run goes on from its last commit, every sample once an epoch."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from perception.config import TrainConfig, from_json, to_json
from perception.data.stream import SampleStream, micro_batches
from perception.distributed import failure
from perception.errors import UserError
from perception.stopping import (
    CHANGE_SIGNAL,
    STOP_SIGNALS,
    Generation,
    StopRequest,
    begin_generation,
    end_generation,
    read_generations,
    record_first_step,
)
from pipelines import elastic
from pipelines.__main__ import main
from pipelines.configs import named_config
from pipelines.elastic import FRUITLESS_LIMIT, WantedRanks, lost_ranks, resized, visible_devices
from pipelines.launch import Ended
from pipelines.rank_report import End, Outcome, RankEnd
from tests.pipelines import training_runs as runs

OBSERVED = Path(__file__).with_name("observed_training.py")
COMMIT_STEPS = 20
NUM_SCENES = runs.TINY["data.num_train_scenes"]
needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
ENGINES = [
    ("torch", "gloo"),
    pytest.param("horovod", "mpi", marks=needs_horovod),
    pytest.param("horovod", "gloo", marks=needs_horovod),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Run:
    """An elastic run in a process of its own, with what it printed and what its ranks trained on."""

    def __init__(self, out: Path, cache: Path, *words: str, failure: str = "", **settings: Any) -> None:
        self.out, self.observed = out, out.with_name(f"{out.name}-observed")
        self.observed.mkdir(exist_ok=True)
        self.output = out.with_name(f"{out.name}-output.txt")
        environment = {**runs.environment(cache), "OBSERVED_FOLDER": str(self.observed), "OBSERVED_FAILURE": failure}
        argv = [sys.executable, str(OBSERVED), "train", *words, "--out", str(out)]
        if "--resume" not in words:
            argv.insert(3, "lane-small")
            for name, value in {**runs.TINY, **{n.replace("__", "."): v for n, v in settings.items()}}.items():
                argv += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        with self.output.open("a") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment, cwd=runs.ROOT)

    @property
    def shown(self) -> str:
        return self.output.read_text()

    def wait_until(self, condition: Callable[[], bool], limit_seconds: float = 240) -> None:
        deadline = time.monotonic() + limit_seconds
        while not condition():
            assert self.process.poll() is None, self.shown
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.02)

    def step(self) -> int:
        """The last that was logged."""
        try:
            lines = (self.out / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError):
            return 0

    def kill_rank(self, generation: int, rank: int, step: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Once the generation has done `step`."""
        self.wait_until(lambda: len(read_generations(self.out)) == generation and self.step() >= step)
        folder = self.out / "ranks" / f"generation-{generation}"
        os.kill(int(failure.pid_file(folder, rank).read_text()), number)

    def end(self) -> int:
        try:
            return self.process.wait(300)
        finally:
            self.process.kill()

    def committed_names(self) -> list[str]:
        """The images of all steps that count, in the order of the sample stream."""
        lines = [json.loads(line) for file in self.observed.iterdir() for line in file.read_text().splitlines()]
        names: list[str] = []
        for number, generation in enumerate(read_generations(self.out), 1):
            assert generation.last_step is not None
            for step in range(generation.first_step, generation.last_step + 1):
                ranks = [line for line in lines if (line["generation"], line["step"]) == (number, step)]
                assert sorted(line["rank"] for line in ranks) == list(range(generation.ranks))
                for line in sorted(ranks, key=lambda line: line["rank"]):
                    names += line["names"]
        return names


def check_every_sample_once_an_epoch(run: Run, num_samples: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks were given is the stream of (seed, epoch, position), without a gap and without a repetition."""
    from perception.data.sources import open_sources

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    config = from_json((run.out / "config.json").read_text(), "config.json")
    training = open_sources(config.data).train
    keys = SampleStream(config.train.seed, len(training)).keys(0, num_samples)
    names = run.committed_names()
    assert names == [training.truth(key.index).name for key in keys]
    for start in range(0, num_samples, NUM_SCENES):
        epoch = names[start : start + NUM_SCENES]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) == NUM_SCENES or start + NUM_SCENES > num_samples


def check_nothing_runs(run: Run, limit_seconds: float = 15) -> None:
    deadline = time.monotonic() + limit_seconds
    while left := [process for process in psutil.process_iter() if str(run.out) in _words(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


# Real runs


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "transport"), ENGINES)
def test_one_of_four_ranks_is_killed_and_comes_back(
    engine: str, transport: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_samples = 600
    draw = random.Random(f"{engine} {transport}")
    rank, step = draw.randrange(4), draw.randrange(COMMIT_STEPS + 1, 2 * COMMIT_STEPS - 5)
    words = ["--ranks", "4", "--elastic-min-ranks", "2", "--commit-every-steps", str(COMMIT_STEPS), "--engine", engine]
    settings = {
        "distributed__transport": transport,
        "train__num_samples": num_samples,
        "train__batch_size_per_rank": 3,
    }
    run = Run(tmp_path / "run", cache, *words, **settings)
    run.kill_rank(1, rank, step)
    assert run.end() == 0, run.shown
    first, second, third = read_generations(run.out)
    assert (first.ranks, second.ranks, third.ranks) == (4, 3, 4)
    assert f"rank {rank} of 4 died of signal 9" in first.cause and "number of ranks changes" in second.cause
    assert (first.last_step, second.first_step, second.last_step) == (20, 21, 40) and third.cause == "finished"
    # 12 images a step whatever the number of ranks: three ranks take four each, in two parts of two.
    assert [g.global_batch for g in (first, second, third)] == [12, 12, 12]
    assert [(g.batch_size_per_rank, g.accumulation) for g in (first, second, third)] == [(3, 1), (3, 2), (3, 1)]
    assert "global batch 12 and learning rate as before (at most 2 a rank, accumulated over 2)" in run.shown
    assert f"going on with 3 of 4 ranks from step {COMMIT_STEPS}" in run.shown
    for generation in (second, third):
        assert generation.downtime_seconds is not None and 0 < generation.downtime_seconds < 200
        assert f"training again on {generation.ranks} ranks, {generation.downtime_seconds:.1f} s" in run.shown
    check_every_sample_once_an_epoch(run, num_samples, cache, monkeypatch)
    records = runs.metrics(run.out)
    assert [record["step"] for record in records] == list(range(1, 51))
    assert all(math.isfinite(record["loss"]) for record in records)
    result = runs.result(run.out)
    assert result["status"] == "finished" and result["samples"] == num_samples and "culane_f1_50" in result["metrics"]
    assert [generation["ranks"] for generation in result["generations"]] == [4, 3, 4]
    config = json.loads((run.out / "config.json").read_text())
    assert (config["distributed"]["num_ranks"], config["train"]["global_batch"]) == (4, 12)
    assert config["train"]["batch_size_per_rank"] == 3
    check_nothing_runs(run)


@pytest.mark.slow
def test_runs_with_the_same_commits_are_equal_to_the_bit(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at other steps and other ranks, taken up at the same commits; one rank alone needs no communication."""
    words = ["--ranks", "2", "--elastic-min-ranks", "1", "--commit-every-steps", str(COMMIT_STEPS), "--engine", "auto"]
    digests = []
    for name, rank, step in [("a", 0, 23), ("b", 1, 31)]:
        run = Run(tmp_path / name, cache, *words, train__num_samples=220)
        run.kill_rank(1, rank, step)
        assert run.end() == 0, run.shown
        spans = [(g.ranks, g.global_batch, g.first_step, g.last_step) for g in read_generations(run.out)]
        assert spans == [(2, 4, 1, 20), (1, 4, 21, 40), (2, 4, 41, 55)]
        check_every_sample_once_an_epoch(run, 220, cache, monkeypatch)
        digests.append(runs.result(run.out)["checkpoint"]["weights_sha256"])
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_ranks_leave_and_join_when_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--ranks", "2", "--elastic-min-ranks", "1", "--commit-every-steps", "10", "--engine", "torch"]
    run = Run(tmp_path / "run", cache, *words, train__num_samples=800)
    order = run.out / "ranks.json"
    run.wait_until(lambda: run.step() > 0)
    order.write_text('{"ranks": 3}')
    run.wait_until(lambda: "ignored" in run.shown)
    order.write_text('{"ranks": 1}')
    run.wait_until(lambda: len(read_generations(run.out)) == 2 and read_generations(run.out)[1].cause == "")
    run.wait_until(lambda: run.step() > (read_generations(run.out)[0].last_step or 0) + 12)
    assert len(read_generations(run.out)) == 2, "it stays for as long as the file asks for it"
    order.unlink()
    assert run.end() == 0, run.shown
    assert f'{order}: ignored; must hold {{"ranks": N}} with N from 1 to 2' in run.shown
    generations = read_generations(run.out)
    assert [generation.ranks for generation in generations] == [2, 1, 2]
    assert all((generation.last_step or 0) % 10 == 0 for generation in generations[:2])
    assert "died" not in run.shown and "--resume" not in run.shown
    check_every_sample_once_an_epoch(run, 800, cache, monkeypatch)


@pytest.mark.slow
def test_too_few_ranks_end_the_run_which_can_be_resumed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--ranks", "2", "--elastic-min-ranks", "2", "--commit-every-steps", "10", "--engine", "torch"]
    run = Run(tmp_path / "run", cache, *words, train__num_samples=120)
    run.kill_rank(1, 1, 12, signal.SIGSEGV)
    assert run.end() == failure.EXIT_PREEMPTED, run.shown
    last = run.shown.splitlines()[-1]
    assert last.startswith("elastic: 1 of 2 ranks left, fewer than --elastic-min-ranks 2; go on from step 10 with ")
    assert last.endswith(f"--resume --out {run.out} --ranks 2")
    result = runs.result(run.out)
    assert result["status"] == "preempted" and "SIGSEGV" in result["cause"] and len(result["generations"]) == 1
    resumed = Run(run.out, cache, "--resume", "--ranks", "2", "--elastic-min-ranks", "1")
    assert resumed.end() == 0, resumed.shown
    assert [(g.ranks, g.first_step, g.last_step) for g in read_generations(run.out)] == [(2, 1, 10), (2, 11, 30)]
    check_every_sample_once_an_epoch(resumed, 120, cache, monkeypatch)


@pytest.mark.slow
def test_a_crash_loop_ends(tmp_path: Path, cache: Path) -> None:
    words = ["--ranks", "3", "--elastic-min-ranks", "1", "--engine", "torch"]
    run = Run(tmp_path / "run", cache, *words, failure="die", train__num_samples=120)
    assert run.end() == 1, run.shown
    *_, given_up, last = run.shown.splitlines()
    assert given_up == f"elastic: given up: {FRUITLESS_LIMIT} generations in a row died without a new commit"
    assert last.startswith("rank 0 of 1 ended with exit code 7; logs: ")
    assert [generation.ranks for generation in read_generations(run.out)] == [3, 2, 1]
    assert runs.result(run.out)["status"] == "failed" and "exit code 7" in runs.result(run.out)["cause"]
    check_nothing_runs(run)


@pytest.mark.slow
def test_an_exception_would_come_again_and_ends_the_run(tmp_path: Path, cache: Path) -> None:
    words = ["--ranks", "2", "--elastic-min-ranks", "1", "--engine", "torch"]
    run = Run(tmp_path / "run", cache, *words, failure="raise", train__num_samples=120)
    assert run.end() == 1, run.shown
    assert run.shown.splitlines()[-1].startswith("rank 1 of 2 ended with exit code 1: ValueError: this rank is broken")
    assert "going on" not in run.shown and len(read_generations(run.out)) == 1
    result = runs.result(run.out)
    assert result["status"] == "failed" and "this rank is broken" in result["cause"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["the ranks end", "the next ranks start"])
def test_a_stop_during_a_change_of_generation_ends_everything(
    moment: str, number: signal.Signals, tmp_path: Path, cache: Path
) -> None:
    words = ["--ranks", "2", "--elastic-min-ranks", "1", "--commit-every-steps", "10", "--engine", "torch"]
    run = Run(tmp_path / "run", cache, *words, train__num_samples=4000)
    run.kill_rank(1, 1, 12)
    if moment == "the next ranks start":
        run.wait_until(lambda: (run.out / "ranks" / "generation-2").exists())
    run.process.send_signal(number)
    begin = time.monotonic()
    assert run.end() == failure.EXIT_PREEMPTED, run.shown
    assert time.monotonic() - begin < 60
    assert f"stopped by {number.name}; go on from step" in run.shown.splitlines()[-1]
    assert "Traceback" not in run.shown and runs.result(run.out)["status"] == "preempted"
    check_nothing_runs(run)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=needs_horovod)])
def test_workers_that_torchrun_restarts_take_up_the_last_commit(engine: str, tmp_path: Path, cache: Path) -> None:
    """The same number of ranks again, hence the same weights as without any death."""
    settings = {**runs.TINY, "train.num_samples": 120, "train.checkpoint_every_steps": 10}
    reference, out = tmp_path / "reference", tmp_path / "run"
    words = ["lane-small", "--engine", engine, "--set", "distributed.transport=gloo"]
    done = runs.run(runs.command("train", *words, "--ranks", "2", "--out", str(reference), settings=settings), cache)
    assert done.returncode == 0, done.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    torchrun += ["--master-port", "29741", "-m"]
    argv = runs.command("train", *words, "--resume-if-possible", "--out", str(out), settings=settings)
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*torchrun, *argv[2:]], stdout=output, stderr=output, env=runs.environment(cache), cwd=runs.ROOT
        )
    try:
        metrics, deadline = out / "metrics.jsonl", time.monotonic() + 200
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 14):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
            time.sleep(0.02)
        workers = [p for p in psutil.Process(process.pid).children() if "--resume-if-possible" in _words(p)]
        assert len(workers) == 2
        workers[1].kill()
        assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
    finally:
        process.kill()
    first, second = read_generations(out)
    assert (first.last_step, second.first_step, second.last_step) == (10, 11, 30)
    assert first.cause != "finished" and second.cause == "finished"
    assert runs.result(out)["checkpoint"]["weights_sha256"] == runs.result(reference)["checkpoint"]["weights_sha256"]


# Rules, without ranks


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
