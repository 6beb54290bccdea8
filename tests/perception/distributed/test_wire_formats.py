"""fp32, fp16, bf16 and PowerSGD on the wire: convergence, exactness, bytes, inf, resumption, by two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perception.checkpoint import load_checkpoint
from tests.perception.distributed import scenarios
from tests.perception.distributed.test_layer import check, needs_horovod, reports
from tests.pipelines import training_runs as runs

engines = pytest.mark.parametrize(
    ("engine", "transport"), [("torch", "gloo"), pytest.param("horovod", "mpi", marks=needs_horovod)]
)


@pytest.mark.slow
@engines
@pytest.mark.parametrize("scenario", list(scenarios.scenarios_of("wire")))
def test_wire_format(scenario: str, engine: str, transport: str) -> None:
    check(scenario, reports(engine, transport, 2, "engine", "wire"), engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("horovod", marks=needs_horovod)])
def test_training_with_powersgd_resumes_to_the_bit(tmp_path: Path, engine: str) -> None:
    """From step 6 of 12: the same weights as without the break, as each rank takes up its own errors."""
    cache, out = tmp_path / "cache", tmp_path / "run"
    settings = {"distributed__wire_format": "powersgd", "distributed__powersgd_rank": 2}
    done = runs.train(out, cache, 2, engine, train__num_samples=48, train__checkpoint_every_steps=6, **settings)
    assert done.returncode == 0, done.stderr
    digest = runs.result(out)["checkpoint"]["weights_sha256"]
    first, last = sorted((out / "checkpoints").glob("*.pt"))
    errors = load_checkpoint(first)["local"]["reduction"]
    assert len(errors) == 2 and errors[0].any() and not torch.equal(*errors), "each rank has errors of its own"
    last.write_bytes(last.read_bytes()[:-1000])
    resumed = runs.train(out, cache, resume=True, ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "step-00000006.pt at step 6" in resumed.stdout and "gradient errors" not in resumed.stdout
    assert runs.result(out)["checkpoint"]["weights_sha256"] == digest


@pytest.mark.slow
def test_errors_of_another_wire_format_are_left_out_in_words(tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "run"
    assert runs.train(out, cache, 2, "torch", train__num_samples=16, train__checkpoint_every_steps=2).returncode == 0
    max((out / "checkpoints").glob("*.pt")).write_bytes(b"")
    words = ["train", "--resume", "--out", str(out), "--ranks", "2"]
    resumed = runs.run(runs.command(*words, settings={"distributed.wire_format": "powersgd"}), cache)
    assert resumed.returncode == 0, resumed.stderr
    assert "gradient errors do not fit distributed.wire_format or powersgd_rank" in resumed.stdout
