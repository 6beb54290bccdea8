"""Which engine and transport a run takes."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from perception import distributed
from perception.config import DistributedConfig
from perception.distributed import choice
from perception.distributed.environment import RankEnvironment
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
    assert transport in ("nccl", "gloo" if choice.horovod_has("gloo") else "mpi")
    reducing = choice.choose_launch(DistributedConfig(local_reduction="engine"), 2)[1]
    assert reducing in ("nccl", "mpi" if choice.horovod_has("mpi") else "gloo")


def test_on_gpus_horovod_needs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda _: object())
    built = {"nccl": False, "mpi": True}
    monkeypatch.setattr(choice, "horovod_has", built.__getitem__)
    assert choice.choose_engine("auto", 8, on_gpu=True) == "torch"
    assert choice.choose_engine("auto", 8, on_gpu=False) == "horovod"
    with pytest.raises(UserError, match=r"built without NCCL.*or take torch"):
        choice.choose_engine("horovod", 8, on_gpu=True)
    built["nccl"] = True
    assert choice.choose_engine("auto", 8, on_gpu=True) == choice.choose_engine("horovod", 8, on_gpu=True) == "horovod"


def test_hidden_gpus_and_a_torch_without_them_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher must see what the ranks will see through torch.cuda."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(choice.Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.setattr(choice, "horovod_has", lambda _: True)
    for version, visible, transport in [
        ("2.13.0+cu130", None, "nccl"),
        ("2.13.0+cpu", None, "gloo"),
        ("2.13.0+cu130", "", "gloo"),
        ("2.13.0+cu130", "-1", "gloo"),
        ("2.13.0+cu130", "0,1", "nccl"),
    ]:
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(choice.metadata, "version", lambda _, version=version: version)
        assert choice.choose_launch(DistributedConfig(engine="torch"), 2) == ("torch", transport), (version, visible)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_gpu_of_a_slurm_task_that_sees_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from perception.distributed import start

    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert start._device(RankEnvironment(3, 8, 3, 8, 0, 1, "slurm")) == torch.device("cuda", 0)
    assert taken == [0]
    with pytest.raises(UserError, match="local rank 3 has no GPU"):
        start._device(RankEnvironment(3, 8, 3, 8, 0, 1, "torchrun"))


def test_gloo_cannot_be_had_under_mpirun() -> None:
    """Horovod would run MPI there, and the record would say Gloo."""
    place = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
    pytest.importorskip("horovod")
    with pytest.raises(UserError, match="mpirun started this rank"):
        distributed.connect(DistributedConfig(engine="horovod", transport="gloo"), environ)
