"""A job for tests of launchers: a small process that says where it runs, sleeps, and ends as it is told.

    python launched_job.py RUN_FOLDER SECONDS [EXIT_CODE] [--ranks N]

It writes result.json as a training run would: finished, or preempted after SIGTERM or SIGUSR2 (exit code 75).
SECONDS "stubborn": it takes no notice of signals. What it was told by its launcher goes to told.json.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def write(path: Path, content: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def main() -> int:
    words = sys.argv[1:]
    ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else None
    folder = Path(words[0])
    stop: list[int] = []
    stubborn = words[1] == "stubborn"
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: None if stubborn else stop.append(number))
    rank = int(os.environ.get("SLURM_PROCID", 0)) if "SLURM_STEP_NUM_TASKS" in os.environ else 0
    told = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "ranks": ranks,
        "rank": rank,
        "size": int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "mark": os.environ.get("MARK"),
        "folder": str(Path.cwd()),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
    }
    with (folder / "starts.txt").open("a") as file:
        file.write(f"{os.getpid()} rank {rank}\n")
    write(folder / (f"told-{rank}.json" if rank else "told.json"), told)
    print("the job runs", flush=True)
    deadline = time.monotonic() + (1e9 if stubborn else float(words[1]))
    while time.monotonic() < deadline and not stop:
        time.sleep(0.02)
    code = 75 if stop else int(next((word for word in words[2:3] if word.isdigit()), 0))
    if rank == 0:
        if stop:
            write(folder / "result.json", {"status": "preempted", "cause": f"signal {stop[0]}", "metrics": {}})
        elif code == 0:
            write(folder / "result.json", {"status": "finished", "cause": "", "metrics": {}})
        else:
            with contextlib.suppress(OSError):
                (folder / "result.json").unlink()
            print("error: it was told to fail", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
