"""`doctor` on GPU nodes: a fault that would spoil a night is told with its cure, a sound node is told in few lines."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perception.errors import UserError
from perception.gpu import NoNvml
from perception.gpu_node import GpuDetails, GpuNode, GpuPair, GpuProcess
from pipelines import doctor
from pipelines.doctor_compare import compare_nodes
from pipelines.finding import Finding
from pipelines.gpu_findings import gpu_findings
from tests.perception.nvml_double import build_double

GPU = GpuDetails(
    0,
    name="NVIDIA H100",
    pci_address="00000000:3B:00.0",
    memory_bytes=80 << 30,
    sm_clock_mhz=345,
    max_sm_clock_mhz=1980,
    throttle_reasons=("idle",),
    persistence=True,
    ecc=True,
    corrected_errors=0,
    uncorrected_errors=0,
    remapping_pending=False,
    remapping_failed=False,
    pcie_width=16,
    max_pcie_width=16,
    nvlinks=(True,) * 18,
    fabric="completed",
    mig=False,
    processes=(),
)
OTHER = replace(GPU, index=1, pci_address="00000000:3C:00.0")
PAIR = GpuPair(0, 1, "between NUMA nodes", True, True)
NODE = GpuNode("550.54.15", "550.54.15", (12, 4), (GPU, OTHER), (PAIR,), {})
TORCH = {"cuda": "12.4", "cuda_usable": True}


def of_second(**values: Any) -> GpuNode:
    return replace(NODE, gpus=(GPU, replace(OTHER, **values)))


def test_a_sound_node_is_told_in_few_lines_and_nothing_is_wrong() -> None:
    findings = gpu_findings(NODE, TORCH)
    assert [(finding.name, finding.state) for finding in findings] == [
        (name, "ok") for name in ("gpu driver", "gpu 0", "gpu 1", "nvlink", "gpu errors")
    ]
    assert findings[0].value == "550.54.15, runs CUDA up to 12.4"
    assert findings[1].value == "NVIDIA H100, 80 GiB"


def test_a_node_that_tells_nothing_is_not_accused() -> None:
    silent = GpuNode(gpus=(GpuDetails(0), GpuDetails(1)), pairs=(GpuPair(0, 1, None, None, None),))
    assert all(finding.state in ("ok", "note") for finding in gpu_findings(silent, TORCH))


LINKS_DOWN = replace(OTHER, nvlinks=(True,) * 16 + (False,) * 2)
FAULTS: list[tuple[str, GpuNode, str, str, str]] = [
    ("gpu 1", of_second(fault="lost"), "warning", "lost (PCI 00000000:3C:00.0)", "leave this node out"),
    ("gpu 1", of_second(fault="needs a reset"), "warning", "needs a reset", "--gpu-reset"),
    (
        "gpu 1 throttles",
        of_second(throttle_reasons=("power cap", "hardware thermal"), temperature_celsius=92.0),
        "warning",
        "hardware thermal at 92 °C (345 of 1980 MHz)",
        "cooling",
    ),
    ("gpu 1 clocks", of_second(throttle_reasons=("clocks set by a user",)), "note", "held down", "--reset-gpu-clocks"),
    ("gpu 1 memory", of_second(remapping_failed=True), "warning", "could not be replaced", "have it replaced"),
    ("gpu 1 memory", of_second(remapping_pending=True), "warning", "waits for a reset", "before the night"),
    ("gpu 1 ecc", of_second(uncorrected_errors=2), "warning", "since the driver was loaded: 2", "--gpu-reset"),
    ("gpu 1 ecc", of_second(ecc=False), "note", "switched off", "--ecc-config=1"),
    ("gpu 1 persistence", of_second(persistence=False), "warning", "off", "nvidia-smi -pm 1"),
    ("gpu 1 pcie", of_second(pcie_width=4), "warning", "x4 of x16", "slot"),
    ("gpu 1 nvswitch", of_second(fabric="in progress"), "warning", "in progress", "nvidia-fabricmanager"),
    (
        "gpu 1 nvlink",
        replace(NODE, gpus=(GPU, LINKS_DOWN)),
        "warning",
        "16 links up, others have 18 (down: 16, 17)",
        "nvlink --status",
    ),
    (
        "nvlink",
        replace(NODE, pairs=(replace(PAIR, nvlink=False),)),
        "warning",
        "missing between 0-1; they use PCIe (between NUMA nodes)",
        "topo -m",
    ),
    (
        "nvlink",
        GpuNode(gpus=(replace(GPU, nvlinks=None), replace(OTHER, nvlinks=None)), pairs=(replace(PAIR, nvlink=False),)),
        "note",
        "none; GPUs reach each other by between NUMA nodes",
        "lower scaling factor",
    ),
    (
        "nvlink",
        GpuNode(gpus=(replace(GPU, nvlinks=(False,)), replace(OTHER, nvlinks=(False,))), pairs=(PAIR,)),
        "note",
        "none (the GPUs could: no link is up)",
        "PCIe",
    ),
    ("gpu peer access", replace(NODE, pairs=(replace(PAIR, peer_access=False),)), "warning", "none between 0-1", "ACS"),
    (
        "gpu models",
        of_second(name="NVIDIA A100"),
        "warning",
        "mixed: 1 x NVIDIA H100, 80 GiB, 1 x NVIDIA A100, 80 GiB",
        "PCI_BUS_ID",
    ),
    ("gpu driver", replace(NODE, kernel_module="535.1"), "warning", "but kernel module 535.1", "reboot"),
    (
        "gpu errors",
        replace(NODE, xids={"0000:3c:00": {79: 2}, "0000:99:00": {13: 1}}),
        "warning",
        "gpu 1: Xid 79 (fell off the bus) x 2; gpu 0000:99:00: Xid 13 x 1",
        "leave the node out",
    ),
    ("gpu errors", replace(NODE, xids=None), "note", "may not be read", "dmesg"),
    (
        "gpu 1 in use",
        of_second(processes=(GpuProcess(17, "python", 3 << 30), GpuProcess(18, None, None))),
        "warning",
        "process 17 python, 3.0 GiB, process 18",
        "CUDA_VISIBLE_DEVICES",
    ),
]


@pytest.mark.parametrize(("name", "node", "state", "value", "cure"), FAULTS, ids=lambda value: str(value)[:24])
def test_a_fault_is_told_with_its_cure(name: str, node: GpuNode, state: str, value: str, cure: str) -> None:
    found = [finding for finding in gpu_findings(node, TORCH) if finding.name == name]
    assert len(found) == 1 and found[0].state == state
    assert value in found[0].value and cure in found[0].cure


def test_errors_of_programs_alone_are_no_fault_of_the_node() -> None:
    found = {finding.name: finding for finding in gpu_findings(replace(NODE, xids={"0000:3b:00": {13: 4}}), TORCH)}
    assert found["gpu errors"] == Finding("gpu errors", "gpu 0: Xid 13 x 4")


def test_missing_links_of_eight_gpus_are_one_line() -> None:
    gpus = tuple(replace(GPU, index=index) for index in range(8))
    pairs = tuple(
        GpuPair(first, second, "host bridge" if first < 4 else "one NUMA node", False, True)
        for first in range(8)
        for second in range(first + 1, 8)
    )
    lines = [f for f in gpu_findings(replace(NODE, gpus=gpus, pairs=pairs), TORCH) if f.name == "nvlink"]
    assert [line.value for line in lines] == [
        "missing between 0-1, 0-2, 0-3, 0-4 and 24 more pairs; "
        "they use PCIe (host bridge (22 pairs), one NUMA node (6 pairs))"
    ]


@pytest.mark.parametrize(
    ("torch", "value"),
    [
        ({"cuda": None, "cuda_usable": False}, "this build of torch cannot use them"),
        ({"cuda": "13.0", "cuda_usable": False}, "built for CUDA 13.0, the driver runs less"),
        ({"cuda": "12.8", "cuda_usable": False}, "torch finds none that it can use"),
        ({"cuda": "12.8", "cuda_usable": True}, ""),
        ({"error": "not there"}, ""),
    ],
)
def test_torch_that_cannot_use_the_gpus(torch: dict[str, Any], value: str) -> None:
    found = [finding.value for finding in gpu_findings(NODE, torch) if finding.name == "torch on GPUs"]
    assert found == ([value] if value else [])


def test_no_gpu_is_a_note_and_a_driver_that_fails_a_warning() -> None:
    none = NoNvml("NVML says: no", "mend it", False)
    assert gpu_findings(GpuNode(none=none), TORCH) == [Finding("gpus", "none (NVML says: no)", "note", "mend it")]
    for node in (GpuNode(none=replace(none, is_fault=True)), GpuNode(kernel_module="550.1", none=none)):
        assert [finding.state for finding in gpu_findings(node, TORCH)] == ["warning"]
    [_, finding] = gpu_findings(GpuNode("550.1"), TORCH)
    assert finding.state == "note" and "none: the driver knows none" in finding.value


# --- The command ---


def test_doctor_asks_the_library_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_double(tmp_path / "nvml")))
    monkeypatch.setenv("NVML_DOUBLE", "gpus=2;1.persistence=0;1.*=15")
    found = {finding.name: finding for finding in doctor._gpus(TORCH)}
    assert found["gpu 0"].state == "ok" and found["gpu 1"].value == "lost"
    monkeypatch.setenv("NVML_DOUBLE", "sleep=600")
    started = time.monotonic()
    [finding] = doctor._gpus(TORCH, timeout_seconds=1.0)
    assert finding.value == "asking NVML failed: no answer within 1 s" and "leave this node out" in finding.cure
    assert time.monotonic() - started < 10


def report(folder: Path, node: str, *findings: Finding) -> Path:
    path = folder / f"{node}.json"
    path.write_text(json.dumps({"ok": True, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    return path


def test_nodes_are_compared(tmp_path: Path) -> None:
    driver, off = Finding("gpu driver", "550.1"), Finding("gpu 0 persistence", "off", "warning", "switch it on")
    memory = [Finding("memory", f"{free} GiB free") for free in (1, 2)]
    alike = [report(tmp_path, f"n{number}", driver, memory[number]) for number in (0, 1)]
    assert compare_nodes(alike) == [Finding("nodes", "2 alike, nothing to mend")]
    third = report(tmp_path, "n2", Finding("gpu driver", "535.1"), off, Finding("gpu 0", "A100"))
    assert [(finding.name, finding.value) for finding in compare_nodes([*alike, third])] == [
        ("gpu driver", "550.1 (n0, n1); 535.1 (n2)"),
        ("gpu 0", "not there (n0, n1); A100 (n2)"),
        ("n2: gpu 0 persistence", "off"),
    ]


def test_what_is_no_report_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.__main__ import main

    good = report(tmp_path, "good", Finding("python", "3.11"))
    (tmp_path / "bad.json").write_text('{"findings": [{"nam": "x"}]}')
    for files, message in [
        (["bad.json", "good.json"], "bad.json: no report of `doctor --json`"),
        (["none.json", "good.json"], "none.json: no report"),
        (["good.json"], "give the reports of two nodes or more"),
    ]:
        with pytest.raises(UserError, match=re.escape(message)) as error:
            main(["doctor", "--compare", *(str(tmp_path / name) for name in files)])
        assert "\n" not in str(error.value)
    other = report(tmp_path, "other", Finding("python", "3.12"))
    assert main(["doctor", "--compare", str(good), str(other)]) == 1
    assert "!  python  3.11 (good); 3.12 (other)" in capsys.readouterr().out
    assert main(["doctor", "--compare", str(good), str(report(tmp_path, "same", Finding("python", "3.11")))]) == 0
