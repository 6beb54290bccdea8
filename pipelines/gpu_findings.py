"""What `doctor` says of a node's GPUs: faults that would spoil a night, and what they cost. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from perception.gpu import HARMFUL_REASONS
from perception.gpu_node import GpuDetails, GpuNode, GpuPair, GpuProcess, same_address
from pipelines.finding import GIB, Finding

XID_MEANINGS = {
    31: "a program's wrong memory access",
    43: "a program's own fault",
    48: "uncorrectable memory error",
    62: "internal halt",
    63: "memory row to be replaced at a reset",
    64: "memory row could not be replaced",
    74: "NVLink error",
    79: "fell off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "no answer from the GPU's firmware",
    120: "error in the GPU's firmware",
}
_PROGRAM_XIDS = (13, 31, 43, 45)
"""Of a program that failed, not of the hardware."""


def gpu_findings(node: GpuNode, torch: dict[str, Any]) -> list[Finding]:
    """Judge a node; `torch` is the answer of doctor's own probe of torch."""
    if node.none is not None:
        # A loaded module without a usable NVML is a broken GPU machine, not one without GPUs.
        is_fault = node.none.is_fault or node.kernel_module is not None
        return [Finding("gpus", f"none ({node.none.reason})", "warning" if is_fault else "note", node.none.cure)]
    if not node.gpus:
        cure = "lspci shows one? Then look at dmesg; in a container: docker run --gpus all"
        return [_driver(node), Finding("gpus", "none: the driver knows none", "note", cure)]
    findings = [_driver(node), *_models(node.gpus)]
    for gpu in node.gpus:
        findings += _of_gpu(gpu)
    findings += [*_links(node.gpus, node.pairs), _xids(node), *_processes(node.gpus), *_torch(node, torch)]
    return findings


def _driver(node: GpuNode) -> Finding:
    cuda = "" if node.cuda is None else f", runs CUDA up to {node.cuda[0]}.{node.cuda[1]}"
    value = f"{node.driver or 'unknown'}{cuda}"
    if node.driver and node.kernel_module and node.driver != node.kernel_module:
        cure = "the driver was updated under a running kernel module: reboot, or load it anew"
        return Finding("gpu driver", f"{value}, but kernel module {node.kernel_module}", "warning", cure)
    return Finding("gpu driver", value)


def _models(gpus: Sequence[GpuDetails]) -> list[Finding]:
    models = Counter(_model(gpu) for gpu in gpus if gpu.name is not None)
    if len(models) < 2:
        return []
    value = ", ".join(f"{count} x {model}" for model, count in models.items())
    cure = (
        "each step waits for the slowest: choose equal ones by CUDA_VISIBLE_DEVICES, with CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )
    return [Finding("gpu models", f"mixed: {value}", "warning", cure)]


def _model(gpu: GpuDetails) -> str:
    memory = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / GIB:.0f} GiB"
    return f"{gpu.name or 'unknown model'}{memory}"


def _of_gpu(gpu: GpuDetails) -> list[Finding]:
    """Its model, then a finding for each thing that is wrong with it."""
    name = f"gpu {gpu.index}"
    if gpu.fault:
        where = f" (PCI {gpu.pci_address})" if gpu.pci_address else ""
        cure = "leave this node out of the night; nvidia-smi --gpu-reset, else reboot; look at dmesg for its Xid"
        return [Finding(name, f"{gpu.fault}{where}", "warning", cure)]
    told = [_model(gpu)]
    if gpu.power_limit_watts is not None:
        told.append(f"limit {gpu.power_limit_watts:.0f} W")
    if gpu.mig:
        told.append("divided by MIG")
    return [Finding(name, ", ".join(told)), *_slow(gpu, name), *_memory_errors(gpu, name), *_set_up(gpu, name)]


def _slow(gpu: GpuDetails, name: str) -> list[Finding]:
    reasons = gpu.throttle_reasons or ()
    harmful = [reason for reason in reasons if reason in HARMFUL_REASONS]
    clocks = ""
    if gpu.sm_clock_mhz is not None and gpu.max_sm_clock_mhz is not None:
        clocks = f" ({gpu.sm_clock_mhz} of {gpu.max_sm_clock_mhz} MHz)"
    warmth = "" if gpu.temperature_celsius is None else f" at {gpu.temperature_celsius:.0f} °C"
    if harmful:
        cure = "cooling or power supply: every rank waits for this GPU; leave the node out until it is mended"
        return [Finding(f"{name} throttles", f"{', '.join(harmful)}{warmth}{clocks}", "warning", cure)]
    if "clocks set by a user" in reasons:
        cure = "nvidia-smi --reset-gpu-clocks, unless it is meant so"
        return [Finding(f"{name} clocks", f"held down by a setting{clocks}", "note", cure)]
    return []


def _memory_errors(gpu: GpuDetails, name: str) -> list[Finding]:
    findings = []
    if gpu.remapping_failed:
        cure = "its memory has no spare rows left: have it replaced"
        findings.append(Finding(f"{name} memory", "a faulty row could not be replaced", "warning", cure))
    elif gpu.remapping_pending:
        cure = "nvidia-smi --gpu-reset, or reboot, before the night"
        findings.append(Finding(f"{name} memory", "a faulty row waits for a reset to be replaced", "warning", cure))
    if gpu.uncorrected_errors:
        value = f"errors that could not be corrected, since the driver was loaded: {gpu.uncorrected_errors}"
        findings.append(
            Finding(f"{name} ecc", value, "warning", "nvidia-smi --gpu-reset; if they come again, replace it")
        )
    elif gpu.corrected_errors:
        findings.append(Finding(f"{name} ecc", f"{gpu.corrected_errors} errors, all corrected"))
    if gpu.ecc is False:
        cure = "memory errors go unseen: nvidia-smi --ecc-config=1, then reboot"
        findings.append(Finding(f"{name} ecc", "switched off", "note", cure))
    return findings


def _set_up(gpu: GpuDetails, name: str) -> list[Finding]:
    findings = []
    if gpu.persistence is False:
        cure = "each job waits seconds for the driver, and settings are lost: nvidia-smi -pm 1"
        findings.append(Finding(f"{name} persistence", "off", "warning", cure))
    if gpu.pcie_width is not None and gpu.max_pcie_width is not None and gpu.pcie_width < gpu.max_pcie_width:
        value = f"x{gpu.pcie_width} of x{gpu.max_pcie_width}"
        findings.append(Finding(f"{name} pcie", value, "warning", "batches arrive slower: look at its slot or riser"))
    if gpu.fabric is not None and gpu.fabric != "completed":
        cure = "CUDA will not start: systemctl start nvidia-fabricmanager, of the driver's version"
        findings.append(Finding(f"{name} nvswitch", gpu.fabric, "warning", cure))
    return findings


def _links(gpus: Sequence[GpuDetails], pairs: Sequence[GpuPair]) -> list[Finding]:
    """NVLink of all GPUs in one line where all is well, else what is missing."""
    linked = {gpu.index: gpu.nvlinks for gpu in gpus if gpu.nvlinks is not None}
    most = max((sum(links) for links in linked.values()), default=0)
    findings = []
    for index, links in linked.items():
        if most and sum(links) < most:
            down = ", ".join(str(number) for number, up in enumerate(links) if not up)
            cure = "reductions go at the speed of the slowest pair: nvidia-smi nvlink --status, then reset or mend"
            value = f"{sum(links)} links up, others have {most} (down: {down or 'none told'})"
            findings.append(Finding(f"gpu {index} nvlink", value, "warning", cure))
    apart = [pair for pair in pairs if pair.nvlink is False]
    if most and apart:
        cure = "a bridge or switch is missing between them, or its links are down: nvidia-smi topo -m"
        value = f"missing between {_shown(apart)}; they use PCIe ({_paths(apart)})"
        findings.append(Finding("nvlink", value, "warning", cure))
    elif most and not findings:
        findings.append(Finding("nvlink", f"{most} links up on each of {len(linked)} GPUs"))
    elif pairs and not most:
        equipped = " (the GPUs could: no link is up)" if linked else ""
        cure = "gradients go over PCIe: expect a lower scaling factor"
        findings.append(Finding("nvlink", f"none{equipped}; GPUs reach each other by {_paths(pairs)}", "note", cure))
    refused = [pair for pair in pairs if pair.peer_access is False]
    if refused:
        cure = "data go through the host's memory; unless the model has none: switch off ACS in the BIOS, or the IOMMU"
        findings.append(Finding("gpu peer access", f"none between {_shown(refused)}", "warning", cure))
    return findings


def _shown(pairs: Sequence[GpuPair], most: int = 4) -> str:
    shown = ", ".join(f"{pair.first}-{pair.second}" for pair in pairs[:most])
    return shown + (f" and {len(pairs) - most} more pairs" if len(pairs) > most else "")


def _paths(pairs: Iterable[GpuPair]) -> str:
    counts = Counter(pair.path or "a way that is not told" for pair in pairs)
    return ", ".join(path if len(counts) == 1 else f"{path} ({count} pairs)" for path, count in counts.items())


def _xids(node: GpuNode) -> Finding:
    if node.xids is None:
        return Finding("gpu errors", "the kernel's log may not be read here", "note", "dmesg | grep Xid, on the host")
    told = []
    worst = False
    for address, codes in node.xids.items():
        index = next((gpu.index for gpu in node.gpus if same_address(gpu.pci_address, address)), None)
        for code, count in sorted(codes.items()):
            worst |= code not in _PROGRAM_XIDS
            meaning = f" ({XID_MEANINGS[code]})" if code in XID_MEANINGS else ""
            told.append(f"gpu {index if index is not None else address}: Xid {code}{meaning} x {count}")
    if not told:
        return Finding("gpu errors", "no Xid in the kernel's log")
    cure = "leave the node out if they are fresh: dmesg -T | grep Xid tells when" if worst else ""
    return Finding("gpu errors", "; ".join(told), "warning" if worst else "ok", cure)


def _processes(gpus: Sequence[GpuDetails]) -> list[Finding]:
    findings = []
    for gpu in gpus:
        if gpu.processes:
            value = ", ".join(_process(process) for process in gpu.processes)
            cure = "end it, or take other GPUs by CUDA_VISIBLE_DEVICES: it takes memory and time from training"
            findings.append(Finding(f"gpu {gpu.index} in use", value, "warning", cure))
    return findings


def _process(process: GpuProcess) -> str:
    memory = "" if process.memory_bytes is None else f", {process.memory_bytes / GIB:.1f} GiB"
    return f"process {process.pid}{f' {process.name}' if process.name else ''}{memory}"


def _torch(node: GpuNode, torch: dict[str, Any]) -> list[Finding]:
    if "error" in torch:
        return []
    if not torch["cuda"]:
        cure = "install a CUDA build: make clean setup TORCH_INDEX=URL of your CUDA version's wheels"
        return [Finding("torch on GPUs", "this build of torch cannot use them", "warning", cure)]
    if torch["cuda_usable"]:
        return []
    needed = int(str(torch["cuda"]).split(".")[0])
    if node.cuda is not None and node.cuda[0] < needed:
        cure = f"update the driver, or install a build of torch for CUDA {node.cuda[0]}"
        return [Finding("torch on GPUs", f"built for CUDA {torch['cuda']}, the driver runs less", "warning", cure)]
    cure = "CUDA_VISIBLE_DEVICES may hide them; else python -c 'import torch; torch.cuda.init()' tells why"
    return [Finding("torch on GPUs", "torch finds none that it can use", "warning", cure)]
