"""Training from the command line: it learns, resumes to the bit, stops well, and does not depend on ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
import torch

from pipelines.configs import CONFIGS
from tests.pipelines import training_runs as runs

ENGINES = [
    pytest.param(
        "horovod",
        marks=pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
    ),
    "torch",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_a_run_leaves_what_the_design_names(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    done = runs.train(out, cache, train__num_samples=13, train__checkpoint_every_steps=2)
    assert done.returncode == 0, done.stderr
    result = runs.result(out)
    assert result["status"] == "finished" and result["samples"] == 13 and result["steps"] == 7
    assert {"culane_f1_50", "culane_f1_75", "culane_mf1", "tusimple_accuracy", "tusimple_fp", "tusimple_fn"} <= set(
        result["metrics"]
    )
    checkpoint = out / result["checkpoint"]["path"]
    assert checkpoint.exists() and len(result["checkpoint"]["weights_sha256"]) == 64
    # The newest two; here the best is the last.
    assert len(list((out / "checkpoints").glob("*.pt"))) == 2
    records = runs.metrics(out)
    assert [record["step"] for record in records] == list(range(1, 8))
    assert {"loss", "lr", "grad_norm", "images_per_second", "seconds_data", "seconds_compute"} <= set(records[0])
    picture = cv2.imread(str(out / "validation.png"))
    assert picture is not None and picture.shape[1] > 600
    assert any((out / "events").iterdir())
    environment = json.loads((out / "environment.json").read_text())
    assert environment["data"]["train"]["images"] == 100 and environment["communicator"]["ranks"] == 1
    again = runs.train(out, cache)
    assert again.returncode == 2 and "--resume" in again.stderr and "Traceback" not in again.stderr
    complete = runs.run(runs.command("train", str(out / "config.json"), "--out", str(tmp_path / "again")), cache)
    assert complete.returncode == 0
    assert runs.result(tmp_path / "again")["checkpoint"]["weights_sha256"] == result["checkpoint"]["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_equal_one(tmp_path: Path, cache: Path, engine: str) -> None:
    """fp32, batch norm synchronised, the same global batch: first gradient to 1e-5, losses to 1e-4 over 20 steps.

    The learning rate is small: assignment of proposals to lanes is discrete, and a flipped decision
    would amplify differences in the last bit.
    """
    same = {
        "train__num_samples": 158,
        "train__precision": "fp32",
        "train__sync_batch_norm": True,
        "optim__lr": 1e-4,
        "optim__lr_scaling": "none",
    }
    assert runs.train(tmp_path / "one", cache, train__batch_size_per_rank=8, **same).returncode == 0
    for number in (1, 2):
        done = runs.train(tmp_path / f"two{number}", cache, 2, engine, train__batch_size_per_rank=4, **same)
        assert done.returncode == 0, done.stderr
    one, two, again = (runs.metrics(tmp_path / name) for name in ("one", "two1", "two2"))
    assert len(one) == len(two) == 20 and one[-1]["samples"] == two[-1]["samples"] == 158
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["lr"] == a["lr"]
    assert [record["loss"] for record in two] == [record["loss"] for record in again], "two runs must be bit-equal"
    digests = [runs.result(tmp_path / name)["checkpoint"]["weights_sha256"] for name in ("two1", "two2")]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "engine"), [(1, "solo"), (2, "torch"), pytest.param(2, *ENGINES[0].values, marks=ENGINES[0].marks)]
)  # type: ignore[attr-defined]
def test_killed_at_ten_random_steps_and_resumed_to_the_bit(
    tmp_path: Path, cache: Path, ranks: int, engine: str
) -> None:
    settings = {**runs.TINY, "train.num_samples": 96 * ranks, "train.checkpoint_every_steps": 3}
    undisturbed = tmp_path / "undisturbed"
    words = ["--ranks", str(ranks), "--engine", engine]
    done = runs.run(runs.command("train", "lane-small", "--out", str(undisturbed), *words, settings=settings), cache)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "killed"
    argv = runs.command("train", "lane-small", "--out", str(out), *words, settings=settings)
    for step in sorted(random.Random(ranks).sample(range(1, 46), 10)):
        code, output = runs.start_and_signal(argv, cache, out, step, signal.SIGKILL, whole_session=False)
        assert code == -signal.SIGKILL, output
        argv = runs.command("train", "--resume", "--out", str(out), *words)
    done = runs.run(argv, cache)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    expected, actual = runs.result(undisturbed), runs.result(out)
    assert actual["checkpoint"]["weights_sha256"] == expected["checkpoint"]["weights_sha256"]
    assert actual["metrics"] == expected["metrics"]
    assert [r["step"] for r in runs.metrics(out)] == [r["step"] for r in runs.metrics(undisturbed)]
    assert [r["loss"] for r in runs.metrics(out)] == [r["loss"] for r in runs.metrics(undisturbed)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize(("ranks", "engine"), [(1, "solo"), (2, "auto")])
def test_a_stop_signal_saves_and_ends_with_75(
    tmp_path: Path, cache: Path, ranks: int, engine: str, number: signal.Signals
) -> None:
    settings = {**runs.TINY, "train.num_samples": 40 * ranks}
    words = ["--ranks", str(ranks), "--engine", engine]
    undisturbed = tmp_path / "undisturbed"
    runs.run(runs.command("train", "lane-small", "--out", str(undisturbed), *words, settings=settings), cache)
    out = tmp_path / "stopped"
    argv = runs.command("train", "lane-small", "--out", str(out), *words, settings=settings)
    code, output = runs.start_and_signal(argv, cache, out, 4, number, whole_session=False)
    assert code == 75, output
    stopped = runs.result(out)
    assert stopped["status"] == "preempted" and number.name in stopped["cause"]
    assert stopped["samples"] == stopped["steps"] * 2 * ranks < 40 * ranks
    done = runs.run(runs.command("train", "--resume", "--out", str(out), *words), cache)
    assert done.returncode == 0, done.stderr
    assert runs.result(out)["checkpoint"]["weights_sha256"] == runs.result(undisturbed)["checkpoint"]["weights_sha256"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root: " + mounted.stderr.decode().strip())
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, cache: Path, small_disk: Path) -> None:
    reference = tmp_path / "reference"
    settings = {"train__num_samples": 40, "train__checkpoint_every_steps": 5}
    runs.train(reference, cache, **settings)
    # Room for one checkpoint and the records, whatever the size of the model; not for two.
    checkpoint = max(path.stat().st_size for path in (reference / "checkpoints").glob("*.pt"))
    size = f"remount,size={checkpoint * 8 // 5}"
    subprocess.run(["mount", "-o", size, str(small_disk)], check=True)
    out = small_disk / "run"
    first = runs.train(out, cache, train__checkpoint_every_steps=5, train__num_samples=40)
    if first.returncode == 0:
        pytest.fail("the disk was meant to be too small for this run")
    assert first.returncode == 2, first.stderr
    last = first.stderr.strip().splitlines()[-1]
    assert "no space left" in last and "--resume" in last and "last good checkpoint is" in last
    assert "Traceback" not in first.stderr
    kept = sorted((out / "checkpoints").glob("*"))
    assert [path.suffix for path in kept] == [".json", ".pt"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = runs.train(out, cache, resume=True)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.result(out)["checkpoint"]["weights_sha256"] == runs.result(reference)["checkpoint"]["weights_sha256"]


@pytest.mark.slow
def test_a_truncated_checkpoint_is_passed_over(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    done = runs.train(out, cache, train__num_samples=40, train__checkpoint_every_steps=6)
    digest = runs.result(out)["checkpoint"]["weights_sha256"]
    assert done.returncode == 0
    newest = max((out / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1000])
    resumed = runs.train(out, cache, resume=True)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{newest}" in resumed.stdout and "taking the checkpoint before it" in resumed.stdout
    assert "resumed from" in resumed.stdout
    assert runs.result(out)["checkpoint"]["weights_sha256"] == digest


@pytest.mark.slow
def test_more_ranks_than_images_and_other_mistakes_are_one_line(tmp_path: Path, cache: Path) -> None:
    for words, expected in [
        (["train", "lane-smal"], 'did you mean "lane-small"'),
        (["train", "lane-small", "--set", "optim.lrr=1"], 'did you mean "optim.lr"'),
        (["train", "lane-small", "--set", "model.input_height=100"], "multiples of 32"),
        (["train", "lane-small", "--data", str(tmp_path / "nowhere")], "nowhere"),
        (["train", "lane-small", "--ranks", "2", "--engine", "solo"], "solo"),
        (["train", "--resume", "--out", str(tmp_path / "nothing")], "config.json"),
    ]:
        out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
        done = runs.run(runs.command(*words, *out), cache)
        assert done.returncode == 2, (words, done.stderr)
        assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not (tmp_path / "out" / "config.json").exists(), "a refused run must not claim its folder"


@pytest.mark.slow
def test_nonfinite_steps_are_skipped_named_and_end_the_run(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    done = runs.train(
        out,
        cache,
        2,
        "torch",
        train__num_samples=80,
        optim__lr=1e20,
        train__max_nonfinite_steps=3,
        optim__clip_norm=0.0,
    )
    assert done.returncode == 1
    assert "skipped: inf or NaN" in done.stdout and "generated-" in done.stdout
    assert runs.result(out)["status"] == "diverged"


@pytest.mark.slow
@pytest.mark.parametrize("model", list(CONFIGS))
def test_every_configuration_trains_as_it_is(tmp_path: Path, cache: Path, model: str) -> None:
    """Two steps at its own size, on images of which a part is left out by the crop."""
    few = {"train.num_samples": 4, "train.batch_size_per_rank": 2, "train.log_every_steps": 1}
    data = {"data.num_train_scenes": 100, "data.num_validation_scenes": 4}
    done = runs.run(runs.command("train", model, "--out", str(tmp_path), settings={**few, **data}), cache)
    assert done.returncode == 0, done.stderr
    assert [record["samples"] for record in runs.metrics(tmp_path)] == [2, 4]


@pytest.mark.slow
def test_a_checkpoint_holds_no_code_and_averages_buffers(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    assert runs.train(out, cache, 2, "torch", train__num_samples=40).returncode == 0
    content = torch.load(out / runs.result(out)["checkpoint"]["path"], weights_only=True)
    assert len(content["local"]["buffers"]) == 2
    assert not torch.equal(*content["local"]["buffers"]), "each rank has batch statistics of its own"


@pytest.mark.slow
def test_config_json_alone_reproduces_and_resumes_a_run_of_two_ranks(tmp_path: Path, cache: Path) -> None:
    """As the README says: no --ranks, no --engine, from any part of it."""
    out = tmp_path / "run"
    assert runs.train(out, cache, 2, train__num_samples=40).returncode == 0
    recorded = json.loads((out / "config.json").read_text())["distributed"]
    assert (recorded["engine"], recorded["transport"], recorded["num_ranks"]) == ("auto", "auto", 2)
    again = runs.run(runs.command("train", str(out / "config.json"), "--out", str(tmp_path / "again")), cache)
    assert again.returncode == 0, again.stderr
    digest = runs.result(out)["checkpoint"]["weights_sha256"]
    assert runs.result(tmp_path / "again")["checkpoint"]["weights_sha256"] == digest
    settings = {**runs.TINY, "train.num_samples": 40}
    argv = runs.command("train", "lane-small", "--ranks", "2", "--out", str(tmp_path / "cut"), settings=settings)
    runs.start_and_signal(argv, cache, tmp_path / "cut", 3, signal.SIGTERM, whole_session=False)
    resumed = runs.run(runs.command("train", "--resume", "--out", str(tmp_path / "cut")), cache)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.result(tmp_path / "cut")["checkpoint"]["weights_sha256"] == digest


@pytest.mark.slow
def test_a_refused_resumption_changes_nothing(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run"
    assert runs.train(out, cache, train__num_samples=20).returncode == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.parent.name != "ranks"}
    for setting in ("model.neck_channels=32", "optim.ema_decay_samples=0"):
        refused = runs.run(runs.command("train", "--resume", "--out", str(out), "--set", setting), cache)
        assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1, refused.stderr
        assert {path: path.read_bytes() for path in before} == before
    finished = runs.run(runs.command("train", "--resume", "--out", str(out)), cache)
    assert finished.returncode == 0 and "finished already" in finished.stdout
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_fails_says_so_in_its_result(tmp_path: Path, cache: Path, ranks: int) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    (data / "list").mkdir(parents=True)
    for name in "abcd":
        cv2.imwrite(str(data / f"{name}.jpg"), np.full((590, 1640, 3), 90, np.uint8))
        (data / f"{name}.lines.txt").write_text("600 580 620 500 640 420\n")
    # Its header is whole, so that it is found broken only when training comes to it.
    broken = data / "c.jpg"
    broken.write_bytes(broken.read_bytes()[:1500])
    (data / "list" / "train.txt").write_text("".join(f"{name}.jpg\n" for name in "abcd"))
    settings = {**runs.TINY, "train.num_samples": 40}
    words = ["--data", str(data), "--out", str(out), "--ranks", str(ranks)]
    done = runs.run(runs.command("train", "lane-small", *words, settings=settings), cache)
    assert done.returncode == 2 and "c.jpg" in done.stderr, done.stderr
    assert runs.result(out)["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_loader_workers_do_not_die_of_a_signal_to_all_processes(
    tmp_path: Path, cache: Path, number: signal.Signals
) -> None:
    """As Ctrl-C on a terminal and Slurm do it; afterwards nothing is left running."""
    out = tmp_path / "run"
    settings = {**runs.TINY, "train.num_samples": 4000, "data.workers_per_rank": 2}
    argv = runs.command("train", "lane-small", "--out", str(out), settings=settings)
    code, output = runs.start_and_signal(argv, cache, out, 4, number, whole_session=True)
    assert code == 75, output
    assert "Traceback" not in output and runs.result(out)["status"] == "preempted"
    deadline = time.monotonic() + 15
    while processes := [p for p in psutil.process_iter() if str(out) in " ".join(_words(p))]:
        assert time.monotonic() < deadline, processes
        time.sleep(0.2)
    resumed = runs.run(runs.command("train", "--resume", "--out", str(out), settings={"train.num_samples": 60}), cache)
    assert resumed.returncode == 0, resumed.stderr


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ranks.json", "process0.ready"])
def test_a_signal_during_the_measurement_ends_it_whole(tmp_path: Path, cache: Path, variant: str) -> None:
    """The first file is there when the ranks are measured, the second when the independent processes are."""
    out = tmp_path / "run"
    words = ["lane-small", "--ranks", "2", "--out", str(out), "--measure-scaling"]
    argv = runs.command("train", *words, settings=runs.TINY)
    process = subprocess.Popen(
        argv, cwd=runs.ROOT, env=runs.environment(cache), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while not (out / "scaling" / variant).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2.0 if variant == "ranks.json" else 0.0)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "Traceback" not in output and "error" not in output
    deadline = time.monotonic() + 15
    while left := [p for p in psutil.process_iter() if str(out) in " ".join(_words(p))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
