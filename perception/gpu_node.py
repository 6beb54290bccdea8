"""The GPUs of a node as they are before a run: models, driver, links between them, faults, who uses them. No torch.

What `doctor` judges. Plain values throughout, so that a process that hangs in a wedged driver can be left behind and
its answer passed on as JSON.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from perception.gpu import LOST, GpuFaultError, NoNvml, Nvml, open_nvml

PATHS = {
    0: "same board",
    10: "one PCIe switch",
    20: "PCIe switches",
    30: "host bridge",
    40: "one NUMA node",
    50: "between NUMA nodes",
}
"""NVML's level of the closest common ancestor of two GPUs → what data between them pass, the shortest first."""

# Of nvml.h, by its names there: clocks, ECC counters, P2P capabilities and the states of an NVSwitch fabric.
_CLOCK_SM, _CORRECTED, _UNCORRECTED, _SINCE_BOOT = 1, 0, 1, 0
_P2P_READ, _P2P_NVLINK, _P2P_OK, _ENABLED = 0, 2, 0, 1
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}
_MOST_NVLINKS = 36
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's fixed number of the host's own."""


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    """On the host, also where it is asked in a container."""
    name: str | None
    """None where it cannot be seen from here."""
    memory_bytes: int | None


@dataclass(frozen=True)
class GpuDetails:
    """One GPU; None is what it does not tell."""

    index: int
    """NVML's number, in the order of the PCI bus."""
    fault: str = ""
    """LOST or "needs a reset": what was not asked before is unknown then."""
    name: str | None = None
    uuid: str | None = None
    pci_address: str | None = None
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    """Memory errors are corrected and counted."""
    corrected_errors: int | None = None
    """Since the driver was loaded; the same of the next."""
    uncorrected_errors: int | None = None
    remapping_pending: bool | None = None
    """Rows of memory are replaced at the next reset."""
    remapping_failed: bool | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    nvlinks: tuple[bool, ...] | None = None
    """Is each of its NVLinks up? None where it has none."""
    fabric: str | None = None
    """State of the NVSwitch fabric that it is registered with."""
    mig: bool | None = None
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True)
class GpuPair:
    """The way between two GPUs."""

    first: int
    second: int
    path: str | None
    """One of PATHS, over PCIe."""
    nvlink: bool | None
    """They reach each other over NVLink."""
    peer_access: bool | None
    """One reads the other's memory, over NVLink or PCIe."""


@dataclass(frozen=True)
class GpuNode:
    """All GPUs that the driver shows here, whatever CUDA_VISIBLE_DEVICES says."""

    driver: str | None = None
    kernel_module: str | None = None
    """Version of the loaded module; None where it cannot be read."""
    cuda: tuple[int, int] | None = None
    """Newest CUDA version that the driver runs."""
    gpus: tuple[GpuDetails, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    xids: dict[str, dict[int, int]] | None = None
    """PCI address → code → how often, in the kernel's log; None where that cannot be read."""
    none: NoNvml | None = None
    """Why there is nothing to tell."""


def examine_gpus() -> GpuNode:
    """Ask NVML for everything above. May hang where a driver is wedged."""
    nvml = open_nvml()
    if isinstance(nvml, NoNvml):
        return GpuNode(kernel_module=_kernel_module(), none=nvml)
    try:
        handles = nvml.handles()
        cuda = nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
        gpus = tuple(_details(nvml, index, handle) for index, handle in handles.items())
        return GpuNode(
            driver=nvml.ask("nvmlSystemGetDriverVersion"),
            kernel_module=_kernel_module(),
            cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            gpus=gpus,
            pairs=_pairs(nvml, {gpu.index: handles[gpu.index] for gpu in gpus if not gpu.fault}),
            xids=_kernel_xids(),
        )
    finally:
        nvml.close()


def node_from_json(raw: dict[str, Any]) -> GpuNode:
    """What `dataclasses.asdict` made of a GpuNode, after a round trip through JSON."""
    gpus = [
        GpuDetails(
            **{
                **gpu,
                "throttle_reasons": _tuple(gpu["throttle_reasons"]),
                "nvlinks": _tuple(gpu["nvlinks"]),
                "processes": None if gpu["processes"] is None else tuple(GpuProcess(**p) for p in gpu["processes"]),
            }
        )
        for gpu in raw["gpus"]
    ]
    xids = raw["xids"]
    return GpuNode(
        raw["driver"],
        raw["kernel_module"],
        _tuple(raw["cuda"]),
        tuple(gpus),
        tuple(GpuPair(**pair) for pair in raw["pairs"]),
        None if xids is None else {gpu: {int(code): n for code, n in of.items()} for gpu, of in xids.items()},
        None if raw["none"] is None else NoNvml(**raw["none"]),
    )


def xids_in(log: str) -> dict[str, dict[int, int]]:
    """Critical errors in a kernel log: PCI address → code → how often.

    >>> xids_in("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.")
    {'0000:3b:00': {79: 1}}
    """
    found: dict[str, dict[int, int]] = {}
    for address, code in re.findall(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)", log):
        codes = found.setdefault(address.lower(), {})
        codes[int(code)] = codes.get(int(code), 0) + 1
    return found


def same_address(pci_address: str | None, of_log: str) -> bool:
    """Does "00000000:3B:00.0", as NVML has it, stand for the log's "0000:3b:00"?"""
    if pci_address is None:
        return False
    short = pci_address.lower().split(".")[0]
    return short.split(":")[-2:] == of_log.split(".")[0].split(":")[-2:] and _domain(short) == _domain(of_log)


def _domain(address: str) -> int:
    return int(address.split(":")[0], 16) if address.count(":") == 2 else 0


def _details(nvml: Nvml, index: int, handle: Any) -> GpuDetails:
    known: dict[str, Any] = {}
    if handle is None:
        return GpuDetails(index, LOST)
    try:
        for name, value in _questions(nvml, handle):
            known[name] = value
    except GpuFaultError as error:
        return GpuDetails(index, str(error), **known)
    return GpuDetails(index, **known)


def _questions(nvml: Nvml, handle: Any) -> Any:
    """Field and value, one after the other: what was told before a GPU is lost stays known."""
    ask = nvml.ask
    yield "name", ask("nvmlDeviceGetName", handle)
    yield "uuid", ask("nvmlDeviceGetUUID", handle)
    pci = ask("nvmlDeviceGetPciInfo_v3", handle)
    yield "pci_address", None if pci is None else _text(pci.busId)
    yield "memory_bytes", nvml.memory(handle)[1]
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    yield "power_limit_watts", None if limit is None else limit / 1000
    yield "temperature_celsius", ask("nvmlDeviceGetTemperature", handle, 0)
    yield "sm_clock_mhz", ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM)
    yield "max_sm_clock_mhz", ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM)
    yield "throttle_reasons", nvml.throttle_reasons(handle)
    yield "persistence", _flag(ask("nvmlDeviceGetPersistenceMode", handle))
    ecc = ask("nvmlDeviceGetEccMode", handle)
    yield "ecc", None if ecc is None else ecc[0] == _ENABLED
    yield "corrected_errors", ask("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _SINCE_BOOT)
    yield "uncorrected_errors", ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_BOOT)
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    yield "remapping_pending", None if rows is None else bool(rows[2])
    yield "remapping_failed", None if rows is None else bool(rows[3])
    yield "pcie_width", ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
    yield "max_pcie_width", ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    yield "nvlinks", _nvlinks(nvml, handle)
    yield "fabric", _fabric(nvml, handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    yield "mig", None if mig is None else mig[0] == _ENABLED
    yield "processes", _processes(nvml, handle)


def _nvlinks(nvml: Nvml, handle: Any) -> tuple[bool, ...] | None:
    states = []
    for link in range(_MOST_NVLINKS):
        state = nvml.ask("nvmlDeviceGetNvLinkState", handle, link)
        if state is None:  # No such link.
            break
        states.append(state == _ENABLED)
    return tuple(states) or None


def _fabric(nvml: Nvml, handle: Any) -> str | None:
    make = getattr(nvml.module, "c_nvmlGpuFabricInfo_t", None)
    if make is None:
        return None
    info = make()
    # The binding hands the structure on as it is.
    if nvml.ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
        return None
    state = _FABRIC_STATES.get(info.state)
    return f"failed (NVML code {info.status})" if state == "completed" and info.status else state


def _processes(nvml: Nvml, handle: Any) -> tuple[GpuProcess, ...] | None:
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        found = nvml.ask(name, handle)
        if found is not None:
            return tuple(GpuProcess(p.pid, _process_name(p.pid), p.usedGpuMemory) for p in found)
    return None


def _pairs(nvml: Nvml, handles: Mapping[int, Any]) -> tuple[GpuPair, ...]:
    pairs = []
    for (first, one), (second, other) in combinations(handles.items(), 2):
        try:
            level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", one, other)
            nvlink, read = (nvml.ask("nvmlDeviceGetP2PStatus", one, other, what) for what in (_P2P_NVLINK, _P2P_READ))
        except GpuFaultError:
            # One of them was lost since it was looked at: its own line said what was still known.
            continue
        pairs.append(
            GpuPair(
                first,
                second,
                None if level is None else PATHS.get(level),
                None if nvlink is None else nvlink == _P2P_OK,
                None if read is None else read == _P2P_OK,
            )
        )
    return tuple(pairs)


def _kernel_module() -> str | None:
    """Version of the loaded module, by its own word: after an update it is older than the library."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return None
    return kernel_module_in(text)


def kernel_module_in(text: str) -> str | None:
    """
    >>> kernel_module_in("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024")
    '550.54.15'
    """
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def _kernel_xids() -> dict[str, dict[int, int]] | None:
    """None where the log may not be read, as in most containers."""
    try:
        answer = subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return xids_in(answer.stdout) if answer.returncode == 0 else None


def _process_name(pid: int) -> str | None:
    """None in a container: NVML tells the host's numbers, which are other processes here."""
    try:
        if str(Path("/proc/self/ns/pid").readlink()) != _FIRST_PID_NAMESPACE:
            return None
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _flag(state: int | None) -> bool | None:
    return None if state is None else state == _ENABLED


def _text(value: str | bytes) -> str:
    """Fields of structures come as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _tuple(values: Sequence[Any] | None) -> Any:
    return None if values is None else tuple(values)
