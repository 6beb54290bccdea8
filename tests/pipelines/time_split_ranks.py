"""One rank of `test_time_split.py`: trains a few steps in which rank 1 is slow to load its images.

`python time_split_ranks.py FOLDER ENGINE TRANSPORT SECONDS_AN_IMAGE`; the log lines of all steps
and the means over ranks go to FOLDER/rank<N>.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from perception import distributed
from perception.config import override
from perception.data.lane_targets import LaneExample, SampleKey
from perception.data.sample import LaneSample
from perception.run_folder import RunFolder
from perception.stopping import StopRequest
from perception.tasks import LaneTask
from perception.telemetry import SilentTelemetry
from perception.trainer import Trainer
from perception.training_run import load_sources, set_threads
from pipelines.configs import named_config
from tests.pipelines.training_runs import TINY


class SlowToLoad(LaneTask):
    seconds = 0.0

    def prepare(self, sample: LaneSample, key: SampleKey, train: bool) -> LaneExample:
        if train:
            time.sleep(self.seconds)
        return super().prepare(sample, key, train)


class Log(SilentTelemetry):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log(self, step: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.records.append({"step": step, **values})


def main(folder: Path, engine: str, transport: str, seconds: float) -> None:
    settings = {**TINY, "train.num_samples": 80, "train.trace_steps": 3, "data.num_validation_scenes": 4}
    assignments = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    config = override(
        named_config("lane-small"),
        [*assignments, f"distributed.engine={engine}", f"distributed.transport={transport}"],
    )
    communicator = distributed.connect(config.distributed)
    set_threads(config, communicator)
    task = SlowToLoad(config)
    task.seconds = seconds if communicator.rank == 1 else 0.0
    log = Log()
    run_folder = RunFolder(folder / "run")
    if communicator.is_first:
        run_folder.begin(resume=False)
    communicator.barrier()
    trainer = Trainer(config, task, load_sources(config, communicator), communicator, run_folder, log)
    outcome = trainer.run(StopRequest())
    mean = outcome.rank_means.mean()
    assert mean is not None
    report = {"records": log.records, "mean": mean._asdict(), "summary": outcome.rank_means.summary()}
    (folder / f"rank{communicator.rank}.json").write_text(json.dumps(report))
    communicator.barrier()
    communicator.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
