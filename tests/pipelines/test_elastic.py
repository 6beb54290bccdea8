"""Elastic training by real ranks: they die, leave and come back, and every sample is seen once an epoch."""

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
from pathlib import Path
from typing import Any

import psutil
import pytest

from perception.config import from_json
from perception.data.stream import SampleStream
from perception.distributed import failure
from perception.generations import read_generations
from pipelines.elastic import FRUITLESS_LIMIT
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
    training = open_sources(config.data, config.task).train
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
