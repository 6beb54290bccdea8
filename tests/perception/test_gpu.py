"""GPU samples and node details through NVIDIA's own binding, by a test double of its library in C."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception import gpu_follower
from perception.gpu import (
    LOST,
    GpuSample,
    NoGpus,
    NoNvml,
    Nvml,
    Xid,
    open_nvml,
    visible_gpus,
)
from perception.gpu_follower import EnergyMeter, NoFollower, ThreadedFollower, summary
from tests.perception.nvml_double import build_double, run_with

SAMPLE = """
from dataclasses import asdict
from perception.gpu import open_gpus
gpus = open_gpus()
print(json.dumps([asdict(sample) for sample in gpus.sample()]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_double(tmp_path_factory.mktemp("nvml") / "new")


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_double(tmp_path_factory.mktemp("nvml") / "old", old_driver=True)


# --- Samples ---


def test_every_figure_is_in_the_unit_of_its_name(library: Path) -> None:
    settings = (
        "gpus=2;1.utilisation=7;1.memory=1024;1.power=1500;1.energy=2500;1.temperature=91;1.clock=345;1.throttle=0x44"
    )
    first, second = run_with(library, SAMPLE, settings)
    assert first == {
        "index": 0,
        "fault": "",
        "utilisation": 0.75,
        "memory_bytes": 8 << 30,
        "power_watts": 300.0,
        "energy_joules": 5000.0,
        "temperature_celsius": 55,
        "sm_clock_mhz": 1980,
        "throttle_reasons": [],
    }
    assert second == {
        "index": 1,
        "fault": "",
        "utilisation": 0.07,
        "memory_bytes": 1024,
        "power_watts": 1.5,
        "energy_joules": 2.5,
        "temperature_celsius": 91,
        "sm_clock_mhz": 345,
        "throttle_reasons": ["power cap", "hardware thermal"],
    }


CALLS = {
    "nvmlDeviceGetUtilizationRates": "utilisation",
    "nvmlDeviceGetPowerUsage": "power_watts",
    "nvmlDeviceGetTotalEnergyConsumption": "energy_joules",
    "nvmlDeviceGetTemperature": "temperature_celsius",
    "nvmlDeviceGetClockInfo": "sm_clock_mhz",
}


def test_each_call_that_fails_leaves_its_own_figure_unknown_and_no_other(library: Path) -> None:
    """NotSupported 3, NoPermission 4, FunctionNotFound 13, Unknown 999, and a code that the binding does not know."""
    program = f"""
from dataclasses import asdict
from perception.gpu import open_gpus
answers = []
for function in {list(CALLS)!r}:
    for code in (3, 4, 13, 999, 4711):
        os.environ["NVML_DOUBLE"] = f"gpus=1;{{function}}={{code}}"
        [sample] = open_gpus().sample()
        answers.append([function, [name for name, value in asdict(sample).items() if value is None]])
print(json.dumps(answers))
"""
    answers = run_with(library, program)
    assert len(answers) == 25
    for function, unknown in answers:
        assert unknown == [CALLS[function]]


def test_all_calls_unsupported_is_all_unknown_and_never_0(library: Path) -> None:
    functions = [*CALLS, "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlEventSetCreate"]
    functions += ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
    settings = ";".join(f"{function}=3" for function in functions)
    program = """
from perception.gpu_follower import follow_gpus
import time
follower = follow_gpus(period_seconds=0.01)
values = {}
while not values:
    values = follower.take()
follower.close()
print(json.dumps(values))
"""
    for sample in run_with(library, SAMPLE, settings):
        assert [value for name, value in sample.items() if name not in ("index", "fault")] == [None] * 7
    assert run_with(library, program, settings) == {"num_gpus": 2.0, "num_gpus_lost": 0.0}


def test_an_old_driver_lacks_functions_and_tells_the_rest(old_library: Path) -> None:
    first, _ = run_with(old_library, SAMPLE, "throttle=0x8")
    # Its first memory call counts the driver's own GiB; the reasons come by their former name.
    assert first["memory_bytes"] == 9 << 30 and first["throttle_reasons"] == ["hardware slowdown"]
    assert first["energy_joules"] is None and first["power_watts"] == 300.0


def test_a_lost_gpu_stays_lost_and_the_others_go_on(library: Path) -> None:
    program = """
from perception.gpu import open_gpus
gpus = open_gpus()
rounds = [gpus.sample()]
double(**{"1__*": 15})
rounds.append(gpus.sample())
os.environ["NVML_DOUBLE"] = "gpus=3;2.*=16"
rounds.append(gpus.sample())
gpus.close()
print(json.dumps([[(s.fault, s.power_watts) for s in samples] for samples in rounds]))
"""
    before, lost, after = run_with(library, program, "gpus=3")
    assert before == [["", 300.0]] * 3
    assert lost == [["", 300.0], ["lost", None], ["", 300.0]]
    assert after == [["", 300.0], ["lost", None], ["needs a reset", None]]


def test_a_gpu_that_is_lost_before_it_is_opened_is_counted(library: Path) -> None:
    samples = run_with(library, SAMPLE, "gpus=3;1.*=15")
    assert [sample["fault"] for sample in samples] == ["", "lost", ""]


def test_critical_errors_are_told_once_and_of_watched_gpus_alone(library: Path) -> None:
    program = """
from perception.gpu import open_gpus
gpus = open_gpus()
rounds = [gpus.xids()]
double(**{"1__xid_number": 1, "1__xid": 48})
rounds += [gpus.xids(), gpus.xids()]
double(**{"0__xid_number": 1, "1__xid_number": 2})
rounds.append(gpus.xids())
print(json.dumps([[(xid.index, xid.code) for xid in found] for found in rounds]))
"""
    assert run_with(library, program) == [[], [[1, 48]], [], [[0, 79], [1, 48]]]
    # GPU 0 does not tell of such errors: what it does is not seen.
    assert run_with(library, program, "0.events=0") == [[], [[1, 48]], [], [[1, 48]]]
    assert (
        run_with(
            library, SAMPLE.replace("gpus.sample()", "gpus.sample()[:0]") + "assert gpus.xids() is None", "events=0"
        )
        == []
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("1", [1]), ("2,0", [2, 0]), ("GPU-c,GPU-a0", [2, 0]), ("0,7,1", [0]), ("", []), ("NoDevFiles", []), ("1,1", [])],
)
def test_visible_devices_are_respected(setting: str, expected: list[int], library: Path) -> None:
    program = "from perception.gpu import open_gpus\nprint(json.dumps(open_gpus().indices))"
    assert run_with(library, program, "gpus=3", CUDA_VISIBLE_DEVICES=setting) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from(["0", "1", "5", "-1", "GPU-", "GPU-a", "GPU-ab", "MIG-1", "x", "", " 1 ", "+1"])))
def test_chosen_gpus_are_there_and_each_once(parts: list[str]) -> None:
    chosen = visible_gpus(",".join(parts), ["GPU-ab1", "GPU-ac1", None])
    assert len(set(chosen)) == len(chosen) and set(chosen) <= {0, 1, 2}
    assert len(chosen) <= len(parts)


def test_an_ambiguous_or_partial_gpu_ends_the_list() -> None:
    uuids = ["GPU-ab", "GPU-ac"]
    assert visible_gpus("GPU-a,0", uuids) == () and visible_gpus("1,MIG-GPU-ab/1/0,0", uuids) == (1,)
    assert visible_gpus(None, uuids) == (0, 1)


# --- No GPUs ---


@pytest.mark.parametrize(
    ("code", "is_fault", "cure"),
    [
        (9, True, "modprobe nvidia"),
        (12, False, "--gpus all"),
        (18, True, "reboot"),
        (999, True, "start the container anew"),
        (4, True, "nvidia-smi"),
    ],
)
def test_a_library_that_does_not_open_is_no_gpus_and_says_why(
    code: int, is_fault: bool, cure: str, library: Path
) -> None:
    program = """
from perception.gpu import open_gpus, open_nvml
from perception.gpu_follower import follow_gpus
none, gpus, follower = open_nvml(), open_gpus(), follow_gpus()
print(json.dumps([none.reason, none.cure, none.is_fault, gpus.sample(), gpus.xids(), follower.take()]))
"""
    reason, told, fault, samples, xids, values = run_with(library, program, f"nvmlInitWithFlags={code}")
    assert reason.startswith("NVML says: ") and cure in told and fault is is_fault
    assert (samples, xids, values) == ([], None, {})


def test_no_library_at_all(tmp_path: Path) -> None:
    """What the binding answers where nothing is installed, wherever this test runs: it finds a file that is none."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    program = (
        "from perception.gpu import open_nvml\nnone = open_nvml()\nprint(json.dumps([none.reason, none.is_fault]))"
    )
    assert run_with(tmp_path, program) == ["NVML says: NVML Shared Library Not Found", False]


def test_nvidias_own_library_without_a_driver() -> None:
    """Debian's package libnvidia-ml1 (non-free), installed, or unpacked below the folder that NVML_PACKAGE names."""
    root = os.environ.get("NVML_PACKAGE", "/")
    found = sorted(Path(root).glob("usr/lib/*/nvidia/current/libnvidia-ml.so.1"))
    if not found:
        pytest.skip("NVIDIA's libnvidia-ml.so.1 is not here: apt-get install libnvidia-ml1 (non-free)")
    device = Path("/dev/nvidiactl")
    if device.exists():
        pytest.skip("there is a driver")
    program = (
        "from perception.gpu import open_nvml\nnone = open_nvml()\n"
        "print(json.dumps([none.reason, none.cure, none.is_fault]))"
    )
    try:
        reason, cure, is_fault = run_with(found[0].parent, program)
    finally:
        device.unlink(missing_ok=True)  # For root the library makes it, driver or not.
    assert (reason, is_fault) == ("NVML says: Driver Not Loaded", True) and "modprobe nvidia" in cure


def test_a_driver_without_gpus(library: Path) -> None:
    program = "from perception.gpu import open_gpus\nprint(json.dumps(open_gpus().reason))"
    assert run_with(library, program, "gpus=0") == "no GPU: the driver knows none"
    assert run_with(library, program, CUDA_VISIBLE_DEVICES="") == "no GPU: CUDA_VISIBLE_DEVICES leaves none"


def test_an_old_package_of_the_same_name_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(NVMLError=Exception))
    none = open_nvml()
    assert isinstance(none, NoNvml) and none.is_fault and "pip uninstall pynvml" in none.cure
    monkeypatch.setitem(sys.modules, "pynvml", None)
    none = open_nvml()
    assert isinstance(none, NoNvml) and not none.is_fault and "not installed" in none.reason


def test_a_binding_without_a_function_or_an_error_of_its_own_tells_nothing() -> None:
    class NVMLError(Exception):
        value = 3

    def refuse() -> None:
        raise NVMLError

    def no_text() -> None:
        b"\xff".decode()

    nvml = Nvml(types.SimpleNamespace(NVMLError=NVMLError, refuse=refuse, no_text=no_text, **CODES))
    assert [nvml.ask(name) for name in ("refuse", "no_text", "newer")] == [None] * 3


CODES = {"NVML_ERROR_GPU_IS_LOST": 15, "NVML_ERROR_RESET_REQUIRED": 16}


# --- Beside a run ---


def sampled(*values: float | None, index: int = 0) -> list[GpuSample]:
    return [GpuSample(index, energy_joules=value) for value in values]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1))
def test_energy_is_the_sum_of_what_the_counter_gained_however_often_it_is_read(steps: list[tuple[int, bool]]) -> None:
    meter, counter, total = EnergyMeter(), 1000.0, 0.0
    meter.add(sampled(counter))
    for gained, taken in steps:
        counter += gained
        meter.add(sampled(counter))
        if taken:
            total += meter.take().get(0, 0.0)
    assert total + meter.take().get(0, 0.0) == counter - 1000.0


def test_a_counter_that_starts_anew_is_not_negative_energy() -> None:
    meter = EnergyMeter()
    meter.add(sampled(1000.0, 1010.0, 3.0, 8.0, None, 9.0))
    assert meter.take() == {0: 16.0} and meter.take() == {}
    # What does not tell is not in it, which is not the same as having used nothing.
    meter.add(sampled(None, None, index=1))
    assert meter.take() == {}


def test_a_line_of_metrics_is_of_the_gpus_that_tell() -> None:
    rounds = [
        [GpuSample(0, "", 0.5, 100, 200.0, 1.0, 60.0, 1000.0, ("power cap",)), GpuSample(1, LOST)],
        [GpuSample(0, "", 1.0, 300, None, 2.0, 70.0, 2000.0, ("hardware thermal", "idle")), GpuSample(1, LOST)],
    ]
    assert summary(rounds, {0: 30.0}, [Xid(1, 79)]) == {
        "gpu_utilisation": 0.75,
        "gpu_memory_bytes": 200.0,
        "gpu_power_watts": 200.0,
        "gpu_energy_joules": 30.0,
        "gpu_sm_clock_mhz": 1500.0,
        "gpu_temperature_celsius": 70.0,
        "gpu_throttled": 0.5,
        "gpu_xids": 1.0,
        "num_gpus": 2.0,
        "num_gpus_lost": 1.0,
    }
    assert summary([], {}, None) == {}
    assert summary([[GpuSample(0, LOST)]], {}, None) == {"num_gpus": 1.0, "num_gpus_lost": 1.0}


def test_a_follower_samples_in_the_background_and_ends(library: Path) -> None:
    program = """
import threading, time
from perception.gpu_follower import follow_gpus
follower = follow_gpus(period_seconds=0.02)
def next_values():
    values = {}
    while not values:
        time.sleep(0.01)
        values = follower.take()
    return values
first = next_values()
# Two rounds at least lie between: then the counter's gain is all in, wherever the change fell.
double(energy=5030000, utilisation=25)
joules = 0.0
for _ in range(3):
    later = next_values()
    joules += later.get("gpu_energy_joules", 0.0)
follower.close()
left = [thread.name for thread in threading.enumerate()]
print(json.dumps([first, later, joules, left, follower.take().keys() <= first.keys()]))
"""
    first, later, joules, threads, _ = run_with(library, program)
    assert first["gpu_utilisation"] == 0.75 and first["num_gpus"] == 2.0 and first["gpu_xids"] == 0.0
    assert later["gpu_utilisation"] == 0.25 and joules == 30.0
    assert threads == ["MainThread"]


def test_a_gpu_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    released = threading.Event()
    closed: list[bool] = []

    class Hanging(NoGpus):
        indices = (0,)

        def sample(self) -> list[GpuSample]:
            released.wait(30)
            return []

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(gpu_follower, "_CLOSING_SECONDS", 0.05)
    follower = ThreadedFollower(Hanging("none"), 0.01)
    assert follower.take() == {}
    follower.close()
    assert closed == []
    released.set()


def test_the_twin_of_a_follower_tells_nothing() -> None:
    follower = NoFollower()
    assert follower.take() == {}
    follower.close()
