"""`bench replay` and `bench record`: what is started, what is made of the figures, which mistakes are told."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perception.errors import UserError
from perception.replay import ReplayedSteps
from perception.scaling.profile import GradientReady, StepProfile, read_profile, write_profile
from pipelines.__main__ import main
from pipelines.bench import replay
from pipelines.bench.replay import Plan, Variant

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make setup with ENGINE unset"
)
PROFILE = StepProfile(
    "lane",
    "some accelerator",
    "bf16",
    4,
    0.02,
    0.05,
    0.01,
    tuple(GradientReady(f"g{i}", 1000, 4, 0.01 * i) for i in range(5)),
)


class Launched:
    """Stands for the ranks: each launch is recorded, each turn takes 100 ms, 10 ms more with each launch."""

    def __init__(self) -> None:
        self.launches: list[list[Variant]] = []
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan, variants: Sequence[Variant], folder: Path) -> list[ReplayedSteps]:
        self.launches.append(list(variants))
        self.plans.append(plan)
        step = 0.09 + 0.01 * len(self.launches)
        ranks = range(plan.ranks)
        return [
            ReplayedSteps(
                [[step] * plan.steps for _ in ranks],
                [[0.012] * plan.steps for _ in ranks],
                [[0.004] * plan.steps for _ in ranks],
                [[0.001] * plan.steps for _ in ranks],
                [[0.003] * plan.steps for _ in ranks],
                0.5,
                0.75,
            )
            for _ in variants
        ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    stand_in = Launched()
    monkeypatch.setattr(replay, "_launch", stand_in)
    return stand_in


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    return path


def test_figures_and_the_line_that_says_replay(
    launched: Launched, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "replay.json"
    options = ["--engine", "torch", "--ranks", "4", "--rounds", "1", "--steps", "7", "--json", str(path)]
    assert main(["bench", "replay", str(profile), *options]) == 0
    shown = capsys.readouterr().out
    assert "REPLAY: compute is a recording (some accelerator), the all-reduce is real on this host" in shown
    assert "3.20 of 4" in shown and "careful" not in shown
    figures = json.loads(path.read_text())
    assert figures["replay"] is True and figures["profile"]["device"] == "some accelerator"
    (row,) = figures["variants"]
    assert row["recorded_step_seconds"] == pytest.approx(0.08)
    assert row["step_seconds"] == pytest.approx(0.1)
    assert row["exposed_seconds"] == pytest.approx(0.008)
    assert row["straggler_seconds"] == pytest.approx(0.004)
    assert row["other_seconds"] == pytest.approx(0.1 - 0.08 - 0.012)
    assert row["scaling_factor"] == pytest.approx(4 * 0.08 / 0.1)
    assert (row["mean_lag_seconds"], row["max_lag_seconds"]) == (pytest.approx(0.001), pytest.approx(0.003))
    assert (row["distributed"]["engine"], row["distributed"]["transport"]) == ("torch", "gloo")


@pytest.mark.slow
def test_a_models_name_is_an_estimate(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--node", "dgx-a100", "--images-per-second", "2000", "--batch", "8", "--engine", "torch"]
    assert main(["bench", "replay", "lane-small", *options]) == 0
    assert launched.plans[0].profile.images_per_second == pytest.approx(2000)
    assert "REPLAY: compute is an estimate (A100; 2000 images/s" in capsys.readouterr().out


def test_a_stretched_recording_says_so(launched: Launched, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", str(profile), "--images-per-second", "2000", "--engine", "torch"]) == 0
    assert launched.plans[0].profile.images_per_second == pytest.approx(2000)
    assert "a recording (H100; recorded on some accelerator, stretched to 2000 images/s)" in capsys.readouterr().out


def test_buckets_share_processes_and_rounds_are_interleaved(launched: Launched, profile: Path) -> None:
    sizes = [1, 4, 25]
    compared = [word for size in sizes for word in ("--compare", f"distributed.bucket_mib={size}")]
    common = ["--engine", "torch", "--set", "distributed.first_bucket_mib=0.5", "--rounds", "2"]
    assert main(["bench", "replay", str(profile), *common, *compared]) == 0
    (variants,) = launched.launches
    assert [each.distributed.bucket_mib for each in variants] == [1, 4, 25, 1, 4, 25]
    assert {each.distributed.first_bucket_mib for each in variants} == {0.5}


@needs_horovod
def test_engines_have_processes_of_their_own(
    launched: Launched, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "replay.json"
    compared = [
        "--compare",
        "distributed.engine=torch",
        "distributed.bucket_mib=4",
        "--compare",
        "distributed.engine=horovod",
    ]
    assert main(["bench", "replay", str(profile), "--rounds", "3", *compared, "--json", str(path)]) == 0
    engines = [[each.distributed.engine for each in variants] for variants in launched.launches]
    assert engines == [["torch"], ["horovod"]] * 3
    rows = json.loads(path.read_text())["variants"]
    assert [row["variant"] for row in rows] == [
        "distributed.engine=torch distributed.bucket_mib=4",
        "distributed.engine=horovod",
    ]
    assert rows[0]["step_seconds_by_round"] == pytest.approx([0.10, 0.12, 0.14])
    assert rows[1]["step_seconds"] == pytest.approx(0.13)
    overlap = "rounds do not tell distributed.engine=torch distributed.bucket_mib=4 from distributed.engine=horovod"
    assert overlap in capsys.readouterr().out


def test_slowdown_stretches_everything(launched: Launched, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", str(profile), "--engine", "torch", "--slowdown", "5"]) == 0
    slow = launched.plans[0].profile
    assert slow.step_seconds == pytest.approx(5 * PROFILE.step_seconds)
    assert [g.ready_seconds for g in slow.gradients] == pytest.approx([5 * g.ready_seconds for g in PROFILE.gradients])
    assert "all times x 5 by --slowdown" in capsys.readouterr().out


def test_a_replay_that_means_little_says_so(
    launched: Launched, profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy_and_late(plan: Plan, variants: Sequence[Variant], folder: Path) -> list[ReplayedSteps]:
        late = [[0.02] * plan.steps for _ in range(plan.ranks)]
        return [replace(steps, host_cpu_share=0.97, lag_seconds=late) for steps in launched(plan, variants, folder)]

    monkeypatch.setattr(replay, "_launch", busy_and_late)
    assert main(["bench", "replay", str(profile), "--engine", "torch"]) == 0
    shown = capsys.readouterr().out
    assert "careful: the host's cores were busy 97% of the time (ranks: 0.50 cores)" in shown
    assert "careful: gradients were late by 25% of a recorded step" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks of at least 2"),
        (["--steps", "0"], "--steps and --rounds of at least 1"),
        (["--slowdown", "0"], "--slowdown 0.0: must be a number above 0"),
        (["--slowdown", "nan"], "--slowdown nan: must be a number above 0"),
        (["--jitter-fraction", "1.5"], r"--jitter-fraction 1.5: must be in \[0, 1\)"),
        (["--json", "none/a.json"], "--json none/a.json: folder none does not exist"),
        (["--set", "train.seed=1"], r"train.seed=1: a replay has no settings but those of distributed.\*"),
        (["--compare", "optim.lr=1"], r"optim.lr=1: a replay has no settings but those of distributed.\*"),
        (["--compare", "distributed.bucket_mb=1"], 'did you mean "distributed.bucket_mib"'),
        (["--node", "dgx-x"], "dgx-"),
        (["--engine", "solo"], "solo cannot have 8 ranks"),
        (["--engine", "torch", "--compare", "distributed.transport=mpi"], "mpi needs distributed.engine = horovod"),
        (["--ranks", "100000000"], r"100000000 ranks of lane need .* GiB, this host has .* GiB left"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: list[str],
    message: str,
    launched: Launched,
    profile: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main(["bench", "replay", str(profile), "--engine", "torch", *arguments])
    assert launched.launches == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ('{"model": "lane"}', "device is missing"),
        (json.dumps({**json.loads(json.dumps(PROFILE.__dict__, default=vars)), "gradients": []}), "non-empty list"),
    ],
)
def test_a_bad_profile_is_one_line(content: str | None, message: str, launched: Launched, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as raised:
        main(["bench", "replay", str(path)])
    assert "\n" not in str(raised.value) and "bad.json" in str(raised.value)
    assert launched.launches == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=needs_horovod)])
def test_eight_ranks(engine: str, profile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "replay.json"
    options = ["--ranks", "8", "--rounds", "2", "--steps", "4", "--slowdown", "4", "--json", str(path)]
    compared = ["--compare", "distributed.bucket_mib=0.01", "--compare", "distributed.bucket_mib=25"]
    assert main(["bench", "replay", str(profile), "--engine", engine, *options, *compared]) == 0
    figures = json.loads(path.read_text())
    assert figures["ranks"] == 8 and len(figures["variants"]) == 2
    for row in figures["variants"]:
        assert len(row["step_seconds_by_round"]) == 2
        assert row["recorded_step_seconds"] == pytest.approx(0.32)
        assert row["step_seconds"] > 0.32 and 0 < row["scaling_factor"] < 8
    assert "REPLAY: compute is a recording" in capfd.readouterr().out


@pytest.mark.slow
def test_record_writes_a_profile_that_can_be_stretched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    size = ["--set", "model.input_height=64", "--set", "model.input_width=128", "--set", "train.batch_size_per_rank=2"]
    common = ["bench", "record", "lane-small", "--steps", "3", *size, "--out", str(path)]
    assert main(common) == 0
    own = read_profile(path)
    assert (own.model, own.batch_size_per_rank) == ("lane-small", 2)
    assert 1e6 < sum(gradient.numel for gradient in own.gradients) < 2e6
    assert f"written to {path}" in capsys.readouterr().out
    assert main([*common, "--images-per-second", "2000", "--device", "H100, assumed"]) == 0
    stretched = read_profile(path)
    assert stretched.images_per_second == pytest.approx(2000)
    assert stretched.device == f"H100, assumed, stretched from {own.device}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lane", "--out", "none/p.json"], "--out none/p.json: folder none does not exist"),
        (["lan", "--out", "p.json"], 'model "lan" is unknown; did you mean "lane"?'),
        (["lane", "--out", "p.json", "--steps", "0"], "--steps 0: must be at least 1"),
        (["lane", "--out", "p.json", "--device", "H100"], "--images-per-second and --device go together"),
        (
            ["lane", "--out", "p.json", "--device", "H100", "--images-per-second", "-1"],
            "--images-per-second -1.0: must be a positive number",
        ),
    ],
)
def test_mistakes_of_record(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main(["bench", "record", *arguments])
