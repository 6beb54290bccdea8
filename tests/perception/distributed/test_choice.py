"""Which engine and transport a run takes."""

from __future__ import annotations

import importlib.util

import pytest

from perception.config import DistributedConfig
from perception.distributed import choice
from perception.errors import UserError

INSTALLED = importlib.util.find_spec("horovod") is not None


def without_horovod(monkeypatch: pytest.MonkeyPatch, installed: bool = False) -> None:
    def find(name: str) -> object:
        return object() if installed else None

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize(
    ("engine", "size", "installed", "expected"),
    [
        ("auto", 1, True, "solo"),
        ("auto", 1, False, "solo"),
        ("auto", 2, True, "horovod"),
        ("auto", 2, False, "torch"),
        ("horovod", 8, True, "horovod"),
        ("horovod", 1, True, "horovod"),
        ("torch", 8, False, "torch"),
        ("solo", 1, False, "solo"),
    ],
)
def test_engine(engine: str, size: int, installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_horovod(monkeypatch, installed)
    assert choice.choose_engine(engine, size) == expected


def test_engines_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    without_horovod(monkeypatch)
    with pytest.raises(
        UserError, match=r"distributed\.engine = horovod, but Horovod is not installed: run `make setup`"
    ):
        choice.choose_engine("horovod", 2)
    with pytest.raises(UserError, match=r"distributed\.engine = solo cannot have 2 ranks"):
        choice.choose_engine("solo", 2)


@pytest.mark.parametrize(
    ("engine", "transport", "on_gpu", "mpi", "expected"),
    [
        ("horovod", "auto", True, True, "nccl"),
        ("torch", "auto", True, False, "nccl"),
        ("horovod", "auto", False, True, "mpi"),
        ("horovod", "auto", False, False, "gloo"),
        ("torch", "auto", False, True, "gloo"),
        ("horovod", "gloo", False, True, "gloo"),
        ("horovod", "mpi", False, True, "mpi"),
        ("torch", "gloo", True, False, "gloo"),
        ("torch", "nccl", True, False, "nccl"),
    ],
)
def test_transport(engine: str, transport: str, on_gpu: bool, mpi: bool, expected: str) -> None:
    assert choice.choose_transport(engine, transport, on_gpu, mpi) == expected


@pytest.mark.parametrize(
    ("engine", "transport", "message"),
    [
        ("torch", "mpi", "needs distributed.engine = horovod"),
        ("torch", "nccl", "no GPU is seen: take gloo"),
        ("horovod", "nccl", "no GPU is seen"),
        ("horovod", "mpi", "built without MPI"),
    ],
)
def test_transports_that_cannot_be(engine: str, transport: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choice.choose_transport(engine, transport, on_gpu=False, mpi=False)


def test_launch_of_torch_ranks_needs_no_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    without_horovod(monkeypatch)
    engine, transport = choice.choose_launch(DistributedConfig(), 2)
    assert engine == "torch" and transport in ("gloo", "nccl")
    with pytest.raises(UserError, match="transport = mpi needs"):
        choice.choose_launch(DistributedConfig(transport="mpi"), 2)


@pytest.mark.skipif(not INSTALLED, reason="Horovod is not installed")
def test_launch_takes_what_the_installed_horovod_has() -> None:
    engine, transport = choice.choose_launch(DistributedConfig(), 2)
    assert engine == "horovod"
    assert transport in ("nccl", "mpi" if choice.horovod_has_mpi() else "gloo")
