"""The facts about the installed Horovod on which the layer stands, asked of Horovod itself by real ranks.

They tell a wheel that cannot carry the layer (another version, torch or MPI) from a fault of the layer's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from perception.distributed.rendezvous import horovod_rendezvous
from tests.ranks import launch_script, read_reports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make setup"),
]
Horovod = Any
TRANSPORTS = ("mpi", "gloo")
FLAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)


def reduce(horovod: Horovod, flat: torch.Tensor, name: str, **options: Any) -> None:
    horovod.synchronize(horovod.allreduce_async_(flat, name=name, op=horovod.Sum, **options))


# Facts that two ranks see in one run.


def fact_flat_tensors_are_reduced_in_place(horovod: Horovod) -> None:
    size, rank = horovod.size(), horovod.rank()
    for dtype in FLAT_DTYPES:
        buffer = torch.full((1003,), rank + 1, dtype=dtype)
        part = buffer[16:1000]
        address = part.data_ptr()
        reduce(horovod, part, f"flat.{dtype}")
        assert part.data_ptr() == address and (part == size * (size + 1) // 2).all()
        assert (buffer[:16] == rank + 1).all() and (buffer[1000:] == rank + 1).all()
        for op, expected in ((horovod.Max, size), (horovod.Min, 1)):
            flat = torch.full((7,), rank + 1, dtype=dtype)
            horovod.synchronize(horovod.allreduce_async_(flat, name=f"flat.{dtype}.{expected}", op=op))
            assert (flat == expected).all()
    large = torch.tensor([2**53 + 1 + rank], dtype=torch.int64)
    horovod.synchronize(horovod.allreduce_async_(large, name="large", op=horovod.Max))
    assert large.item() == 2**53 + size, "int64 must not travel as a float"


def fact_other_dtypes_are_refused(horovod: Horovod) -> None:
    """Why the layer widens them; a Horovod that takes them would spare it that."""
    for dtype in (torch.bfloat16, torch.int16, torch.bool):
        with pytest.raises(ValueError):
            reduce(horovod, torch.zeros(4, dtype=dtype), f"refused.{dtype}")


def fact_launch_order_is_free(horovod: Horovod) -> None:
    """Names pair the tensors, not the order of calls."""
    flats = [torch.full((100 + n,), float(n)) for n in range(12)]
    order = list(range(12)) if horovod.rank() == 0 else list(reversed(range(12)))
    handles = [horovod.allreduce_async_(flats[n], name=f"free.{n}", op=horovod.Sum) for n in order]
    for handle in handles:
        horovod.synchronize(handle)
    assert all((flat == n * horovod.size()).all() for n, flat in enumerate(flats))


def fact_a_name_serves_again_once_waited_for(horovod: Horovod) -> None:
    for step in range(5):
        flat = torch.full((64,), float(step))
        handle = horovod.allreduce_async_(flat, name="model0.bucket0", op=horovod.Sum)
        if horovod.rank() == 0 and step == 0:
            with contextlib.suppress(ValueError):
                horovod.allreduce_async_(torch.zeros(64), name="model0.bucket0", op=horovod.Sum)
                # Horovod may have finished the first one already.
                assert horovod.poll(handle)
        horovod.synchronize(handle)
        assert (flat == step * horovod.size()).all()


def fact_broadcast_in_place_from_every_rank(horovod: Horovod) -> None:
    for root in range(horovod.size()):
        for dtype in FLAT_DTYPES:
            flat = torch.full((33,), horovod.rank(), dtype=dtype)
            horovod.broadcast_(flat, root_rank=root, name=f"broadcast.{root}.{dtype}")
            assert (flat == root).all()


def fact_elastic_state_is_committed_and_restored(horovod: Horovod) -> None:
    from horovod.torch.elastic import TorchState

    model = torch.nn.Linear(2, 2)
    state = TorchState(model=model, epoch=0)
    with torch.no_grad():
        model.weight.fill_(float(horovod.rank()))
    state.epoch = horovod.rank()
    state.sync()
    assert state.epoch == 0 and (model.weight == 0).all(), "all ranks take rank 0's"
    state.epoch = 5
    state.commit()
    state.epoch = 6
    with torch.no_grad():
        model.weight.fill_(7.0)
    state.restore()
    assert state.epoch == 5 and (model.weight == 0).all()


FACTS: dict[str, Callable[[Horovod], None]] = {
    name.removeprefix("fact_"): function for name, function in dict(globals()).items() if name.startswith("fact_")
}


def facts_main(folder: Path) -> None:
    import horovod.torch as horovod

    horovod.init()
    failures: dict[str, str] = {}
    for name, function in FACTS.items():
        try:
            function(horovod)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
        reduce(horovod, torch.zeros(1), f"after.{name}")
    (folder / f"rank{horovod.rank()}.json").write_text(json.dumps(failures))
    horovod.shutdown()


@cache
def failures_of(transport: str) -> list[dict[str, Any]]:
    folder = Path(mkdtemp(prefix="horovod-wheel-"))
    launched = launch_script(Path(__file__), ["facts", str(folder)], 2, "horovod", transport, folder)
    assert launched.exit_code == 0, launched.errors
    return read_reports(folder, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fact", list(FACTS))
def test_fact(fact: str, transport: str) -> None:
    for rank, failures in enumerate(failures_of(transport)):
        assert fact not in failures, f"rank {rank}:\n{failures[fact]}"


# Facts that need a run of their own.


def run(what: str, transport: str, ranks: int, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run one of the mains below as ranks, which must end well; returns what rank 0 wrote."""
    launched = launch_script(
        Path(__file__), [what, str(folder)], ranks, "horovod", transport, folder, 120, environment=environment
    )
    assert launched.exit_code == 0, launched.errors + launched.output
    return launched.output + launched.errors


def process_sets_main(folder: Path) -> None:
    """Two hosts of two ranks, emulated: each rank reduces with its like of the other host."""
    import horovod.torch as horovod

    across = [horovod.ProcessSet([0, 2]), horovod.ProcessSet([1, 3])]
    within = [horovod.ProcessSet([0, 1]), horovod.ProcessSet([2, 3])]
    if folder.name == "static":
        horovod.init(process_sets=across + within)
    else:
        horovod.init(process_sets="dynamic")
        for process_set in across + within:
            horovod.add_process_set(process_set)
    rank = horovod.rank()
    own_across, own_within = across[rank % 2], within[rank // 2]
    for dtype in FLAT_DTYPES:
        flat = torch.full((50 + 50 * (rank % 2),), rank, dtype=dtype)
        reduce(horovod, flat, f"across.{dtype}", process_set=own_across)
        assert (flat == 2 * (rank % 2) + 2).all(), flat[:3]
    flat = torch.full((5,), float(rank))
    horovod.broadcast_(flat, root_rank=rank % 2, name="from the first host", process_set=own_across)
    assert (flat == rank % 2).all()
    # Three sets at once, started in another order on each rank.
    groups = [(own_across, 2 * (rank % 2) + 2), (own_within, 4 * (rank // 2) + 1), (horovod.global_process_set, 6)]
    flats = [torch.full((3000,), float(rank)) for _ in groups]
    handles = [
        horovod.allreduce_async_(flats[n], name=f"at once.{n}", op=horovod.Sum, process_set=groups[n][0])
        for n in [(n + rank) % 3 for n in range(3)]
    ]
    for handle in handles:
        horovod.synchronize(handle)
    assert all((flat == total).all() for flat, (_, total) in zip(flats, groups, strict=True))
    with pytest.raises(ValueError, match="not a member"):
        reduce(horovod, torch.zeros(1), "foreign", process_set=across[1 - rank % 2])
    # One set goes on while the ranks of the other sleep.
    began = time.perf_counter()
    if rank % 2 == 0:
        for n in range(5):
            reduce(horovod, torch.zeros(8), f"alone.{n}", process_set=own_across)
        assert time.perf_counter() - began < 10
    else:
        time.sleep(10)
    reduce(horovod, torch.zeros(1), "end")
    horovod.shutdown()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_process_sets_on_four_ranks(kind: str, transport: str, tmp_path: Path) -> None:
    (tmp_path / kind).mkdir()
    run("process_sets", transport, 4, tmp_path / kind)


def fusion_main(folder: Path) -> None:
    import horovod.torch as horovod

    horovod.init()
    for step in range(5):
        flats = [torch.ones(200) for _ in range(8)]
        handles = [
            horovod.allreduce_async_(flat, name=f"fused.{step}.{n}", op=horovod.Sum) for n, flat in enumerate(flats)
        ]
        for handle in handles:
            horovod.synchronize(handle)
    horovod.shutdown()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fusion_threshold_of_zero_is_kept(transport: str, tmp_path: Path) -> None:
    """Else flat buckets would be copied once more. A long cycle has all tensors ready together."""
    copies = {}
    for threshold in (0, 1 << 20):
        timeline = tmp_path / f"timeline-{threshold}.json"
        settings = {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_CYCLE_TIME": "50"}
        folder = tmp_path / str(threshold)
        folder.mkdir()
        run("fusion", transport, 2, folder, {**settings, "HOROVOD_FUSION_THRESHOLD": str(threshold)})
        copies[threshold] = timeline.read_text().count("MEMCPY_IN_FUSION_BUFFER")
    assert copies[0] == 0 and copies[1 << 20] > 0, copies


def reinit_main(folder: Path) -> None:
    """Three rounds of init and shutdown in one process.

    Over MPI Horovod finalises the MPI that it initialised itself, after which there is no way back, so MPI is
    initialised before it. Over Gloo a quick rank would read a slow one's address of the round before from the
    store and abort, so each round has a store of its own.
    """
    import horovod.torch as horovod

    over_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL) if over_mpi else None
    if mpi is not None:
        assert mpi.MPI_Init_thread(None, None, 3, ctypes.byref(ctypes.c_int())) == 0
    with contextlib.ExitStack() as stores:
        for number in range(3):
            horovod.init()
            assert horovod.is_initialized()
            flat = torch.ones(10)
            reduce(horovod, flat, "round")
            assert (flat == horovod.size()).all()
            port = torch.zeros(1, dtype=torch.int64)
            if not over_mpi and horovod.rank() == 0:
                port[0] = stores.enter_context(horovod_rendezvous(horovod.size()))
            horovod.broadcast_(port, root_rank=0, name=f"port.{number}")
            horovod.shutdown()
            assert not horovod.is_initialized()
            os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port.item())
    if mpi is not None:
        mpi.MPI_Finalize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shutdown_and_init_again_in_one_process(transport: str, tmp_path: Path) -> None:
    run("reinit", transport, 2, tmp_path)


LATE_SECONDS = 12


def stall_main(folder: Path) -> None:
    """Rank 1 comes late by far more than the limits; each rank writes how its reduction ended."""
    import horovod.torch as horovod

    horovod.init()
    rank = horovod.rank()
    if rank == 1:
        time.sleep(LATE_SECONDS)
    began = time.perf_counter()
    try:
        reduce(horovod, torch.zeros(4), "model0.bucket3")
        error = ""
    except Exception as caught:
        error = str(caught)
    waited_seconds = time.perf_counter() - began
    (folder / f"rank{rank}.json").write_text(json.dumps({"error": error, "waited_seconds": waited_seconds}))
    # How ranks leave together is not what is looked at here.
    time.sleep(1 if rank == 1 else LATE_SECONDS + 1 - waited_seconds)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stall_check_works_over_mpi_only(transport: str, tmp_path: Path) -> None:
    """Over Gloo its list of ranks is empty (`reserve` for `resize` in gloo_controller.cc): it says and ends nothing.

    So a wait over Gloo has no end of Horovod's own; the layer must set one.
    """
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    said = run("stall", transport, 2, tmp_path, limits)
    waiting, late = read_reports(tmp_path, 2)
    if transport == "mpi":
        assert "Missing ranks:\n1: [allreduce.model0.bucket3]" in said and "Will shutdown" in said, said
        assert "Horovod has been shut down" in waiting["error"] and "Horovod has been shut down" in late["error"]
        assert waiting["waited_seconds"] < LATE_SECONDS - 1
    else:
        assert "Missing ranks" not in said and not waiting["error"] and not late["error"]
        assert waiting["waited_seconds"] > LATE_SECONDS - 4


if __name__ == "__main__":
    mains = {
        "facts": facts_main,
        "process_sets": process_sets_main,
        "fusion": fusion_main,
        "reinit": reinit_main,
        "stall": stall_main,
    }
    mains[sys.argv[1]](Path(sys.argv[2]))
