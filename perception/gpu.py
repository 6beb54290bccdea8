"""What the GPUs of this host do, second by second, as NVML tells it; a null twin where there is none to ask. No torch.

The only importer of pynvml (the package nvidia-ml-py). Each call is guarded by itself: what a GPU or a driver does not
tell is None, never 0. A GPU that is lost, or must be reset, stays so and is not asked again; the others go on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LOST, NEEDS_RESET = "lost", "needs a reset"
HARMFUL_REASONS = ("hardware slowdown", "software thermal", "hardware thermal", "power brake")
"""Reasons for low clocks that say that something is wrong with the machine."""

_REASON_BITS = {
    0x1: "idle",
    0x2: "clocks set by a user",
    0x4: "power cap",
    0x8: HARMFUL_REASONS[0],
    0x10: "sync boost",
    0x20: HARMFUL_REASONS[1],
    0x40: HARMFUL_REASONS[2],
    0x80: HARMFUL_REASONS[3],
    0x100: "display clocks",
}
_CLOCK_SM, _TEMPERATURE_GPU, _EVENT_XID = 1, 0, 0x8
"""NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, nvmlEventTypeXidCriticalError of nvml.h."""


@dataclass(frozen=True)
class NoNvml:
    """Why NVML cannot be asked, and what to do about it."""

    reason: str
    cure: str
    is_fault: bool
    """False where there may simply be no GPU."""


class GpuFaultError(Exception):
    """NVML says that a GPU is lost or needs a reset; its text is LOST or NEEDS_RESET."""


class Nvml:
    """The opened library, asked call by call."""

    def __init__(self, module: Any) -> None:
        self.module = module
        # The binding's own error is none of NVML's, and older bindings have none; a name may hold what is no text.
        self._unusable = (getattr(module, "NVMLLibraryMismatchError", UnicodeDecodeError), UnicodeDecodeError)

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the function `name` answers; None where this GPU, driver or binding does not tell.

        Raises GpuFaultError where the GPU is gone.
        """
        function = getattr(self.module, name, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            if error.value == self.module.NVML_ERROR_GPU_IS_LOST:
                raise GpuFaultError(LOST) from None
            if error.value == self.module.NVML_ERROR_RESET_REQUIRED:
                raise GpuFaultError(NEEDS_RESET) from None
            return None
        except self._unusable:
            return None

    def handles(self) -> dict[int, Any]:
        """NVML's number of each GPU → its handle, None for one that is lost already."""
        found: dict[int, Any] = {}
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            try:
                found[index] = self.ask("nvmlDeviceGetHandleByIndex", index)
            except GpuFaultError:
                found[index] = None
        return found

    def memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Bytes in use and in all. Of old drivers, "in use" includes what the driver keeps for itself."""
        # The second version tells the driver's own share apart.
        for arguments in ((handle, self.module.nvmlMemory_v2), (handle,)):
            memory = self.ask("nvmlDeviceGetMemoryInfo", *arguments)
            if memory is not None:
                return int(memory.used), int(memory.total)
        return None, None

    def throttle_reasons(self, handle: Any) -> tuple[str, ...] | None:
        """Why the clocks are not at their highest, () where they are."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self.ask(name, handle)
            if bits is not None:
                return tuple(reason for bit, reason in _REASON_BITS.items() if bits & bit)
        return None

    def close(self) -> None:
        self.ask("nvmlShutdown")


def open_nvml() -> Nvml | NoNvml:
    """NVML, or why it cannot be asked."""
    try:
        import pynvml as module
    except ImportError:
        return NoNvml("nvidia-ml-py is not installed", "`make setup`", False)
    if not hasattr(module, "nvmlMemory_v2"):
        cure = "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
        return NoNvml("an old package pynvml hides nvidia-ml-py's module of this name", cure, True)
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return _no_nvml(module, error)
    return Nvml(module)


def _no_nvml(module: Any, error: Any) -> NoNvml:
    said = f"NVML says: {error}"
    if error.value == module.NVML_ERROR_LIBRARY_NOT_FOUND:
        return NoNvml(said, "on a GPU machine: install its driver; in a container: docker run --gpus all", False)
    if error.value == module.NVML_ERROR_DRIVER_NOT_LOADED:
        return NoNvml(said, "load the driver's kernel module: modprobe nvidia, then look at dmesg", True)
    if error.value == module.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return NoNvml(said, "the driver was updated under a running kernel module: reboot, or load it anew", True)
    if error.value == module.NVML_ERROR_UNKNOWN:
        cure = "in a container this follows a `systemctl daemon-reload` on the host: start the container anew"
        return NoNvml(said, cure, True)
    return NoNvml(said, "look at nvidia-smi and dmesg", True)


# --- Samples ---


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one time; None is what it does not tell."""

    index: int
    """NVML's number, in the order of the PCI bus."""
    fault: str = ""
    """LOST or NEEDS_RESET: all else is unknown then."""
    utilisation: float | None = None
    """Share of the time in which a kernel ran, 0 to 1."""
    memory_bytes: int | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded; a lower figure than before says that it was loaded anew."""
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Xid:
    """A critical error that the driver reported of a GPU while it was watched."""

    index: int
    """-1: of a GPU that cannot be told."""
    code: int


class Gpus(Protocol):
    """The GPUs that this process may use."""

    indices: tuple[int, ...]

    def sample(self) -> list[GpuSample]:
        """All of them, now."""

    def xids(self) -> list[Xid] | None:
        """Those since the last call; None where the driver does not tell."""

    def close(self) -> None: ...


class NoGpus:
    """Nothing to sample."""

    indices: tuple[int, ...] = ()

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def sample(self) -> list[GpuSample]:
        return []

    def xids(self) -> list[Xid] | None:
        return None

    def close(self) -> None:
        return None


class NvmlGpus:
    """GPUs by NVML."""

    def __init__(self, nvml: Nvml, handles: Mapping[int, Any]) -> None:
        self.indices = tuple(handles)
        self._nvml, self._handles = nvml, dict(handles)
        self._faults = {index: LOST for index, handle in handles.items() if handle is None}
        self._events = self._watch_xids()

    def sample(self) -> list[GpuSample]:
        samples = []
        for index in self.indices:
            if index not in self._faults:
                try:
                    samples.append(self._sample(index, self._handles[index]))
                    continue
                except GpuFaultError as error:
                    self._faults[index] = str(error)
            samples.append(GpuSample(index, self._faults[index]))
        return samples

    def xids(self) -> list[Xid] | None:
        if self._events is None:
            return None
        found: list[Xid] = []
        while True:
            try:
                # A timeout of 0 answers at once: None where nothing has happened.
                event = self._nvml.ask("nvmlEventSetWait_v2", self._events, 0)
            except GpuFaultError:
                event = None
            if event is None:
                return found
            if event.eventType & _EVENT_XID:
                found.append(Xid(self._index_of(event.device), int(event.eventData)))

    def close(self) -> None:
        if self._events is not None:
            self._nvml.ask("nvmlEventSetFree", self._events)
        self._nvml.close()

    def _sample(self, index: int, handle: Any) -> GpuSample:
        ask = self._nvml.ask
        utilisation = ask("nvmlDeviceGetUtilizationRates", handle)
        milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
        millijoules = ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        return GpuSample(
            index,
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            memory_bytes=self._nvml.memory(handle)[0],
            power_watts=None if milliwatts is None else milliwatts / 1000,
            energy_joules=None if millijoules is None else millijoules / 1000,
            temperature_celsius=ask("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
            sm_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            throttle_reasons=self._nvml.throttle_reasons(handle),
        )

    def _watch_xids(self) -> Any:
        """An event set, None where no GPU can be watched."""
        events = self._nvml.ask("nvmlEventSetCreate")
        if events is None:
            return None
        num_watched = 0
        for handle in self._handles.values():
            try:
                supported = None if handle is None else self._nvml.ask("nvmlDeviceGetSupportedEventTypes", handle)
                if supported is not None and supported & _EVENT_XID:
                    self._nvml.ask("nvmlDeviceRegisterEvents", handle, _EVENT_XID, events)
                    num_watched += 1
            except GpuFaultError:
                # The first sample finds it again, and says so.
                continue
        if num_watched:
            return events
        self._nvml.ask("nvmlEventSetFree", events)
        return None

    def _index_of(self, device: Any) -> int:
        try:
            index = self._nvml.ask("nvmlDeviceGetIndex", device)
        except GpuFaultError:
            return -1
        return -1 if index is None else int(index)


def open_gpus(environ: Mapping[str, str] = os.environ) -> Gpus:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves to this process. An index in it is taken as NVML's.

    CUDA itself numbers by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID, which differs where models are mixed.
    """
    nvml = open_nvml()
    if isinstance(nvml, NoNvml):
        return NoGpus(nvml.reason)
    handles = nvml.handles()
    chosen = visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), [_uuid(nvml, handle) for handle in handles.values()])
    if not chosen:
        nvml.close()
        left = "CUDA_VISIBLE_DEVICES leaves none" if handles else "the driver knows none"
        return NoGpus(f"no GPU: {left}")
    return NvmlGpus(nvml, {index: handles[index] for index in chosen})


def visible_gpus(setting: str | None, uuids: Sequence[str | None]) -> tuple[int, ...]:
    """Which of the GPUs with these UUIDs CUDA shows under a CUDA_VISIBLE_DEVICES: their places, in its order.

    As CUDA reads it: indexes or the beginnings of UUIDs; what follows one that names no GPU is not looked at; one
    that stands twice leaves none. Parts of a GPU (MIG-...) name none here.

    >>> visible_gpus("2,GPU-a", ["GPU-abc", "GPU-bcd", "GPU-cde"])
    (2, 0)
    """
    if setting is None:
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for part in setting.split(","):
        part = part.strip()
        number = re.match(r"\+?\d+", part)
        if number:
            places = [int(number.group())] if int(number.group()) < len(uuids) else []
        elif part.startswith("GPU-"):
            places = [place for place, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(part)]
        else:
            places = []
        if len(places) != 1:
            break
        if places[0] in chosen:
            return ()
        chosen += places
    return tuple(chosen)


def _uuid(nvml: Nvml, handle: Any) -> str | None:
    try:
        return None if handle is None else nvml.ask("nvmlDeviceGetUUID", handle)
    except GpuFaultError:
        return None
