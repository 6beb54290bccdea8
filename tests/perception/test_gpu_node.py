"""A node's GPUs before a run, through NVIDIA's own binding and a test double of its library in C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perception.gpu_node import kernel_module_in, same_address, xids_in
from tests.perception.nvml_double import build_double, run_with

EXAMINE = """
from dataclasses import asdict
from perception.gpu_node import examine_gpus, node_from_json
node = examine_gpus()
raw = json.loads(json.dumps(asdict(node)))
assert node_from_json(raw) == node
print(json.dumps(raw))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_double(tmp_path_factory.mktemp("nvml") / "new")


def test_an_old_driver_tells_what_it_can(tmp_path: Path) -> None:
    node = run_with(build_double(tmp_path / "old", old_driver=True), EXAMINE, "processes=2")
    assert [process["pid"] for process in node["gpus"][0]["processes"]] == [4000, 4001]
    assert node["gpus"][0]["fabric"] is None and node["gpus"][0]["memory_bytes"] == 80 << 30


def test_details_and_links_of_a_node(library: Path) -> None:
    settings = "1.nvlinks_down=0x3;1.p2p_nvlink=5;1.path=10;1.persistence=0;1.uncorrected=2;1.width=8;mig=1;1.fabric=1"
    node = run_with(library, EXAMINE, settings)
    first, second = node["gpus"]
    assert (node["driver"], node["cuda"], node["none"]) == ("550.54.15", [12, 4], None)
    assert first["name"] == "NVIDIA H100 80GB HBM3" and first["pci_address"] == "00000000:10:00.0"
    assert (first["power_limit_watts"], first["persistence"], first["ecc"], first["mig"]) == (700.0, True, True, True)
    assert (first["pcie_width"], first["max_pcie_width"], first["processes"]) == (16, 16, [])
    assert first["nvlinks"] == [True] * 18 and first["fabric"] is None
    assert second["nvlinks"] == [False] * 2 + [True] * 16 and second["fabric"] == "not started"
    assert (second["persistence"], second["uncorrected_errors"], second["pcie_width"]) == (False, 2, 8)
    assert node["pairs"] == [{"first": 0, "second": 1, "path": "one PCIe switch", "nvlink": False, "peer_access": True}]


def test_what_a_node_does_not_tell_is_unknown(library: Path) -> None:
    silent = "nvlinks=0;nvmlDeviceGetP2PStatus=3;nvmlDeviceGetTopologyCommonAncestor=3;nvmlDeviceGetEccMode=3"
    silent += ";nvmlDeviceGetTotalEccErrors=3;nvmlDeviceGetRemappedRows=3;nvmlDeviceGetComputeRunningProcesses_v3=3"
    node = run_with(library, EXAMINE, silent)
    first = node["gpus"][0]
    unknown = ("nvlinks", "ecc", "corrected_errors", "uncorrected_errors", "remapping_pending", "processes", "fabric")
    assert [first[name] for name in unknown] == [None] * len(unknown)
    assert node["pairs"] == [{"first": 0, "second": 1, "path": None, "nvlink": None, "peer_access": None}]


def test_a_gpu_lost_half_way_keeps_what_it_told(library: Path) -> None:
    node = run_with(library, EXAMINE, "gpus=3;1.nvmlDeviceGetPersistenceMode=15;2.*=15")
    _, half, gone = node["gpus"]
    assert (half["fault"], half["memory_bytes"], half["persistence"]) == ("lost", 80 << 30, None)
    assert (gone["fault"], gone["name"]) == ("lost", None)
    assert node["pairs"] == []


def test_critical_errors_in_a_kernel_log() -> None:
    log = """
[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.
[3.0] NVRM: Xid (PCI:0000:5E:00.0): 13, pid=17, Graphics Exception
[4.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15
"""
    assert xids_in(log) == {"0000:3b:00": {79: 2}, "0000:5e:00.0": {13: 1}}
    assert xids_in("") == {}


@pytest.mark.parametrize(
    ("ours", "of_log", "same"),
    [
        ("00000000:3B:00.0", "0000:3b:00", True),
        ("00000000:3B:00.0", "0000:3c:00", False),
        ("00000001:3B:00.0", "0000:3b:00", False),
        ("00000000:3B:00.0", "0000:3b:00.0", True),
        (None, "0000:3b:00", False),
    ],
)
def test_addresses_of_nvml_and_of_the_log(ours: str | None, of_log: str, same: bool) -> None:
    assert same_address(ours, of_log) is same


def test_versions_of_kernel_modules() -> None:
    open_module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    assert kernel_module_in(open_module) == "570.86.15"
    assert kernel_module_in("GCC version: 12.2.0") is None


def test_nothing_of_it_needs_torch_or_numpy() -> None:
    program = """
import perception.gpu, perception.gpu_follower, perception.gpu_node
print(json.dumps([name in sys.modules for name in ("torch", "numpy", "pynvml")]))
"""
    answer: Any = run_with(None, program)
    assert answer == [False, False, False]
