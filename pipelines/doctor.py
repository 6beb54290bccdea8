"""`doctor`: what this machine has for training, and one line on what to do about each thing that is missing.

Before a night, on each node: `srun --ntasks-per-node=1 sh -c 'python -m pipelines doctor --json > $(hostname).json'`,
then `doctor --compare *.json`, since each step of a job waits for its slowest node.

Answers in a bare Python too: what might not be installed is asked in a process of its own, which
may also crash.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from perception.cores import available_cores
from perception.errors import UserError
from perception.gpu_node import node_from_json
from pipelines.doctor_compare import compare_nodes
from pipelines.finding import GIB, Finding, State
from pipelines.gpu_findings import gpu_findings
from pipelines.rank_commands import find_mpirun

MARKS: dict[str, str] = {"ok": "ok", "note": "-", "warning": "!", "broken": "X"}
PYTHON_FLOOR = (3, 11)
MIN_SHARED_MEMORY_BYTES = GIB
MIN_OPEN_FILES = 4096
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
PACKAGES = ("numpy", "scipy", "opencv-python-headless", "albumentations", "tensorboard", "psutil")

# Run by a process of its own; prints one JSON object as its last line.
TORCH_PROBE = """
import json, torch, torch.distributed as d
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "cuda_usable": torch.cuda.is_available(),
    "gloo": d.is_available() and d.is_gloo_available(), "nccl": d.is_available() and d.is_nccl_available(),
}))
"""
HOROVOD_PROBE = """
import json, horovod, horovod.torch as h
print(json.dumps({
    "version": horovod.__version__, "mpi": bool(h.mpi_built()), "gloo": bool(h.gloo_built()),
    "nccl": bool(h.nccl_built()),
}))
"""
# NVML may hang in a wedged driver: it is left behind then.
GPU_PROBE = """
import dataclasses, json
from perception.gpu_node import examine_gpus
print(json.dumps(dataclasses.asdict(examine_gpus())))
"""
GPU_PROBE_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="reports of several nodes by --json: say in what they differ, and look at nothing here",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or 1 where something that training needs is broken, or nodes differ."""
    if arguments.compare:
        findings = compare_nodes(arguments.compare)
        print("\n".join(_lines(findings)))
        return 1 if any(finding.state != "ok" for finding in findings) else 0
    findings = examine()
    broken = any(finding.state == "broken" for finding in findings)
    if arguments.json:
        print(json.dumps({"ok": not broken, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    else:
        print("\n".join(table(findings)))
    return 1 if broken else 0


def table(findings: Iterable[Finding]) -> list[str]:
    """Aligned lines: mark, name, value, and a cure below; then the verdict."""
    findings = list(findings)
    counts = {state: sum(finding.state == state for finding in findings) for state in MARKS}
    verdict = "training cannot run" if counts["broken"] else "training can run"
    return [*_lines(findings), "", f"{verdict}: {counts['broken']} broken (X), {counts['warning']} to mend (!)"]


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]:<2} {finding.name:<{width}}  {finding.value}")
        if finding.cure:
            lines.append(f"   {'':<{width}}  → {finding.cure}")
    return lines


def examine() -> list[Finding]:
    """Everything that is looked at, in the order in which it is shown."""
    torch = _probe(TORCH_PROBE)
    return [
        _python(),
        _packages(),
        _torch(torch),
        *_engines(torch, _probe(HOROVOD_PROBE)),
        *_processor(),
        _memory(),
        *_gpus(torch),
        _shared_memory(shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0),
        *_limits(),
        _disk(),
        _compiler(),
        _network(),
        _slurm(),
        _docker(),
    ]


def _python() -> Finding:
    value = f"{platform.python_version()} in {sys.prefix}"
    if sys.version_info[:2] < PYTHON_FLOOR:
        return Finding("python", value, "broken", "install Python 3.11 or newer, then `make setup`")
    return Finding("python", value)


def _packages() -> Finding:
    missing = []
    for name in PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding("packages", f"missing: {', '.join(missing)}", "broken", "`make setup`")
    return Finding("packages", "all there")


def _torch(probe: dict[str, Any]) -> Finding:
    if "error" in probe:
        return Finding("torch", probe["error"], "broken", "`make setup`")
    build = f"CUDA {probe['cuda']}" if probe["cuda"] else "CPU build"
    return Finding("torch", f"{probe['version']} ({build})")


def _engines(torch: dict[str, Any], horovod: dict[str, Any]) -> list[Finding]:
    findings = []
    if "error" not in horovod:
        built = [name for name in ("mpi", "gloo", "nccl") if horovod[name]]
        findings.append(Finding("engine horovod", f"{horovod['version']}, built with {', '.join(built) or 'nothing'}"))
        if horovod["mpi"]:
            findings.append(_mpirun())
        if torch.get("cuda_usable") and not horovod["nccl"]:
            cure = "install nvcc and NCCL's headers, then `make clean setup`; --engine torch needs neither"
            findings.append(Finding("horovod on GPUs", "built without NCCL", "warning", cure))
    elif "No module named 'horovod'" in horovod["error"]:
        cure = "`make setup` builds it; --engine torch needs none"
        findings.append(Finding("engine horovod", "not installed", "warning", cure))
    else:
        cure = "`make clean setup` builds it anew, or use --engine torch"
        findings.append(Finding("engine horovod", horovod["error"], "broken", cure))
    if "error" not in torch:
        available = [name for name in ("gloo", "nccl") if torch[name]]
        state: State = "ok" if available else "warning"
        cure = "" if available else "install a build of torch with torch.distributed"
        findings.append(Finding("engine torch", f"built with {', '.join(available) or 'nothing'}", state, cure))
    return findings


def _mpirun() -> Finding:
    try:
        return Finding("mpirun", str(find_mpirun(os.environ)))
    except UserError as error:
        return Finding("mpirun", "not found", "warning", str(error))


def _processor() -> list[Finding]:
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(line.group(1).split()) if line else set()
    found = [feature for feature in CPU_FEATURES if feature in flags]
    fast = bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    cores, all_cores = available_cores(), os.cpu_count() or 1
    share = f"{cores} of {all_cores}" if cores != all_cores else str(cores)
    return [
        Finding("processor", model.group(1) if model else platform.machine()),
        Finding("cores", f"{share} usable"),
        Finding(
            "cpu features",
            ", ".join(found) or "none of those asked for",
            "ok" if fast else "note",
            "" if fast else "no bf16 in hardware: train.precision=auto takes fp32 on the CPU",
        ),
    ]


def _memory() -> Finding:
    numbers = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    total, free = (int(numbers.get(name, 0)) * 1024 / GIB for name in ("MemTotal", "MemAvailable"))
    value = f"{total:.1f} GiB, {free:.1f} GiB available"
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        value += f"; this container may use {int(limit) / GIB:.1f} GiB"
    if free < 2:
        return Finding("memory", value, "warning", "free some: a rank needs about 2 GiB")
    return Finding("memory", value)


def _gpus(torch: dict[str, Any], timeout_seconds: float = GPU_PROBE_SECONDS) -> list[Finding]:
    probe = _probe(GPU_PROBE, timeout_seconds)
    if "error" in probe:
        cure = "the driver may hang: look at dmesg and nvidia-smi, and leave this node out of the night"
        return [Finding("gpus", f"asking NVML failed: {probe['error']}", "warning", cure)]
    return gpu_findings(node_from_json(probe), torch)


def _shared_memory(total_bytes: int) -> Finding:
    value = f"{total_bytes / GIB:.1f} GiB"
    if total_bytes < MIN_SHARED_MEMORY_BYTES:
        cure = (
            "ranks and loader workers share data there: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        )
        return Finding("/dev/shm", value, "warning", cure)
    return Finding("/dev/shm", value)


def _limits() -> list[Finding]:
    def shown(number: int, unit: int = 1, name: str = "") -> str:
        return "unlimited" if number == resource.RLIM_INFINITY else f"{number // unit}{name}"

    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    few = files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES
    cure = f"ulimit -n 65536 (the hard limit is {shown(files_hard)}), or docker run --ulimit nofile=65536"
    findings = [Finding("open files", shown(files), "warning" if few else "ok", cure if few else "")]
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        cure = "InfiniBand pins memory: docker run --ulimit memlock=-1, or /etc/security/limits.conf"
        findings.append(Finding("locked memory", shown(locked, 1024, " KiB"), "warning", cure))
    else:
        findings.append(Finding("locked memory", shown(locked, 1024, " KiB")))
    small = stack != resource.RLIM_INFINITY and stack < 8 * 2**20
    cure = "ulimit -s 65536, or docker run --ulimit stack=67108864"
    return [
        *findings,
        Finding("stack", shown(stack, 1024, " KiB"), "warning" if small else "ok", cure if small else ""),
    ]


def _disk() -> Finding:
    free_gib = shutil.disk_usage(Path.cwd()).free / GIB
    value = f"{free_gib:.1f} GiB free in {Path.cwd()}"
    if free_gib < 2:
        return Finding("disk", value, "warning", "free some: checkpoints and generated scenes need about 2 GiB")
    return Finding("disk", value)


def _compiler() -> Finding:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None or shutil.which("make") is None:
        cure = "only building Horovod needs it: apt-get install g++ make, or train with ENGINE=torch"
        return Finding("compiler", f"{compiler} or make not found", "note", cure)
    return Finding("compiler", _first_line([compiler, "--version"]) or compiler)


def _network() -> Finding:
    """The interface that ranks on several hosts would meet at; on one host they use `lo`."""
    found = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo")
    routes = [line.split() for line in _read("/proc/net/route").splitlines()[1:]]
    default = next((route[0] for route in routes if len(route) > 1 and route[1] == "00000000"), None)
    fabric = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    value = f"one host: lo; several: {default or 'no default route'}; all: {', '.join(found) or 'none'}"
    if fabric:
        value += f"; InfiniBand: {', '.join(fabric)}"
    if len(found) > 1:
        cure = "several hosts: name another by GLOO_SOCKET_IFNAME, HOROVOD_GLOO_IFACE and NCCL_SOCKET_IFNAME"
        return Finding("network", value, "note", cure)
    return Finding("network", value)


def _slurm() -> Finding:
    job = os.environ.get("SLURM_JOB_ID")
    if shutil.which("srun") is None:
        return Finding("slurm", f"no srun{f', inside job {job}' if job else ''}", "note", "only several hosts need it")
    return Finding("slurm", (_first_line(["srun", "--version"]) or "srun") + (f", inside job {job}" if job else ""))


def _docker() -> Finding:
    if shutil.which("docker") is None:
        return Finding("docker", "no client", "note", "only jobs in images need it: install docker, podman works too")
    client = _first_line(["docker", "--version"])
    server = _first_line(["docker", "version", "--format", "{{.Server.Version}}"])
    if not server:
        cure = "only jobs in images need it: start the daemon, or join its group"
        return Finding("docker", f"{client}; no daemon answers", "note", cure)
    return Finding("docker", f"{client}; daemon {server}")


def _probe(program: str, timeout_seconds: float = 120.0) -> dict[str, Any]:
    """What the program prints as JSON, or {"error": its last line}."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that hangs inside a driver cannot be ended: it is left to the system.
            process.communicate(timeout=5)
        return {"error": f"no answer within {timeout_seconds:g} s"}
    if process.returncode == 0:
        result = json.loads(output.strip().splitlines()[-1])
        assert isinstance(result, dict)
        return result
    if process.returncode < 0:
        return {"error": f"died of signal {-process.returncode}"}
    last = (errors.strip().splitlines() or ["no output"])[-1]
    return {"error": last.removeprefix("ModuleNotFoundError: ")}


def _first_line(command: list[str]) -> str:
    """First line that a command prints; "" where it fails or says nothing."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = answer.stdout.strip().splitlines()
    return lines[0] if answer.returncode == 0 and lines else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
