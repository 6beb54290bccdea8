"""`bench allreduce`: its arithmetic, its groups of processes, and whole measurements of a tiny kind."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from perception.errors import UserError
from pipelines.__main__ import main
from pipelines.bench import allreduce, allreduce_report, allreduce_rounds
from pipelines.bench.allreduce_rounds import Measured, Turn
from pipelines.bench.allreduce_variants import Candidate, Variant, all_variants, chosen_variants
from pipelines.bench.intervals import median_interval, paired_ratio
from pipelines.bench.rank_group import RankGroup, socket_path
from tests.ranks import ROOT

ALONE, LIMIT, OURS, OURS_SLOW, DDP, HOROVOD = (
    Variant("one process", "plain", "torch", "gloo"),
    Variant("limit", "plain", "torch", "gloo"),
    Variant("ours/torch-gloo/engine", "ours", "torch", "gloo"),
    Variant("ours/horovod-gloo/engine", "ours", "horovod", "gloo"),
    Variant("ddp/gloo", "ddp", "torch", "gloo"),
    Variant("horovod-optimizer/mpi", "horovod_optimizer", "horovod", "mpi", note="contiguous"),
)


def a_plan(*arguments: str) -> allreduce.Plan:
    import argparse

    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    (plan,) = allreduce._plans(parser.parse_args(list(arguments)))
    return plan


# --- Intervals


def test_a_disturbance_of_a_whole_round_cancels() -> None:
    limit = [1.0, 9.0, 1.0, 4.0, 1.0]
    ratio = paired_ratio(limit, [2 * value for value in limit])
    assert (ratio.value, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(5)
    intervals = [median_interval([draw.gauss(1.0, 0.1) for _ in range(9)]) for _ in range(80)]
    held = sum(interval.low <= 1.0 <= interval.high for interval in intervals)
    assert 0.88 <= held / len(intervals) <= 0.995
    assert statistics.mean(interval.high - interval.low for interval in intervals) < 0.25


# --- Arithmetic of the report


@pytest.fixture
def measured() -> Measured:
    """Three rounds; the second is twice as slow for all."""
    variants = [ALONE, LIMIT, OURS, OURS_SLOW, DDP, HOROVOD]
    turns = {
        variant.name: [Turn(value * slow, 0.01, value * slow) for slow in (1, 2, 1)]
        for variant, value in zip(variants, (0.08, 0.1, 0.125, 0.16, 0.2, 0.25), strict=True)
    }
    return Measured(
        variants=variants,
        candidates={variant.name: Candidate("as it is") for variant in variants},
        calibration={"ddp/gloo": {"as it is": 0.2}},
        steps=10,
        warm_up_steps=2,
        num_parameters=1000,
        precision="bf16",
        kept=True,
        left_out=[],
        turns=turns,
        weights={OURS.name: 0.0, DDP.name: 1e-6, HOROVOD.name: 1e-5},
    )


def test_rows_and_summary(measured: Measured) -> None:
    result = allreduce_report.evaluate(a_plan("--batch", "4"), measured)
    rows = {row["variant"]: row for row in result["rows"]}
    ours = rows[OURS.name]
    assert ours["images_per_second"] == pytest.approx(2 * 4 / 0.125)
    assert ours["scaling_factor"] == pytest.approx(2 * 0.08 / 0.125)
    assert ours["exposed_seconds"] == pytest.approx(0.025)
    assert [ours[f"ratio_to_limit{end}"] for end in ("", "_low", "_high")] == pytest.approx([0.8] * 3)
    assert (ours["engine"], ours["ranks"], ours["step_seconds"]) == ("torch-gloo", 2, 0.125)
    assert (rows["one process"]["ranks"], rows["limit"]["scaling_factor"]) == (1, pytest.approx(1.6))
    summary = result["summary"]
    assert summary["best"] == OURS.name
    assert summary["ratio_to_limit"]["value"] == pytest.approx(0.8)
    assert summary["ratio_to_ddp"]["low"] == pytest.approx(1.6)
    assert summary["ratio_to_horovod_optimizer"]["high"] == pytest.approx(2.0)
    assert result["weights"]["mismatches"] == []
    json.dumps(result)


def test_the_tables_show_every_variant(measured: Measured) -> None:
    result = allreduce_report.evaluate(a_plan(), measured)
    shown = allreduce_report.table(result)
    for variant in measured.variants:
        assert f"\n{variant.name} " in shown
    assert "0.800 [0.800, 0.800] times the throughput of limit" in shown
    assert "horovod-optimizer/mpi: contiguous" in shown
    both = allreduce_report.sweep_table([result, {**result, "ranks": 4}])
    assert both.count("ddp/gloo") == 2 and "4 ranks" in both


@pytest.mark.parametrize("difference", [2e-3, float("inf"), float("nan")])
def test_other_weights_are_a_mismatch(measured: Measured, difference: float) -> None:
    measured.weights[DDP.name] = difference
    measured.ranks_differ.append(HOROVOD.name)
    result = allreduce_report.evaluate(a_plan(), measured)
    assert result["weights"]["mismatches"] == [DDP.name, HOROVOD.name]


def test_weights_are_compared_by_the_way_they_went(tmp_path: Path) -> None:
    """A missing reduction is small beside the weights, and large beside their change."""
    initial = np.full(6, 100.0, dtype=np.float32)
    expected = initial + np.array([1, 1, 1, 1e-9, 2, 2], dtype=np.float32)
    off = expected + np.array([0, 0, 0, 0, 0.5, 0])
    for name, weights in {"reference": expected, "same": expected, "off": off}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "weights.npy", weights.astype(np.float32))
        np.save(tmp_path / name / "initial.npy", initial)
        (tmp_path / name / "names.json").write_text(json.dumps([["a", 3], ["b", 1], ["c", 2]]))
    assert allreduce_rounds._difference(tmp_path / "same", tmp_path / "reference") == 0
    expected_difference = 0.5 / np.sqrt(8)
    found = allreduce_rounds._difference(tmp_path / "off", tmp_path / "reference")
    assert found == pytest.approx(expected_difference, rel=1e-4)
    (tmp_path / "off" / "names.json").write_text(json.dumps([["a", 6]]))
    assert allreduce_rounds._difference(tmp_path / "off", tmp_path / "reference") == float("inf")


# --- Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: must be above 0"),
        (["--rounds", "0"], "--rounds 0: must be above 0"),
        (["--steps", "-1"], "--steps -1: must be above 0"),
        (["--sweep-ranks", "1,x"], "--sweep-ranks 1,x: must be whole numbers above 0"),
        (["--sweep-ranks", "0,2"], "--sweep-ranks 0,2: must be whole numbers above 0"),
        (["--model", "many-small", "--set", "model.neck_channels=8"], "--model many-small has no settings"),
        (["--set", "distributed.bucket_mb=8"], 'did you mean "distributed.bucket_mib"'),
        (["--json", "none/a.json"], "--json none/a.json: folder none does not exist"),
        (["--variants", "ours,dpd"], '--variants: "dpd" is unknown; did you mean "ddp"'),
        (["--profile-variant", "ours"], '--profile-variant "ours": give one variant by its full name'),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        main(["bench", "allreduce", *arguments])
    assert message in str(error.value)


def test_variants_by_name_and_by_family() -> None:
    chosen, _ = chosen_variants(2, ["ddp", "ours/torch-gloo"])
    names = [variant.name for variant in chosen]
    assert names == [
        "one process",
        "limit",
        "ours/torch-gloo/shared_memory",
        "ours/torch-gloo/engine",
        "ddp/gloo",
    ]


def test_a_sweep_over_ranks_may_name_what_only_some_numbers_have() -> None:
    for ranks, ours in ((1, "ours/solo"), (2, "ours/torch-gloo/engine")):
        chosen, _ = chosen_variants(ranks, ["ours/solo", "ours/torch-gloo/engine"])
        assert [variant.name for variant in chosen] == ["one process", "limit", ours]


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen, left_out = chosen_variants(2, [])
    assert len(chosen) + len(left_out) == len(all_variants(2))
    assert all(line.endswith("left out, Horovod is not installed") for line in left_out) and left_out


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, contextlib; from pipelines.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main(['bench', 'allreduce', '--help'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--sweep-ranks" in done.stdout


# --- Groups of processes

_RANK = """
import json, os, socket, sys, time
rank = int(os.environ["RANK"])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.send(json.dumps({"rank": rank, "pid": os.getpid()}).encode())
while request := connection.recv(65536):
    request = json.loads(request)
    if request["do"] == "fail" and rank == request["rank"]:
        sys.exit("this rank had enough")
    connection.send(json.dumps({"rank": rank, "square": request.get("number", 0) ** 2}).encode())
    while request["do"] == "spin" and time.sleep(0) is None:
        pass
"""


@pytest.fixture
def group(tmp_path: Path) -> Any:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    argv = [sys.executable, str(script), str(socket_path(tmp_path))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    group = RankGroup("the group", argv, 2, "torch", "gloo", environment, tmp_path)
    yield group
    group.kill()
    assert not any(_is_alive(pid) for pid in group.pids)


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_all_ranks_answer_in_order(group: RankGroup) -> None:
    assert group.ask({"do": "square", "number": 3}) == [{"rank": 0, "square": 9}, {"rank": 1, "square": 9}]
    group.end()
    assert not any(_is_alive(pid) for pid in group.pids)


def test_paused_processes_take_no_time_and_go_on(group: RankGroup) -> None:
    group.ask({"do": "spin"})
    group.pause()
    time.sleep(0.05)
    before = group.cpu_seconds()
    time.sleep(0.2)
    assert group.cpu_seconds() == before
    group.resume()
    deadline = time.monotonic() + 30
    while group.cpu_seconds() == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group.cpu_seconds() > before
    group.pause()


@pytest.mark.slow
def test_a_rank_that_ends_is_told_with_its_words(group: RankGroup, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the group: a process ended; its message is above"):
        group.ask({"do": "fail", "rank": 1})
    assert "this rank had enough" in capfd.readouterr().err


@pytest.mark.slow
def test_a_killed_rank_is_told(group: RankGroup, capfd: pytest.CaptureFixture[str]) -> None:
    group.pause()
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(UserError, match="the group: a process ended"):
        group.ask({"do": "square"})
    assert "rank 0 of 2 died of signal 9" in capfd.readouterr().err


def test_a_command_that_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with pytest.raises(UserError, match="the group: a process ended"):
        RankGroup("the group", [str(tmp_path / "none")], 1, "torch", "gloo", environment, tmp_path)
    assert "No such file or directory" in capfd.readouterr().err


# --- Real measurements


@pytest.mark.slow
def test_models_are_as_large_as_they_say() -> None:
    import torch

    from perception.benchmark_models import RESNETS, Classifier, build_workload

    for name, shape in RESNETS.items():
        with torch.device("meta"):
            model = Classifier(*shape)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert millions == pytest.approx(float(name.removeprefix("resnet-").removesuffix("m")), rel=0.04)
    one, other = (build_workload("many-small", None, (32, 32), 2, rank, seed=3) for rank in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert not torch.equal(one.batches[0], other.batches[0])
    assert [(p.numel(), p.dim()) for p in one.model.parameters()] == [(256, 1)] * 1000


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lane-small", "sign"])
def test_detectors_learn_on_their_batches(model: str) -> None:
    import torch

    from perception.benchmark_models import build_workload

    torch.set_num_threads(1)
    workload = build_workload(model, a_plan("--model", model).config, (160, 416), 2, 0, 0)
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = workload.loss(workload.model, workload.batches[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["kept", "fresh"])
def test_a_whole_measurement(processes: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--model", "many-small", "--rounds", "2", "--steps", "2", "--processes", processes]
    variants = [] if processes == "kept" else ["--variants", "ours/torch-gloo"]
    assert main(["bench", "allreduce", *arguments, *variants, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    chosen, left_out = chosen_variants(2, ["ours/torch-gloo"] if variants else [])
    assert [row["variant"] for row in result["rows"]] == [variant.name for variant in chosen]
    assert result["left_out"] == left_out and result["processes"] == processes
    assert all(len(row["step_seconds_by_round"]) == 2 and row["cpu_seconds"] > 0 for row in result["rows"])
    assert set(result["weights"]["relative_difference"]) == {v.name for v in chosen if v.method != "plain"}
    assert result["waiting_cpu_seconds"] <= 0.1
    assert result["num_parameters"] == 256_000 and "torch" in result["versions"]
    assert "ours/torch-gloo/engine after 3 fp32 steps" in capfd.readouterr().out


@pytest.mark.slow
def test_ranks_that_do_not_reduce_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = Variant("broken", "plain", "torch", "gloo")
    variants = [v for v in all_variants(2) if v.method == "plain" or v.name == "ours/torch-gloo/engine"]
    monkeypatch.setattr(allreduce_rounds, "chosen_variants", lambda *_: ([*variants, broken], []))
    path = tmp_path / "figures.json"
    arguments = ["--model", "many-small", "--rounds", "1", "--steps", "1", "--json", str(path)]
    assert main(["bench", "allreduce", *arguments]) == 1
    weights = json.loads(path.read_text())["weights"]
    assert weights["mismatches"] == ["broken"] and weights["ranks_differ"] == ["broken"]
    assert weights["relative_difference"]["broken"] > 0.1
    assert "error: broken ends with other weights than the reference" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_an_interrupt_ends_every_process(number: signal.Signals, exit_code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelines", "bench", "allreduce", "--model", "many-small", "--steps", "1000000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "many-small" in process.stdout.readline()
            # Two settings of the limit are tried: two launchers, each with two keepers and two ranks.
            deadline = time.monotonic() + 120
            while len(family := psutil.Process(process.pid).children(recursive=True)) < 10:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(60) == exit_code
        finally:
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert list(tmp_path.glob("allreduce-*")) == []


@pytest.mark.slow
def test_a_profile_is_a_table_of_operators(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "many-small", "--steps", "2", "--profile-variant", "ours/torch-gloo/engine"]
    assert main(["bench", "allreduce", *arguments]) == 0
    shown = capfd.readouterr().out
    assert "Self CPU" in shown and "aten::addcmul" in shown


def test_a_plan_keeps_what_was_asked_for() -> None:
    plan = a_plan("--model", "lane", "--full-size", "--set", "distributed.bucket_mib=3", "--variants", " ours, ddp ")
    assert (plan.config.model.input_height, plan.config.model.input_width) == (320, 800)
    assert plan.config.distributed.bucket_mib == 3.0 and plan.variants == ("ours", "ddp")
    assert replace(plan, model="many-small").image_size == (320, 800)
