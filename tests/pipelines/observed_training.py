"""`python -m pipelines`, but each rank records which images its steps trained on, and may be made to fail.

observed_training.py train ...

OBSERVED_FOLDER takes a file a rank, a line a step. OBSERVED_FAILURE: "die" (the last rank, by os._exit, before its
first step) or "raise" (the last rank, an exception in its third step).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from perception.distributed.environment import rank_environment
from perception.generations import read_generations
from pipelines import train
from pipelines.__main__ import main


class _Noting:
    """Batches, of which it keeps the images' names."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.names: list[str] = []

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.names += batch.names
        return batch


def observe(folder: Path, failure: str) -> None:
    from perception.trainer import Trainer

    original = Trainer.step

    def step(self: Trainer, batches: Any, *arguments: Any) -> Any:
        last = self.communicator.rank == self.communicator.size - 1
        if last and failure == "die":
            os._exit(7)
        if last and failure == "raise" and self.progress.step == 2:
            raise ValueError("this rank is broken")
        noting = _Noting(batches)
        log = original(self, noting, *arguments)
        line = {
            "generation": len(read_generations(self.folder.path)),
            "rank": self.communicator.rank,
            "step": self.progress.step,
            "names": noting.names,
        }
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return log

    Trainer.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    train.PROGRAM = (sys.executable, __file__)
    if rank_environment(os.environ).launcher != "none":
        observe(Path(os.environ["OBSERVED_FOLDER"]), os.environ.get("OBSERVED_FAILURE", ""))
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception:
        # A rank's own hook, where it is installed, knows what to do.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
