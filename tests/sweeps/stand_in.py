"""A stand-in for a training run, for tests: it sleeps instead of training, and writes the files that a run writes.

    python -I -S stand_in.py train MODEL --out FOLDER --set optim.lr=1e-3 …

Its figures are made up: the metric depends on optim.lr and the seed by a formula. It takes signals, control.json,
checkpoints and --resume-if-possible as a real run does. Standard library only: it starts in a few hundredths of a
second. STAND_IN_SECONDS is its length.

STAND_IN_GATE names a folder: half way it waits there until it is let through, so that a test knows where a night stands
on a machine of any speed. It takes one file "token-…" away, or finds a file "open"; "held" and "passed" in its run
folder tell how far it is. Signals and control.json end the wait.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

NUM_STEPS = 20
NUM_EVALUATIONS = 4
HELD_STEP = NUM_STEPS // 2
EXIT_PREEMPTED = 75


def main() -> int:
    words = sys.argv[1:]
    folder = Path(words[words.index("--out") + 1])
    settings = dict(words[place + 1].split("=", 1) for place, word in enumerate(words) if word == "--set")
    lr, seed = float(settings.get("optim.lr", "1.5e-3")), int(settings.get("train.seed", "0"))
    num_samples = int(settings.get("train.num_samples", "900"))
    length = float(os.environ.get("STAND_IN_SECONDS", "0.4"))
    metric = "ap50" if words[1].startswith("sign") else "culane_f1_50"
    if os.environ.get("SLURM_PROCID", "0") != "0":
        # Of several ranks one is enough to stand in.
        return 0
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _: stopped.append(received))
    checkpoints, result_file, control = folder / "checkpoints", folder / "result.json", folder / "control.json"
    checkpoints.mkdir(parents=True, exist_ok=True)
    step = max((int(path.stem[5:]) for path in checkpoints.glob("step-*.json")), default=0)
    append(folder / "starts.txt", f"{os.getpid()} from step {step}\n")
    append(folder / "variables.txt", f"{' '.join(sorted(os.environ))}\n")
    if result_file.exists():
        if json.loads(result_file.read_text())["status"] == "finished":
            return 0
        result_file.unlink()
    status, cause = "finished", ""
    gate = os.environ.get("STAND_IN_GATE")
    while step < NUM_STEPS:
        if gate and step >= HELD_STEP and not (folder / "passed").exists():
            (folder / "held").touch()
            while not stopped and not control.exists() and not may_pass(Path(gate)):
                time.sleep(0.05)
            if not stopped:
                (folder / "passed").touch()
        time.sleep(length / NUM_STEPS)
        step += 1
        row = {"step": step, "samples": num_samples * step // NUM_STEPS, "seconds": step * length / NUM_STEPS}
        if step % (NUM_STEPS // NUM_EVALUATIONS) == 0 and step < NUM_STEPS:
            row[f"validation/{metric}"] = value_of(lr, seed) * step / NUM_STEPS
            write(checkpoints / f"step-{step:08d}.json", {"step": step})
        append(folder / "metrics.jsonl", json.dumps(row) + "\n")
        if control.exists():
            status, cause = "pruned", json.loads(control.read_text())["cause"]
            break
        if stopped:
            status, cause = "preempted", f"signal {stopped[0]} received"
            write(checkpoints / f"step-{step:08d}.json", {"step": step})
            break
    result = {
        "status": status,
        "cause": cause,
        "metrics": {metric: value_of(lr, seed) * step / NUM_STEPS},
        "throughput": {"images_per_second": 100.0, "scaling_factor": None, "ratio_to_limit": None},
        "lost_scaling": {"data": 0.0, "exposed_allreduce": 0.0, "straggler": 0.0},
        "checkpoint": {"path": None, "sha256": None, "weights_sha256": None},
        "seconds": step * length / NUM_STEPS,
        "samples": num_samples * step // NUM_STEPS,
    }
    write(result_file, result)
    return EXIT_PREEMPTED if status == "preempted" else 0


def may_pass(gate: Path) -> bool:
    if (gate / "open").exists():
        return True
    for token in gate.glob("token-*"):
        with contextlib.suppress(FileNotFoundError):  # Another one was faster.
            token.unlink()
            return True
    return False


def value_of(lr: float, seed: int) -> float:
    return 0.8 - 0.1 * abs(math.log10(lr) + 2.5) + 0.001 * (seed * 7919 % 13 - 6)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def write(path: Path, value: object) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(value))
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
